"""The common part of the commands on files: find arrays and tensors, read any box of them, and copy them into files.

Every rank reads and writes its share, with no more than a window of host memory.
"""

from __future__ import annotations

import glob
import json
import os
import re
import sysconfig
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import HpcdistError, InputError, listed
from hpcdist.formats import safetensors
from hpcdist.formats.contents import Contents, Dataset, Format, Slices, Stored, identity
from hpcdist.formats.known import FORMATS, describe
from hpcdist.formats.paths import check_target, file_errors, shown
from hpcdist.formats.plain import Raw
from hpcdist.layout import Box
from hpcdist.layout.box import Shards, grid, summed
from hpcdist.runtime.cli import meter, nbytes, progress
from hpcdist.runtime.commandline import Parser, show_bytes
from hpcdist.runtime.world import World, team_of
from hpcdist.staging.pieces import check_pieces, piece_limit
from hpcdist.staging.reader import OpenFiles, TensorReader
from hpcdist.staging.writer import WINDOW, FileWriter, SaveOptions
from hpcdist.tensors.storage import bits
from hpcdist.validation.local import ArgumentError

Report = dict[str, Any]
_NAMED = re.compile(r"(.+\.(?:npz|pt|safetensors|h5)):(.+)", re.DOTALL)
_MOST_OPEN = 12  # input files kept open

Read = Callable[[int, Box, Tensor], object]  # fills a tensor with a box of the i-th tensor


class _SourceFile(Format):
    """Any file, as an array of its bytes: the commands read these without an INPUT."""

    def describe(self, path: str) -> Contents:
        at = identity(path)
        raw = Raw(path, 0, (at.size,), torch.uint8)
        return Contents(path, "file", {"": Stored("", raw.shape, raw.dtype, raw)}, {path: at})

    def by_library(self, path: str, stored: Stored) -> Slices:
        return lambda box: torch.from_file(path, size=stored.nbytes(), dtype=torch.uint8)[box.slices()]


_READ: dict[str, Format] = {**FORMATS, ".py": _SourceFile()}


class Source(NamedTuple):
    """One array in one file.

    Attributes:
        spec: the user's name for it: the path, and after a colon the array's name where the file may hold several.
        stored: the array in the file.
        contents: the contents of the file.
    """

    spec: str
    stored: Stored
    contents: Contents


def described(spec: str) -> Source:
    """Look up the array that `spec` names in its file, or the only one there.

    Raises:
        InputError, FileError: it does not exist, or cannot be read.
    """
    path, name = _split(spec)
    suffix = Path(path).suffix
    if suffix not in _READ:
        expected = f"one of {', '.join(FORMATS)}; hpcdist convert copies all tensors of a folder"
        raise InputError("HD501", f"{path}: unknown suffix {suffix!r}; expected {expected}")
    contents = describe(path, _READ[suffix])
    key = name and contents.key(name)
    if key and "" in contents.tensors:
        raise InputError("HD408", f"{path}: holds an array without a name, and no array {key!r}")
    found = contents.chosen(key)
    arrays = list(found.tensors.values())
    if not arrays:
        raise InputError("HD408", f"{path}: holds no array")
    if len(arrays) > 1:
        one = f"name one as {path}:NAME; it has: {listed(found.tensors)}; hpcdist convert copies all"
        raise InputError("HD408", f"{path}: holds {len(arrays)} arrays; {one}")
    return Source(spec, arrays[0], found)


def _split(spec: str) -> tuple[str, str | None]:
    """Split into path and name; a file named by the whole text comes first."""
    found = None if os.path.lexists(spec) else _NAMED.fullmatch(spec)
    return (found[1], found[2]) if found else (spec, None)


@dataclass(frozen=True)
class Inputs:
    """The arrays that the ranks read together, as one joined array.

    Attributes:
        sources: all arrays, in order.
        shape, dtype: of all of them, joined.
        dim: dimension along which they are joined, >= 0.
        boxes: of each array in the whole.
    """

    sources: Sequence[Source]
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    boxes: Shards

    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def share(self, world: World, rank: int) -> Box:
        """The box of the arrays that a rank reads where they are gathered in memory."""
        mine = layout.block_range(len(self.sources), world.world_size, rank)
        displs = self.boxes.displs.tolist()
        return layout.whole(self.shape).narrow(self.dim, displs[mine.start], displs[mine.stop])

    def reading(self, window: int) -> AbstractContextManager[Read]:
        """As :func:`reading`, of the arrays."""
        return reading([(OpenFiles(source.contents), source.stored) for source in self.sources], window, _MOST_OPEN)

    def by_library(self) -> Slices:
        """Return boxes of the joined array as the libraries of the arrays' formats read them."""

        @lru_cache(_MOST_OPEN)
        def opened(i: int) -> Slices:
            path = self.sources[i].contents.path
            return _READ[Path(path).suffix].by_library(path, self.sources[i].stored)

        def slices(box: Box) -> Tensor:
            out = torch.empty(box.shape, dtype=self.dtype, device="cpu")
            self.join(lambda i, inner, part: bits(part).copy_(bits(opened(i)(inner))), box, out)
            return out

        return slices

    def join(self, read: Read, whole: Box, out: Tensor) -> None:
        """Fill `out`, a CPU tensor, with a box of the joined array; `read` reads boxes of the arrays."""
        for i in self.boxes.intersecting(whole).tolist():
            at = self.boxes[i]
            common = at.intersect(whole)
            box = common.relative_to(at.offset) if self.sources[i].stored.shape else Box((), ())
            read(i, box, out[common.slices(whole.offset)].view(box.shape))


@contextmanager
def reading(tensors: Sequence[tuple[OpenFiles, Stored]], window: int, most: int) -> Iterator[Read]:
    """Read boxes of the tensors of files, for a ``with`` block, which closes the files.

    Every piece of which something is read is compared with its checksum, once. A read that fails raises a FileError.

    Args:
        tensors: each with its files.
        window: bytes of host memory, half of which are for what is read.
        most: how many tensors stay open; some formats' libraries hold all of each in memory.
    """
    opened: dict[int, TensorReader] = {}

    def read(i: int, box: Box, out: Tensor) -> None:
        files, stored = tensors[i]
        half = window // 2
        if stored.raw is not None and layout.runs(box, stored.shape)[1] == 1:
            half = max(half, 2 * out.nbytes)  # straight into `out`, a piece of any size at once
        with file_errors(f"{files.contents.path}: {stored.name}".rstrip(": ")):
            if i not in opened:
                if len(opened) >= most:
                    opened.pop(next(iter(opened))).files.close()
                opened[i] = TensorReader(files, stored, verify=True)
            opened[i].read(box, out, half)

    try:
        yield read
    finally:
        for reader in opened.values():
            reader.files.close()


def find(world: World, given: Sequence[str], dim: int) -> Inputs:
    """Find the inputs that `given` names, in that order; by default, the files of Python's standard library.

    Collective.

    Raises:
        RankError, InputError: on all ranks, if an input cannot be read or they do not fit together along `dim`.
    """
    comm = team_of().comm
    specs = objects.run_on_root(comm, "inputs", (lambda: _expand(given)) if given else _standard_library)
    mine = layout.block_range(len(specs), world.world_size, world.rank)
    looked = progress(specs[mine.start : mine.stop], world, "look")
    parts = objects.run_on_all(comm, "inputs", lambda: [described(spec) for spec in looked])
    sources = [source for part in parts for source in part]
    if given:
        objects.run_on_root(comm, "inputs", lambda: _check_once(sources))
    return joined(sources, dim)


def _expand(inputs: Sequence[str]) -> list[str]:
    """Expand names and patterns into files; a name after a colon is applied to each file.

    They come in the order given; the files that a pattern matches in natural order, s2 before s10.

    Raises:
        InputError: a pattern that matches nothing.
    """
    specs: list[str] = []
    for given in inputs:
        path, name = _split(given)
        paths = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True), key=_natural)
        if not paths:
            raise InputError("HD401", f"{path}: no such file, and no file matches")
        specs += [p if name is None else f"{p}:{name}" for p in paths]
    return specs


def _natural(path: str) -> list[Any]:
    """A key that sorts the numbers within names as numbers."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]+)", path))]


def _standard_library() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(str(path) for path in root.rglob("*.py") if "site-packages" not in path.parts and path.is_file())


def _check_once(sources: Sequence[Source]) -> None:
    """Check that no array is named twice, under whatever names the file has; an InputError if one is."""
    seen: dict[object, Source] = {}
    for source in sources:
        path = source.contents.path
        other = seen.setdefault((source.contents.files[path], source.stored.name), source)
        if other is not source and os.path.samefile(path, other.contents.path):
            raise InputError("HD507", f"{source.spec}: named twice, also as {other.spec}")


def joined(sources: Sequence[Source], dim: int) -> Inputs:
    """Join arrays along `dim`; an InputError if they do not fit together."""
    name, first = sources[0].spec, sources[0].stored
    ndim = len(first.shape) or 1
    if not -ndim <= dim < ndim:
        what = f"{name} has {len(first.shape)} dims, expected {-ndim} to {ndim - 1}"
        raise InputError("HD505", f"--dim {dim}: {what}")
    dim %= ndim

    def besides(stored: Stored) -> object:
        return stored.dtype, len(stored.shape), stored.shape[:dim], stored.shape[dim + 1 :]

    for source in sources:
        if besides(source.stored) != besides(first):
            this, other = (f"{of.dtype} {of.shape}" for of in (source.stored, first))
            raise InputError("HD303", f"{source.spec}: {this} does not fit {other} of {name} along dim {dim}")
    displs = summed([source.stored.shape[dim] if source.stored.shape else 1 for source in sources])  # 0-d: one row
    shape = (*first.shape[:dim], int(displs[-1]), *first.shape[dim + 1 :])
    return Inputs(sources, shape, first.dtype, dim, Shards(shape, dim, displs))


def in_pieces(path: str, datasets: Sequence[Dataset], window: int) -> list[Dataset]:
    """Cut tensors for the output `path`, half of the window a piece, since reading one may take as much again.

    Pieces that a tensor has in its file are kept if they fit and are runs of it: each is then read once, with its
    checksum.

    Raises:
        InputError: there are too many pieces.
    """
    found = []
    for d in datasets:
        limit, pieces = piece_limit(window // 2, d.dtype.itemsize), d.pieces
        if not len(pieces) or int(pieces.sizes.max()) > limit or not pieces.are_runs:
            try:
                check_pieces(d.shape, d.dtype.itemsize, limit)
            except ArgumentError as error:
                raise InputError("HD419", f"{path}: {d.name} {error}") from error
            pieces = grid(d.shape, limit)
        found.append(replace(d, pieces=pieces))
    return found


def copy(
    world: World, team: Team, verb: str, path: str, datasets: Sequence[Dataset], read: Read, options: SaveOptions
) -> tuple[int, int]:
    """Write tensors to a file, or to several and an index. Collective over `team`.

    Args:
        datasets: perhaps with the pieces in which they are in a file: see in_pieces().
        read: raises an HpcdistError for what cannot be read.

    Returns:
        How many pieces this rank has, and how many of them another run has left complete.

    Raises:
        RankError: on every rank, if anything failed on one; existing files are then as they were.
    """
    datasets = in_pieces(path, datasets, options.window)
    mine = share(datasets, team.rank, team.size)
    if path.endswith(safetensors.SUFFIX):
        options = replace(options, attrs={"format": "pt", **options.attrs})
    with meter(world, verb, sum(d.nbytes() for d in datasets) // team.size) as bar:
        options = replace(options, progress=bar.update)
        with FileWriter(team, verb, path, datasets, options) as file:
            buffer = torch.empty(piece_limit(options.window // 2, 1), dtype=torch.uint8, device="cpu")
            try:
                for i, row, box in mine:
                    if file.problem is not None:
                        break
                    dtype = datasets[i].dtype
                    x: Tensor = buffer[: box.size() * dtype.itemsize].view(dtype).view(box.shape)
                    read(i, box, x)
                    file.put(i, row, x)
            except HpcdistError as error:
                file.fail(error)
    return len(mine), file.kept


def share(datasets: Sequence[Dataset], rank: int, size: int) -> list[tuple[int, int, Box]]:
    """Return the share of one of `size` ranks: (tensor, piece, box of the piece), where pieces are runs, in order.

    A piece belongs to the rank in whose part of all bytes it begins.
    """
    first, found = summed([d.nbytes() for d in datasets]), []
    total, last = int(first[-1]), rank + 1 == size
    limits = total * rank // size, total * (rank + 1) // size + last  # the last has what begins at the end, too
    for i, (start, d) in enumerate(zip(first[:-1], datasets, strict=True)):
        low, high = np.searchsorted(start + d.pieces.starts * d.dtype.itemsize, limits).tolist()
        found += [(i, row, d.pieces[row]) for row in range(low, high)]
    return found


def add_options(p: Parser) -> None:
    """Add the options that all of these commands have."""
    p.add_argument(
        "--window", type=nbytes, default=WINDOW, metavar="BYTES",
        help="host memory that a rank may use for data in transit to files, such as 64M (default 256M)",
    )  # fmt: skip
    p.add_argument("--resume", action="store_true", help="resume a killed job: write only what differs from its output")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def check_output(name: str, inputs: Iterable[str], nbytes: int) -> None:
    """Check before any data move that a file of `nbytes` can be written, and is none of the inputs.

    Raises:
        InputError, FileError: it cannot: no such folder, not writable, no space, or an input under another name.
    """
    if os.path.exists(name) and any(os.path.samefile(name, path) for path in inputs):
        raise InputError("HD507", f"{name}: is also an input, which it would replace")
    check_target(name, nbytes)


def copied(
    world: World, args: Namespace, report: Report, started: float, done: tuple[int, int], *result: str
) -> list[str]:
    """Complete the report on a copy of all bytes to files; return lines of the report as text. Collective.

    Args:
        done: what copy() returned on this rank.
        result: lines.
    """
    found = objects.all_gather_object(team_of().comm, (time.perf_counter() - started, *done))
    seconds, pieces, kept = zip(*found, strict=True)
    slowest = max(seconds)
    report |= {"seconds": slowest, "output": args.output}
    lines = [
        f"ranks: {world.world_size}, each reads and writes its share, {show_bytes(args.window)} at a time",
        *result,
    ]
    if args.resume:
        report |= {"pieces": sum(pieces), "pieces_kept": sum(kept)}
        lines.append(f"resumed: {sum(kept)} of {sum(pieces)} pieces were there and are kept")
    took = f"every rank writes: {slowest * 1e3:.2f} ms, {report['bytes'] / slowest / 1e9:.2f} GB/s"
    return [*lines, took, f"written: {shown(args.output)}"]


def finish(world: World, args: Namespace, report: Report, lines: Iterable[str]) -> None:
    """Print a report on rank 0: as lines of text, or as JSON."""
    if world.rank == 0:
        print(json.dumps(report) if args.json else "\n".join(lines), flush=True)
