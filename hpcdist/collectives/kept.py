"""Planned calls that a team keeps for the next one like them; the data of small ones travel behind the headers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdist import activity, layout
from hpcdist.comm.team import HEADER, Team
from hpcdist.layout import Box
from hpcdist.process import abort
from hpcdist.routes.route import Method
from hpcdist.tensors.storage import copyable
from hpcdist.validation import collective

BEHIND_HEADERS = Method("behind the headers by which the ranks agree", "the data of every rank fit there")
_SPARE = 2**12  # bytes of a result; larger ones are not allocated in advance


class Movement(NamedTuple):
    """What moves in a planned operation: the parts of one tensor, in rank order.

    Attributes:
        shape, dtype: those of the whole tensor.
        sources, dests: box that each rank sends, and box that it receives; None for a rank that sends or receives none.
        recvs: (source, box) pairs that make up this rank's part of the result.
        combine: makes the result, or writes it to `out`, of what arrived from the ranks, all of it of one box; None if
            each part has its own place in the result.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: Sequence[Box | None]
    dests: Sequence[Box | None]
    recvs: Sequence[tuple[int, Box]]
    combine: Callable[[Sequence[Tensor], Tensor | None], Tensor] | None = None


class Kept:
    """A planned call, kept for the next one like it, and where its result lies if its data come behind the headers.

    A rank may have forgotten a call that others repeat, or repeat another one. So the header of a repeated call has the
    number of the call that was planned, which all ranks count alike: unless all have the same, all plan together.

    Every rank receives the parts of all ranks, also in a gather or a split: for so few bytes an Allgather takes as long
    as a Gatherv, and it tells every rank whether the others make the same call with tensors that fit.

    Persistent requests (MPI_Allgather_init) would not match the blocking Allgather of another rank's verb, and hang
    where this is an error. They would gain little: 256 bytes on 2 ranks take 2.47 instead of 2.26 us with MPICH 5.0.2,
    and 0.61 instead of 0.74 us with Open MPI 5.0.11.

    Args:
        x: tensor that this rank sends.
        behind: bytes behind its header, or -1: its data as well if they fit there, even where those of others do not.
        parts: the parts, if all of them arrived behind the headers.
        prefix: bytes before the data of each rank that sends some; they stay the same.

    Attributes:
        inline: whether the data come behind the headers.
        calls: calls of the other kind (with or without async_op) that the team had made.
        finish: see Operation.
    """

    finish: Callable[[Any], Any] | None = None

    def __init__(self, team: Team, x: Tensor | None, behind: int, parts: Movement | None, prefix: int) -> None:
        buffers = self._buffers = team.headers
        team.planned += 1
        number = team.planned.to_bytes(8, "little")
        self._headers = tuple([header[:-8] + number for header in buffers.last])
        self.calls = team.calls[team.foreground is team]
        self.inline = parts is not None
        self._nbytes, self._ndim = (0, 0) if x is None else (max(0, behind - prefix), x.dim())
        start = HEADER + max(0, behind - self._nbytes)
        self._start = b"".join((buffers.own[: HEADER - 8], number, buffers.own[HEADER:start]))
        self._rest = bytes(len(buffers.own) - start - self._nbytes)
        self._box = None if parts is None else parts.dests[team.rank]
        if parts is None or self._box is None:
            return
        self._dtype, itemsize, places = parts.dtype, parts.dtype.itemsize, []
        self._combine = parts.combine
        self._pieces = None if self._combine is None else self._cut(parts, prefix)
        self._spare: list[tuple[Tensor, Any]] = []  # results that are given to later calls, and their memory
        self._most = 0
        for source, box in sorted(parts.recvs, key=itemgetter(1)):
            held = parts.sources[source]
            assert held is not None
            at = layout.run_start(box, held)
            if at is None or layout.run_start(box, self._box) is None:
                self._pieces = self._cut(parts, prefix)
                break
            begin = buffers.starts[source] + prefix + itemsize * at
            places.append(slice(begin, begin + itemsize * prod(box.shape)))
        self._pick = itemgetter(*places, slice(0))  # a tuple, whatever their number

    def _cut(self, parts: Movement, prefix: int) -> list[tuple[Tensor, tuple[slice, ...]]]:
        """Return views of the data behind the headers, and where each goes in the result."""
        assert self._box is not None
        messages, pieces = torch.frombuffer(self._buffers.all, dtype=torch.uint8), []
        for source, box in parts.recvs:
            held, begin = parts.sources[source], self._buffers.starts[source] + prefix
            if held is not None:
                part = messages[begin : begin + parts.dtype.itemsize * held.size()].view(parts.dtype).view(held.shape)
                pieces.append((copyable(part[box.slices(held.offset)]), box.slices(self._box.offset)))
        return pieces

    def exchange(self, team: Team, x: Any) -> bool:
        """Exchange the headers of this call, with `x` behind this rank's; return whether no rank's has changed.

        Collective; one Allgather.
        """
        buffers = self._buffers
        data: Any = b""
        if x is not None and self._nbytes:
            memory: Any = buffers.memory
            if type(x) is list:
                data = b"".join([memory(part.data_ptr(), part.nbytes) for part in x])
            else:
                data = memory(x.data_ptr(), self._nbytes)
        message = b"".join((self._start, data, self._rest))
        collective.allgather(team, message)
        if buffers.headers(buffers.all) == self._headers:
            return True
        buffers.own = message
        return False

    def keep(self, op: Any) -> None:
        """Keep what an operation that moves more data knows after its plan."""
        self._plan = {name: value for name, value in vars(op).items() if name not in op.own}

    def again(self, op: Any, team: Team) -> Any:
        """Move the data of another such operation, after exchange(). Collective."""
        activity.touch()
        vars(op).update(self._plan)
        op.sent, op.dest = op.x, op.out
        if isinstance(op.x, Tensor) and op.x.dim() != self._ndim:
            op.sent = op.x.view(1)
        try:  # a context would take time
            return op.forward(team)
        except BaseException as error:
            abort.InTransfer.check(op.name, team.size, error)
            raise

    def take(self, out: Tensor | None) -> Tensor | None:
        """Return this rank's part of the result in new memory, or in `out`, which is contiguous; None if it has none.

        Memory is allocated for several calls at once: between other work, one allocation takes a fifth of a call.
        """
        buffers = self._buffers
        if self._box is None:
            return None
        if self._combine is not None and self._pieces is not None:
            return self._combine([piece for piece, _ in self._pieces], out)
        if out is not None:
            memory = buffers.memory(out.data_ptr(), out.nbytes)
        else:
            kept = not torch.is_inference_mode_enabled()  # tensors are of the mode they are made in
            spare = self._spare if kept else []
            if not spare:
                made = [torch.empty(self._box.shape, dtype=self._dtype, device="cpu")]
                made += [torch.empty_like(made[0]) for _ in range(self._most if kept else 0)]  # takes half the time
                spare += [(x, buffers.memory(x.data_ptr(), x.nbytes)) for x in made]
                self._most = 15 if made[0].nbytes <= _SPARE else 0
            out, memory = spare.pop()
        if self._pieces is None:
            memory[:] = b"".join(self._pick(buffers.all))
        else:
            for piece, index in self._pieces:
                copyable(out)[index].copy_(piece)
        return out


def prefix_of(numbers: int) -> int:
    """Return the bytes of encode(): a multiple of 16, so that data of any dtype are aligned behind them."""
    return -(-numbers // 2) * 16


def numbers_of_all(team: Team, numbers: int) -> list[array[int]]:
    """Return what encode() encoded on each rank, of `numbers` numbers, behind whose headers it came."""
    return [array("q", team.headers.data(rank, 0, 8 * numbers)) for rank in range(team.size)]


def encode(numbers: Sequence[int]) -> bytes:
    """Encode the description of the data that follow, for the other ranks."""
    return array("q", numbers).tobytes().ljust(prefix_of(len(numbers)), b"\0")
