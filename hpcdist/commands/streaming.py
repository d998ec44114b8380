"""From files to a file, with no more than a window of host memory on any rank: what the commands do with ``-o``."""

from __future__ import annotations

import hashlib
import os
import resource
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.collectives.gather import gather
from hpcdist.comm.groups import Group
from hpcdist.comm.team import Team
from hpcdist.commands import outputs
from hpcdist.commands import sources as files
from hpcdist.commands.arrays import Opened
from hpcdist.commands.inputs import Inputs, equal
from hpcdist.commands.sources import Source
from hpcdist.control import objects
from hpcdist.errors import InputError, reason
from hpcdist.files.raw import memory
from hpcdist.layout import Box
from hpcdist.runtime.cli import Meter
from hpcdist.runtime.world import World
from hpcdist.tensors.storage import as_bytes

__all__ = ["Joined", "Written", "each_alone", "to_file", "to_root", "verify"]

_OPEN = 32  # files at most that are kept open
_SPARE = 16  # file descriptors that are left to all else


class Joined:
    """The inputs as the one array that they are together, of which any box can be read. To be used in a with block."""

    def __init__(self, data: Inputs, window: int) -> None:
        self._data = data
        self._window = window
        rows = [source.extent(data.dim) for source in data.sources]
        self._starts = list(accumulate(rows, initial=0))
        self._open: dict[int, tuple[ExitStack, Opened]] = {}
        free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
        self._most = max(1, min(_OPEN, (free - _SPARE) // 2))  # an archive takes two

    def read(self, box: Box, out: Tensor) -> None:
        """Fill `out`, a CPU tensor of the box's shape.

        Raises:
            InputError: a file cannot be read, or is not what its header said before.
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
                except Exception as error:  # each library has its own way to say that a file is damaged
                    raise InputError(f"{source.spec}: cannot be read: {reason(error)}") from error
                row = stop
            i += 1

    def _array(self, i: int, source: Source) -> Opened:
        if i not in self._open:
            if len(self._open) >= self._most:
                self._open.pop(next(iter(self._open)))[0].close()
            stack = ExitStack()
            array = stack.enter_context(self._data.opened(source))
            if array.shape != source.shape or array.dtype != source.dtype:
                stack.close()
                raise InputError(f"{source.spec}: has changed while it was read")
            self._open[i] = (stack, array)
        return self._open[i][1]

    def __enter__(self) -> Joined:
        return self

    def __exit__(self, *_: object) -> None:
        for stack, _array in self._open.values():
            stack.close()


Read = Callable[[Box, Tensor], None]


class Written(NamedTuple):
    """How a file was written: the seconds that it took this rank, the file's pieces, and those that were there."""

    seconds: float
    pieces: int
    kept: int


def to_file(
    world: World,
    team: Team,
    verb: str,
    read: Read,
    path: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    window: int,
    resume: str | None,
) -> Written:
    """Write an array to a file: every rank of the team reads and writes its share of the pieces. Collective over it.

    `resume` says what the array comes from, to go on with a file that was left of the same; None begins anew.

    Raises:
        RankError: on every rank of the team, if anything failed; the name then holds what it held.
    """
    start = time.perf_counter()
    nbytes = layout.whole(shape).size() * dtype.itemsize
    with Meter(world, verb, nbytes // team.size) as meter:
        out = outputs.create(team, verb, path, shape, dtype, window, resume is not None, resume or "", meter.add)
        problem = None
        try:
            buffer = _Buffer(out.pieces, dtype)
            for row in out.mine():
                piece = buffer.of(out.pieces[row])
                read(out.pieces[row], piece)
                out.put(row, piece)
        except InputError as error:
            problem = str(error)
        out.finish(problem)
    return Written(time.perf_counter() - start, len(out.pieces), out.kept)


class _Buffer:
    """The memory of one piece, used again for the next."""

    def __init__(self, pieces: Sequence[Box], dtype: torch.dtype) -> None:
        self._memory = torch.empty(max((p.size() for p in pieces), default=0), dtype=dtype, device="cpu")

    def of(self, box: Box) -> Tensor:
        return self._memory[: box.size()].view(box.shape)


def to_root(
    world: World, read: Read, path: str, shape: tuple[int, ...], dtype: torch.dtype, window: int, route: str, root: int
) -> float:
    """Write an array to a file as the root alone: round after round, every rank reads a piece, and the root gathers
    them over the route and writes them. Collective over the world; otherwise as :func:`to_file`."""
    start = time.perf_counter()
    comm, size = world.team.comm, world.world_size
    nothing = torch.empty(0, dtype=torch.uint8, device=world.device if route == "nccl" else "cpu")
    gather(nothing, 0, root, route=route)  # a route that cannot run here is refused before there is a file
    with _alone(world) as team, Meter(world, "gather", layout.whole(shape).size() * dtype.itemsize) as meter:
        share = max(2 * dtype.itemsize, window // size)
        out: list[outputs.Output] = []
        objects.broadcast(
            comm, "gather", lambda: out.append(outputs.create(team, "gather", path, shape, dtype, share)), root
        )
        pieces = outputs.pieces_of(shape, dtype, share)
        buffer, arrived = _Buffer(pieces, dtype), _Arrived(pieces, dtype, size) if world.rank == root else None
        problem = None
        for first in range(0, len(pieces), size):
            now = pieces[first : first + size]
            box = now[world.rank] if world.rank < len(now) else layout.whole((0,))
            mine = buffer.of(box)
            try:
                if box.size() and problem is None:
                    read(box, mine)
            except InputError as error:
                problem = str(error)
            x = as_bytes(mine)
            if arrived is None:
                gather(x.to(world.device) if route == "nccl" else x, 0, root, route=route)
            elif route == "nccl":
                whole = gather(x.to(world.device), 0, root, route=route)
                arrived.put(out[0], first, now, None if whole is None else whole.cpu())
            else:
                gather(x, 0, root, route=route, out=arrived.memory(now))
                arrived.put(out[0], first, now, None)
            meter.add(sum(box.size() for box in now) * dtype.itemsize)
        problem = next((text for text in objects.all_gather_object(comm, problem) if text is not None), None)
        objects.broadcast(comm, "gather", lambda: out[0].finish(problem), root)
    return time.perf_counter() - start


class _Arrived:
    """The root's memory for the pieces of a round, one after the other."""

    def __init__(self, pieces: Sequence[Box], dtype: torch.dtype, size: int) -> None:
        self._dtype = dtype
        largest = max((box.size() for box in pieces), default=0)
        self._memory = torch.empty(min(size, len(pieces)) * largest, dtype=dtype, device="cpu")

    def memory(self, boxes: Sequence[Box]) -> Tensor:
        """The bytes of these pieces."""
        return as_bytes(self._memory[: sum(box.size() for box in boxes)])

    def put(self, out: outputs.Output, first: int, boxes: Sequence[Box], arrived: Tensor | None) -> None:
        """Write the pieces, which are numbered from `first` on; `arrived` holds them if they are not here."""
        source = self._memory if arrived is None else arrived.view(self._dtype)
        start = 0
        for i, box in enumerate(boxes):
            out.put(first + i, source[start : start + box.size()].view(box.shape))
            start += box.size()


@contextmanager
def _alone(world: World) -> Iterator[Team]:
    """A team of this rank only."""
    from mpi4py import MPI

    team = Team(MPI.COMM_SELF.Dup(), Group(0, [world.rank], {}, MPI.COMM_SELF), world.settings)
    try:
        yield team
    finally:
        team.free()


def each_alone(world: World, verb: str, steps: Sequence[Callable[[Team], None]]) -> None:
    """Run steps on this rank, with a team of its own; what fails on any rank is a RankError on all. Collective."""

    def run() -> None:
        with _alone(world) as team:
            for step in steps:
                step(team)

    objects.all_gather(world.team.comm, verb, run)


def verify(data: Inputs, parts: Sequence[tuple[str, Box]], window: int) -> tuple[bool, str]:
    """Whether files hold these boxes of the inputs' array, bit by bit, and the SHA-256 of what they hold.

    The hash is of their bytes, one after the other. On this rank alone, with host memory of a window; both sides are
    read by their formats' own libraries, and not as the commands read.
    """
    right, digest = True, hashlib.sha256()
    for spec, whole in parts:
        with files.opened_by_library(spec) as held:
            right = right and held.shape == whole.shape and held.dtype == data.dtype
            for source, box in zip(data.sources, data.boxes(), strict=True) if right else ():
                right = right and _same(data, source, box, held, whole, window // 4)
            for box in _blocks(layout.whole(held.shape), held.dtype, window // 4):
                got = torch.empty(box.shape, dtype=held.dtype, device="cpu")
                held.read(box, got, window // 4)
                digest.update(memory(got))
    return right, digest.hexdigest()


def _same(data: Inputs, source: Source, box: Box, held: Opened, whole: Box, window: int) -> bool:
    """Whether a file, which is `whole` of the array, holds what an input does, which is `box` of it."""
    common = box.intersect(whole)
    if common.size() == 0:
        return True
    with data.opened_by_library(source) as array:
        if array.shape != source.shape or array.dtype != source.dtype:
            return False
        for part in _blocks(common, data.dtype, window):
            got = torch.empty(part.shape, dtype=data.dtype, device="cpu")
            expected = torch.empty_like(got)
            held.read(part.relative_to(whole.offset), got, window)
            if source.shape:
                array.read(part.relative_to(box.offset), expected, window)
            else:  # one row of the whole
                array.read(Box((), ()), expected.view(()), window)
            if not equal(got, expected):
                return False
    return True


def _blocks(box: Box, dtype: torch.dtype, nbytes: int) -> Iterator[Box]:
    return layout.boxes(box, max(1, nbytes // dtype.itemsize))
