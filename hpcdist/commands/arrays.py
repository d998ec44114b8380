"""The commands gather, concat and split: join arrays from files, and cut one into several."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from string import Formatter
from typing import Any

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.collectives.concat import concat
from hpcdist.collectives.gather import gather
from hpcdist.comm.groups import Group
from hpcdist.comm.settings import ROUTES
from hpcdist.comm.team import Team
from hpcdist.commands import inputs
from hpcdist.commands.compare import ROUNDS, compare, equal, route_table
from hpcdist.commands.copying import Read, check_output, copy
from hpcdist.commands.inputs import Inputs, Joined, find, slices_of
from hpcdist.control import objects
from hpcdist.errors import InputError
from hpcdist.formats.contents import Dataset, Slices
from hpcdist.formats.paths import shown
from hpcdist.layout import Box
from hpcdist.routes.select import best
from hpcdist.runtime.cli import Parser, nbytes, path, placed, plural, show_bytes, timed
from hpcdist.runtime.world import World
from hpcdist.staging.pieces import shard_boxes
from hpcdist.staging.writer import WINDOW, SaveOptions
from hpcdist.tensors.storage import as_bytes, row_major

__all__ = [
    *("concat_main", "concat_parser", "gather_main", "gather_parser", "shortened", "show", "speed", "split_main"),
    "split_parser",
]

Report = dict[str, Any]
_MISMATCH = 1  # exit status if the result differs from the inputs
_MAX_PARTS = 10**6
_WIDTH = re.compile(r"0?\d{0,2}d?")


def gather_main(world: World, args: argparse.Namespace) -> int:
    """Gather the inputs on the ranks of the world; return the exit status. Collective."""
    root = getattr(args, "root", 0)
    if not 0 <= root < world.world_size:
        expected = f"expected 0 to {world.world_size - 1} with {world.world_size} ranks"
        raise InputError("HD508", f"--root {root}: {expected}")
    if args.output and "{" in args.output:
        what = "gather writes one file; a pattern is for hpcdist.concat and hpcdist.split"
        raise InputError("HD506", f"{args.output}: {what}")
    return _join(world, args, "concat" if args.everywhere else "gather", args.everywhere)


def concat_main(world: World, args: argparse.Namespace) -> int:
    """Join the inputs on every rank of the world; return the exit status. Collective."""
    if args.output is None or "{" not in args.output:
        return _join(world, args, "concat", args.output is None or args.compare)
    if args.compare:
        raise InputError("HD505", f"{args.output}: with --compare one file is written, and not one for each rank")
    names, comm = _file_names(args.output, world.world_size), world.team.comm
    data, report = _found(world, args, "concat")
    own = [(names[world.rank], layout.whole(data.shape))]  # perhaps in a folder that only this node has
    objects.all_gather(comm, "output", lambda: check_output(own[0][0], data, 0 if args.resume else data.nbytes()))
    objects.broadcast(comm, "output", lambda: _check_distinct(names))
    report |= _write_alone(world, args, data, own)
    if args.verify:
        found = objects.all_gather(comm, "verify", lambda: _verified(data, _files(own), args.window))
        report |= found[0] | {"verified": all(one["verified"] for one in found)}
    lines = [
        f"result: shape {tuple(data.shape)} in {world.world_size} files, one per rank",
        speed("every rank writes", report["seconds"], world.world_size * data.nbytes()),
    ]
    return _finish(world, args, data, report, lines, "the inputs")


def split_main(world: World, args: argparse.Namespace) -> int:
    """Split the input on the ranks of the world; return the exit status. Collective."""
    count = world.world_size if args.parts is None else args.parts
    if not 1 <= count <= _MAX_PARTS:
        raise InputError("HD508", f"--parts {count}: expected 1 to {_MAX_PARTS}")
    names = _file_names(args.output, count)
    data, report = _found(world, args, "split")
    if len(data.sources) > 1:
        raise InputError("HD505", f"{args.input[0]}: matches {len(data.sources)} files, expected one")
    if not data.sources[0].shape:
        raise InputError("HD513", f"{args.input[0]}: is 0-d: it has no dimension to split along")

    def check() -> None:
        _check_distinct(names)
        folders: set[str] = set()
        for name in names:
            folder = os.path.dirname(name)
            check_output(name, data, 0 if args.resume or folder in folders else data.nbytes())
            folders.add(folder)

    objects.broadcast(world.team.comm, "output", check)
    extents = layout.block(data.shape[data.dim], count)
    parts = list(zip(names, shard_boxes(data.shape, data.dim, extents), strict=True))
    mine = layout.block_range(count, world.world_size, world.rank)
    report |= _write_alone(world, args, data, [parts[i] for i in mine]) | {"parts": count, "extents": extents}
    if args.verify:
        report |= objects.broadcast(world.team.comm, "verify", lambda: _verified(data, _files(parts), args.window))
    lines = [
        f"ranks: {world.world_size}, each reads and writes its share, {show_bytes(args.window)} at a time",
        f"result: shape {tuple(data.shape)} in {count} parts of {shortened(extents)} rows",
        speed("every rank writes", report["seconds"], data.nbytes()),
    ]
    return _finish(world, args, data, report, lines, "the input", " of the parts, one after the other")


def _join(world: World, args: argparse.Namespace, verb: str, everywhere: bool) -> int:
    """Join the inputs: in one file, which all ranks write, or in memory, on the root or on every rank. Collective."""
    in_memory = args.output is None or everywhere or args.compare or args.route not in ("auto", "hdf5")
    root = getattr(args, "root", 0)
    if args.resume and in_memory:
        raise InputError("HD505", "--resume: needs -o, and is without --all, --compare and --route")
    data, report = _found(world, args, verb)
    if args.output is not None:
        size = 0 if args.resume else data.nbytes()
        objects.broadcast(world.team.comm, "output", lambda: check_output(args.output, data, size), root)
    if in_memory:
        lines = _join_in_memory(world, args, data, report, everywhere, root)
        return _finish(world, args, data, report, lines, "the inputs read on one process")
    report |= {"route": "every rank writes", "bytes_sent": 0}
    report |= _write(world, args, data, world.team, [(args.output, layout.whole(data.shape))])
    if args.verify:
        files = _files([(args.output, layout.whole(data.shape))])
        report |= objects.broadcast(world.team.comm, "verify", lambda: _verified(data, files, args.window))
    lines = [
        f"ranks: {world.world_size}, each reads and writes its share, {show_bytes(args.window)} at a time",
        f"result: shape {tuple(data.shape)} in the file; nothing sent between ranks",
    ]
    if "pieces" in report:
        lines.append(f"resumed: {report['pieces_kept']} of {report['pieces']} pieces were there and are kept")
    lines.append(speed("every rank writes", report["seconds"], data.nbytes()))
    return _finish(world, args, data, report, lines, "the inputs read on one process")


def _join_in_memory(
    world: World, args: argparse.Namespace, data: Inputs, report: Report, everywhere: bool, root: int
) -> list[str]:
    """Gather the inputs in memory, and write the output if there is one; complete the report. Collective.

    Returns:
        Lines of the report as text.
    """
    inputs.check_memory(world, data, everywhere, root)
    shard = data.shard(world)
    own = data.nbytes_by_rank()
    report["bytes_sent"] = sum(own) * (world.world_size - 1) if everywhere else sum(own) - own[root]

    def move(x: Tensor, route: str, out: Tensor | None) -> Tensor | None:
        if everywhere:
            return concat(x, data.dim, route=route, out=out)
        return gather(x, data.dim, root, route=route, out=out)

    if args.compare:
        report["routes"], result = compare(world, shard, move, data.nbytes())
    else:
        x = placed(world, shard, args.route)
        report["seconds"], result = timed(world, lambda: move(x, args.route, None))
        report["route"] = best(world.team, x.is_cuda) if args.route == "auto" else args.route
    held = None if result is None else result.cpu()
    if args.output:
        read: Read = lambda i, box, out: as_bytes(out).copy_(as_bytes(row_major(held[box.slices()])))  # type: ignore[index]  # noqa: E731
        parts = [(args.output, layout.whole(data.shape))] if world.rank == root else []
        _write_alone(world, args, data, parts, read)
    if args.verify or data.demo:
        report |= _verified_in_memory(world, data, held, args, root)
    counts = shortened(end - start for start, end in pairwise(data.bounds))
    where = "every rank" if everywhere else f"rank {root}"
    lines = [
        f"ranks: {world.world_size} on {plural(world.nodes, 'node')}; arrays per rank: {counts}",
        f"result: shape {tuple(data.shape)} on {where}; {report['bytes_sent']:,} bytes sent between ranks",
    ]
    if args.compare:
        lines += ["", route_table(report["routes"], report["bytes_sent"]), ""]
        return [*lines, f"time: median of {ROUNDS} rounds, the slowest rank; GB/s: bytes of the result per time"]
    return [*lines, speed(f"route {report['route']}", report["seconds"], data.nbytes())]


def _found(world: World, args: argparse.Namespace, verb: str) -> tuple[Inputs, Report]:
    """Find the inputs, and begin the report. Collective."""
    data = find(world, args.input, args.dim, args.output)
    names = [] if data.demo else [source.spec for source in data.sources]
    return data, {
        "verb": verb, "ranks": world.world_size, "nodes": world.nodes, "files": len(data.sources), "inputs": names,
        "dim": data.dim, "shape": list(data.shape), "dtype": str(data.dtype).removeprefix("torch."),
        "bytes": data.nbytes(),
    }  # fmt: skip


def _finish(
    world: World, args: argparse.Namespace, data: Inputs, report: Report, lines: list[str], whom: str, of: str = ""
) -> int:
    """Print the report on rank 0; return the exit status."""
    if args.output:
        report["output"] = args.output

    def text() -> str:
        kind = "source files of Python's standard library" if data.demo else "array" + "s" * (len(data.sources) > 1)
        size = f"{report['bytes']:,} bytes of {report['dtype']}"
        found = [f"{report['verb']}: {len(data.sources)} {kind}, {size}, along dim {report['dim']}"]
        if report["inputs"]:
            found.append(f"order: {shortened(map(shown, report['inputs']))}")
        found += lines
        if "output" in report:
            found.append(f"written: {shown(report['output'])}")
        if "verified" in report:
            equals = "equal to" if report["verified"] else "NOT EQUAL to"
            found.append(f"sha256 {report['sha256']}{of}: {equals} {whom}")
        return "\n".join(found)

    show(world, report, None if args.json else text)
    return _MISMATCH if report.get("verified") is False else 0


def show(world: World, report: Report, text: Callable[[], str] | None) -> None:
    """Print a report on rank 0: as the text that `text` returns, or without it as JSON."""
    if world.rank == 0:
        print(json.dumps(report) if text is None else text(), flush=True)


def shortened(items: Iterable[object]) -> str:
    """Return a list as text; of a long one, the first four items and the last.

    Example::

        >>> shortened(range(12))
        '0, 1, 2, 3, ..., 11'
    """
    texts = list(map(str, items))
    return ", ".join(texts if len(texts) <= 8 else [*texts[:4], "...", texts[-1]])


def speed(how: str, seconds: float, nbytes: int) -> str:
    """Return the line of a report on the time that the data took."""
    return f"{how}: {seconds * 1e3:.2f} ms, {nbytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"


def _write(
    world: World,
    args: argparse.Namespace,
    data: Inputs,
    team: Team,
    parts: Sequence[tuple[str, Box]],
    read: Read | None = None,
) -> Report:
    """Write files, each of which holds a box of the array. Collective over `team`.

    Args:
        read: fills memory with a box of the array; by default, from the inputs.
    """
    start, pieces, kept = time.perf_counter(), 0, 0
    with Joined(data, args.window // 2) as joined:
        from_inputs: Read = lambda i, box, out: joined.read(box, out)  # noqa: E731
        for name, whole in parts:
            at = whole.offset
            options = SaveOptions("posix", args.window, args.resume)
            shifted: Read = lambda i, box, out, at=at: (read or from_inputs)(i, box.shift(at), out)  # type: ignore[misc]  # noqa: E731
            done = copy(world, team, args.prog, name, [Dataset("data", whole.shape, data.dtype)], shifted, options)
            pieces, kept = pieces + done[0], kept + done[1]
    seconds = max(objects.all_gather_object(team.comm, time.perf_counter() - start))
    return {"seconds": seconds} | ({"pieces": pieces, "pieces_kept": kept} if args.resume else {})


def _write_alone(
    world: World, args: argparse.Namespace, data: Inputs, parts: Sequence[tuple[str, Box]], read: Read | None = None
) -> Report:
    """Write files on this rank alone; return the seconds of the slowest rank. Collective over the world."""
    start = time.perf_counter()

    def write() -> None:
        with _alone(world) as team:
            _write(world, args, data, team, parts, read)

    objects.all_gather(world.team.comm, args.prog, write)
    return {"seconds": max(objects.all_gather_object(world.team.comm, time.perf_counter() - start))}


@contextmanager
def _alone(world: World) -> Iterator[Team]:
    """Make a team of this rank only."""
    from mpi4py import MPI

    team = Team(MPI.COMM_SELF.Dup(), Group(0, [world.rank], {}, MPI.COMM_SELF), world.settings)
    try:
        yield team
    finally:
        team.free()


Held = tuple[Slices, Box]  # an array that holds a box of the whole


def _files(parts: Sequence[tuple[str, Box]]) -> Callable[[torch.dtype], Iterator[Held]]:
    """The arrays of files, as their formats' own libraries read them."""

    def held(dtype: torch.dtype) -> Iterator[Held]:
        for name, box in parts:
            stored, slices = slices_of(name)
            yield (slices if (stored.shape, stored.dtype) == (box.shape, dtype) else _other), box

    return held


def _other(box: Box) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")  # equal to nothing


def _verified(data: Inputs, held: Callable[[torch.dtype], Iterator[Held]], window: int) -> Report:
    """Compare arrays with boxes of the inputs, bit by bit, on this rank alone and within a window. Both are read by the
    libraries of their formats, and not as the commands read.

    Returns:
        "verified", and the "sha256" of the bytes of the arrays, one after the other.
    """
    right, digest = True, hashlib.sha256()
    limit = max(1, window // 4 // data.dtype.itemsize)
    for slices, whole in held(data.dtype):
        for source, box in zip(data.sources, data.boxes, strict=True):
            common = box.intersect(whole)
            if common.size():
                stored, inner = slices_of(source.spec, source.text)
                right = right and (stored.shape, stored.dtype) == (source.shape, source.dtype)
                for part in layout.boxes(common, limit) if right else ():
                    at = part.relative_to(box.offset) if source.shape else Box((), ())  # 0-d: one row of the whole
                    got = slices(part.relative_to(whole.offset))
                    right = right and equal(got, inner(at).view(part.shape))
        for part in layout.boxes(layout.whole(whole.shape), limit):
            digest.update(as_bytes(row_major(slices(part))).numpy().data)
    return {"verified": right, "sha256": digest.hexdigest()}


def _verified_in_memory(
    world: World, data: Inputs, result: Tensor | None, args: argparse.Namespace, root: int
) -> Report:
    """Compare the result of `root`, and its output file, with the inputs, and that of other ranks with the root's.
    Collective."""
    whole = layout.whole(data.shape)

    def held(dtype: torch.dtype) -> Iterator[Held]:
        assert result is not None
        yield (lambda box: result[box.slices()]), whole

    def check() -> Report:
        found = _verified(data, held, args.window)
        if args.output:
            in_file = _verified(data, _files([(args.output, whole)]), args.window)
            found["verified"] = found["verified"] and in_file == found
        return found

    report = objects.broadcast(world.team.comm, "verify", check, root)
    own = None if result is None else hashlib.sha256(as_bytes(row_major(result)).numpy().data).hexdigest()
    same = {digest for digest in objects.all_gather_object(world.team.comm, own) if digest} == {report["sha256"]}
    return report | {"verified": report["verified"] and same}


def _file_names(pattern: str, count: int) -> list[str]:
    """Return the name of each of `count` parts.

    Raises:
        InputError: `pattern` is not a pattern, or gives two parts the same name.

    Example::

        >>> _file_names("parts/{rank:04d}.npy", 3)[2]
        'parts/0002.npy'
    """
    advice = "write {rank} or {rank:04d} for the number of a part"
    try:
        fields = [field[1:] for field in Formatter().parse(pattern) if field[1] is not None]
        if any(name != "rank" or change or not _WIDTH.fullmatch(how or "") for name, how, change in fields):
            raise ValueError("unsupported field")
        names = [pattern.format(rank=i) for i in range(count)]
    except ValueError as error:
        raise InputError("HD506", f"{pattern}: cannot be a pattern ({error}); {advice}") from error
    if len(set(names)) < count:
        raise InputError("HD506", f"{pattern}: gives parts the same name; {advice}")
    return names


def _check_distinct(names: Iterable[str]) -> None:
    """Raise an InputError if two names are of one file, through links or ".."."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(os.path.realpath(name), name)
        if other != name:
            raise InputError("HD507", f"{name}: is the same file as {other}")


def gather_parser() -> Parser:
    """Return the parser of python -m hpcdist.gather."""
    p = _join_parser(
        "hpcdist.gather",
        "Join arrays from files along one dimension, over the ranks of an MPI job. With -o they are streamed: every "
        "rank reads and writes its share of the result, a window at a time, so nothing has to fit in memory. Without "
        "-o each rank reads its share of the files, in the order given, and they are gathered in memory. Without "
        "INPUT: the source files of Python's standard library. To copy all tensors of a checkpoint: hpcdist.convert.",
        "example: mpirun -n 4 python -m hpcdist.gather 'shards/*.npy' -o whole.h5",
    )
    where = p.add_mutually_exclusive_group()
    # SUPPRESS, since argparse takes a value that is the default for one that was not given.
    where.add_argument("--root", type=int, default=argparse.SUPPRESS, help="rank that receives the result (default 0)")
    where.add_argument(
        "--all", dest="everywhere", action="store_true", help="every rank receives the result; rank 0 writes it"
    )
    return p


def concat_parser() -> Parser:
    """Return the parser of python -m hpcdist.concat."""
    return _join_parser(
        "hpcdist.concat",
        "Join arrays from files along one dimension, on every rank of an MPI job: like hpcdist.gather, but every rank "
        "receives the result. With -o NAME all ranks write one file; with -o 'NAME-{rank}' each rank writes a copy of "
        "its own, for folders that the nodes do not share.",
        "example: mpirun -n 2 python -m hpcdist.concat 'shards/*.npy' -o '/local/whole-{rank}.npy'",
    )


def split_parser() -> Parser:
    """Return the parser of python -m hpcdist.split."""
    p = Parser(
        prog="hpcdist.split",
        description="Split an array in a file along one dimension into parts in files of their own, over the ranks of "
        "an MPI job. Every rank reads and writes its share, a window at a time: nothing has to fit in memory.",
        epilog="example: mpirun -n 4 python -m hpcdist.split whole.h5 -o 'parts/{rank:04d}.npy' --parts 16",
    )
    p.add_argument(
        "input", nargs=1, metavar="INPUT",
        help=".npy, .npz, .pt, .safetensors or .h5; FILE:NAME for one array of several",
    )  # fmt: skip
    p.add_argument(
        "-o", "--output", type=path, metavar="PATTERN", required=True,
        help="names of the parts, with {rank} or {rank:04d} for their number: .npy, .pt, .safetensors or .h5",
    )  # fmt: skip
    p.add_argument("--parts", type=int, help="number of parts (default: one for each rank)")
    p.add_argument("--dim", type=int, default=0, help="dimension to split along (default 0)")
    _add_common(p)
    return p


def _join_parser(prog: str, description: str, epilog: str) -> Parser:
    p = Parser(prog=prog, description=description, epilog=epilog)
    p.add_argument(
        "input", nargs="*", metavar="INPUT",
        help="a file or a quoted pattern: .npy, .npz, .pt, .safetensors, .h5; "
        "FILE:NAME for one array of a file that holds several",
    )  # fmt: skip
    p.add_argument("--dim", type=int, default=0, help="dimension to join along (default 0)")
    p.add_argument("-o", "--output", type=path, metavar="OUT", help="write the result: .npy, .pt, .safetensors or .h5")
    p.add_argument(
        "--route", choices=ROUTES, default="auto",
        help="how the data travel in memory (default auto; with -o, auto is directly from file to file)",
    )  # fmt: skip
    p.add_argument("--compare", action="store_true", help="time every route that can run here, in one table")
    _add_common(p)
    return p


def _add_common(p: Parser) -> None:
    """Add the options that gather, concat and split share."""
    p.set_defaults(prog=p.prog.removeprefix("hpcdist."))
    p.add_argument(
        "--window", type=nbytes, default=WINDOW, metavar="BYTES",
        help="with -o: host memory that a rank may use for data, such as 64M (default 256M)",
    )  # fmt: skip
    p.add_argument("--resume", action="store_true", help="resume a killed job: write only what differs from its output")
    p.add_argument("--staging", type=path, metavar="DIR", help="staging folder of route hdf5, shared by all nodes")
    p.add_argument(
        "--verify", action="store_true",
        help="compare the result with the inputs, both read again on one process by the libraries of their formats",
    )  # fmt: skip
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")
