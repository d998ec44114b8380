"""Samples in the memory of the nodes: blocks of them that are read together, and of which batches are made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.team import Team
from hpcdist.data.fields import Column, Field
from hpcdist.layout.box import Ints, summed
from hpcdist.process import abort
from hpcdist.staging.pieces import Progress

ALIGNMENT = 64  # bytes: of a field's rows in memory


class Segment:
    """Blocks of samples, in the memory of the ranks of one node, or with `spread` of all: each rank reads a share of
    them, the nodes in their order.

    Args:
        cuts: the first sample of each block of the data, and the end.
        blocks: numbers of the blocks.

    Attributes:
        whole: whether this node has all of them.
        nbytes: of this node's memory for them.
    """

    def __init__(self, team: Team, fields: Sequence[Field], cuts: Ints, blocks: Ints, spread: bool) -> None:
        here = team.topology
        self._nodes, self._node = (here.nodes, here.node) if spread else ([here.local_ranks], 0)
        self._fields, self._cuts, self._rank = fields, cuts, here.local_rank
        self.whole = len(self._nodes) == 1
        ends = summed([len(ranks) for ranks in self._nodes])
        bounds = len(blocks) * np.arange(ends[-1] + 1) // ends[-1]
        first = ends[self._node] + here.local_rank
        self._mine = blocks[bounds[first] : bounds[first + 1]]
        self._node_of = np.full(len(cuts) - 1, -1)  # of each block of the data
        self._node_of[blocks] = np.repeat(np.arange(len(self._nodes)), np.diff(bounds[ends]))
        held = blocks[self._node_of[blocks] == self._node]
        self.nbytes, self._memory = 0, list[Tensor]()
        self._places: list[tuple[int, int, Ints]] = []  # of a field: first byte, and end; how its rows have moved
        for field in fields:
            starts, moved = field.rows(cuts[held]), np.zeros(len(cuts) - 1, np.int64)
            begins = summed(field.rows(cuts[held + 1]) - starts)
            moved[held] = begins[:-1] - starts
            self._places.append((self.nbytes, self.nbytes + int(begins[-1]) * field.row, moved))
            self.nbytes = -(-self._places[-1][1] // ALIGNMENT) * ALIGNMENT

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": []}  # which is shared

    def attach(self, memory: Tensor) -> None:
        """Take the node's memory, flat bytes, from which its samples are taken."""
        self._memory = [
            memory[a:b].view(-1, field.row) for field, (a, b, _) in zip(self._fields, self._places, strict=True)
        ]

    def read(self, memory: Tensor, verify: bool | None, progress: Progress = None) -> None:
        """Read this rank's blocks into the node's memory.

        Raises:
            FileError: they cannot be read, have changed, or differ from their checksum.
        """
        for run in np.split(self._mine, np.flatnonzero(np.diff(self._mine) != 1) + 1) if self._mine.size else ():
            start, stop = int(self._cuts[run[0]]), int(self._cuts[run[-1] + 1])
            for field, (place, _, moved) in zip(self._fields, self._places, strict=True):
                a, b = (place + int(moved[run[0]] + field.rows(n)) * field.row for n in (start, stop))
                field.read(start, stop, memory[a:b], verify, progress)

    def columns(self, wanted: Ints) -> list[Column]:
        """Copy samples of this node."""
        found: list[Column] = []
        block = self._cuts.searchsorted(wanted, "right") - 1
        for field, (_, _, moved), memory in zip(self._fields, self._places, self._memory, strict=True):
            starts = moved[block] + field.rows(wanted)
            if field.ragged:
                ends, held = starts + field.counts(wanted), memory.numpy()  # of which a part takes less time
                parts = [held[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
                found.append(field.column(torch.from_numpy(np.concatenate([held[:0], *parts])), wanted))
            else:
                found.append(field.column(memory.index_select(0, torch.from_numpy(starts)), wanted))
        return found

    def exchange(self, team: Team, mine: Ints, wanted: Sequence[Ints]) -> list[tuple[Ints, list[Column]]]:
        """Copy those of this rank's samples that are here. Where there are several nodes, also those of other nodes,
        and send theirs to the ranks that this rank serves: collective over `team`.

        Args:
            wanted: samples of each rank; not used on one node.

        Returns:
            Places among this rank's samples, and the columns there.
        """
        from hpcdist.routes.mpi import MPI_ROUTE  # which imports MPI

        def at(samples: Ints, node: int) -> Ints:
            return np.flatnonzero(self._node_of[self._cuts.searchsorted(samples, "right") - 1] == node)

        found, sends, recvs, ours = [], [], [], len(self._nodes[self._node])
        with abort.InTransfer("data.Loader", 1 if self.whole else team.size):
            for node, ranks in enumerate(self._nodes):
                here = at(mine, node)
                if node == self._node:
                    found.append((here, self.columns(mine[here])))
                    continue
                for rank in ranks[self._rank :: ours]:  # each rank has one that serves it on every node
                    own = wanted[rank][at(wanted[rank], self._node)]
                    if own.size:
                        parts = chain.from_iterable([x] if isinstance(x, Tensor) else x for x in self.columns(own))
                        sends.append((rank, torch.cat([x.reshape(-1).view(torch.uint8) for x in parts])))
                if here.size:
                    sizes = [int(field.counts(mine[here]).sum()) * field.row for field in self._fields]
                    message = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
                    recvs.append((ranks[self._rank % len(ranks)], message, here, sizes))
            messages = [(rank, x) for rank, x, _, _ in recvs]
            MPI_ROUTE.exchange(team, sends, messages, max((x.numel() for _, x in sends + messages), default=0))
        for _, message, here, sizes in recvs:
            received = zip(self._fields, torch.split_with_sizes(message, sizes), strict=True)
            found.append((here, [field.column(x.clone(), mine[here]) for field, x in received]))
        return found


def merged(parts: Sequence[tuple[Ints, list[Column]]]) -> list[Column]:
    """Join the columns of samples at these places of a batch."""
    if len(parts) == 1:
        return parts[0][1]
    back = np.concatenate([places for places, _ in parts]).argsort()
    found: list[Any] = []
    for same in zip(*(columns for _, columns in parts), strict=True):
        if isinstance(same[0], Tensor):
            found.append(torch.cat(same).index_select(0, torch.from_numpy(back)))
        else:
            samples = list(chain.from_iterable(same))
            found.append([samples[i] for i in back])
    return found
