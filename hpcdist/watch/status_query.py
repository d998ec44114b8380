"""Query the activity of all ranks. If a rank does not answer, another rank of its node reads its shared record."""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hpcdist import activity
from hpcdist.activity import ENDING, FINALIZED, RUNNING, Process, SharedRecord, procstat
from hpcdist.activity.procstat import identity, opened
from hpcdist.control import objects
from hpcdist.control.objects import node_file
from hpcdist.watch.hang_table import WAITS, Report, of_json

if TYPE_CHECKING:
    from mpi4py import MPI

_SILENT = "running, but does not answer: native code that holds Python's lock, no processor for it, or lost messages"
_UNSEEN = "does not answer: it is stopped, in native code that holds Python's lock, or its node is down or cut off"
_MOST_PEERS = 512  # ranks of a team that are reported: a message has 64 KiB
_SHOWN = 4  # sizes of tensors of a call
KEY = 32  # bytes
_DIGEST = 16  # bytes
_REFUSAL = 0.2  # seconds in which a host refuses a datagram
_BUFFER = 2**20  # bytes on their way to a rank: the answers of many ranks at once
_HEAD = struct.Struct(f"<{_DIGEST}sH")  # of a message: digest and length of its compressed text
# Messages read at once, and seconds to rest after none of them was this job's: any user of the nodes can send UDP
# datagrams, and must not keep a core busy with them.
_BATCH, _PAUSE = 32, 0.02


class Datagrams:
    """Small messages between the watching threads of a job, outside MPI: this rank's receiver, and sends to others.

    On one node each rank reads from a pipe, which the others open through /proc. It has no name, no port and no file,
    and only processes of this user can open it. Otherwise they are UDP datagrams, on the addresses that
    :func:`rendezvous.meet` has found. Each carries a keyed digest; one rank draws the key, and the others get it over
    MPI.

    Args:
        key: secret of the job.
        address: address of this host in the network that the nodes share; None on one node.

    Attributes:
        address: address for the other ranks, as JSON.
    """

    def __init__(self, key: bytes, address: str | None) -> None:
        self._key = key
        self._socket: socket.socket | None = None
        self._pipe: list[int] = []
        if address is None:
            self._pipe += os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self.address = [os.getpid(), self._pipe[1], *identity(self._pipe[1])]
        else:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._socket.bind((address, 0))
            self._socket.setblocking(False)
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            self.address = list(self._socket.getsockname())
        self._rest = b""

    def fileno(self) -> int:
        return self._pipe[0] if self._socket is None else self._socket.fileno()

    def expect_all(self) -> None:
        """Make room for the answers of many ranks at once.

        Only a rank that asks needs it. Linux gives a user 64 MiB of pipes on a node. If 64 ranks had 1 MiB each, each
        new pipe of this user, in any program, would hold 8 KiB instead of 64.
        """
        with suppress(OSError):
            if self._pipe:
                fcntl.fcntl(self._pipe[0], fcntl.F_SETPIPE_SZ, _BUFFER)

    def send(self, address: Sequence[Any], message: dict[str, Any]) -> None:
        """Send a message, which is lost if the other rank does not exist, has too many, or if it is too long."""
        body = zlib.compress(json.dumps(message).encode())
        part = _HEAD.pack(self._digest(body), len(body)) + body
        if len(part) > select.PIPE_BUF:  # writes to a pipe are atomic up to this size
            return
        with suppress(OSError):
            if self._socket is not None:
                self._socket.sendto(part, tuple(address))
                return
            pid, writer, *expected = address
            fd = opened(pid, writer, expected)  # for reading, too: without readers, writing may end this process
            try:
                os.write(fd, part)
            finally:
                os.close(fd)

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that arrived from ranks of this job."""
        found: list[dict[str, Any]] = []
        with suppress(BlockingIOError):
            for _ in range(_BATCH):
                data = self._rest + os.read(self.fileno(), select.PIPE_BUF)
                while len(data) >= _HEAD.size:
                    digest, length = _HEAD.unpack_from(data)
                    body = data[_HEAD.size : _HEAD.size + length]
                    if len(body) < length:
                        break
                    data = data[_HEAD.size + length :]
                    if compare_digest(digest, self._digest(body)):
                        found.append(json.loads(zlib.decompress(body)))
                    elif self._socket is not None:  # a stranger's datagram: none of it is looked at again
                        break
                self._rest = data if self._socket is None else b""  # a datagram is received whole
        if not found:
            time.sleep(_PAUSE)
        return found

    def refused(self, address: Sequence[Any]) -> bool:
        """Whether the host reports that the socket no longer exists; a host that is down reports nothing."""
        if self._socket is None:
            return False
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.settimeout(_REFUSAL)
            probe.connect(tuple(address))
            try:
                probe.send(b"")  # ignored, since it has no digest
                probe.recv(1)
            except ConnectionRefusedError:
                return True
        return False

    def close(self) -> None:
        for fd in self._pipe:
            os.close(fd)
        if self._socket is not None:
            self._socket.close()

    def _digest(self, body: bytes) -> bytes:
        return blake2b(body, key=self._key, digest_size=_DIGEST).digest()


class StatusQuery:
    """The means of this rank to query the others, and to answer them.

    Making it is collective over `comm`. All data that are needed when a rank hangs are exchanged then.

    Args:
        comm: all ranks.
        local: the ranks of this node.
        address: address of this host; None on one node whose processes can open each other's files.

    Attributes:
        rank: rank of this process.
        ranks: all ranks.
        local_ranks: rank of each slot of this node's shared record; this rank alone where the nodes' processes share
            none.
        ended: whether another rank ends the job.
        raised_by: rank that raises a HangError, if any.
        folder: where it has written flight records; "" if nowhere.
        asked_by: reason and time (seconds of time.monotonic) of the last question of each rank.
    """

    def __init__(self, comm: MPI.Intracomm, local: MPI.Comm, address: str | None) -> None:
        self.rank: int = comm.rank
        file = node_file(local)
        self._record = SharedRecord(1 if file is None else local.size, file)  # of its own, if the node cannot share it
        self._slot = 0 if file is None else local.rank
        self.announce(RUNNING)
        key = objects.broadcast_bytes(comm, os.urandom(KEY) if comm.rank == 0 else b"", 0)
        self.datagrams = Datagrams(key, address)
        leader = int.from_bytes(objects.broadcast_bytes(local, comm.rank.to_bytes(8, "little"), 0), "little")
        me = {"address": self.datagrams.address, "host": socket.gethostname(), "pid": os.getpid()}
        self._peers = objects.all_gather_object(comm, {**me, "node": leader, "slot": self._slot})
        self.ranks = list(range(comm.size))
        slots = {peer["slot"]: rank for rank, peer in enumerate(self._peers) if peer["node"] == leader}
        self.local_ranks: dict[int, int] = slots if len(slots) == local.size else {self._slot: self.rank}
        self.asked_by: dict[int, tuple[str, float]] = {}
        self._answers: dict[int, Report] = {}
        self.ended = False
        self.raised_by: int | None = None
        self.folder = ""
        self._number = 0  # of the latest question: only answers to it count
        activity.start(self._record, self._slot)

    def announce(self, state: int) -> None:
        """Show the state of this process to the other ranks of this node."""
        self._record.announce(self._slot, state)

    def next_process(self) -> tuple[int, int] | None:
        """Return (slot, descriptor of its process) of the next rank on this node, which this rank watches."""
        slots = sorted(self.local_ranks)
        slot = slots[(slots.index(self._slot) + 1) % len(slots)]
        try:
            return None if slot == self._slot else (slot, os.pidfd_open(self._record.read(slot).pid))
        except (OSError, AttributeError):  # an old kernel: the launcher will notice, or the deadline
            return None

    def died(self, slot: int) -> bool:
        """Whether the process of a slot has ended without finalize()."""
        process = self._record.read(slot)
        return process.state == RUNNING and procstat.condition(process.pid, process.started) == "dead"

    def end_job(self) -> None:
        """Announce to all ranks that this one ends the job."""
        self.announce(ENDING)
        self.send_all("end")

    def send_all(self, kind: str, folder: str = "") -> None:
        """Announce to all other ranks that this one will "raise", or "end" the job; where it has written records."""
        for rank in self.ranks:
            if rank != self.rank:
                self._send(rank, {"kind": kind, "folder": folder})

    def job_ends(self) -> bool:
        """Whether a rank is ending the job."""
        return self.ended or any(self._record.read(slot).state == ENDING for slot in self.local_ranks)

    def dead_ranks(self) -> dict[int, Report]:
        """Return the ranks of this node whose process has ended without finalize()."""
        return {rank: self._seen(rank) for slot, rank in self.local_ranks.items() if self.died(slot)}

    def own_report(self) -> Report:
        """Report this rank's activity."""
        for record in activity.thread_records:
            record.settle()
        process, frames = self._record.read(self._slot), procstat.frames()
        report = self._report(self.rank, process)
        for thread, record in zip(report.threads, activity.thread_records, strict=False):
            thread.waited = record.waited
            if thread.call is not None:
                thread.tensors = _described(record.tensors)
                peers = activity.peers.get(thread.call.team, [])
                thread.peers = peers if len(peers) <= _MOST_PEERS else []
        first = process.threads[0].thread if process.threads else os.getpid()  # which is the main thread's ID
        main = first if first in frames else os.getpid()
        if main in frames:
            busy = any(thread.call is not None for thread in report.threads)
            report.doing = WAITS if busy else procstat.doing(main, frames[main])
            report.stack = [] if busy else procstat.stack(frames[main])
        return report

    def take(self, message: dict[str, Any]) -> None:
        """Process a message of another rank."""
        source = message["from"]
        if message["kind"] == "ask":
            self.asked_by[source] = message["why"], time.monotonic()
            self._answer(source, message["number"], self.own_report())
        elif message["kind"] == "end":
            self.ended = True
        elif message["kind"] == "raise":
            self.raised_by, self.folder = source, message["folder"]
        elif message["kind"] == "ask about":
            self._answer(source, message["number"], self._seen(message["rank"]))
        elif message["number"] == self._number:
            report = of_json(message["report"])
            self._answers[report.rank] = report

    def ask(self, why: str, seconds: float, until: Callable[[float, Callable[[], bool]], None]) -> dict[int, Report]:
        """Return the activity of every rank, from its own report if it answers.

        Args:
            why: reason, which the other ranks see.
            seconds: time to wait for answers.
            until: takes messages until a time, or until a condition holds.
        """
        self.datagrams.expect_all()
        self._number += 1
        self._answers = {self.rank: self.own_report()}
        begin = time.monotonic()
        for part in (0.3, 1.0):  # silent ranks are asked again
            for rank in self._silent():
                self._send(rank, {"kind": "ask", "why": why, "number": self._number})
            until(begin + part * seconds, lambda: not self._silent())
        for rank in self._silent():
            if rank in self.local_ranks.values():
                self._answers[rank] = self._seen(rank)
            else:
                self._ask_node_of(rank)
        until(time.monotonic() + 0.3 * seconds, lambda: not self._silent())
        for rank in self._silent():  # as are all other ranks of its node
            self._answers[rank] = self._unseen(rank, self.datagrams.refused(self._peers[rank]["address"]))
        return dict(sorted(self._answers.items()))

    def close(self) -> None:
        activity.start(None)
        self.datagrams.close()
        self._record.close()

    def _ask_node_of(self, rank: int) -> None:
        """Query a rank of the same node that has answered, if any."""
        node = self._peers[rank]["node"]
        witness = next((r for r in self._answers if self._peers[r]["node"] == node), None)
        if witness is not None:
            self._send(witness, {"kind": "ask about", "rank": rank, "number": self._number})

    def _silent(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self._answers]

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        self.datagrams.send(self._peers[rank]["address"], {**message, "from": self.rank})

    def _answer(self, rank: int, number: int, report: Report) -> None:
        self._send(rank, {"kind": "answer", "number": number, "report": asdict(report)})

    def _seen(self, rank: int) -> Report:
        """Report on a rank of this node from its record, and from the system's data on its process."""
        slot = self._peers[rank]["slot"]
        if self.local_ranks.get(slot) != rank:
            return self._unseen(rank, False)
        process = self._record.read(slot)
        report = self._report(rank, process)
        condition = procstat.condition(process.pid, process.started)
        report.doing = _SILENT if condition == "alive" else condition
        if condition == "dead" and process.state == FINALIZED:
            report.doing = "at its end: it has finalized"
        return report

    def _unseen(self, rank: int, dead: bool) -> Report:
        peer = self._peers[rank]
        return Report(rank, peer["host"], peer["pid"], doing="dead" if dead else _UNSEEN, known=False)

    def _report(self, rank: int, process: Process) -> Report:
        peer = self._peers[rank]
        return Report(rank, peer["host"], peer["pid"], process.threads)


def _described(call: Any) -> str:
    """Describe the tensors among nested lists, "8192 x torch.float32": the number of elements and dtype of each."""
    sizes = Counter(f"{x.numel()} x {x.dtype}" for x in _tensors(call))
    texts = [f"{count} tensors of {size}" if count > 1 else size for size, count in sizes.items()]
    return ", ".join(texts[:_SHOWN]) + (f", and {len(texts) - _SHOWN} other sizes" if len(texts) > _SHOWN else "")


def _tensors(call: Any) -> list[Tensor]:
    if isinstance(call, (list, tuple)):
        return [x for part in call for x in _tensors(part)]
    return [call] if isinstance(call, Tensor) else []
