"""Record what the real code does on one rank of a job of any size, and simulate jobs by SimGrid's SMPI.

A rank is recorded in this process, with a communicator that sends nothing, and answers as if all ranks made the same
call. Copies are recorded by their bytes, and not made. simulate() needs smpirun: apt-get install libsimgrid-dev
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hpcdist as hd
from hpcdist.comm.team import HEADER, Group, Settings, Team
from hpcdist.control import objects
from hpcdist.runtime import world


class Machine(NamedTuple):
    """Nodes, and ranks on each.

    Attributes:
        wire, wire_latency: bytes/s of a node's wire in each direction, and seconds of a message between nodes.
        memory, latency: bytes/s of all messages within a node, of which one has half at most; seconds of one.
        copies: bytes/s that a rank copies while all do.
    """

    nodes: int
    ranks: int
    wire: float = 2.5e10
    wire_latency: float = 2e-6
    memory: float = 1e11
    latency: float = 1e-6
    copies: float = 5e9

    @property
    def size(self):
        return self.nodes * self.ranks


def seconds(comm, call, repeats=1):
    """Return the seconds of a call on all ranks, the fewest of several times: other programs disturb the rest."""
    found = []
    for _ in range(7):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        comm.Barrier()
        found.append((time.perf_counter() - start) / repeats)
    return min(found)


def measured(comm):
    """Describe the machine on which a job of two or more ranks runs."""
    rank, size, nodes = comm.rank, comm.size, len(set(comm.allgather(MPI.Get_processor_name())))
    big = 2**26  # bytes: more than caches hold
    one, other, each = np.ones(big, np.uint8), np.ones(big, np.uint8), size // nodes

    def rate(peer):
        def exchange():
            cuts = [slice(at, at + 2**20) for at in range(0, big, 2**20)]
            requests = [comm.Irecv(other[cut], peer) for cut in cuts]
            MPI.Request.Waitall(requests + [comm.Isend(one[cut], peer) for cut in cuts])

        return big * each / seconds(comm, exchange)

    def latency(peer):
        return seconds(comm, lambda: comm.Sendrecv(one[:8], peer, 0, other[:8], peer), 100)

    near, far = rank ^ 1, (rank + size // 2) % size
    rates = rate(far), latency(far), rate(near), latency(near)
    return Machine(nodes, each, *rates, big / seconds(comm, partial(np.copyto, one, other)))


class Event(NamedTuple):
    """A call of MPI, a copy, or the result.

    Attributes:
        peer: the other rank, the root, or the event that a Wait waits for.
        nbytes: of the message.
        sent, received: bytes for, and from, each rank, where they differ.
        ranks: of the communicator; empty for all.
    """

    name: str
    peer: int = 0
    nbytes: int = 0
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()


Log = list[Event]


def _counts(spec):
    if not isinstance(spec, (list, tuple)) or not isinstance(spec[1], Sequence):
        return ()
    kinds = spec[-1] if isinstance(spec[-1], list) and len(spec) == 4 else [MPI.BYTE] * len(spec[1])
    item = getattr(spec[0], "itemsize", 1)
    return tuple(item * count * kind.Get_size() for count, kind in zip(spec[1], kinds, strict=True))


class Recorder:
    """A communicator that records the calls of another one."""

    def __init__(self, comm, log):
        self._comm, self._log = comm, log

    def __getattr__(self, name):
        found = getattr(self._comm, name)
        if name.islower() or name == "Free":
            return found

        def call(*args):
            result = found(*args)
            if name in ("Dup", "Split"):
                return Recorder(result, self._log)
            specs = [arg for arg in args if isinstance(arg, (list, tuple, np.ndarray))] or [b""]
            peer = next((arg for arg in args if isinstance(arg, int)), 0)
            nbytes = memoryview(specs[0] if isinstance(specs[0], (bytes, np.ndarray)) else specs[0][0]).nbytes
            counts = (_counts(specs[at]) for at in (0, -1))
            self._log.append(Event(name, peer, nbytes, *counts, getattr(self._comm, "ranks", ())))
            wait = Event("Wait", len(self._log) - 1)
            return SimpleNamespace(Wait=lambda: (result.Wait(), self._log.append(wait)))

        return call


class Alone:
    """A communicator of one process, in the place of any rank.

    Args:
        node: the ranks of its node.
        extents: of the tensors of all ranks, for their headers, where they differ.
        told: what rank 0, the root of all, has sent to all; empty if it is recorded.
    """

    ranks: tuple[int, ...] = ()

    def __init__(self, rank, size, node, extents, told):
        self.rank, self.size, self._node, self._extents = rank, size, node, extents
        self._told, self._heard = told, iter(list(told))

    def __getattr__(self, name):
        return lambda *args: self if name == "Dup" else SimpleNamespace(Wait=lambda: None)

    def Split(self, color, key):  # noqa: N802
        part = Alone(self.rank - self._node[0], len(self._node), self._node, (), [])
        part.ranks = tuple(self._node)
        return part

    def _of_root(self, mine):
        if self.rank == 0:
            self._told.append(mine)
            return mine
        return next(self._heard, mine)

    def bcast(self, value, root=0):
        return self._of_root(value)

    def allgather(self, value):
        return [self._of_root(value)] + [value] * (self.size - 1)

    gather = allgather

    def Bcast(self, spec, root=0):  # noqa: N802
        memory = memoryview(spec[0]).cast("B")
        memory[:] = self._of_root(bytes(memory))

    def Allgather(self, send, recv):  # noqa: N802
        send, recv = (spec if isinstance(spec, np.ndarray) else spec[0] for spec in (send, recv))
        if mine := bytes(send):
            everyone, stride = memoryview(recv).cast("B"), len(mine)
            everyone[:] = self._of_root(mine) + mine * (self.size - 1)
            if self._extents and stride >= HEADER:
                for rank, extent in enumerate(self._extents):  # in hpcdist/validation/collective.py
                    everyone[rank * stride + 24 :][:8] = extent.to_bytes(8, "little")

    def Allgatherv(self, send, recv, root=0):  # noqa: N802
        if recv is not None and isinstance(recv[0], bytearray):  # small values, not tensors
            recv[0][:] = bytes(send[0]) * self.size

    Gatherv = Allgatherv

    def Alltoall(self, send, recv):  # noqa: N802
        recv[...] = send if self.size == 1 else 0  # nothing arrives from others

    def Alltoallv(self, send, recv):  # noqa: N802
        if self.size == 1 and isinstance(recv[0], bytearray):  # small values, not tensors
            recv[0][:] = bytes(send[0])

    def Exscan(self, send, recv):  # noqa: N802
        recv[...] = self.rank * send

    def Allreduce(self, send, recv, op=MPI.SUM):  # noqa: N802
        if isinstance(send, np.ndarray):  # else each has the same
            recv[...] = self.size * send


class _Windows:
    """Memory that the ranks of a node share, with the messages that the real one takes."""

    problem = reason = None

    def __init__(self, team):
        self._team = team

    def take(self, nbytes):
        self._team.topology.comm.Bcast([bytearray(HEADER), MPI.BYTE])
        objects.everywhere(self._team.comm, True)
        return SimpleNamespace(bytes=torch.empty(nbytes, dtype=torch.uint8))


class _Copies(TorchDispatchMode):
    def __init__(self, log):
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in ("copy_", "clone"):
            return func(*args, **(kwargs or {}))
        times = 1 if all(x.is_contiguous() for x in args[:2] if isinstance(x, Tensor)) else 2  # fitted to measured jobs
        self._log.append(Event("copy", nbytes=times * args[0].nbytes))
        return args[0] if name == "copy_" else torch.empty(args[0].shape, dtype=args[0].dtype)


def record(call, rank, machine, extents=(), told=None):
    """Return the events of a call on one of the ranks; see Alone."""
    size, each, log = machine.size, machine.ranks, Log()
    settings = Settings(
        device=torch.device("cpu"), own_gpus=False, timeout=timedelta(1), nodes=machine.nodes,
        node_of=tuple(r // each for r in range(size)), memory=((2**60, 2**60),) * size, tuned=None, staging="",
        child_environ={}, making_group=nullcontext,
    )  # fmt: skip
    first = rank // each * each
    comm = Alone(rank, size, range(first, first + each), extents, [] if told is None else told)
    team = Team(Recorder(comm, log), Group(rank, range(size)), settings)
    team.windows = _Windows(team)
    log.clear()
    with patch.object(world, "team_of", lambda group=None: team), _Copies(log):
        result = call()
    return [*log, Event("result", nbytes=getattr(result, "nbytes", 0))]


# A replay


def lines(rank, machine, log):
    """Yield a rank's events in SMPI's format."""
    number = Counter()
    started = {}
    last = {}  # for each rank, the event of the latest message to it
    yield "init"
    for i, (name, peer, nbytes, sent, received, ranks) in enumerate(log):
        if name == "copy":
            yield f"compute {nbytes}"
        elif name in ("Isend", "Irecv"):
            pair = (rank, peer) if name == "Isend" else (peer, rank)
            number[pair] += 1
            if name == "Isend":  # one after the other, where SimGrid would share the wire among all
                if (before := started.pop(last.get(peer, -1), None)) is not None:
                    yield before
                last[peer] = i
            yield f"{name.lower()} {peer} {number[pair]} {nbytes}"
            started[i] = f"wait {pair[0]} {pair[1]} {number[pair]}"
        elif name == "Wait":
            if peer in started:
                yield started.pop(peer)
        elif name == "Allgather":
            yield f"allgather {nbytes} {nbytes}"
        elif name == "Allgatherv":
            yield f"compute {nbytes}"
            yield f"allgatherv {received[rank]} {_text(received)}"
        elif name[:8] == "Alltoall":
            yield f"alltoallv {sum(sent)} {_text(sent)} {sum(received)} {_text(received)}"
        elif name in ("Gatherv", "Scatterv"):  # MPICH and Open MPI send each part by itself
            parts, verbs = (received, ("recv", "send")) if name == "Gatherv" else (sent, ("send", "recv"))
            others = [other for other in range(machine.size) if rank == peer != other]
            yield from (f"i{verbs[0]} {other} {_SMALL} {parts[other]}" for other in others)
            yield from (f"wait {(f'{o} {rank}', f'{rank} {o}')[verbs[0] == 'send']} {_SMALL}" for o in others)
            yield f"compute {parts[rank]}" if others else f"{verbs[1]} {peer} {_SMALL} {nbytes}"
        elif name != "result":  # Bcast, Allreduce or Barrier: the ranks tell each other in log2 steps
            group, step = ranks or range(machine.size), 1
            while step < len(group):
                to, of = (group[(group.index(rank) + way) % len(group)] for way in (step, -step))
                yield f"isend {to} {_SMALL + step} {nbytes}"
                yield f"recv {of} {_SMALL + step} {nbytes}"
                yield f"wait {rank} {to} {_SMALL + step}"
                step *= 2
    yield "finalize"


_SMALL = 2**20  # tags from here on are not of Isend and Irecv
_OPTIONS = (
    "smpi/coll-selector:mpich smpi/bw-factor:0:1 smpi/lat-factor:0:1 network/TCP-gamma:1e15 network/crosstraffic:no"
)


def _text(counts):
    return " ".join(map(str, counts))


def _link(name, rate, latency, policy="SHARED"):
    return f'<link id="{name}" bandwidth="{rate}Bps" latency="{latency}s" sharing_policy="{policy}"/>'


def platform(machine):
    """Describe a machine to SimGrid: a wire in each direction and the memory of each node; the switch never waits."""
    nodes, half = range(machine.nodes), machine.wire_latency / 2
    rows = [f'<host id="n{n}" speed="{machine.copies}f" core="{machine.ranks}"/>' for n in nodes]
    rows += [_link(f"{way}{n}", machine.wire, half) for n in nodes for way in ("up", "down")]
    rows += [_link(f"memory{n}", machine.memory, machine.latency) for n in nodes]
    rows += [_link("message", machine.memory / 2, 0, "FATPIPE")]
    for a in nodes:
        for b in nodes:
            way = "".join(f'<link_ctn id="{x}"/>' for x in ((f"up{a}", f"down{b}"), (f"memory{a}", "message"))[a == b])
            rows.append(f'<route src="n{a}" dst="n{b}" symmetrical="NO">{way}</route>')
    head = '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd"><platform version="4.1">'
    return f'{head}<zone id="z" routing="Full">' + "\n".join(rows) + "</zone></platform>"


def simulate(machine, logs):
    """Return the seconds that a machine takes, by SimGrid."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{rank}.txt") for rank in range(machine.size)]
        for rank, file in enumerate(files):
            file.write_text("".join(f"{rank} {line}\n" for line in lines(rank, machine, logs[rank])))
        hosts = "".join(f"n{rank // machine.ranks}\n" for rank in range(machine.size))
        texts = {"platform.xml": platform(machine), "hosts": hosts, "traces": "".join(f"{file}\n" for file in files)}
        for name, text in texts.items():
            Path(folder, name).write_text(text)
        command = f"smpirun -np {machine.size} -platform platform.xml -hostfile hosts -replay traces".split()
        command[1:1] = [f"--cfg={option}" for option in _OPTIONS.split()]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = re.search(r"Simulation time (\S+)", done.stderr)
    if found is None:
        raise RuntimeError(done.stderr)
    return float(found[1])


# Calls


def _tensor(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


def _skewed(size, nbytes):
    """Rank 0 has 16 times the bytes of each other rank, and all together as many as with `nbytes` each."""
    each = size * nbytes // (size + 15)
    return [size * nbytes - (size - 1) * each, *(size - 1) * [each]]


# Each makes the tensors of a rank, of so many bytes, and returns the call.
CASES = {
    "concat": lambda rank, size, nbytes: partial(hd.concat, _tensor(nbytes)),
    "concat 16:1": lambda rank, size, nbytes: partial(hd.concat, _tensor(_skewed(size, nbytes)[rank])),
    "gather": lambda rank, size, nbytes: partial(hd.gather, _tensor(nbytes)),
    "split": lambda rank, size, nbytes: partial(hd.split, None if rank else _tensor(nbytes * size)),
    "rows to columns": lambda rank, size, nbytes: partial(
        hd.redistribute, _tensor(nbytes).view(-1, min(2**10, nbytes // size) * size), hd.Split(0), hd.Split(1)
    ),
}


def recorded(case, nbytes, machine, ranks):
    """Return the events of a case on some ranks, of which the first is 0."""
    extents, told = _skewed(machine.size, nbytes) if "16:1" in case else (), list[bytes]()
    return [record(CASES[case](rank, machine.size, nbytes), rank, machine, extents, told) for rank in ranks]


def outside(event, rank, machine):
    """Return the bytes that an event brings into the node of a rank, and those that it sends out of it."""
    name, peer, nbytes, sent, received, _ = event
    first = rank // machine.ranks * machine.ranks
    home = slice(first, first + machine.ranks)
    if name in ("Isend", "Irecv"):
        moved = 0 if home.start <= peer < home.stop else nbytes
        return (0, moved) if name == "Isend" else (moved, 0)
    if name == "Allgatherv" and sum(received) >= 2**19:  # a ring of MPI's; below, every rank receives all
        return (rank == first) * (sum(received) - received[rank - 1]), 0
    into, out = (sum(of) - sum(of[home]) for of in (received, sent))
    return into, out


def least_outside(case, nbytes, machine):
    """Return the bytes that a case must bring into the node of rank 0, or send out of it."""
    counts = _skewed(machine.size, nbytes) if "16:1" in case else [nbytes] * machine.size
    if case == "rows to columns":
        return sum(counts[machine.ranks :]) * machine.ranks / machine.size
    own, others = sum(counts[: machine.ranks]), sum(counts[machine.ranks :])
    return max(own, others) if "concat" in case else others


def messages(log):
    """Return how many messages with data a rank handles one after the other."""
    return sum(max(len(event.received or event.sent) - 1, event.name == "Irecv") for event in log)


def metadata(log, size):
    """Return the bytes that a rank receives in each exchange of what is no data."""
    times = {"Allgather": size, "Bcast": 1, "Allreduce": 1}
    return [times[event.name] * event.nbytes for event in log if event.name in times]
