"""Adapt a route for host memory to GPU memory: copy messages through two host buffers, in rounds of limited size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.route import Message, Method, Route, Vector, cut
from hpcdist.layout import limits
from hpcdist.tensors import accelerator
from hpcdist.tensors.storage import Scratch, as_bytes

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

Pair = tuple[Tensor, Tensor]


class Staged(Route):
    """A route through pinned host buffers: in each round, every message advances by at most `step` bytes.

    All ranks take part in every round, including those with data in host memory: the number of rounds follows from the
    longest message, which all ranks know. Host memory stays within two windows, whatever the size of the data.
    """

    def __init__(self, route: Route) -> None:
        self.route, self.name = route, route.name

    def method(self, team: Team, operation: str, nbytes: int, largest: int = 0) -> Method:
        inner = operation if operation == "allgatherv" else "exchange"
        found = self.route.method(team, inner, min(nbytes, limits.WINDOW))
        why = f"route {self.name} cannot access the GPU memory here"
        return Method(f"pinned host buffers, {found.name}", "; ".join(filter(None, [why, found.reason])))

    def missing(self, team: Team) -> str | None:
        return self.route.missing(team)

    def carries(self, team: Team, gpu: bool) -> bool:
        return True

    def allgatherv_sends(self, team: Team, send: Tensor, recv: Tensor, what: Vector) -> None:
        source, target = _Host([as_bytes(send)]), _Host(cut(recv, what.counts, what.displs))
        for start, step in _rounds(what.longest, team.size):
            ((mine, part),), into = source.round(start, step), target.round(start, step)
            _copy([(mine, part)])
            now = [host.numel() for host, _ in into]
            self.route.allgatherv(team, mine, target.memory, now, layout.displs(now))
            _copy([(part, host) for host, part in into])

    def exchange(self, team: Team, sends: list[Message], recvs: list[Message], longest: int) -> None:
        source, target = _Host([block for _, block in sends]), _Host([block for _, block in recvs])
        for start, step in _rounds(longest, team.size):
            out, into = source.round(start, step), target.round(start, step)
            _copy(out)
            self.route.exchange(team, _messages(sends, out), _messages(recvs, into), min(step, longest - start))
            _copy([(part, host) for host, part in into])


def _messages(whole: list[Message], now: list[Pair]) -> list[Message]:
    """Return the messages of a round, in host memory."""
    return [(rank, host) for (rank, _), (host, _) in zip(whole, now, strict=True) if host.numel()]


def _rounds(longest: int, size: int) -> list[tuple[int, int]]:
    step = max(1, limits.WINDOW // size)
    return [(start, step) for start in range(0, longest, step)]


def _copy(pairs: list[Pair]) -> None:
    for to, source in pairs:
        to.copy_(source, non_blocking=True)
    for device in {x.device for pair in pairs for x in pair if not x.is_cpu}:
        accelerator.synchronize(device)


class _Host:
    """The host side of messages.

    Attributes:
        memory: their parts in the latest round, packed without gaps.
    """

    memory: Tensor

    def __init__(self, messages: list[Tensor]) -> None:
        self._messages = messages
        self._scratch = Scratch(pinned=any(not message.is_cpu for message in messages))

    def round(self, start: int, step: int) -> list[Pair]:
        """Return (host memory, part of the message) for each message in the round from `start`."""
        parts = [message[start : start + step] for message in self._messages]
        self._scratch.reset()
        self.memory = self._scratch.take([sum(map(len, parts))], torch.uint8)
        return list(zip(torch.split(self.memory, list(map(len, parts))), parts, strict=True)) if parts else []
