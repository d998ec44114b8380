"""The command ``python -m hpcdist.gather``: arrays in any number of files become one, on any number of ranks."""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist import concat, files, gather, layout
from hpcdist.buffers import as_bytes
from hpcdist.command import Parser, agreed, progress, run, table
from hpcdist.errors import InputError, RankError
from hpcdist.files import Source
from hpcdist.routes import NAMES, ROUTES
from hpcdist.world import World

_ROUNDS = 5  # timed runs of each route with --compare, after one that is not counted
_MISMATCH = 1  # the exit status if the result is not what one process reads


@dataclass(frozen=True)
class Inputs:
    """What the ranks read together.

    Attributes:
        sources: all arrays, in order; rank r has ``sources[bounds[r]:bounds[r + 1]]``.
        shape, dtype: of the result.
        dim: along which they are joined, >= 0.
    """

    sources: list[Source]
    bounds: list[int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    of_stdlib: bool

    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize

    def read(self, source: Source) -> Tensor:
        """One array, with at least one dim."""
        x = _read_text(source.spec) if self.of_stdlib else files.load(source.spec)
        return x if x.dim() else x.view(1)

    def rows(self, source: Source) -> int:
        return source.shape[self.dim] if source.shape else 1


def main(world: World, args: argparse.Namespace) -> int:
    """Gather the inputs on the ranks of the world; returns the exit status. Collective."""
    if not 0 <= args.root < world.world_size:
        raise InputError(f"--root {args.root}: expected 0 to {world.world_size - 1} with {world.world_size} ranks")
    inputs = _find(world, args.input, args.dim)
    if args.output:
        agreed(world, lambda: files.check_output(args.output, inputs.dtype, inputs.nbytes()), args.root)
    shard = agreed_shard(world, inputs)
    report: dict[str, Any] = {
        "verb": "concat" if args.all else "gather",
        "ranks": world.world_size,
        "nodes": world.nodes,
        "files": len(inputs.sources),
        "dim": inputs.dim,
        "shape": list(inputs.shape),
        "dtype": str(inputs.dtype).removeprefix("torch."),
        "bytes": inputs.nbytes(),
        "bytes_sent": _bytes_sent(world, inputs, shard, args),
    }
    result: Tensor | None
    if args.compare:
        report["routes"], result = _compare(world, inputs, shard, args)
    else:
        start = _now(world)
        result = _move(shard, inputs, args, args.route)
        report["route"] = args.route
        report["seconds"] = _slowest(world, start)
    if args.output:
        agreed(world, lambda: files.save(result, args.output), args.root)  # type: ignore[arg-type]
        report["output"] = args.output
    if args.verify or inputs.of_stdlib:
        report |= _verify(world, inputs, result, args)
    if world.rank == 0:
        print(json.dumps(report) if args.json else _text(report, inputs, world, args), flush=True)
    return _MISMATCH if report.get("verified") is False else 0


def _find(world: World, given: Sequence[str], dim: int) -> Inputs:
    """Which arrays there are, which rank reads which, and whether they fit together. Collective."""
    of_stdlib = not given
    (specs,) = agreed(world, _stdlib if of_stdlib else lambda: files.expand(given), root=0)
    bounds = [*layout.displs(layout.block(len(specs), world.world_size)), len(specs)]
    mine = specs[bounds[world.rank] : bounds[world.rank + 1]]
    describe = _describe_text if of_stdlib else files.describe
    sources = [
        source for part in agreed(world, lambda: [describe(spec) for spec in mine]) for source in part
    ]
    first = sources[0]
    ndim = len(first.shape) or 1
    if not -ndim <= dim < ndim:
        raise InputError(f"--dim {dim}: {first.spec} has {len(first.shape)} dims, expected {-ndim} to {ndim - 1}")
    dim %= ndim
    for source in sources:
        if source.dtype != first.dtype:
            raise InputError(f"{source.spec}: dtype {source.dtype}, but {first.spec} has {first.dtype}")
        if _hole(source, dim) != _hole(first, dim):
            raise InputError(
                f"{source.spec}: shape {source.shape} does not fit {first.shape} of {first.spec} along dim {dim}"
            )
    total = sum(source.shape[dim] if source.shape else 1 for source in sources)
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    return Inputs(sources, bounds, shape, first.dtype, dim, of_stdlib)


def _hole(source: Source, dim: int) -> tuple[int, ...]:
    """What must be the same in all arrays: the number of dims, and the extents besides dim."""
    return (len(source.shape), *source.shape[:dim], *source.shape[dim + 1 :])


def _stdlib() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(str(path) for path in root.rglob("*.py") if "site-packages" not in path.parts and path.is_file())


def _describe_text(path: str) -> Source:
    return Source(path, (Path(path).stat().st_size,), torch.uint8)


def _read_text(path: str) -> Tensor:
    return torch.from_numpy(np.fromfile(path, np.uint8))


def agreed_shard(world: World, inputs: Inputs) -> Tensor:
    """What this rank's files hold, joined; no rows if it has none. Collective."""

    def read() -> Tensor:
        mine = inputs.sources[inputs.bounds[world.rank] : inputs.bounds[world.rank + 1]]
        parts = [_read(inputs, source) for source in progress(mine, world, "read")]
        if not parts:
            shape = list(inputs.shape)
            shape[inputs.dim] = 0
            return torch.empty(shape, dtype=inputs.dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts, inputs.dim)

    shards: list[Tensor] = []
    agreed(world, lambda: shards.append(read()))
    return shards[0]


def _read(inputs: Inputs, source: Source) -> Tensor:
    x = inputs.read(source)
    if source.shape and tuple(x.shape) != source.shape:
        raise InputError(f"{source.spec}: has changed while it was read")
    return x


def _move(
    shard: Tensor, inputs: Inputs, args: argparse.Namespace, route: str, out: Tensor | None = None
) -> Tensor | None:
    if args.all:
        return concat(shard, inputs.dim, route=route, out=out)
    return gather(shard, inputs.dim, args.root, route=route, out=out)


def _bytes_sent(world: World, inputs: Inputs, shard: Tensor, args: argparse.Namespace) -> int:
    """The bytes that go from one rank to another: nothing is padded, so that every route sends the same."""
    own: list[int] = world.team.comm.allgather(shard.nbytes)
    return sum(own) * (world.world_size - 1) if args.all else sum(own) - own[args.root]


def _now(world: World) -> float:
    world.team.comm.Barrier()
    return time.perf_counter()


def _slowest(world: World, start: float) -> float:
    """Seconds since `start` on the rank that took longest."""
    seconds: list[float] = world.team.comm.allgather(time.perf_counter() - start)
    return max(seconds)


def _compare(
    world: World, inputs: Inputs, shard: Tensor, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], Tensor | None]:
    """Run every route that can run here on the same data, in turn, into memory that is there already."""
    times: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    outs: dict[str, tuple[Tensor, Tensor | None]] = {}
    for route in ROUTES:
        x = shard.to(world.device) if route == "nccl" and world.own_gpus else shard
        try:
            outs[route] = (x, _move(x, inputs, args, route))
            times[route] = []
        except RankError as error:
            refused[route] = next(iter(error.problems.values()))
    for _ in progress(range(_ROUNDS), world, "compare"):
        for route, (x, out) in outs.items():
            start = _now(world)
            _move(x, inputs, args, route, out)
            if x.is_cuda:
                torch.cuda.synchronize(x.device)
            times[route].append(_slowest(world, start))
    results = {route: out for route, (_, out) in outs.items()}
    same = {route: out is None or _equal(out.cpu(), results["mpi"]) for route, out in results.items()}
    everywhere = world.team.comm.allgather(same)
    best = min(median(runs) for runs in times.values())
    rows: list[dict[str, Any]] = [
        {
            "route": route,
            "seconds": median(runs),
            "gigabytes_per_second": inputs.nbytes() / max(median(runs), 1e-9) / 1e9,
            "ratio_to_best": median(runs) / best,
            "same_result": all(rank[route] for rank in everywhere),
        }
        for route, runs in times.items()
    ]
    return rows + [{"route": route, "refused": why} for route, why in refused.items()], results["mpi"]


def _equal(x: Tensor, y: Tensor | None) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    if y is None or x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.equal(as_bytes(x.contiguous()), as_bytes(y.contiguous()))


def _sha256(x: Tensor) -> str:
    return hashlib.sha256(as_bytes(x.contiguous().cpu()).numpy()).hexdigest()


def _verify(world: World, inputs: Inputs, result: Tensor | None, args: argparse.Namespace) -> dict[str, Any]:
    """Read all inputs on one process, the root, and compare bit by bit with the result, and with the output file.

    With --all, the results of the other ranks are compared by their SHA-256. Collective.
    """

    def check() -> bool:
        assert result is not None
        held = [result.cpu()] + ([_reload(args.output, inputs)] if args.output else [])
        start, right = 0, all(tuple(whole.shape) == inputs.shape for whole in held)
        for source in progress(inputs.sources, world, "verify"):
            rows = inputs.rows(source)
            x = inputs.read(source)
            right = right and all(_equal(whole.narrow(inputs.dim, start, rows), x) for whole in held)
            start += rows
        return right

    (right,) = agreed(world, check, args.root)
    digest = None if result is None else _sha256(result)
    digests = [d for d in world.team.comm.allgather(digest) if d is not None]
    serial = world.team.comm.bcast(_serial_sha256(inputs) if world.rank == args.root else None, args.root)
    return {"sha256": digests[0], "serial_sha256": serial, "verified": right and set(digests) == {serial}}


def _reload(path: str, inputs: Inputs) -> Tensor:
    x = files.load(path)
    return x if x.dim() else x.view(inputs.shape)


def _serial_sha256(inputs: Inputs) -> str:
    """Of the whole tensor as one process reads it: what `cat` and `sha256sum` give for the default input."""
    digest = hashlib.sha256()
    if inputs.dim == 0:
        for source in inputs.sources:
            digest.update(as_bytes(inputs.read(source).contiguous()).numpy())
    else:
        digest.update(as_bytes(torch.cat([inputs.read(s) for s in inputs.sources], inputs.dim)).numpy())
    return digest.hexdigest()


def _text(report: dict[str, Any], inputs: Inputs, world: World, args: argparse.Namespace) -> str:
    size = report["bytes"]
    what = "source files of Python's standard library" if inputs.of_stdlib else "arrays"
    where = "every rank" if args.all else f"rank {args.root}"
    lines = [
        f"{report['verb']}: {report['files']} {what}, {size:,} bytes of {report['dtype']}, along dim {report['dim']}",
        f"ranks: {report['ranks']} on {report['nodes']} node{'s' * (report['nodes'] > 1)}; "
        f"files a rank: {', '.join(map(str, _files_a_rank(inputs)))}",
        f"result: shape {tuple(report['shape'])} on {where}; {report['bytes_sent']:,} bytes sent between ranks",
    ]
    if "routes" in report:
        lines += ["", _route_table(report["routes"], report["bytes_sent"]), ""]
        lines.append(f"time: median of {_ROUNDS} runs in turn, the slowest rank; GB/s: bytes of the result by time")
    else:
        seconds = report["seconds"]
        lines.append(f"route {report['route']}: {seconds * 1e3:.2f} ms, {size / max(seconds, 1e-9) / 1e9:.2f} GB/s")
    if "output" in report:
        lines.append(f"written: {report['output']}")
    if "verified" in report:
        verdict = "equal to" if report["verified"] else f"NOT EQUAL to {report['serial_sha256']} of"
        lines.append(f"sha256 {report['sha256']}: {verdict} the inputs read on one process")
    return "\n".join(lines)


def _files_a_rank(inputs: Inputs) -> list[str]:
    counts = [str(end - start) for start, end in zip(inputs.bounds, inputs.bounds[1:], strict=False)]
    return counts if len(counts) <= 8 else [*counts[:7], "..."]


def _route_table(routes: list[dict[str, Any]], bytes_sent: int) -> str:
    head = ["route", "time (ms)", "GB/s", "bytes sent", "ratio to best", "same result"]
    rows = [
        [
            row["route"],
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['gigabytes_per_second']:.2f}",
            f"{bytes_sent:,}",
            f"{row['ratio_to_best']:.2f}",
            "yes" if row["same_result"] else "NO",
        ]
        for row in routes
        if "refused" not in row
    ]
    refused = [f"{row['route']}: not run: {row['refused']}" for row in routes if "refused" in row]
    return "\n".join([table(head, rows), *refused])


def parser() -> Parser:
    """The command line of python -m hpcdist.gather."""
    p = Parser(
        prog="hpcdist.gather",
        description="Join arrays from files along one dimension, over the ranks of an MPI job: each rank reads its "
        "share of the files, in sorted order. Without INPUT: the source files of Python's standard library.",
        epilog="example: mpirun -n 4 python -m hpcdist.gather 'shards/*.npy' -o whole.h5",
    )
    p.add_argument(
        "input", nargs="*", metavar="INPUT",
        help="a file or a quoted pattern: .npy, .npz, .pt, .safetensors, .h5; "
        "FILE:NAME for one array of a file that holds several",
    )  # fmt: skip
    p.add_argument("-o", "--output", metavar="OUT", help="write the result: .npy, .pt, .safetensors or .h5")
    p.add_argument("--dim", type=int, default=0, help="the dimension to join along (default 0)")
    where = p.add_mutually_exclusive_group()
    where.add_argument("--root", type=int, default=0, help="the rank that receives the result (default 0)")
    where.add_argument("--all", action="store_true", help="every rank receives the result; rank 0 writes it")
    p.add_argument("--route", choices=NAMES, default="auto", help="how the data travel (default auto)")
    p.add_argument("--compare", action="store_true", help="time every route that can run here, in one table")
    p.add_argument("--verify", action="store_true", help="compare the result with the inputs read on one process")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return p


if __name__ == "__main__":
    run(parser(), main)
