"""The arrays that a command reads: find them, divide them among the ranks, check that they fit together."""

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

from hpcdist import layout, memory
from hpcdist.commands import sources as files
from hpcdist.commands.sources import Source
from hpcdist.control import objects
from hpcdist.errors import InputError
from hpcdist.files.regular import shown
from hpcdist.layout import Box
from hpcdist.runtime.cli import progress
from hpcdist.runtime.world import World
from hpcdist.staging.pieces import shard_boxes
from hpcdist.staging.reader import Reader
from hpcdist.tensors.storage import as_bytes, copyable, row_major

__all__ = ["Inputs", "check_memory", "equal", "find", "sha256"]


@dataclass(frozen=True)
class Inputs:
    """The arrays that the ranks read together.

    Attributes:
        sources: all arrays, in order; rank r reads ``sources[bounds[r]:bounds[r + 1]]``.
        shape, dtype: of all of them, joined.
        dim: dimension along which they are joined, >= 0.
        of_stdlib: whether they are the source files of Python's standard library, as uint8.
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
        """A text that differs for other inputs, and for these once they are changed."""
        stats = [(s.spec, os.stat(files.path_of(s.spec))) for s in self.sources]
        return repr((self.dim, [(spec, stat.st_size, stat.st_mtime_ns) for spec, stat in stats]))

    def names(self) -> list[str]:
        """The names of the arrays, in the order in which they are joined; not of the standard library's files."""
        return [] if self.of_stdlib else [source.spec for source in self.sources]

    def nbytes_by_rank(self) -> list[int]:
        """The bytes of the arrays that each rank reads."""
        whole = self.shape[self.dim]
        row = self.nbytes() // whole if whole else 0
        return [
            row * sum(source.extent(self.dim) for source in self.sources[start:end])
            for start, end in pairwise(self.bounds)
        ]

    def open(self, source: Source, by_library: bool = False) -> AbstractContextManager[Reader]:
        """Open one array, to read boxes of it: as the commands do, or by its format's own library."""
        return files.open_bytes(source.spec) if self.of_stdlib else files.open_array(source.spec, by_library)

    def boxes(self) -> list[Box]:
        """The box of each array in the whole."""
        return shard_boxes(self.shape, self.dim, [source.extent(self.dim) for source in self.sources])

    def read(self, source: Source, by_library: bool = False) -> Tensor:
        """Read one array, as open() opens it, with at least one dim.

        Raises:
            InputError: it cannot be read, or differs from its header as it was before.
        """
        with self.open(source, by_library) as array:
            if array.shape != source.shape or array.dtype != source.dtype:
                raise InputError("HD407", f"{source.spec}: has changed while it was read")
            x = array.whole()
        return x if x.dim() else x.view(1)

    def shard(self, world: World) -> Tensor:
        """Read this rank's arrays and join them; no rows if it has none. Collective: errors are raised on all ranks."""
        mine = self.sources[self.bounds[world.rank] : self.bounds[world.rank + 1]]
        parts: list[Tensor] = []
        step = lambda: parts.extend(self.read(source) for source in progress(mine, world, "read"))  # noqa: E731
        objects.all_gather(world.team.comm, "read", step)
        if len(parts) == 1:
            return parts[0]
        shape = list(self.shape)
        shape[self.dim] = 0
        parts.append(torch.empty(shape, dtype=self.dtype, device="cpu"))
        return torch.cat(list(map(copyable, parts)), self.dim).view(self.dtype)

    def verify(self, held: Sequence[Tensor], world: World) -> tuple[bool, str | None]:
        """Compare tensors bit by bit with all inputs, read here, on one process, by the formats' own libraries.

        Returns:
            The verdict, and for dim 0 the SHA-256 of the inputs in their order.
        """
        digest = hashlib.sha256()
        start, right = 0, all(tuple(whole.shape) == self.shape for whole in held)
        for source in progress(self.sources, world, "verify"):
            x = self.read(source, by_library=True)
            rows = x.shape[self.dim]
            right = right and all(equal(whole.narrow(self.dim, start, rows), x) for whole in held)
            digest.update(as_bytes(row_major(x)).numpy().data)
            start += rows
        return right, digest.hexdigest() if self.dim == 0 else None


def find(world: World, given: Sequence[str], dim: int, output: str | None) -> Inputs:
    """Find the inputs that `given` names, in that order; by default, the files of Python's standard library.

    Collective. With an `output` something must be given: an empty variable of a script must not fill a file.

    Raises:
        RankError, InputError: on all ranks, if one of them cannot be read or they do not fit together along `dim`.
    """
    if output and not given:
        raise InputError("HD505", f"{shown(output)}: no INPUT is given, and without one nothing is written")
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
    """Check before anything is read that each node has memory for its ranks' inputs and results. Collective.

    Raises:
        InputError: on all ranks, if one has not.
    """
    own = data.nbytes_by_rank()[world.rank]
    need = own + (data.nbytes() if everywhere or world.rank == root else 0)
    nodes = objects.all_gather_object(world.team.comm, (world.node, need, memory.available()))
    for node in range(world.nodes):
        total = sum(bytes_ for where, bytes_, _ in nodes if where == node)
        free = min(free for where, _, free in nodes if where == node)
        if total > free:
            where = f"node {node}" if world.nodes > 1 else "this host"
            raise InputError(
                "HD504",
                f"the inputs and the result need {total:,} bytes of memory on {where}, and {free:,} are available: "
                "with -o FILE, and without --all and --compare, they are streamed through a window of it",
            )


def _check(sources: Sequence[Source], dim: int) -> int:
    """Check that the arrays can be joined along dim, which is returned non-negative."""
    first = sources[0]
    ndim = len(first.shape) or 1
    if not -ndim <= dim < ndim:
        raise InputError(
            "HD508", f"--dim {dim}: {first.spec} has {len(first.shape)} dims, expected {-ndim} to {ndim - 1}"
        )
    dim %= ndim
    for source in sources:
        if source.dtype != first.dtype:
            raise InputError("HD513", f"{source.spec}: dtype {source.dtype}, but {first.spec} has {first.dtype}")
        if _besides(source, dim) != _besides(first, dim):
            raise InputError(
                "HD513",
                f"{source.spec}: shape {source.shape} does not fit {first.shape} of {first.spec} along dim {dim}",
            )
    return dim


def _besides(source: Source, dim: int) -> tuple[int, ...]:
    """The number of dims and the extents besides dim, which must be the same in all arrays."""
    return (len(source.shape), *source.shape[:dim], *source.shape[dim + 1 :])


def _stdlib() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(str(path) for path in root.rglob("*.py") if "site-packages" not in path.parts and path.is_file())


def _describe_text(path: str) -> Source:
    return Source(path, (Path(path).stat().st_size,), torch.uint8)


def equal(x: Tensor, y: Tensor) -> bool:
    """Compare the shapes, dtypes and bits of two tensors."""
    same = x.shape == y.shape and x.dtype == y.dtype
    return same and torch.equal(as_bytes(row_major(x)), as_bytes(row_major(y)))


def sha256(x: Tensor) -> str:
    """The SHA-256 of a tensor's bytes, in order."""
    return hashlib.sha256(as_bytes(row_major(x.cpu())).numpy().data).hexdigest()
