"""The ranks of a process group: communicators of their own, and their place in the record of calls."""

from __future__ import annotations

import secrets
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from hpcdist import activity
from hpcdist.backend.queue import Queue
from hpcdist.comm.team import freeing
from hpcdist.comm.windows import Topology, Window, Windows

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Communicator", "create", "finish"]


_POLLED = 4  # messages that are looked at for each new one: thousands may be under way


class Pending(Protocol):
    """A message that may not be done yet."""

    def is_completed(self) -> bool: ...


class Communicator:
    """What a process group needs of MPI. Collective over `comm`.

    Args:
        comm: communicator of the ranks of the group, in its order; owned and freed here.
        peers: for each rank of the group, its rank in the world.
        node_of: for each rank of the group, the number of its node.
        timeout: deadline of its calls.

    Attributes:
        comm, p2p_comm: communicators for collectives, and for messages between two ranks.
        rank, size: rank of this process in the group, and number of its ranks.
        number: identity of the group in records of calls, the same on all ranks.
        queue: collectives that were called with async_op, in their order.
        transfers: messages that are sent or received; their memory is kept until they are done.
        limit: deadline of its calls, in seconds.
        several_threads: whether several threads of this rank have called collectives.
        most_tag: largest tag of a message.
    """

    def __init__(
        self, comm: MPI.Intracomm, peers: Sequence[int], node_of: Sequence[int], timeout: timedelta | None
    ) -> None:
        from mpi4py import MPI

        self.comm = comm
        self.p2p_comm = comm.Dup()
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.peers = list(peers)
        self._node_of = node_of
        self.most_tag = int(comm.Get_attr(MPI.TAG_UB) or 32767)
        self.several_threads = False
        self._caller = 0
        self.queue = Queue()
        self.transfers: deque[Pending] = deque()
        self._keeping = threading.Lock()
        self.set_timeout(timeout)
        self._begun = 0
        self._topology: Topology | None = None
        self._windows: Windows | None = None
        self._window: Window | None = None  # held as long as `_shared` is used
        self._shared: Tensor | None = None
        number = array("q", [2 * secrets.randbits(60) + 2])
        comm.Bcast([number, MPI.INT64_T])
        self.number: int = number[0]
        activity.peers[self.number] = self.peers
        _open.add(self)

    def set_timeout(self, timeout: timedelta | None) -> None:
        """Set the deadline of calls from now on; None for that of the world."""
        self.limit = None if timeout is None else timeout.total_seconds()
        if self.limit is not None:
            activity.expect_limit(self.limit)

    def next_call(self) -> int:
        """Return the number of a collective of this group that begins now."""
        self._begun += 1
        return self._begun

    def note_thread(self) -> None:
        """Note that this thread calls a collective."""
        caller = threading.get_ident()
        if caller != self._caller:
            self.several_threads, self._caller = self._caller != 0, caller

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on one node. The same on all ranks."""
        return len(set(self._node_of)) == 1

    @property
    def windows(self) -> Windows:
        """The memory that the ranks of this node share. Collective over the group when it is first used."""
        if self._windows is None:
            self._topology = Topology(self.comm, self._node_of)
            self._windows = Windows(self.comm, self._topology)
        return self._windows

    def shared_memory(self, nbytes: int) -> Tensor | None:
        """Return memory that all ranks of the group share, flat bytes; None if they are on several nodes, or cannot.

        Collective over the group when it is first used, and for more bytes than before. Kept until the group ends.
        """
        if self._shared is not None and len(self._shared) >= nbytes:
            return self._shared
        if not self.one_node:
            return None
        window = self.windows.take(nbytes)
        if window is not None:
            self._shared, self._window = window.bytes, window
        return None if window is None else self._shared

    def keep(self, transfer: Pending) -> None:
        """Keep a message until it is done, whatever becomes of its handle; forget the oldest ones if they are."""
        with self._keeping:
            for _ in range(min(_POLLED, len(self.transfers))):
                oldest = self.transfers.popleft()
                if not oldest.is_completed():
                    self.transfers.append(oldest)
            self.transfers.append(transfer)

    def keep_what_is_left(self) -> None:
        """Keep the memory of messages that were never waited for: MPI may still use it."""
        _kept.extend(transfer for transfer in self.transfers if not transfer.is_completed())
        self.transfers.clear()

    def part(self, ranks: Sequence[int], timeout: timedelta | None, tag: int = 0) -> Communicator:
        """Make a communicator of some ranks of the group. Collective over these ranks alone.

        Args:
            tag: separates those that several threads make at once.
        """
        peers, node_of = [self.peers[rank] for rank in ranks], [self._node_of[rank] for rank in ranks]
        return create(self.comm, ranks, peers, node_of, timeout, tag)

    def abandon(self) -> None:
        """Keep all that MPI may still use, and wait for nothing: the calls may never end."""
        self.queue.abandon()
        self.keep_what_is_left()
        _open.discard(self)
        _abandoned.append(self)

    def free(self) -> None:
        """Finish the asynchronous calls, and free the communicators; a second call does nothing."""
        if not self.comm:  # COMM_NULL
            return
        self.queue.stop()
        self.keep_what_is_left()
        if self._windows is not None:
            self._windows.free()
        if self._topology is not None:
            self._topology.free()
        self._windows = self._topology = self._window = self._shared = None
        activity.peers.pop(self.number, None)
        self.p2p_comm.Free()
        self.comm.Free()


_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_kept: list[Pending] = []
_abandoned: list[Communicator] = []


def finish() -> None:
    """Finish the asynchronous calls of all groups: the program ends."""
    for team in list(_open):
        team.queue.stop()


def create(
    whole: MPI.Intracomm,
    ranks: Sequence[int],
    peers: Sequence[int],
    node_of: Sequence[int],
    timeout: timedelta | None,
    tag: int,
) -> Communicator:
    """Make a communicator of some ranks of another one. Collective over these ranks alone."""
    from mpi4py import MPI

    with freeing(whole.Get_group()) as all_, freeing(all_.Incl(ranks)) as part:
        return Communicator(MPI.Intracomm.Create_group(whole, part, tag), peers, node_of, timeout)
