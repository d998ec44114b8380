"""Adapt a route for host memory to GPU memory: copy messages through two host buffers, in rounds of limited size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.layout import limits
from hpcdist.routes.base import Ints, Message, Method, Route
from hpcdist.routes.sends import Exchange
from hpcdist.tensors import accelerator
from hpcdist.tensors.storage import Scratch, as_bytes

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

__all__ = ["Staged"]


Segment = tuple[int, int]  # (start, length) of one message within a tensor of messages


class Staged(Exchange):
    """A route through pinned host buffers: in each round, every message advances by at most `step` bytes.

    All ranks take part in every round, including those with data in host memory: the number of rounds follows from the
    longest message, which all ranks know. Host memory stays within two windows, whatever the size of the data.
    """

    def __init__(self, route: Route) -> None:
        self.route, self.name = route, route.name

    def method(self, team: Team, operation: str, nbytes: int) -> Method:
        inner = "exchange" if operation == "alltoallv" else operation
        found = self.route.method(team, inner, min(nbytes, limits.WINDOW))
        why = f"route {self.name} cannot access the GPU memory here"
        return Method(f"pinned host buffers, {found.name}", "; ".join(filter(None, [why, found.reason])))

    def missing(self, team: Team) -> str | None:
        return self.route.missing(team)

    def carries(self, team: Team, gpu: bool) -> bool:
        return True

    def gatherv(self, team: Team, send: Tensor, recv: Tensor | None, counts: Ints, displs: Ints, root: int) -> None:
        blocks = list(zip(displs, counts, strict=True))
        source = _Host(send, [(0, counts[team.rank])])
        target = None if recv is None else _Host(recv, blocks)
        for start, step in _rounds(max(counts), team.size):
            now = _lengths(counts, start, step)
            buffer = None if target is None else target.buffer(start, step)
            self.route.gatherv(team, source.load(start, step), buffer, now, layout.displs(now), root)
            if target is not None:
                target.store(start, step)

    def scatterv(self, team: Team, send: Tensor | None, recv: Tensor, counts: Ints, displs: Ints, root: int) -> None:
        blocks = list(zip(displs, counts, strict=True))
        source = None if send is None else _Host(send, blocks)
        target = _Host(recv, [(0, counts[team.rank])])
        for start, step in _rounds(max(counts), team.size):
            now = _lengths(counts, start, step)
            loaded = None if source is None else source.load(start, step)
            self.route.scatterv(team, loaded, target.buffer(start, step), now, layout.displs(now), root)
            target.store(start, step)

    def allgatherv(self, team: Team, send: Tensor, recv: Tensor, counts: Ints, displs: Ints) -> None:
        blocks = list(zip(displs, counts, strict=True))
        source, target = _Host(send, [(0, counts[team.rank])]), _Host(recv, blocks)
        for start, step in _rounds(max(counts), team.size):
            now = _lengths(counts, start, step)
            self.route.allgatherv(team, source.load(start, step), target.buffer(start, step), now, layout.displs(now))
            target.store(start, step)

    def exchange(self, team: Team, sends: list[Message], recvs: list[Message], longest: int) -> None:
        source, target = _Host.of([block for _, block in sends]), _Host.of([block for _, block in recvs])
        for start, step in _rounds(longest, team.size):
            out = _at(sends, source.load(start, step), source.lengths(start, step))
            into = _at(recvs, target.buffer(start, step), target.lengths(start, step))
            self.route.exchange(team, out, into, min(step, longest - start))
            target.store(start, step)


def _at(messages: list[Message], buffer: Tensor, lengths: list[int]) -> list[Message]:
    """Return the part of each message in this round, in host memory."""
    starts = layout.displs(lengths)
    return [
        (rank, buffer[start : start + length])
        for (rank, _), start, length in zip(messages, starts, lengths, strict=True)
        if length
    ]


def _rounds(longest: int, size: int) -> list[tuple[int, int]]:
    step = max(1, limits.WINDOW // size)
    return [(start, step) for start in range(0, longest, step)]


def _lengths(messages: Iterable[int], start: int, step: int) -> list[int]:
    """Return how many bytes of each message move in the round from `start`."""
    return [max(0, min(step, nbytes - start)) for nbytes in messages]


class _Host:
    """The host side of messages: a buffer for their parts in one round.

    Attributes:
        parts: bytes of each message.
    """

    def __init__(self, messages: Tensor, segments: Sequence[Segment]) -> None:
        whole = as_bytes(messages)
        self.parts = [whole[start : start + length] for start, length in segments]
        self._scratch: Scratch | None = None

    @classmethod
    def of(cls, blocks: Sequence[Tensor]) -> _Host:
        """Create the host side of messages in separate memory."""
        host = cls(torch.empty(0, device="cpu"), [])
        host.parts = list(blocks)
        return host

    def lengths(self, start: int, step: int) -> list[int]:
        """Return how many bytes of each message move in the round from `start`."""
        return _lengths((part.numel() for part in self.parts), start, step)

    def buffer(self, start: int, step: int) -> Tensor:
        """Return a host buffer for one round, packed without gaps."""
        if self._scratch is None:
            self._scratch = Scratch(pinned=any(not part.is_cpu for part in self.parts))
        self._scratch.reset()
        return self._scratch.take([sum(self.lengths(start, step))], torch.uint8)

    def load(self, start: int, step: int) -> Tensor:
        """Copy the data that this rank sends in the round to the host buffer."""
        buffer = self.buffer(start, step)
        for host, part in self._pairs(buffer, start, step):
            host.copy_(part, non_blocking=True)
        self._wait()
        return buffer

    def store(self, start: int, step: int) -> None:
        """Copy the data that this rank received in the round to their place."""
        for host, part in self._pairs(self.buffer(start, step), start, step):
            part.copy_(host, non_blocking=True)
        self._wait()

    def _pairs(self, buffer: Tensor, start: int, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return (host memory, part of the message) for each message that moves in this round."""
        lengths = self.lengths(start, step)
        return [
            (buffer[at : at + length], part[start : start + length])
            for part, at, length in zip(self.parts, layout.displs(lengths), lengths, strict=True)
            if length
        ]

    def _wait(self) -> None:
        for device in {part.device for part in self.parts if not part.is_cpu}:
            accelerator.synchronize(device)
