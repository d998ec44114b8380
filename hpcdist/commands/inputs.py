"""The arrays that a command reads: which there are, which rank reads which, and whether they fit together."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hpcdist import layout, limits, memory
from hpcdist.commands import sources as files
from hpcdist.commands.arrays import Opened
from hpcdist.commands.sources import Source
from hpcdist.control import objects
from hpcdist.errors import InputError
from hpcdist.files.regular import shown
from hpcdist.layout import Box
from hpcdist.runtime.cli import progress
from hpcdist.runtime.world import World
from hpcdist.staging.pieces import shard_boxes
from hpcdist.tensors.storage import as_bytes, copyable, row_major

__all__ = ["Inputs", "check_memory", "equal", "find", "sha256"]


@dataclass(frozen=True)
class Inputs:
    """What the ranks read together.

    Attributes:
        sources: all arrays, in order; rank r reads ``sources[bounds[r]:bounds[r + 1]]``.
        shape, dtype: of all of them, joined.
        dim: along which they are joined, >= 0.
        of_stdlib: they are the source files of Python's standard library, as uint8.
    """

    sources: list[Source]
    bounds: list[int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    of_stdlib: bool

    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def fingerprint(self) -> str:
        """What tells these inputs from others, and from themselves once they are changed."""
        stats = [(s.spec, os.stat(files.path_of(s.spec))) for s in self.sources]
        return repr((self.dim, [(spec, stat.st_size, stat.st_mtime_ns) for spec, stat in stats]))

    def names(self) -> list[str]:
        """What was taken, in the order in which it is joined; not the standard library's files."""
        return [] if self.of_stdlib else [source.spec for source in self.sources]

    def nbytes_by_rank(self) -> list[int]:
        """The bytes of the arrays that each rank reads."""
        whole = self.shape[self.dim]
        row = self.nbytes() // whole if whole else 0
        return [
            row * sum(source.extent(self.dim) for source in self.sources[start:end])
            for start, end in pairwise(self.bounds)
        ]

    def opened(self, source: Source) -> AbstractContextManager[Opened]:
        """One array, for reading boxes of it."""
        return files.opened_bytes(source.spec) if self.of_stdlib else files.opened(source.spec)

    def opened_by_library(self, source: Source) -> AbstractContextManager[Opened]:
        """The same, by its format's own library."""
        return files.opened_bytes(source.spec) if self.of_stdlib else files.opened_by_library(source.spec)

    def boxes(self) -> list[Box]:
        """Where each of the arrays lies in the whole."""
        return shard_boxes(self.shape, self.dim, [source.extent(self.dim) for source in self.sources])

    def read(self, source: Source, opened: AbstractContextManager[Opened]) -> Tensor:
        """One array that is opened here, with at least one dim.

        Raises:
            InputError: it cannot be read, or is not what its header said before.
        """
        with opened as array:
            if array.shape != source.shape or array.dtype != source.dtype:
                raise InputError(f"{source.spec}: has changed while it was read")
            x = torch.empty(array.shape, dtype=array.dtype, device="cpu")
            array.read(layout.whole(array.shape), x, limits.WINDOW)
        return x if x.dim() else x.view(1)

    def shard(self, world: World) -> Tensor:
        """This rank's arrays, joined; no rows if it has none. Collective: an error on one rank is one on all."""
        mine = self.sources[self.bounds[world.rank] : self.bounds[world.rank + 1]]
        parts: list[Tensor] = []
        step = lambda: parts.extend(self.read(source, self.opened(source)) for source in progress(mine, world, "read"))  # noqa: E731
        objects.all_gather(world.team.comm, "read", step)
        if len(parts) == 1:
            return parts[0]
        shape = list(self.shape)
        shape[self.dim] = 0
        parts.append(torch.empty(shape, dtype=self.dtype, device="cpu"))
        return torch.cat(list(map(copyable, parts)), self.dim).view(self.dtype)

    def verify(self, held: Sequence[Tensor], world: World) -> tuple[bool, str | None]:
        """Whether the tensors that are held have the bits of all inputs, read here, on one process, by the formats' own
        libraries.

        Returns:
            The verdict, and for dim 0 the SHA-256 of the inputs in their order.
        """
        digest = hashlib.sha256()
        start, right = 0, all(tuple(whole.shape) == self.shape for whole in held)
        for source in progress(self.sources, world, "verify"):
            x = self.read(source, self.opened_by_library(source))
            rows = x.shape[self.dim]
            right = right and all(equal(whole.narrow(self.dim, start, rows), x) for whole in held)
            digest.update(as_bytes(row_major(x)).numpy().data)
            start += rows
        return right, digest.hexdigest() if self.dim == 0 else None


def find(world: World, given: Sequence[str], dim: int, output: str | None) -> Inputs:
    """The inputs that `given` stands for, in that order; nothing given stands for Python's standard library.

    Collective. With an `output` something must be given: a variable of a script that is empty must not fill a file.

    Raises:
        RankError, InputError: on all ranks, if one of them cannot be read or they do not fit together along `dim`.
    """
    if output and not given:
        raise InputError(f"{shown(output)}: no INPUT is given, and without one nothing is written")
    comm = world.team.comm
    specs = objects.broadcast(comm, "inputs", (lambda: files.expand(given)) if given else _stdlib)
    bounds = [*layout.displs(layout.block(len(specs), world.world_size)), len(specs)]
    mine = specs[bounds[world.rank] : bounds[world.rank + 1]]
    describe = files.describe if given else _describe_text
    described = objects.all_gather(comm, "inputs", lambda: [describe(spec) for spec in progress(mine, world, "look")])
    sources = [source for part in described for source in part]
    if given:
        objects.broadcast(comm, "inputs", lambda: files.check_once(sources))  # one rank's numbers of files and devices
    dim = _check(sources, dim)
    total = sum(source.extent(dim) for source in sources)
    shape = sources[0].shape
    return Inputs(sources, bounds, (*shape[:dim], total, *shape[dim + 1 :]), sources[0].dtype, dim, of_stdlib=not given)


def check_memory(world: World, data: Inputs, everywhere: bool, root: int) -> None:
    """Find before anything is read that a node has no memory for its ranks' inputs and results. Collective.

    Raises:
        InputError: on all ranks.
    """
    own = data.nbytes_by_rank()[world.rank]
    need = own + (data.nbytes() if everywhere or world.rank == root else 0)
    told = objects.all_gather_object(world.team.comm, (world.node, need, memory.available()))
    for node in range(world.nodes):
        total = sum(bytes_ for where, bytes_, _ in told if where == node)
        free = min(free for where, _, free in told if where == node)
        if total > free:
            where = f"node {node}" if world.nodes > 1 else "this host"
            raise InputError(
                f"the inputs and the result need {total:,} bytes of memory on {where}, and {free:,} are available: "
                "with -o FILE, and without --all and --compare, they are streamed through a window of it"
            )


def _check(sources: Sequence[Source], dim: int) -> int:
    """Whether the arrays can be joined along dim, which is returned non-negative."""
    first = sources[0]
    ndim = len(first.shape) or 1
    if not -ndim <= dim < ndim:
        raise InputError(f"--dim {dim}: {first.spec} has {len(first.shape)} dims, expected {-ndim} to {ndim - 1}")
    dim %= ndim
    for source in sources:
        if source.dtype != first.dtype:
            raise InputError(f"{source.spec}: dtype {source.dtype}, but {first.spec} has {first.dtype}")
        if _besides(source, dim) != _besides(first, dim):
            raise InputError(
                f"{source.spec}: shape {source.shape} does not fit {first.shape} of {first.spec} along dim {dim}"
            )
    return dim


def _besides(source: Source, dim: int) -> tuple[int, ...]:
    """What must be the same in all arrays: the number of dims, and the extents besides dim."""
    return (len(source.shape), *source.shape[:dim], *source.shape[dim + 1 :])


def _stdlib() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(str(path) for path in root.rglob("*.py") if "site-packages" not in path.parts and path.is_file())


def _describe_text(path: str) -> Source:
    return Source(path, (Path(path).stat().st_size,), torch.uint8)


def equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    same = x.shape == y.shape and x.dtype == y.dtype
    return same and torch.equal(as_bytes(row_major(x)), as_bytes(row_major(y)))


def sha256(x: Tensor) -> str:
    """Of the tensor's bytes, in order."""
    return hashlib.sha256(as_bytes(row_major(x.cpu())).numpy().data).hexdigest()
