"""What this rank does, and the other ranks of its node: by their shared records, and the system's data on them."""

from __future__ import annotations

import os
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

from hpcdist import activity
from hpcdist.activity import ENDING, FINALIZED, RUNNING, Process, SharedRecord, procstat
from hpcdist.control import objects
from hpcdist.tensors import accelerator
from hpcdist.tensors.storage import tensors_in
from hpcdist.watch import torch_groups
from hpcdist.watch.hang_table import WAITS, Report

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

_SILENT = "running, but does not answer: native code that holds Python's lock, no processor for it, or lost messages"
_UNSEEN = "does not answer: it is stopped, in native code that holds Python's lock, or its node is down or cut off"
_MOST_PEERS = 512  # ranks of a team, and groups, that are reported
_SHOWN = 4  # sizes of tensors of a call


class Reporter:
    """The shared record of this node, and reports on the ranks of the node. Making it is collective over `comm`.

    Args:
        comm: all ranks.
        local, node: the ranks of this node, and its number.
        address: where this rank receives messages.

    Attributes:
        record, slot: record of this node, and the slot in it of this rank.
        members: address, host, pid, node and slot of each rank.
        local_ranks: rank of each slot; this rank alone where the node's processes share no record.
        launched: how many collectives this rank has launched, at the latest count(), by the name of torch's group; and
            the number of hpcdist's own calls.
        still: seconds without another one.
        device: this rank's GPU, if the watch looks after it.
    """

    def __init__(self, comm: MPI.Intracomm, local: MPI.Comm, node: int, address: Any) -> None:
        file = objects.node_file(local)
        self.record = SharedRecord(1 if file is None else local.size, file)
        self.slot = 0 if file is None else local.rank
        self.announce(RUNNING)
        self.rank = comm.rank
        member = {"address": address, "host": socket.gethostname(), "pid": os.getpid(), "node": node, "slot": self.slot}
        self.members = objects.all_gather_object(comm, member)
        slots = {other["slot"]: rank for rank, other in enumerate(self.members) if other["node"] == node}
        self.local_ranks: dict[int, int] = slots if len(slots) == local.size else {self.slot: self.rank}
        self.launched = dict[str, int]()
        self.still = 0.0
        self.device: torch.device | None = None

    def announce(self, state: int) -> None:
        """Announce the state of this process to the ranks of this node."""
        self.record.announce(self.slot, state)

    def count(self, seconds: float) -> float:
        """Count time that has passed without another collective on the GPU; return the deadline of those."""
        launched, limit = launched_now()
        self.still = self.still + seconds if launched == self.launched else 0.0
        self.launched = launched
        return limit

    def waits_for_gpu(self) -> bool:
        """Whether the GPU has work to do, or the main thread is in torch's functions that launch and wait for work.

        Work on streams of the program's own is not seen. Only a rank that is late asks: CUDA's graphs are not captured
        while another thread asks for a stream.
        """
        if self.device is None:
            return False
        frame = procstat.frames().get(os.getpid())
        waiting = ("torch.distributed", "torch.accelerator", f"torch.{accelerator.KIND}")
        if frame is not None and str(frame.f_globals.get("__name__")).startswith(waiting):
            return True
        try:
            return not accelerator.idle(self.device)
        except Exception:  # an earlier operation of the GPU has failed
            return True

    def died(self, slot: int) -> bool:
        """Whether the process of a slot has ended without finalize()."""
        process = self.record.read(slot)
        return process.state == RUNNING and procstat.condition(process.pid, process.started) == "dead"

    def dead(self) -> dict[int, Report]:
        """Return reports on the ranks of this node that have died; none if one of them ends the job on purpose."""
        if any(self.record.read(slot).state == ENDING for slot in self.local_ranks):
            return {}
        return {rank: self.seen(rank) for slot, rank in self.local_ranks.items() if self.died(slot)}

    def own(self) -> Report:
        """Report this rank's activity."""
        for record in activity.thread_records:
            record.settle()
        process, frames = self.record.read(self.slot), procstat.frames()
        report = self._report(self.rank, process)
        now = launched_now()[0]
        report.still = self.still if self.still and now == self.launched and self.waits_for_gpu() else 0.0
        report.launched = dict(list(now.items())[1:_MOST_PEERS])
        for thread, record in zip(report.threads, activity.thread_records, strict=False):
            thread.waited = record.waited
            if thread.call is not None:
                thread.tensors = _described(record.tensors)
                peers = activity.peers.get(thread.call.team, [])
                thread.peers = peers if len(peers) <= _MOST_PEERS else []
        first = process.threads[0].thread if process.threads else os.getpid()  # the main thread's ID is the pid
        main = first if first in frames else os.getpid()
        if main in frames:
            busy = any(thread.call is not None for thread in report.threads)
            report.doing = WAITS if busy else procstat.doing(main, frames[main])
            report.stack = [] if busy else procstat.stack(frames[main])
        return report

    def seen(self, rank: int) -> Report:
        """Report on a rank of this node from its record, and from the system's data on its process."""
        slot = self.members[rank]["slot"]
        if self.local_ranks.get(slot) != rank:
            return self.unseen(rank, False)
        process = self.record.read(slot)
        report = self._report(rank, process)
        condition = procstat.condition(process.pid, process.started)
        report.doing = _SILENT if condition == "alive" else condition
        if condition == "dead" and process.state == FINALIZED:
            report.doing = "at its end: it has finalized"
        return report

    def unseen(self, rank: int, dead: bool) -> Report:
        """Report on a rank of which nothing is known, but perhaps that it is dead."""
        report = self._report(rank, None)
        report.doing, report.known = "dead" if dead else _UNSEEN, False
        return report

    def _report(self, rank: int, process: Process | None) -> Report:
        member = self.members[rank]
        return Report(rank, member["host"], member["pid"], [] if process is None else process.threads)


def launched_now() -> tuple[dict[str, int], float]:
    """Return the number of hpcdist's calls, then of the collectives of each of torch's groups, and those' deadline."""
    launched, limit = torch_groups.launched()
    return {"hpcdist": sum(record.begun for record in activity.thread_records), **launched}, limit


def _described(call: Any) -> str:
    """Describe the tensors among nested lists, "8192 x torch.float32": the number of elements and dtype of each."""
    sizes = Counter(f"{x.numel()} x {x.dtype}" for x in tensors_in([call]))
    texts = [f"{count} tensors of {size}" if count > 1 else size for size, count in sizes.items()]
    return ", ".join(texts[:_SHOWN]) + (f", and {len(texts) - _SHOWN} other sizes" if len(texts) > _SHOWN else "")
