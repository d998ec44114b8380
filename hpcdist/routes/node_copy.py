"""Results in windows, the shared memory of a node: one copy per node, and each byte is sent to a node once.

Every rank writes its shard into the window of its node. Then the nodes exchange the missing data, from and into
their windows. Each rank of a node sends and receives a part, which uses all of them for the network.

It is an algorithm of the route mpi for host memory, where a team has several nodes and several ranks on one of them:
MPI's own Allgatherv brings every rank its own copy over the wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm, prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpcdist import activity, layout
from hpcdist.comm import messages
from hpcdist.comm.node_memory import Topology, Window
from hpcdist.layout import Box, limits
from hpcdist.routes.route import Ints, Message, Method, Step, nothing
from hpcdist.tensors.storage import as_bytes, copyable, row_major

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

SHARED_LEAST = 2**16  # bytes of a shared result; below, a copy for each rank costs less than the agreement on a window
SHARED = Method("memory that the ranks of a node share", "shared=True was passed", True)
MESSAGE = 2**16  # bytes of a message between nodes at least, where there are several
_ALIGNMENT = 64  # bytes


def helps(team: Team) -> bool:
    """Whether a team has several nodes, and several ranks on one of them. The same on all ranks."""
    return 1 < len(set(team.node_of)) < team.size


def concat(team: Team, shard: Tensor, boxes: Sequence[Box], shape: tuple[int, ...], dim: int) -> Tensor | None:
    """Concatenate the shards of all ranks along `dim` in the windows of their nodes. Collective.

    Args:
        shard: this rank's shard, in host memory, of any strides.
        boxes: the box of each rank's shard in the result.
        shape: shape of the result.

    Returns:
        The result, in the window of this node; None on all ranks if there is no window: see ``team.unshared``.
    """
    inner = prod(shape[dim + 1 :]) * shard.itemsize
    matrix = _Matrix(
        prod(shape[:dim]), [box.offset[dim] * inner for box in boxes], [box.shape[dim] * inner for box in boxes]
    )
    window = take(team, matrix.nbytes, matrix.nbytes)
    if window is None:
        return None
    whole = window.target(shape, shard.dtype)
    copyable(whole)[boxes[team.rank].slices()].copy_(copyable(shard))
    if len(team.topology.nodes) > 1:
        team.topology.comm.Barrier()
        _exchange(team, *_messages(team.topology, team.rank, window.bytes, matrix))
    team.topology.comm.Barrier()
    return window.tensor(shape, shard.dtype)


def split(team: Team, whole: Tensor | None, boxes: Sequence[Box], dtype: torch.dtype, root: int) -> Tensor | None:
    """Split the root's tensor into one part for each rank, in the windows of their nodes. Collective.

    Args:
        whole: on the root, its tensor, in host memory, of any strides.
        boxes: the box of each rank's part.

    Returns:
        This rank's part, in the window of its node; None on all ranks if there is no window: see ``team.unshared``.
    """
    sizes = [-(-box.size() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for box in boxes]
    local = team.topology.local_ranks
    window = take(team, sum(sizes[rank] for rank in local), sum(box.size() for box in boxes) * dtype.itemsize)
    if window is None:
        return None
    offsets = dict(zip(local, layout.displs([sizes[rank] for rank in local]), strict=True))

    def copy_local_parts() -> None:
        if whole is not None:
            for rank, offset in offsets.items():
                part = window.target(boxes[rank].shape, dtype, offset)
                copyable(part).copy_(copyable(whole[boxes[rank].slices()]))

    sends, recvs = [], []
    if whole is not None:
        sends = [(rank, whole[boxes[rank].slices()]) for rank in range(team.size) if rank not in offsets]
    elif root not in offsets:
        recvs = [(root, window.target(boxes[team.rank].shape, dtype, offsets[team.rank]))]
    _exchange(team, sends, recvs, copy_local_parts)
    team.topology.comm.Barrier()
    return window.tensor(boxes[team.rank].shape, dtype, offsets[team.rank])


def refusal(team: Team, total: int) -> str | None:
    """Return why a result of `total` bytes will not be shared, as far as is known before the call. Collective."""
    if total < SHARED_LEAST:
        return f"its {total} bytes are fewer than {SHARED_LEAST}, below which private memory is faster"
    return team.windows.problem


def take(team: Team, nbytes: int, total: int) -> Window | None:
    """Take a window of `nbytes` on this node, for a result of `total` bytes on all nodes. Collective.

    Returns:
        The window; None on all ranks if there is no window: see ``team.unshared``.
    """
    team.unshared = refusal(team, total)
    if team.unshared is not None:
        return None
    window = team.windows.take(nbytes)
    team.unshared = team.windows.reason
    return window


class _Matrix(NamedTuple):
    """A whole in row-major memory, as bytes, of which each rank has all rows of some columns.

    Attributes:
        rows: number of rows.
        starts, widths: first column, and number of columns, of each rank.
    """

    rows: int
    starts: Sequence[int]
    widths: Sequence[int]

    @property
    def nbytes(self) -> int:
        return self.rows * sum(self.widths)


def _messages(topology: Topology, me: int, memory: Tensor, matrix: _Matrix) -> tuple[list[Message], list[Message]]:
    """Return the messages that this rank sends from the window of its node, and receives into it, as (rank, view).

    A pair of ranks exchanges its messages in the same order on both sides.
    """
    whole = memory[: matrix.nbytes].view(matrix.rows, sum(matrix.widths))
    home = topology.local_ranks
    sends: list[Message] = []
    recvs: list[Message] = []
    for node, ranks in enumerate(topology.nodes):
        if node == topology.node or not matrix.nbytes:
            continue
        # The number of messages that gives all ranks of both nodes nearly the same number.
        owners = min(lcm(len(ranks), len(home)), 4 * max(len(ranks), len(home)))
        for owner, rows, columns in _parts(matrix, home, owners):
            if home[owner % len(home)] == me:
                sends.append((ranks[owner % len(ranks)], whole[rows, columns]))
        for owner, rows, columns in _parts(matrix, ranks, owners):
            if home[owner % len(home)] == me:
                recvs.append((ranks[owner % len(ranks)], whole[rows, columns]))
    return sends, recvs


def _parts(matrix: _Matrix, ranks: Sequence[int], owners: int) -> Iterator[tuple[int, slice, slice]]:
    """Cut the columns of a node's ranks into messages of similar size: return (owner, rows, columns) for each."""
    turn = 0
    for start, width in _runs(matrix, ranks):
        size = matrix.rows * width
        count = max(1, min(owners, size // MESSAGE))
        by_rows = matrix.rows >= count
        extent = matrix.rows if by_rows else width
        for i in range(count):
            part = slice(extent * i // count, extent * (i + 1) // count)
            columns = slice(start, start + width) if by_rows else slice(start + part.start, start + part.stop)
            if part.start < part.stop:
                yield turn % owners, part if by_rows else slice(0, matrix.rows), columns
            turn += 1


def _runs(matrix: _Matrix, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first column, number of columns) of the ranks' columns, joined where they are adjacent."""
    found: list[tuple[int, int]] = []
    for start, width in sorted((matrix.starts[rank], matrix.widths[rank]) for rank in ranks):
        if found and sum(found[-1]) == start:
            found[-1] = found[-1][0], found[-1][1] + width
        elif width:
            found.append((start, width))
    return found


def _exchange(team: Team, sends: list[Message], recvs: list[Message], meanwhile: Step = nothing) -> None:
    """Exchange tensors of any strides; call `meanwhile` while they are in transit."""
    whole = [
        (rank, view, view if view.is_contiguous() else torch.empty_like(view, memory_format=torch.contiguous_format))
        for rank, view in recvs
    ]
    packed = [(rank, as_bytes(row_major(view))) for rank, view in sends]  # lives until it is sent
    requests = messages.start(team.comm, packed, [(rank, as_bytes(buffer)) for rank, _, buffer in whole])
    meanwhile()
    for request in requests:
        request.Wait()
    for _, view, buffer in whole:
        if buffer is not view:
            copyable(view).copy_(copyable(buffer))


class _Rounds:
    """Messages that pass through a window in rounds, each of which takes the same share of every message.

    Three parts of the window take turns: one round is on the wire, while the one before it is copied out of the window
    and the one after it is written into it.
    """

    def __init__(self, counts: Ints) -> None:
        self._counts = counts
        self.number = max(1, -(-sum(counts) // max(1, limits.WINDOW // 2)))
        self._size = max(sum(self.lengths(turn)) for turn in range(self.number))
        self.nbytes = self._size * min(3, self.number)

    def lengths(self, turn: int) -> list[int]:
        """Return the bytes of each message in a round."""
        return [count * (turn + 1) // self.number - count * turn // self.number for count in self._counts]

    def matrix(self, turn: int) -> _Matrix:
        lengths = self.lengths(turn)
        return _Matrix(1, layout.displs(lengths), lengths)

    def memory(self, window: Tensor, turn: int) -> Tensor:
        """Return the part of the window for a round."""
        start = turn % 3 * self._size
        return window[start : start + self._size]

    def write(self, window: Tensor, turn: int, message: Tensor, rank: int) -> None:
        """Write a rank's part of a round into the window."""
        if turn < self.number:
            matrix, start = self.matrix(turn), self._counts[rank] * turn // self.number
            source = message[start : start + matrix.widths[rank]]
            self.memory(window, turn)[matrix.starts[rank] :][: len(source)].copy_(source)

    def read(self, window: Tensor, turn: int, blocks: Sequence[Tensor]) -> None:
        """Copy all ranks' parts of a round out of the window."""
        if turn >= 0:
            matrix, memory = self.matrix(turn), self.memory(window, turn)
            for block, start, length in zip(blocks, matrix.starts, matrix.widths, strict=True):
                at = block.numel() * turn // self.number
                block[at : at + length].copy_(memory[start : start + length])


def in_rounds(team: Team, send: Tensor, blocks: Sequence[Tensor]) -> bool:
    """Gather the `send` of all ranks into `blocks` through a window of the node. Collective.

    Returns:
        Whether there is a window. The same on all ranks.
    """
    rounds = _Rounds([block.numel() for block in blocks])
    window = team.windows.take(rounds.nbytes)
    if window is None:
        return False
    memory, me, node = window.bytes, team.rank, team.topology.comm
    rounds.write(memory, 0, send, me)
    for turn in range(rounds.number):
        node.Barrier()  # the round is written, and the one before it received, by all ranks of this node
        activity.touch()
        exchanged = _messages(team.topology, me, rounds.memory(memory, turn), rounds.matrix(turn))

        def meanwhile(turn: int = turn) -> None:
            rounds.write(memory, turn + 1, send, me)
            rounds.read(memory, turn - 1, blocks)

        _exchange(team, *exchanged, meanwhile)
    node.Barrier()
    rounds.read(memory, rounds.number - 1, blocks)
    return True
