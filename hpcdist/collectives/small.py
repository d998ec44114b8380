"""Small calls: their data travel behind the headers by which the ranks agree, and the call is kept for the next one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.route import Method
from hpcdist.comm.team import HEADER, Team
from hpcdist.layout import Box
from hpcdist.tensors.storage import copyable
from hpcdist.validation import collective
from hpcdist.validation.collective import Agreed

BEHIND_HEADERS = Method("behind the headers by which the ranks agree", "the data of every rank fit there")
_MOST = 256  # calls that a team keeps, or a plan
_HEADERS = 2**16  # headers that it keeps with them: fewer calls in a large team


class Parts(NamedTuple):
    """What moves in a planned operation: the parts of one tensor, in rank order.

    Attributes:
        shape, dtype: those of the whole tensor.
        sources, dests: box that each rank sends, and box that it receives; None for a rank that sends or receives none.
        recvs: (source, box) pairs that make up this rank's part of the result.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: Sequence[Box | None]
    dests: Sequence[Box | None]
    recvs: Sequence[tuple[int, Box]]

    def traffic(self, rank: int) -> tuple[int, int]:
        """Return the bytes that a rank sends to, and receives from, other ranks."""
        nothing = Box((0,) * len(self.shape), (0,) * len(self.shape))
        sources, dests = ([box or nothing for box in boxes] for boxes in (self.sources, self.dests))
        moves = layout.overlaps(sources, dests, rank)
        sent, received = (sum(box.size() for peer, box in of if peer != rank) for of in (moves.sends, moves.recvs))
        return self.dtype.itemsize * sent, self.dtype.itemsize * received

    def came(self, agreed: Agreed, prefix: int) -> bool:
        """Return whether the data of all ranks arrived behind the headers. The same on all ranks."""
        for nbytes, box in zip(agreed.inlines, self.sources, strict=True):
            if box is not None and nbytes != prefix + self.dtype.itemsize * box.size():
                return False
        return agreed.inline


class Small:
    """A call whose data arrived behind the headers, kept after its plan.

    Every rank receives the parts of all ranks, also in a gather or a split: for so few bytes an Allgather takes as long
    as a Gatherv, and it tells every rank whether the others make the same call with tensors that fit.

    Persistent requests (MPI_Allgather_init) would not match the blocking Allgather of another rank's verb, and hang
    where this is an error. They would gain little: 256 bytes on 2 ranks take 2.47 instead of 2.26 us with MPICH 5.0.2,
    and 0.61 instead of 0.74 us with Open MPI 5.0.11.

    Args:
        prefix: bytes before the data of each rank that sends some; they stay the same.

    Attributes:
        calls: calls of the other kind (with or without async_op) that the team had made.
    """

    def __init__(self, team: Team, parts: Parts, prefix: int = 0) -> None:
        buffers = team.headers
        sends = parts.sources[team.rank] is not None
        self._buffers, self._headers = buffers, buffers.last
        self._header = bytes(buffers.own[: HEADER + prefix * sends])
        self.calls = team.calls[team.foreground is team]
        self._box, self._dtype = parts.dests[team.rank], parts.dtype
        if self._box is None:
            return
        messages = copyable(buffers.messages.view(parts.dtype))
        pieces: list[tuple[Tensor, Box]] = []
        for source, box in parts.recvs:
            held = parts.sources[source]
            assert held is not None
            start = (buffers.starts[source] + prefix) // parts.dtype.itemsize
            view = messages.narrow(0, start, held.size())
            view = view if len(held.shape) == 1 else view.view(held.shape)
            view = view if box == held else view[box.slices(held.offset)]
            pieces.append((view, box.relative_to(self._box.offset) if any(self._box.offset) else box))
        pieces.sort(key=lambda piece: piece[1].offset)
        self._views, self._boxes = [view for view, _ in pieces], [box for _, box in pieces]
        self._dim = _joined_dim(self._boxes, self._box.shape)
        # From 4 dims on, torch.cat may choose another order of strides.
        self._allocates = self._dim is None or len(self._box.shape) > 3 or messages.dtype is not parts.dtype

    def exchange(self, team: Team, x: Tensor | None) -> bool:
        """Exchange the headers of this call, with `x` behind this rank's; return whether no rank's has changed.

        Collective; one Allgather.
        """
        buffers = self._buffers
        buffers.put_again(self._header, x)
        collective.allgather(team, buffers.send, buffers.recv)
        return buffers.headers() == self._headers

    def take(self, out: Tensor | None) -> Tensor | None:
        """Return this rank's part of the result in new memory, or in `out`; None if it receives none."""
        if self._box is None:
            return None
        if out is None and self._allocates:
            out = torch.empty(self._box.shape, dtype=self._dtype, device="cpu")
        if out is None:
            return torch.cat(self._views, self._dim or 0)
        whole = copyable(out)
        if self._dim is not None:
            torch.cat(self._views, self._dim, out=whole)
        else:
            for view, box in zip(self._views, self._boxes, strict=True):
                whole[box.slices()].copy_(view)
        return out


def remember(repeats: dict[Any, Any], key: object, small: Small, size: int) -> None:
    """Keep a call of a team of `size` ranks, to be found by its arguments."""
    if len(repeats) >= max(1, min(_MOST, _HEADERS // size)):
        repeats.clear()
    repeats[key] = small


def prefix_of(numbers: int) -> int:
    """Return the bytes of encode(): a multiple of 16, so that data of any dtype are aligned behind them."""
    return -(-numbers // 2) * 16


def encode(numbers: Sequence[int]) -> bytes:
    """Encode the description of the data that follow, for the other ranks."""
    return array("q", numbers).tobytes().ljust(prefix_of(len(numbers)), b"\0")


def _joined_dim(boxes: Sequence[Box], shape: tuple[int, ...]) -> int | None:
    """Return the dim along which boxes, in their order, follow each other in a tensor of `shape`; None if in none."""
    for dim in range(len(shape)):
        ends, across = 0, (*shape[:dim], *shape[dim + 1 :])
        for box in boxes:
            if box.offset[dim] != ends or (*box.shape[:dim], *box.shape[dim + 1 :]) != across:
                break
            ends += box.shape[dim]
        else:
            if boxes and ends == shape[dim]:
                return dim
    return None
