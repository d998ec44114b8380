"""The arrays in files that the commands gather, concat and split join: found by name, and read a box at a time."""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.control import objects
from hpcdist.errors import InputError, listed
from hpcdist.formats.contents import Contents, Format, Slices, Stored, identity
from hpcdist.formats.known import FORMATS, describe
from hpcdist.formats.plain import Raw
from hpcdist.layout import Box
from hpcdist.layout.box import Shards, summed
from hpcdist.runtime.cli import progress
from hpcdist.runtime.world import World, team_of
from hpcdist.staging.reader import OpenFiles, TensorReader
from hpcdist.tensors.storage import bits

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
        window: bytes of host memory, half of which are for the tensors that are filled.
        most: how many tensors stay open; some formats' libraries hold all of each in memory.
    """
    opened: dict[int, TensorReader] = {}

    def read(i: int, box: Box, out: Tensor) -> None:
        files, stored = tensors[i]
        if i not in opened:
            if len(opened) >= most:
                opened.pop(next(iter(opened))).files.close()
            opened[i] = TensorReader(files, stored, window, verify=True)
        opened[i].read(box, out)

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
