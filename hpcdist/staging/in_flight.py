"""Saves in the background, from their call to their commit: the copies that they write, and who waits for them.

Those of :func:`hpcdist.staging.save` are flights. Those of ``torch.distributed.checkpoint.async_save`` are uploads:
they run in a thread of torch's, and only the thread's end tells that they have ended on all ranks.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from operator import index
from typing import Any

import torch
from torch import Tensor

from hpcdist import activity, memory
from hpcdist.comm.team import Team
from hpcdist.formats.safetensors import INDEX, index_of
from hpcdist.runtime import background
from hpcdist.runtime.background import Handle
from hpcdist.tensors import pool
from hpcdist.tensors.storage import copyable
from hpcdist.validation.local import WrongError

__all__ = ["Flight", "Upload", "buffer_of", "wait_for"]

_ALIGNMENT = 64  # bytes
_NAP = 0.01  # seconds between two looks at a thread
_POLL = 0.5  # seconds; events tell earlier, unless a job has ended before its first step

_flights: list[Flight] = []  # of this process, in the order of the calls
_lock = threading.Lock()
_uploads: weakref.WeakSet[Upload] = weakref.WeakSet()  # of this process; each belongs to its writer
_UPLOAD_THREAD = "AsyncCheckpointExecutor"  # how torch names the thread of one async_save, which ends with it


class Flight:
    """A save on its way.

    Args:
        team: the ranks that save.
        path: of the file, as the caller has passed it.
        mpio: whether HDF5 writes it through MPI-IO.

    Attributes:
        tensors: by name, what is yet to be written: copies, and tensors of the caller's.
    """

    def __init__(self, team: Team, path: Any, mpio: bool) -> None:
        self.team, self.place, self.mpio = team, _place(path), mpio
        self.tensors: dict[str, Tensor] = {}
        self.nbytes = 0  # of the copies
        self._callers: set[str] = set()  # names of tensors that are not copied, and not written yet
        self._released, self._ended = threading.Event(), threading.Event()
        self._handle: Handle[None] | None = None

    def copy(self, tensors: Mapping[str, Tensor], buffer: int) -> None:
        """Copy tensors to host memory: the last ones, as many as fit into `buffer` bytes with the copies of earlier
        saves, for which it waits if need be."""
        needed = sum(x.nbytes for x in tensors.values())
        for flight in _others(self):
            if needed + sum(other.nbytes for other in _others(self)) <= buffer:
                break
            flight.wait()
        left = buffer - sum(flight.nbytes for flight in _others(self))
        chosen: dict[str, Tensor] = {}
        for name, x in reversed(list(tensors.items())):
            left -= x.nbytes
            if left < 0:
                break
            chosen[name] = x
        copies = _copied(chosen)
        for device in {x.device for x in tensors.values() if x.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self.nbytes = sum(x.nbytes for x in copies.values())
        self._callers = tensors.keys() - copies.keys()
        self.tensors.update({name: copies.get(name, x) for name, x in tensors.items()})

    def start(self, submit: Callable[[], Handle[None]]) -> Handle[None]:
        """Submit the save, and return once the caller's tensors may be changed."""
        with _lock:
            _flights.append(self)
        try:
            self._handle = submit()
        except BaseException:
            self.end()
            raise
        if self._callers:
            self._wait(self._released)
        return self._handle

    def written(self, name: str) -> None:
        """Let go a tensor that is in the file."""
        del self.tensors[name]
        self._callers.discard(name)
        if not self._callers:
            self._released.set()

    def end(self) -> None:
        """The save is complete, or has failed."""
        self.tensors.clear()
        with _lock:
            if self in _flights:
                _flights.remove(self)
        self._released.set()
        self._ended.set()

    def wait(self) -> None:
        """Wait for its end; the error, if it fails, is for those who wait for its handle."""
        self._wait(self._ended)
        self.end()

    def _wait(self, event: threading.Event) -> None:
        # No deadline: the save has one of its own.
        with activity.InCall("staging.save", self.team, activity.NOBODY):
            while not event.wait(_POLL):
                if self._handle is not None and self._handle.done():
                    return


class Upload:
    """A save by ``dcp.async_save``, which begins on the caller's thread and runs in one of torch's.

    Args:
        path: of the file.

    Attributes:
        thread: that saves, once it has begun; None before.
    """

    def __init__(self, path: str) -> None:
        self.thread: threading.Thread | None = None
        self._place = _place(path)
        _uploads.add(self)

    @staticmethod
    def is_here() -> bool:
        """Whether this thread is torch's for an async_save."""
        return threading.current_thread().name.startswith(_UPLOAD_THREAD)

    def begin(self, path: str) -> None:
        """Note what this thread saves."""
        self.thread, self._place = threading.current_thread(), _place(path)

    def concerns(self, place: str | None) -> bool:
        """Whether it may still write a file. Before it has begun, it may be given another name than the writer's."""
        return self.is_running() and (self.thread is None or self._place == place)

    def is_running(self) -> bool:
        """Whether it has not ended: its thread lives, or one does that may be its."""
        if self.thread is not None:
            return self.thread.is_alive()
        known = {upload.thread for upload in list(_uploads)}
        return any(one.name.startswith(_UPLOAD_THREAD) and one not in known for one in threading.enumerate())


def _wait_for_uploads(concerns: Callable[[Upload], bool]) -> None:
    """Wait for what torch saves in the background, unless this is such a thread itself: torch's own rule is that one of
    them begins when the one before has ended."""
    while not Upload.is_here() and any(concerns(upload) for upload in list(_uploads)):
        time.sleep(_NAP)


background.before_leaving.append(partial(_wait_for_uploads, Upload.is_running))  # its process group ends then


def wait_for(path: Any, mpio: bool = False, after: Team | None = None) -> None:
    """Wait for the saves in flight to the same name, so that what is older does not come after what is newer.

    Also to the file of which `path` is the index, and to files in it, if it is a folder.

    Args:
        mpio: whether HDF5 will open the file on all ranks together: while it opens one, it holds a lock, for which the
            ranks would wait crosswise if they opened another one meanwhile.
        after: team in whose background the caller's own save will run, after these.
    """
    place = _place(path)
    _wait_for_uploads(lambda upload: upload.concerns(place))
    for flight in list(_flights):
        if flight.team is not after and (_is_at(flight.place, place) or (mpio and flight.mpio)):
            flight.wait()


def buffer_of(team: Team, given: Any) -> int:
    """Return the bytes that copies may have; by default half of what is free, divided among the ranks of this node."""
    if given is not None:
        if index(given) < 0:
            raise WrongError("HD419", f"buffer is {given}, expected a number of bytes >= 0")
        return index(given)
    node_of = team.settings.node_of
    ranks = node_of.count(node_of[team.peers[team.rank]])
    return memory.available() // 2 // ranks


def _others(mine: Flight) -> list[Flight]:
    with _lock:
        return [flight for flight in _flights if flight is not mine]


def _is_at(saved: str | None, place: str | None) -> bool:
    if saved is None or place is None:
        return False
    return place in (saved, os.path.dirname(saved)) or (place.endswith(INDEX) and place == index_of(saved))


def _place(path: Any) -> str | None:
    try:
        return os.path.realpath(os.fsdecode(path))
    except (TypeError, ValueError):  # reported when the call is checked
        return None


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to contiguous host memory, pinned for those on a GPU; none if there is no memory for them.

    All lie in one block, which the next save uses again, and for which the pool searches once.
    """
    copies = {}
    try:
        for pinned in (False, True):
            mine = {name: x for name, x in tensors.items() if x.is_cuda == pinned}
            sizes = [-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in mine.values()]
            if not mine:
                continue
            if pinned:
                block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True, device="cpu")
            else:
                block = pool.empty([sum(sizes)], torch.uint8, "cpu", fixed=True)
            for (name, x), part in zip(mine.items(), torch.split(block, sizes), strict=True):
                copies[name] = part[: x.nbytes].view(x.dtype).view(x.shape)
                copyable(copies[name]).copy_(copyable(x), non_blocking=pinned)
    except (MemoryError, RuntimeError):
        return {}
    return copies


def _forget() -> None:
    """In a child process: the saves are its parent's, and another thread may hold the lock."""
    global _lock
    _lock = threading.Lock()
    _flights.clear()
    _uploads.clear()


os.register_at_fork(after_in_child=_forget)
