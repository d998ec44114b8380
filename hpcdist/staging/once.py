"""Plan how ranks that want the same part of a file read it once, together: which of them reads what, and sends it to
which others. Computed from integers; the same on all of these ranks.

Each reads a share of the bytes, one batch in a round, and while it reads the next one, the batch is sent: to the other
ranks of its node, and to one rank of each other node, which forwards it in the next round. So each byte comes to a node
once. Ranks that share memory forward nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hpcdist import layout
from hpcdist.layout import Box
from hpcdist.staging.pieces import PIECE
from hpcdist.staging.reader import DatasetReader

__all__ = ["BATCH", "Batch", "Block", "Plan", "plan_once"]

BATCH = 2**22  # bytes that are read before they are sent; smaller blocks are packed together
_LARGE = 2**18  # bytes of a block that has a message of its own, without a copy
_ALIGNMENT = 16  # bytes, of a block in a buffer: of every dtype


@dataclass(frozen=True)
class Block:
    """A box of a tensor that is read at a time.

    Attributes:
        tensor: number of the tensor in the call.
        row: piece of the file's table of which this is the next part, or which it is.
        checks: pieces that are read and compared first.
        nbytes: its size.
    """

    tensor: int
    box: Box
    row: int | None
    checks: tuple[int, ...]
    nbytes: int

    @property
    def padded(self) -> int:
        """Its bytes in a buffer with others."""
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Batch:
    """Blocks that travel in one message.

    Attributes:
        direct: whether it is one block that is a run of its tensor: nothing need be copied if that is in host memory.
    """

    blocks: tuple[Block, ...]
    direct: bool

    @property
    def nbytes(self) -> int:
        return self.blocks[0].nbytes if self.direct else sum(block.padded for block in self.blocks)


@dataclass(frozen=True)
class Plan:
    """How some ranks of a team read together what all of them want.

    Attributes:
        nodes: these ranks, by node.
        rounds: the batches of each round, by the rank that reads it.
        shared: whether the ranks of a node have one copy in memory that they share.
    """

    nodes: Sequence[Sequence[int]]
    rounds: Sequence[Mapping[int, Batch]]
    shared: bool = False

    @property
    def forwards(self) -> bool:
        """Whether batches that come from other nodes are forwarded, in the step after their own."""
        return len(self.nodes) > 1 and not self.shared

    @property
    def steps(self) -> range:
        """The exchanges; in the last one, batches of the last round are only forwarded."""
        return range(len(self.rounds) + (self.forwards if self.rounds else 0))

    def only(self, pieces: Collection[tuple[int, int]]) -> Plan:
        """Return the plan for some pieces alone: (number of a tensor, piece)."""
        rounds = []
        for round_ in self.rounds:
            left = {}
            for reader, batch in round_.items():
                blocks = tuple(block for block in batch.blocks if (block.tensor, block.row) in pieces)
                if blocks:
                    left[reader] = replace(batch, blocks=blocks)
            if left:
                rounds.append(left)
        return replace(self, rounds=rounds)

    def sends(self, rank: int, step: int) -> list[tuple[int, int, int]]:
        """Return (dest, round, reader) for each message that a rank sends in a step, in the order of arrival."""
        home, found = self._node_of[rank], []
        if step < len(self.rounds) and rank in self.rounds[step]:
            found += [(dest, step, rank) for dest in self._others(rank)]
            found += [(self._relay(rank, node), step, rank) for node in range(len(self.nodes)) if node != home]
        for reader in self._forwarded(home, step):
            if self._relay(reader, home) == rank:
                found += [(dest, step - 1, reader) for dest in self._others(rank)]
        return found

    def recvs(self, rank: int, step: int) -> list[tuple[int, int, int]]:
        """Return (source, round, reader) for each message that a rank receives in a step, in the order of arrival."""
        home, found = self._node_of[rank], []
        for reader in self.rounds[step] if step < len(self.rounds) else ():
            node = self._node_of[reader]
            if rank == reader:
                continue
            if (not self.shared) if node == home else (self._relay(reader, home) == rank):
                found.append((reader, step, reader))
        for reader in self._forwarded(home, step):
            if self._relay(reader, home) != rank:
                found.append((self._relay(reader, home), step - 1, reader))
        return found

    def _forwarded(self, home: int, step: int) -> list[int]:
        """The readers whose batches of the round before the relays of a node send on in a step."""
        if not (self.forwards and 0 < step <= len(self.rounds)):
            return []
        return [reader for reader in self.rounds[step - 1] if self._node_of[reader] != home]

    def _others(self, rank: int) -> list[int]:
        """The other ranks of the same node, if each has memory of its own."""
        return [] if self.shared else [other for other in self.nodes[self._node_of[rank]] if other != rank]

    @cached_property
    def _node_of(self) -> dict[int, int]:
        return {rank: node for node, ranks in enumerate(self.nodes) for rank in ranks}

    def _relay(self, reader: int, node: int) -> int:
        """The rank of a node that receives what a rank of another node has read."""
        return self.nodes[node][reader % len(self.nodes[node])]


def plan_once(
    tensors: Sequence[tuple[DatasetReader, Box]],
    nodes: Sequence[Sequence[int]],
    readers: int | None,
    window: int,
    direct: bool,
    shared: bool = False,
) -> Plan:
    """Plan how the ranks of `nodes` read a box of each tensor.

    Args:
        readers: how many of them read; None for all.
        window: bytes of memory for batches that a rank cannot receive in place.
        direct: whether all of them have contiguous host memory for what they get.
    """
    ranks = sorted(rank for node in nodes for rank in node)
    count = len(ranks) if readers is None else min(readers, len(ranks))
    chosen = [ranks[i * len(ranks) // count] for i in range(count)]
    units = [unit for i, (reader, want) in enumerate(tensors) for unit in _units(i, reader, want, window)]
    total, done = sum(block.nbytes for unit in units for block in unit), 0
    blocks: dict[int, list[Block]] = {rank: [] for rank in chosen}
    for unit in units:
        nbytes = sum(block.nbytes for block in unit)
        blocks[chosen[min(count - 1, (done + nbytes // 2) * count // total)]] += unit
        done += nbytes
    batches = {rank: deque(_packed(tensors, blocks[rank], window)) for rank in chosen}
    return Plan(nodes, _rounds(batches, window // 3, direct), shared)  # up to three rounds are under way


def _units(i: int, reader: DatasetReader, want: Box, window: int) -> Iterator[list[Block]]:
    """Yield the blocks of one tensor; those that one rank must read, one after the other, together."""
    size = reader.stored.dtype.itemsize
    step = max(1, min(BATCH, window // 4) // size)
    for part in reader.parts(want, max(1, min(PIECE, window // 4) // size), follow=True):
        cuts = [part.box]
        if reader.stored.raw is not None if part.row is None else reader.follows(part.row):
            cuts = list(layout.boxes(part.box, step))
        found = [
            Block(i, cut, part.row, part.checks if k == 0 else (), cut.size() * size) for k, cut in enumerate(cuts)
        ]
        yield from [found] if part.row is not None or part.checks else ([block] for block in found)


def _packed(tensors: Sequence[tuple[DatasetReader, Box]], blocks: Sequence[Block], window: int) -> Iterator[Batch]:
    """Yield blocks in batches: large ones alone, small ones together."""
    most, held, nbytes = min(BATCH, window // 4), list[Block](), 0
    for block in blocks:
        if held and (nbytes + block.padded > most or block.nbytes >= _LARGE):
            yield _batch(tensors, held)
            held, nbytes = [], 0
        held.append(block)
        nbytes = most if block.nbytes >= _LARGE else nbytes + block.padded
    if held:
        yield _batch(tensors, held)


def _batch(tensors: Sequence[tuple[DatasetReader, Box]], blocks: Sequence[Block]) -> Batch:
    want, box = tensors[blocks[0].tensor][1], blocks[0].box
    alone = len(blocks) == 1 and layout.runs(box.relative_to(want.offset), want.shape)[1] == 1
    return Batch(tuple(blocks), alone)


def _rounds(batches: Mapping[int, deque[Batch]], budget: int, direct: bool) -> list[dict[int, Batch]]:
    """Divide the batches into rounds, one of each rank at most, that need no more than `budget` bytes of buffers."""
    found: list[dict[int, Batch]] = []
    order = deque(batches)
    while any(batches.values()):
        round_: dict[int, Batch] = {}
        used = 0
        for rank in order:
            if not batches[rank]:
                continue
            needed = 0 if direct and batches[rank][0].direct else batches[rank][0].nbytes
            if not round_ or used + needed <= budget:
                round_[rank] = batches[rank].popleft()
                used += needed
        found.append(round_)
        order.rotate(-1)
    return found
