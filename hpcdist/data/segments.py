"""Samples in the memory of the nodes: blocks of them that are read together, and of which batches are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpcdist.data.fields import Field, Progress
from hpcdist.layout.box import Ints, summed

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

ALIGNMENT = 64  # bytes: of a field's rows in memory


@dataclass(frozen=True)
class Places:
    """Which ranks hold the blocks: those of one node, or of all nodes, each a share, in the order of the nodes.

    Attributes:
        nodes: the ranks of each node.
        node, rank: this node, and the place of this rank on it.
    """

    nodes: Sequence[Sequence[int]]
    node: int
    rank: int

    @classmethod
    def of(cls, team: Team, spread: bool) -> Places:
        here = team.topology
        return cls(here.nodes, here.node, here.local_rank) if spread else cls([here.local_ranks], 0, here.local_rank)

    @property
    def ends(self) -> list[int]:
        """The number of ranks of the nodes before each, and of all."""
        return [0, *np.cumsum([len(ranks) for ranks in self.nodes]).tolist()]


class Column:
    """A field of some samples: their rows as flat bytes, and the number of rows of each sample, if they differ."""

    def __init__(self, field: Field, rows: Tensor, lengths: Ints | None) -> None:
        self.field, self.rows, self.lengths = field, rows, lengths

    def tensor(self) -> Tensor:
        """The rows as a tensor."""
        return self.rows.view(self.field.dtype).view(-1, *self.field.shape)

    def samples(self) -> list[Tensor]:
        """A tensor for each sample."""
        x = self.tensor()
        return list(x.unbind() if self.lengths is None else torch.split_with_sizes(x, self.lengths.tolist()))


class Segment:
    """Blocks of samples. Each rank reads a share of them into its node's memory, the blocks one after the other.

    A sample of the segment is known by its index in it: that in the blocks, in the order given.

    Args:
        cuts: the first sample of each block of the data, and the end.
        blocks: numbers of the blocks.
    """

    def __init__(self, fields: Sequence[Field], cuts: Ints, blocks: Ints, places: Places) -> None:
        self._fields, self._places = fields, places
        self._starts, self._ends = cuts[blocks], cuts[blocks + 1]
        self._first = summed((self._ends - self._starts).tolist())
        ends = places.ends
        bounds = [len(blocks) * end // ends[-1] for end in range(ends[-1] + 1)]
        self._borders = self._first[[bounds[end] for end in ends]]  # the first sample of each node
        here, there = (bounds[end] for end in ends[places.node : places.node + 2])
        mine = ends[places.node] + places.rank
        self._mine = range(bounds[mine], bounds[mine + 1])
        rows = [summed((field.rows(self._ends) - field.rows(self._starts)).tolist()) for field in fields]
        self._bases = [first - first[here] for first in rows]  # of each block, its first row in the node's memory
        sizes = [int(base[there]) * field.row for base, field in zip(self._bases, fields, strict=True)]
        self._places_of = summed([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]).tolist()
        self._sizes = sizes
        self.nbytes: int = self._places_of[-1]
        self._memory: list[Tensor] = []

    @property
    def whole(self) -> bool:
        """Whether this node has all of its samples."""
        return len(self._places.nodes) == 1

    def attach(self, memory: Tensor) -> Segment:
        """Take the node's memory, flat bytes, from which its samples are taken."""
        self._memory = [
            memory[at : at + size].view(-1, field.row) if size else memory[:0].view(0, field.row)
            for at, size, field in zip(self._places_of[:-1], self._sizes, self._fields, strict=True)
        ]
        return self

    def read(self, memory: Tensor, verify: bool | None, progress: Progress = None) -> None:
        """Read this rank's blocks into the node's memory.

        Raises:
            FileError: they cannot be read, have changed, or differ from their checksum.
        """
        at = self._mine.start
        while at < self._mine.stop:
            end = at + 1
            while end < self._mine.stop and self._starts[end] == self._ends[end - 1]:  # as one run
                end += 1
            for field, base, place in zip(self._fields, self._bases, self._places_of[:-1], strict=True):
                into = memory[place + int(base[at]) * field.row : place + int(base[end]) * field.row]
                field.read(int(self._starts[at]), int(self._ends[end - 1]), into, verify, progress)
            at = end

    def columns(self, wanted: Ints) -> list[Column]:
        """Copy samples of this node."""
        found = []
        places = torch.from_numpy(wanted - self._borders[self._places.node])
        for field, base, memory in zip(self._fields, self._bases, self._memory, strict=True):
            if not field.ragged:
                found.append(Column(field, memory.index_select(0, places), None))
                continue
            block, sample = self._located(wanted)
            first, last = field.rows(sample), field.rows(sample + 1)
            start = base[block] + first - field.rows(self._starts[block])
            lengths = last - first
            held = memory.numpy()  # of which a part takes less time
            parts = [held[a:b] for a, b in zip(start.tolist(), (start + lengths).tolist(), strict=True)]
            rows = torch.empty(int(lengths.sum()), field.row, dtype=torch.uint8, device="cpu")
            np.concatenate([held[:0], *parts], out=rows.numpy())
            found.append(Column(field, rows, lengths))
        return found

    def _located(self, wanted: Ints) -> tuple[Ints, Ints]:
        """The blocks that hold samples, and the numbers of the samples among all."""
        block = self._first.searchsorted(wanted, "right") - 1
        return block, self._starts[block] + wanted - self._first[block]

    def exchange(self, team: Team, wanted: Ints, parts: Sequence[Ints]) -> list[Column]:
        """Copy this rank's samples, of several nodes, and send those of other nodes' ranks that this rank serves.
        Collective over `team`.

        Args:
            wanted: samples of all ranks.
            parts: for each rank, which of them are its own, in its order.
        """
        from hpcdist.routes.mpi import MPI_ROUTE  # which imports MPI

        places, nodes, mine = self._places, self._places.nodes, parts[team.rank]
        at_node = self._borders.searchsorted(wanted, "right") - 1
        sends, pieces = [], []
        for node, ranks in enumerate(nodes):
            if node == places.node:
                continue
            for i, rank in enumerate(ranks):
                if i % len(nodes[places.node]) == places.rank:  # each rank has one that serves it on every node
                    own = wanted[parts[rank]][at_node[parts[rank]] == places.node]
                    if own.size:
                        sends.append((rank, torch.cat([column.rows.view(-1) for column in self.columns(own)])))
            here = np.flatnonzero(at_node[mine] == node)
            if here.size:
                columns = self._empty(wanted[mine][here])
                message = torch.empty(sum(c.rows.numel() for c in columns), dtype=torch.uint8, device="cpu")
                pieces.append((ranks[places.rank % len(ranks)], here, columns, message))
        longest = max([message.numel() for _, message in sends] + [piece[3].numel() for piece in pieces], default=0)
        MPI_ROUTE.exchange(team, sends, [(rank, message) for rank, _, _, message in pieces], longest)
        here = np.flatnonzero(at_node[mine] == places.node)
        found = [(here, self.columns(wanted[mine][here]))]
        for _, here, columns, message in pieces:
            sizes = [column.rows.numel() for column in columns]
            for column, part in zip(columns, torch.split_with_sizes(message, sizes), strict=True):
                column.rows = part.view(-1, column.field.row)
            found.append((here, columns))
        return merged(found)

    def _empty(self, wanted: Ints) -> list[Column]:
        """What the columns of samples of another node will be, without memory."""
        _, sample = self._located(wanted)
        found = []
        for field in self._fields:
            lengths = field.rows(sample + 1) - field.rows(sample)
            rows = torch.empty(int(lengths.sum()), field.row, dtype=torch.uint8, device="meta")
            found.append(Column(field, rows, lengths if field.ragged else None))
        return found


def merged(parts: Sequence[tuple[Ints, list[Column]]]) -> list[Column]:
    """Join the columns of samples at these places of a batch."""
    if len(parts) == 1:
        return parts[0][1]
    order = np.concatenate([places for places, _ in parts])
    back = np.argsort(order)
    found = []
    for same in zip(*(columns for _, columns in parts), strict=True):
        field = same[0].field
        if not field.ragged:
            rows = torch.cat([column.rows for column in same]).index_select(0, torch.from_numpy(back))
            found.append(Column(field, rows, None))
            continue
        lengths = np.concatenate([column.lengths for column in same])
        rows = torch.cat([column.rows.view(-1, field.row) for column in same])
        pieces = torch.split_with_sizes(rows, lengths.tolist())
        found.append(Column(field, torch.cat([pieces[i] for i in back]), lengths[back]))
    return found
