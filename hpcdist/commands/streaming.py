"""Copy arrays from files to files, with no more than a window of host memory on any rank."""

from __future__ import annotations

import os
import resource
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.collectives.gather import gather
from hpcdist.comm.groups import Group
from hpcdist.comm.team import Team
from hpcdist.commands.inputs import Inputs
from hpcdist.commands.outputs import Array, Output, pieces_of
from hpcdist.commands.sources import Source
from hpcdist.control import objects
from hpcdist.errors import InputError, reason
from hpcdist.layout import Box
from hpcdist.runtime.cli import meter, placed
from hpcdist.runtime.world import World
from hpcdist.staging.reader import Reader
from hpcdist.staging.target import SaveOptions
from hpcdist.tensors.storage import as_bytes

__all__ = ["Joined", "Writer"]

_MAX_OPEN = 32  # input files kept open
_SPARE = 16  # file descriptors left to everything else


class Joined:
    """The inputs as one joined array, of which any box can be read. Use it in a with block, which closes the files."""

    def __init__(self, data: Inputs, window: int) -> None:
        self._data = data
        self._window = window
        rows = [source.extent(data.dim) for source in data.sources]
        self._starts = list(accumulate(rows, initial=0))
        self._open: dict[int, tuple[ExitStack, Reader]] = {}
        free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
        self._most = max(1, min(_MAX_OPEN, (free - _SPARE) // 2))  # an archive takes two

    def read(self, box: Box, out: Tensor) -> None:
        """Fill `out`, a CPU tensor of the box's shape.

        Raises:
            InputError: a file cannot be read, or its header has changed.
        """
        dim = self._data.dim
        row, end = box.offset[dim], box.offset[dim] + box.shape[dim]
        i = max(0, bisect_right(self._starts, row) - 1)
        while row < end:
            stop = min(end, self._starts[i + 1])
            if row < stop:
                source = self._data.sources[i]
                part = out.narrow(dim, row - box.offset[dim], stop - row)
                at = (*box.offset[:dim], row - self._starts[i], *box.offset[dim + 1 :])
                array = self._array(i, source)
                want = Box(at, tuple(part.shape)) if source.shape else Box((), ())
                try:
                    array.read(want, part if source.shape else part.view(()), self._window)
                except Exception as error:  # each library has its own errors for a damaged file
                    raise InputError("HD402", f"{source.spec}: cannot be read: {reason(error)}") from error
                row = stop
            i += 1

    def _array(self, i: int, source: Source) -> Reader:
        if i not in self._open:
            if len(self._open) >= self._most:
                self._open.pop(next(iter(self._open)))[0].close()
            stack = ExitStack()
            array = stack.enter_context(self._data.open(source))
            if array.shape != source.shape or array.dtype != source.dtype:
                stack.close()
                raise InputError("HD407", f"{source.spec}: has changed while it was read")
            self._open[i] = (stack, array)
        return self._open[i][1]

    def __enter__(self) -> Joined:
        return self

    def __exit__(self, *_: object) -> None:
        for stack, _array in self._open.values():
            stack.close()


Read = Callable[[Box, Tensor], object]  # fills the tensor with a box of an array


@dataclass(frozen=True)
class Writer:
    """Writes arrays to files, with no more than a window of host memory.

    Every method is collective over the world, and returns entries of the report: "seconds", of the slowest rank. It
    raises a RankError on every rank if anything failed on one; existing files are then left as they were.

    Attributes:
        verb: name of the operation, for errors and progress bars.
        dtype: of all arrays.
        window: bytes of host memory that a rank may use.
        source: description of the inputs, which the file to resume must have been written from; None begins anew.
    """

    world: World
    verb: str
    dtype: torch.dtype
    window: int
    source: str | None = None

    def write_together(self, read: Read, path: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """Write one file: every rank reads and writes its share of the pieces."""
        start = time.perf_counter()
        out = self._write(self.world.team, read, path, shape)
        report = self._seconds(start)
        return report if self.source is None else report | {"pieces": len(out.pieces), "pieces_kept": out.kept}

    def write_alone(self, read: Read, parts: Sequence[tuple[str, Box]]) -> dict[str, Any]:
        """Write files on this rank alone, each holding a box of the array."""
        start = time.perf_counter()

        def write() -> None:
            with _alone(self.world) as team:
                for path, box in parts:
                    self._write(team, _shifted(read, box), path, box.shape)

        objects.all_gather(self.world.team.comm, self.verb, write)
        return self._seconds(start)

    def write_on_root(self, read: Read, path: str, shape: tuple[int, ...], route: str, root: int) -> dict[str, Any]:
        """Write one file in rounds: every rank reads a piece, and the root gathers and writes them."""
        start = time.perf_counter()
        world, comm, size = self.world, self.world.team.comm, self.world.world_size
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        gather(placed(world, nothing, route), 0, root, route=route)  # refuses a route before the file exists
        with _alone(world) as team, self._meter(shape, 1) as bar:
            share = max(2 * self.dtype.itemsize, self.window // size)
            out: list[Output] = []
            array, window = Array(path, shape, self.dtype), SaveOptions(window=share)
            objects.broadcast(comm, self.verb, lambda: out.append(Output(team, self.verb, array, window)), root)
            pieces = pieces_of(shape, self.dtype, share)
            buffer = _Buffer(pieces, self.dtype)
            received = _Buffer(pieces, self.dtype, min(size, len(pieces))) if world.rank == root else None
            problem = None
            for first in range(0, len(pieces), size):
                boxes = pieces[first : first + size]
                box = boxes[world.rank] if world.rank < len(boxes) else layout.whole((0,))
                mine = buffer.of(box)
                try:
                    if box.size() and problem is None:
                        read(box, mine)
                except InputError as error:
                    problem = str(error)
                x = placed(world, as_bytes(mine), route)
                memory = None if received is None or x.is_cuda else as_bytes(received.first(boxes))
                whole = gather(x, 0, root, route=route, out=memory)
                if whole is not None:
                    _put(out[0], first, boxes, whole.cpu().view(self.dtype))
                bar.update(sum(box.size() for box in boxes) * self.dtype.itemsize)
            problem = next((text for text in objects.all_gather_object(comm, problem) if text is not None), None)
            objects.broadcast(comm, self.verb, lambda: out[0].finish(problem), root)
        return self._seconds(start)

    def _seconds(self, start: float) -> dict[str, Any]:
        return {"seconds": max(objects.all_gather_object(self.world.team.comm, time.perf_counter() - start))}

    def _write(self, team: Team, read: Read, path: str, shape: tuple[int, ...]) -> Output:
        """Write one file: every rank of the team reads and writes its share of the pieces. Collective over `team`."""
        resume = self.source is not None
        with self._meter(shape, team.size) as bar:
            options = SaveOptions(window=self.window, resume=resume, source=self.source or "", progress=bar.update)
            out = Output(team, self.verb, Array(path, shape, self.dtype), options)
            problem = None
            try:
                buffer = _Buffer(out.pieces, self.dtype)
                for row in out.mine():
                    piece = buffer.of(out.pieces[row])
                    read(out.pieces[row], piece)
                    out.put(row, piece)
            except InputError as error:
                problem = str(error)
            out.finish(problem)
        return out

    def _meter(self, shape: tuple[int, ...], writers: int) -> Any:
        return meter(self.world, self.verb, layout.whole(shape).size() * self.dtype.itemsize // writers)


def _shifted(read: Read, part: Box) -> Read:
    """Return the function that reads boxes of a part of the array."""
    return lambda box, out: read(box.shift(part.offset), out)


def _put(out: Output, first: int, boxes: Sequence[Box], values: Tensor) -> None:
    """Write the pieces from number `first` on, whose values follow each other."""
    pieces = torch.split(values, [box.size() for box in boxes])
    for i, (box, piece) in enumerate(zip(boxes, pieces, strict=True)):
        out.put(first + i, piece.view(box.shape))


class _Buffer:
    """Memory for `count` pieces, used again for the next ones."""

    def __init__(self, pieces: Sequence[Box], dtype: torch.dtype, count: int = 1) -> None:
        largest = max((piece.size() for piece in pieces), default=0)
        self._memory = torch.empty(count * largest, dtype=dtype, device="cpu")

    def first(self, boxes: Sequence[Box]) -> Tensor:
        """Return the memory of these pieces, one after the other."""
        return self._memory[: sum(box.size() for box in boxes)]

    def of(self, box: Box) -> Tensor:
        """Return the memory of one piece, in its shape."""
        return self.first([box]).view(box.shape)


@contextmanager
def _alone(world: World) -> Iterator[Team]:
    """Make a team of this rank only."""
    from mpi4py import MPI

    team = Team(MPI.COMM_SELF.Dup(), Group(0, [world.rank], {}, MPI.COMM_SELF), world.settings)
    try:
        yield team
    finally:
        team.free()
