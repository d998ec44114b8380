"""The ranks of a team by node, and windows: memory that those of one node share, kept and used again when no rank holds
it any more.

It has no name, and is written through one mapping and read through another. The caller's tensors use private mappings
(MAP_PRIVATE). All processes read the same pages. A process that writes in place gets its own copy of these pages, which
no other process sees. With a read-only mapping, such a write would end the process with SIGSEGV. With a shared mapping,
it would change the tensors of the other processes.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpcdist.activity.procstat import NOT_OPENED, address, opened
from hpcdist.control import objects
from hpcdist.process import machine
from hpcdist.tensors import pool

if TYPE_CHECKING:
    from mpi4py import MPI

SLOTS = 64  # windows of a team and node that can exist at once: each takes three descriptors of every process
KEPT = 2**30  # bytes of the windows that nobody holds, at most, beside the one in use
SPARE = 8  # such windows, at most: programs may open 1,024 descriptors
_FREE, _HELD, _FORKED, _LEFT = range(4)  # a rank's use of a window; the last two if a child process may hold it, too
PAGEMAP = "/proc/self/pagemap"
_CHUNK = 2**20  # bytes of it that are read at once
PIECE = 2**24  # bytes of memory that are taken at once: some milliseconds
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14
_PRESENT, _SWAPPED, _SHARED = 0x80, 0x40, 0x20  # bits of the last byte of an entry of 8
_ALL_HELD = f"{SLOTS} windows are held already"


class Topology:
    """Which ranks of a communicator share a node. Collective over `comm`.

    Args:
        comm: the ranks.
        node_of: for each rank, the number of its node.

    Attributes:
        nodes: ranks of `comm` on each node, in the order of their lowest rank.
        node: index of this rank's node in `nodes`.
        local_rank: position of this rank in ``nodes[node]``.
        comm: communicator of the ranks of this node, in that order; that of all ranks if there is one node alone.
    """

    def __init__(self, comm: MPI.Intracomm, node_of: Sequence[int]) -> None:
        nodes: dict[int, list[int]] = {}
        for rank, node in enumerate(node_of):
            nodes.setdefault(node, []).append(rank)
        self.nodes = list(nodes.values())
        self.node = list(nodes).index(node_of[comm.rank])
        self.local_rank = self.local_ranks.index(comm.rank)
        self.comm = comm if len(self.nodes) == 1 else comm.Split(self.node, comm.rank)

    @property
    def local_ranks(self) -> list[int]:
        """The ranks of this node."""
        return self.nodes[self.node]

    def free(self) -> None:
        if len(self.nodes) > 1:
            self.comm.Free()


class SharedBlock:
    """A block of anonymous memory (memfd), which ends with the last process that maps it or has its `fd` open.

    Args:
        nbytes: size, of which nothing is allocated yet.
        fd: descriptor of the block, if another process has made it; owned by this object.

    Attributes:
        bytes: its memory. All processes see writes to it.

    Raises:
        OSError: if the system does not give it.
    """

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("hpcdist-window", os.MFD_CLOEXEC) if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(self.fd, nbytes)
            self.bytes = memoryview(mmap.mmap(self.fd, nbytes))
            self._private = mmap.mmap(self.fd, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
            self._address = self.private().ctypes.data
        except BaseException:
            os.close(self.fd)
            raise

    def allocate(self, start: int, length: int) -> None:
        """Take memory for these bytes now: where it is short, that is an OSError here, and not a SIGBUS later."""
        # In pieces: until it is done, an older kernel begins anew after each signal, such as those of a profiler.
        for at in range(start, start + length, PIECE):
            os.posix_fallocate(self.fd, at, min(PIECE, start + length - at))

    def shared(self) -> Tensor:
        """Return `bytes` as a tensor."""
        return torch.from_numpy(np.frombuffer(self.bytes, np.uint8))

    def private(self) -> np.ndarray:
        """Return its bytes as a new array. Only this process sees writes to it."""
        return np.frombuffer(self._private, np.uint8)

    def map_pages(self) -> None:
        """Map the pages that :meth:`private` reads now, all at once, and not one by one when each is first read."""
        with suppress(OSError, ValueError):
            self._private.madvise(_POPULATE_READ)

    def drop_private_pages(self) -> None:
        """Let :meth:`private` have the contents of :meth:`shared` again, also where this process has written."""
        if _has_private_pages(self._address, self.nbytes):
            self._private.madvise(mmap.MADV_DONTNEED)

    def release_memory(self) -> None:
        """Give its memory back to the system, though other processes may still map it. No process may use it after
        that."""
        os.ftruncate(self.fd, 0)

    def close(self) -> None:
        """Close it here; the memory is unmapped with the last array and tensor on it."""
        os.close(self.fd)
        del self._private, self.bytes


def _has_private_pages(start: int, nbytes: int) -> bool:
    """Whether a private mapping of a shared file has pages of this process's own; True where that is not known."""
    with suppress(OSError), open(PAGEMAP, "rb", buffering=0) as pagemap:
        at, end = (start // mmap.PAGESIZE * 8, -(-(start + nbytes) // mmap.PAGESIZE) * 8)
        while at < end:
            entries = np.frombuffer(os.pread(pagemap.fileno(), min(_CHUNK, end - at), at), np.uint8)[7::8]
            if not len(entries):
                return True
            kinds = entries & (_PRESENT | _SWAPPED | _SHARED)
            if bool(((kinds == _PRESENT) | (kinds == _SWAPPED)).any()):
                return True
            at += 8 * len(entries)
        return False
    return True


class Window:
    """A block of a node's shared memory, while this rank holds it.

    Attributes:
        bytes: memory to write into during the call that took it; all ranks of the node see it.
        block: the block itself, for processes that this rank starts.
    """

    def __init__(self, block: SharedBlock, in_use: memoryview, at: int) -> None:
        self.block, self.bytes = block, block.shared()
        # torch keeps this array alive as long as any tensor on it.
        self._array = block.private()
        weakref.finalize(self._array, _leave, in_use, at, os.getpid()).atexit = False

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Return the bytes from `offset` on as a tensor; while it lives, this rank holds the window."""
        # Of this part alone: torch.save and copy.deepcopy take the whole storage of a tensor.
        mine = self._array[offset : offset + prod(shape) * dtype.itemsize]
        return torch.from_numpy(mine).view(dtype).view(shape)

    def target(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Return the bytes from `offset` on as a tensor to write into."""
        return self.bytes[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _leave(in_use: memoryview, at: int, pid: int) -> None:
    """Called when a rank's last tensor on a window has gone."""
    if os.getpid() == pid:  # a child has its parent's tensors
        in_use[at] = _FREE if in_use[at] == _HELD else _LEFT


class _Slot:
    """A window as this rank has mapped it: its number, its block, and how much of it has memory.

    Attributes:
        idle: of the first rank: time at which it was first seen that nobody holds it.
    """

    def __init__(self, serial: int, block: SharedBlock) -> None:
        self.serial, self.block, self.allocated = serial, block, 0
        self.idle: float | None = None


class Windows:
    """The windows of one node of a team. The first rank of the node chooses one for each call, or makes it.

    Each rank records in shared memory which windows it holds, a byte for each. A window that no rank holds is reused.

    Args:
        comm: all ranks of the team.
        topology: which of them are on this node.

    Attributes:
        problem: why there can be no windows in this job; None if there can.
        reason: why the latest call got no window; None if it got one.
    """

    def __init__(self, comm: MPI.Intracomm, topology: Topology) -> None:
        self._comm, self._topology = comm, topology
        self._ranks, self._me = len(topology.local_ranks), topology.local_rank
        self.slots: dict[int, _Slot] = {}
        self._order: list[int] = []  # of the first rank: the windows, the one used last at the end
        self._control: SharedBlock | None = None
        self._serials = self._in_use = memoryview(b"")
        self._made = 0
        self._lock = threading.Lock()  # the thread that sweeps drops windows, too
        self.problem: str | None = None
        self.reason: str | None = None
        self._open_control()
        _existing.add(self)
        pool.others.add(self)

    def take(self, nbytes: int) -> Window | None:
        """Take a window of this node. Collective over the team.

        All ranks that get one may write into it at once: nobody holds it. Each rank holds it until its tensors on it
        have gone.

        Args:
            nbytes: bytes that this node needs: the same on all its ranks, not on all nodes.

        Returns:
            The window; None on all ranks of the team if any of them cannot have one: see `reason`.
        """
        if self.problem is not None:
            return None
        number = -1
        try:
            number = self._agree_on_slot(nbytes)
            slot = self.slots[number]
            self._allocate(slot, nbytes)
            slot.block.drop_private_pages()
            reason = None
        except OSError as error:
            reason = error.strerror or str(error)
        if not objects.everywhere(self._comm, reason is None):
            reasons = objects.all_gather_object(self._comm, reason)
            self.reason = next(f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text is not None)
            if number >= 0 and self._me == 0:
                with self._lock:
                    self._drop(number)
            return None
        self.reason = None
        return Window(slot.block, self._in_use, number * self._ranks + self._me)

    def free(self) -> None:
        """Keep no windows any more. Windows with tensors on them stay until these are freed."""
        pool.others.discard(self)
        with self._lock:
            for slot in self.slots.values():
                slot.block.close()
            self.slots.clear()
        if self._control is not None:
            self._control.close()
            self._control = None
        self.problem = self.reason = "the team was freed"

    def nbytes(self) -> int:
        """Return the bytes of memory that the windows of this node have."""
        return sum(slot.allocated for n, slot in list(self.slots.items()) if self._serials[n] == slot.serial)

    def clear(self) -> None:
        """Free the windows that no rank holds. Only the first rank of the node can do so."""
        self._free_now(0, 0.0)

    def sweep(self, idle: float) -> bool:
        """Free windows beyond KEPT bytes that no rank has held for some seconds; return whether to call again.

        Of a window of many gigabytes, no other part of the program could have the memory otherwise.
        """
        self._free_now(KEPT, idle)
        return self._me == 0 and self.nbytes() > KEPT

    def _free_now(self, most: int, idle: float) -> None:
        # If the lock is taken, this thread may have it: empty_cache() in a signal handler.
        if self._me == 0 and self._lock.acquire(blocking=False):
            try:
                self._drop_unheld(most, idle)
            finally:
                self._lock.release()

    def _drop_unheld(self, most: int, idle: float = 0.0) -> None:
        """Drop windows that no rank has held for some seconds, the latest last, until they have `most` bytes, there are
        SPARE of them, and there is space for another one."""
        now, unheld = time.monotonic(), self._unheld()
        kept = sum(self.slots[number].block.nbytes for number in unheld)
        for left, number in zip(range(len(unheld), 0, -1), unheld, strict=True):
            slot = self.slots[number]
            slot.idle = now if slot.idle is None else slot.idle
            if (kept > most or left > SPARE or len(self.slots) >= SLOTS) and now - slot.idle >= idle:
                kept -= slot.block.nbytes
                self._drop(number)

    def _unheld(self) -> list[int]:
        """Return the windows that no rank holds, the latest last; forget those that only children read."""
        found = []
        for number in [number for number in self._order if number in self.slots]:
            users = bytes(self._in_use[number * self._ranks : (number + 1) * self._ranks])
            if not any(users):
                found.append(number)
            elif all(byte in (_FREE, _LEFT) for byte in users):
                self._drop(number, memory_too=False)
        return found

    def forked(self) -> None:
        """Never reuse the windows that this rank holds now, because a child process may read them."""
        for number in list(self.slots):  # another thread may make a window meanwhile
            at = number * self._ranks + self._me
            if self._in_use[at] == _HELD:
                self._in_use[at] = _FORKED

    def _open_control(self) -> None:
        """Open the memory in which the ranks of a node record the windows that they hold. Collective: the team."""
        nbytes, there = SLOTS * (8 + self._ranks), list[int]()
        with suppress(OSError):
            if self._me == 0:
                made = SharedBlock(nbytes)
                made.allocate(0, nbytes)
                self._control, there = made, address(made.fd)
        there = self._topology.comm.bcast(there)
        with suppress(OSError):
            if there and self._control is None:
                self._control = SharedBlock(nbytes, opened(there))
        if not objects.everywhere(self._comm, self._control is not None):
            self.problem = self.reason = NOT_OPENED
            return
        assert self._control is not None
        whole = self._control.bytes
        self._serials, self._in_use = whole[: 8 * SLOTS].cast("q"), whole[8 * SLOTS :]

    def _agree_on_slot(self, nbytes: int) -> int:
        """Let the first rank choose a window; return its number, after all ranks have mapped it. Collective: the node.

        Raises:
            OSError: on the ranks that cannot.
        """
        chosen: tuple[int, int, int, list[int]] | None = None
        failed = None
        if self._me == 0:
            try:
                with self._lock:
                    first = self._choose(nbytes)
                slot = self.slots[first]
                chosen = first, slot.serial, slot.block.nbytes, address(slot.block.fd)
            except OSError as error:
                failed = error
        chosen = self._topology.comm.bcast(chosen)
        if failed is not None:
            raise failed
        if chosen is None:
            raise OSError("the first rank of the node has no window")
        number, serial, capacity, there = chosen
        with self._lock:
            for old in [n for n, slot in self.slots.items() if self._serials[n] != slot.serial]:
                self.slots.pop(old).block.close()
        if number not in self.slots:
            self.slots[number] = _Slot(serial, SharedBlock(capacity, opened(there)))
        return number

    def _choose(self, nbytes: int) -> int:
        """Choose a window that no rank holds, or make one; return its number. All ranks of the node then hold it."""
        capacity = pool.class_of(max(1, nbytes), mmap.PAGESIZE)
        same = [number for number in self._unheld() if self.slots[number].block.nbytes == capacity]
        found = same[-1] if same else None
        if found is None:
            self._drop_unheld(0 if nbytes > machine.available() else KEPT)
            found = next((number for number in range(SLOTS) if number not in self.slots), None)
            if found is None:
                raise OSError(_ALL_HELD)
            self._made += 1
            self.slots[found] = _Slot(self._made, SharedBlock(capacity))
            self._serials[found] = self._made
        if self.slots[found].allocated < nbytes:  # all of it, before any rank takes its part
            try:
                _check_memory(nbytes - self.slots[found].allocated)
            except OSError:
                self._drop(found)
                raise
        self._in_use[found * self._ranks : (found + 1) * self._ranks] = bytes([_HELD]) * self._ranks
        self.slots[found].idle = None
        self._order = [number for number in self._order if number != found and number in self.slots] + [found]
        return found

    def _drop(self, number: int, memory_too: bool = True) -> None:
        """Forget a window that no rank holds; the other ranks do so at the next call."""
        slot = self.slots.pop(number)
        self._serials[number] = 0
        self._in_use[number * self._ranks : (number + 1) * self._ranks] = bytes(self._ranks)
        if memory_too:
            with suppress(OSError):
                slot.block.release_memory()
        slot.block.close()

    def _allocate(self, slot: _Slot, nbytes: int) -> None:
        """Allocate the missing memory; each rank of the node allocates a part of it."""
        missing = nbytes - slot.allocated
        if missing > 0:
            pages = -(-missing // mmap.PAGESIZE)
            first, last = (pages * i // self._ranks * mmap.PAGESIZE for i in (self._me, self._me + 1))
            _check_memory(last - first)  # in the control groups of this rank
            slot.block.allocate(slot.allocated + first, last - first)
            slot.allocated += pages * mmap.PAGESIZE


def _check_memory(nbytes: int) -> None:
    free = machine.available()
    if nbytes > free:
        raise OSError(f"{nbytes:,} bytes do not fit into the {free:,} bytes of free memory")


_existing: weakref.WeakSet[Windows] = weakref.WeakSet()


def _before_fork() -> None:
    for windows in list(_existing):
        windows.forked()


os.register_at_fork(before=_before_fork)
