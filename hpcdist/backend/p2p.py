"""Messages between two ranks: MPI's own requests, which wait() completes in the thread that waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.futures import Future

from hpcdist import activity
from hpcdist.backend.host_copies import address, gpu_events, is_plain, pieces, readable, scratch
from hpcdist.backend.work_forwarding import findable
from hpcdist.backend.works import Waiting, seconds
from hpcdist.errors import refusal
from hpcdist.tensors.storage import copyable

if TYPE_CHECKING:
    from hpcdist.backend.communicator import Communicator

__all__ = ["Transfer", "recv", "send"]

_SLEEP = 1e-4  # seconds between two looks at a message with a time limit of its own


class Transfer(Waiting):
    """A message that is sent or received.

    Args:
        verb: name of the call.
        peer: the other rank, or activity.ANYBODY.
        requests: what MPI has to complete.
        memory: contiguous host memory of the message, which is kept alive.
        out: where a message that was received into other memory belongs; None for nothing.
        expected: bytes to receive; None if it is sent.
        later: pieces to receive from the same rank, after the first has told which one that is.
    """

    def __init__(
        self,
        team: Communicator,
        verb: str,
        peer: int,
        requests: list[MPI.Request],
        memory: Tensor,
        out: Tensor | None = None,
        expected: int | None = None,
        later: Sequence[Any] = (),
    ) -> None:
        super().__init__()
        self._team, self._verb, self._peer = team, verb, peer
        self._requests, self._memory, self._out, self._expected = requests, memory, out, expected
        self._later = later
        # Of the stream of recv(), if wait() has another; what is received in place needs none.
        self._events = [] if out is None or out is memory else gpu_events([out])
        self._tensors = [memory if out is None else out]
        self._status = MPI.Status()
        self._received = 0
        self._error: BaseException | None = None
        self._completed = False
        self._lock = threading.Lock()

    def _advance(self, block: bool) -> bool:
        """Complete the requests, as far as they are done or (`block`) all of them; return whether all are done.

        One thread at a time: a request that a thread waits for cannot be looked at by another one.
        """
        if not self._lock.acquire(blocking=block):
            return False
        try:
            return self._completed or self._complete(block)
        finally:
            self._lock.release()

    def _complete(self, block: bool) -> bool:
        while self._requests:
            request = self._requests[0]
            if block:
                request.Wait(self._status)
            elif not request.Test(self._status):
                return False
            self._requests.pop(0)
            if self._expected is not None:
                self._received += self._status.Get_count(MPI.BYTE)
            if self._later:
                source, tag = self._status.Get_source(), self._status.Get_tag()
                self._requests = [self._team.p2p_comm.Irecv([piece, MPI.BYTE], source, tag) for piece in self._later]
                self._later = ()
        self._finish()
        self._completed = True
        return True

    def _finish(self) -> None:
        if self._expected is not None and self._received != self._expected:
            self._error = refusal(
                RuntimeError,
                "HD301",
                f"{self._verb}: rank {self._status.Get_source()} has sent {self._received} bytes, where the tensor has "
                f"{self._expected}",
            )
        elif self._out is not None and self._out is not self._memory:
            for event in self._events:
                event.wait()
            with torch.inference_mode(self._out.is_inference()):
                out = copyable(self._out.detach())
                out.copy_(copyable(self._memory).view(out.shape))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the memory of the message can be used again.

        Raises:
            TimeoutError: if it is not done in time; it can be waited for again.
        """
        limit = seconds(timeout)
        if not self._completed:
            with activity.InCall(self._verb, self._team, self._peer, limit=self._team.limit, tensors=self._tensors):
                if limit is None:
                    self._advance(block=True)
                else:
                    self._wait_until(time.monotonic() + limit, limit)
        if self._error is not None:
            raise self._error
        return True

    def _wait_until(self, end: float, limit: float) -> None:
        while not self._advance(block=False):
            if time.monotonic() > end:
                raise refusal(TimeoutError, "HD609", f"{self._verb}: wait() timed out after {limit:g} s")
            time.sleep(_SLEEP)

    def is_completed(self) -> bool:
        return self._advance(block=False)

    def is_success(self) -> bool:
        return self._completed and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def source_rank(self) -> int:
        """Return the rank of the group from which the message came."""
        return int(self._status.Get_source())

    _source_rank = source_rank

    @findable
    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        self.wait()
        future.set_result(self.result())
        return future


def send(team: Communicator, x: Tensor, dest: int, tag: int) -> Transfer:
    """Begin to send a tensor to a rank of the group."""
    memory = readable(x)
    requests = [team.p2p_comm.Isend([piece, MPI.BYTE], dest, tag) for piece in pieces(address(memory))]
    transfer = Transfer(team, "send", dest, requests, memory)
    team.keep(transfer)
    return transfer


def recv(team: Communicator, x: Tensor, source: int | None, tag: int) -> Transfer:
    """Begin to receive a tensor from a rank of the group; None for any one."""
    memory = x if is_plain(x) else scratch(x.numel(), x.dtype)
    blocks = pieces(address(memory))
    if source is None:
        requests = [team.p2p_comm.Irecv([blocks[0], MPI.BYTE], MPI.ANY_SOURCE, tag)]
        verb, peer, later = "recv from any rank", activity.ANYBODY, blocks[1:]
    else:
        requests = [team.p2p_comm.Irecv([piece, MPI.BYTE], source, tag) for piece in blocks]
        verb, peer, later = "recv", source, []
    transfer = Transfer(team, verb, peer, requests, memory, x, memory.nbytes, later)
    team.keep(transfer)
    return transfer
