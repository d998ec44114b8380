"""Select the route of a call.

A route for host memory moves GPU memory through two host buffers, in rounds of limited size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcdist import activity
from hpcdist.errors import RankError, coded
from hpcdist.layout import limits
from hpcdist.routes.route import Message, Method, Route, Step, Vector, cut
from hpcdist.tensors import accelerator
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.tensors.storage import Scratch, as_bytes

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

# name -> (module, attribute); the module is imported when the route is first selected
ROUTES = {
    "nccl": ("hpcdist.routes.c10d", "NCCL"),
    "gloo": ("hpcdist.routes.c10d", "GLOO"),
    "mpi": ("hpcdist.routes.mpi", "MPI_ROUTE"),
    "hdf5": ("hpcdist.routes.hdf5_files", "HDF5_ROUTE"),
}


@cache
def load(name: str) -> Route:
    """Import and return the route of that name."""
    module, attribute = ROUTES[name]
    route: Route = getattr(import_module(module), attribute)
    return route


def agreed(verb: str, name: str, team: Team, kinds: tuple[int, ...]) -> Route:
    """Return the route of a call, given the kind of memory of each rank's data. Collective over the team.

    A route that cannot access GPU memory is given host buffers.

    Raises:
        RankError: on every rank, if the named route cannot be used here or with these data.
    """
    key = (name, kinds)
    if key not in team.routes:
        team.routes[key] = _select(verb, name, team, [kind == MemoryKind.GPU for kind in kinds])
    route: Route = team.routes[key][0]
    activity.took(route.name)
    return route


def _select(verb: str, name: str, team: Team, gpu: list[bool]) -> tuple[Route, str]:
    """Return the route and the reason."""
    why = f"route={name!r} was passed"
    if name == "auto":
        name = "nccl" if all(gpu) and load("nccl").missing(team) is None else "mpi"
        where = "on GPUs" if all(gpu) else "of which some are in host memory" if any(gpu) else "in host memory"
        why = f"route='auto' takes {name} for data {where}"
        if all(gpu) and name != "nccl":
            why += f" if nccl is not available: {load('nccl').missing(team)}"
    route = load(name)
    missing = route.missing(team)
    if missing is not None:
        raise RankError(verb, dict.fromkeys(range(team.size), coded("HD207", missing)))
    if any(gpu) and not route.carries(team, gpu=True):
        return StagedRoute(route), why
    if not all(gpu) and not route.carries(team, gpu=False):
        text = f"the tensor is on the CPU, and route {name} moves GPU memory only; use route auto"
        raise RankError(verb, {rank: coded("HD207", text) for rank, on_gpu in enumerate(gpu) if not on_gpu})
    if name == "mpi" and any(gpu):
        from hpcdist.routes.mpi import MPI_ON_GPU  # which imports MPI

        route = MPI_ON_GPU
    return route, why


Pair = tuple[Tensor, Tensor]


class StagedRoute(Route):
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

    def allgatherv_sends(self, team: Team, what: Vector, send: Tensor, recv: Tensor) -> None:
        source, target = _Host([as_bytes(send)]), _Host(cut(recv, what.counts, what.displs))
        for start, step in _rounds(what.longest, team.size):
            ((mine, part),), into = source.round(start, step), target.round(start, step)
            _copy([(mine, part)])
            now = [host.numel() for host, _ in into]
            self.route.prepare(team, "allgatherv", Vector.packed(now))(mine, target.memory)
            _copy([(part, host) for host, part in into])

    def start(self, team: Team, sends: list[Message], recvs: list[Message], longest: int) -> Sequence[Step]:
        source, target = _Host([block for _, block in sends]), _Host([block for _, block in recvs])
        for start, step in _rounds(longest, team.size):
            out, into = source.round(start, step), target.round(start, step)
            _copy(out)
            self.route.exchange(team, _messages(sends, out), _messages(recvs, into), min(step, longest - start))
            _copy([(part, host) for host, part in into])
        return ()


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
