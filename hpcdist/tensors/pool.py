"""The memory of large results in host memory: kept when they die, and used again for later ones.

The kernel clears and maps new memory page by page, which takes several times as long as to copy data into it. A block
of the pool is an ordinary storage of torch, and a result is a tensor on it. There is no callback when the last tensor,
storage or array on a block is freed. When the pool needs a block, it checks whether only the pool refers to it.

All blocks together are bounded, those in use and those that lie idle: the pool never keeps more memory than its bound
from the rest of the program. A block in use that it drops is freed with its last tensor, like any other. The kernel may
take blocks that have been idle for some seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from hpcdist import torch_names
from hpcdist.errors import refusal
from hpcdist.process import machine

LEAST = 2**20  # bytes; for less, new memory is as fast
IDLE = 1.0  # seconds after which an idle block is given to the kernel lazily
_SHARE = 8  # the pool has this fraction of the memory that a rank can have
_SLACK = 4  # a block may be larger than a result, by less than 1 part in 2**_SLACK
_SWEPT = 2**26  # bytes of new blocks after which idle ones are given to the kernel lazily at once
_ASKED = 2**13  # bytes of a result for each block that is asked before a new one is made: less time than its pages take
_HUGE = 2**22  # bytes from which huge pages are asked for, as numpy does: these are cleared in a sixth of the time

_libc = ctypes.CDLL(None)


def advise(address: int, nbytes: int, advice: int) -> None:
    """Advise the kernel on the whole pages of a range of memory. Other threads run meanwhile."""
    begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


class PoolBlock:
    """Memory of the pool.

    Attributes:
        storage: the memory; the pool holds no other reference to it.
        address, nbytes: where it was, and its size, when it was made.
        size: largest size of its class; see class_of().
        idle: time at which it was first seen idle since it last served.
        lazy: whether the kernel may have taken its pages since then.
    """

    __slots__ = ("_alone", "_handle", "address", "idle", "lazy", "nbytes", "size", "storage")

    def __init__(self, nbytes: int, size: int) -> None:
        self.storage = torch.UntypedStorage(nbytes, device="cpu")  # type: ignore[no-untyped-call]
        self._handle = torch_names.handle_of_storage(self.storage)
        self.address, self.nbytes, self.size = self.storage.data_ptr(), nbytes, size
        self.idle: float | None = None
        self.lazy = False
        self._alone = self._references()
        if nbytes >= _HUGE:
            advise(self.address, nbytes, mmap.MADV_HUGEPAGE)

    def _references(self) -> tuple[int, int]:
        """Return the numbers of C++ and of Python references to the storage.

        Tensors count among the former, and storages that the program has asked tensors for among the latter.
        """
        return torch_names.references_of_storage(self._handle), sys.getrefcount(self.storage)

    def is_idle(self) -> bool:
        """Return whether only the pool refers to it; it stays so until the pool itself makes a tensor on it."""
        return self._references() == self._alone

    def is_intact(self) -> bool:
        """Return whether it is still the memory that was allocated: not resized, nor shared, nor copied on write."""
        storage = self.storage
        same: bool = storage.nbytes() == self.nbytes and storage.data_ptr() == self.address
        return same and not storage.is_shared()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor on it that is a view of no other, with a version of its own."""
        x = torch.empty(0, dtype=dtype, device="cpu")
        x.set_(self.storage, 0, shape)  # type: ignore[call-overload]  # the strides of row-major memory by default
        return x


@cache
def problem() -> str:
    """Return why this version of torch does not show whether a block is idle; "" if it does, tried on one block."""
    name = f"torch {torch.__version__}"
    try:
        block = PoolBlock(64, 64)
        x = block.tensor((64,), torch.uint8)
        seen = [not block.is_idle(), torch_names.base_of(x) is None]
        storage, array = x.untyped_storage(), x.numpy()
        del x
        seen += [storage is block.storage, not block.is_idle()]
        del storage
        seen.append(not block.is_idle())
        del array
        seen += [block.is_idle(), block.is_intact()]
    except (AttributeError, TypeError, RuntimeError) as error:
        return f"{name} does not count references: {error}"
    return "" if all(seen) else f"{name} counts references in another way"


class Pool:
    """Blocks of memory, in use and idle. Any thread may use it.

    Args:
        limit: bytes of all blocks at most; 0 for no pool.

    Attributes:
        total: bytes of all blocks.
        made, reused, evicted, retried: see memory_stats().
        problem: why there is no pool, if so.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = self.made = self.reused = self.evicted = self.retried = 0
        self._blocks: list[PoolBlock] = []  # the latest used last
        self._sizes: dict[int, int] = {}  # the size of each class that was needed first
        self._new = 0  # bytes of new blocks since idle ones were last swept for them
        self._lock = threading.RLock()
        self._working = False
        self.problem = problem() if limit else "switched off"

    @contextmanager
    def _exclusive(self) -> Iterator[bool]:
        """Hold the lock; False if this thread has it already: a signal handler or finalizer has interrupted it."""
        with self._lock:
            allowed, self._working = not self._working, True
            try:
                yield allowed
            finally:
                self._working = not allowed

    def take(self, nbytes: int, shape: Sequence[int], dtype: torch.dtype, fixed: bool = False) -> Tensor | None:
        """Return a tensor on a block of its size or slightly more; None if the pool cannot have one. See empty()."""
        if self.problem or nbytes > self.limit:
            return None
        size = class_of(nbytes)
        with self._exclusive() as allowed:
            if not allowed:
                return None
            x = self._reuse(size, nbytes, shape, dtype, fixed)
            if x is not None:
                return x
            # Results of one size have no slack, which torch.save would write, too.
            exact = self._sizes.setdefault(size, nbytes) == nbytes
            self._new += nbytes
            due = self._new >= _SWEPT
        if due:
            self._new = 0
            self.sweep(0.0)
        return self._make(size, nbytes if exact else size, shape, dtype)

    def _reuse(self, size: int, nbytes: int, shape: Sequence[int], dtype: torch.dtype, fixed: bool) -> Tensor | None:
        """Return a tensor on an idle block, if there is one; asks those first that were used last."""
        blocks = self._blocks
        fitting = (i for i in reversed(range(len(blocks))) if blocks[i].size == size and blocks[i].nbytes >= nbytes)
        for i in islice(fitting, nbytes // _ASKED):
            if blocks[i].is_idle():
                block = blocks.pop(i)
                if not block.is_intact() or not (fixed or block.storage.resizable()):
                    self.total -= block.nbytes
                    continue
                blocks.append(block)
                block.idle, block.lazy = None, False
                self.reused += 1
                return block.tensor(shape, dtype)
        return None

    def _make(self, size: int, nbytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor on a new block; drop others beyond the limit, those first that were used longest ago."""
        try:
            block = PoolBlock(nbytes, size)
        except RuntimeError:  # beyond a limit of the process, or what the kernel commits
            self.clear()
            block = PoolBlock(nbytes, size)
            self.retried += 1
        x = block.tensor(shape, dtype)
        dropped = []
        with self._exclusive() as allowed:
            if allowed:
                self.made += 1
                self.total += nbytes
                self._blocks.append(block)
                while self.total > self.limit:
                    dropped.append(self._blocks.pop(0))
                    self.total -= dropped[-1].nbytes
                self.evicted += len(dropped)
        return x  # blocks that were dropped are unmapped here, without the lock

    def clear(self) -> None:
        """Free all idle blocks."""
        with self._exclusive() as allowed:
            if allowed:
                self._blocks = [block for block in self._blocks if not block.is_idle()]
                self.total = sum(block.nbytes for block in self._blocks)

    def sweep(self, idle: float) -> bool:
        """Let the kernel take the pages of the blocks that have been idle for some seconds; return whether there are
        others, in use or idle."""
        due, now = [], time.monotonic()
        with self._exclusive() as allowed:
            for block in [block for block in self._blocks if allowed and not block.lazy and block.is_idle()]:
                if not block.is_intact():
                    self._blocks.remove(block)
                    self.total -= block.nbytes
                    continue
                block.idle = now if block.idle is None else block.idle
                if now - block.idle >= idle:
                    block.lazy = True
                    due.append((block.address, block.nbytes, block.storage))  # is not idle to others until then
            left = not all(block.lazy for block in self._blocks)
        while due:
            address, nbytes, storage = due.pop()
            # The kernel takes them when memory is short, also that of a control group; until then they are written
            # again without page faults.
            advise(address, nbytes, mmap.MADV_FREE)
            del storage  # only now may the block be used again
        return left

    def stats(self) -> dict[str, int | str]:
        with self._lock:
            idle = [block for block in self._blocks if block.is_idle()]
            idle_bytes = sum(block.nbytes for block in idle)
            return {
                "limit_bytes": self.limit,
                "in_use_bytes": self.total - idle_bytes,
                "idle_bytes": idle_bytes,
                "in_use_blocks": len(self._blocks) - len(idle),
                "idle_blocks": len(idle),
                "num_allocations": self.made,
                "num_reuses": self.reused,
                "num_evictions": self.evicted,
                "num_alloc_retries": self.retried,
                "problem": self.problem,
            }


def class_of(nbytes: int, least: int = 1) -> int:
    """Return the largest size of the class of a size: 2**_SLACK classes between two powers of two; multiples of
    `least`, a power of two."""
    step = max(least, 1 << max(0, nbytes.bit_length() - 1 - _SLACK))
    return -(-nbytes // step) * step


class Cache(Protocol):
    """Other memory that is kept for later results; see :class:`hpcdist.comm.node_memory.Windows`."""

    def nbytes(self) -> int: ...
    def clear(self) -> None: ...
    def sweep(self, idle: float) -> bool: ...


current = Pool(0)
others: set[Cache] = set()
"""Other memory, which empty_cache(), memory_stats() and sweep() regard, too. Any thread may add and remove some: list()
of it is one step."""


def limit_of(text: str | None, share: int) -> int:
    """Return the bytes of the pool of this rank.

    Args:
        text: value of HPCDIST_CACHE, if it is set: bytes, such as 2G; 0 for no pool.
        share: bytes of memory that this rank can have.

    Raises:
        ValueError: if `text` is not a number of bytes.
    """
    if not text:
        return share // _SHARE
    nbytes = machine.parse(text)
    if nbytes is None:
        raise refusal(ValueError, "HD114", f"HPCDIST_CACHE is {text!r}, expected bytes such as 512M or 2G, or 0")
    return nbytes


def start(limit: int) -> None:
    """Begin with an empty pool of at most `limit` bytes; 0 for none."""
    global current
    current = Pool(limit)


def stop() -> None:
    """Free idle memory, and pool no more. Tensors keep their memory as long as they live."""
    start(0)


def _forget() -> None:
    """In a child process: a thread that is not there may hold the lock, and windows are its parent's."""
    stop()
    others.clear()


os.register_at_fork(after_in_child=_forget)


def sweep() -> bool:
    """Let the kernel take blocks idle for some seconds; return whether to call this again in about a second."""
    return any([current.sweep(IDLE), *(other.sweep(IDLE) for other in list(others))])


def empty_cache() -> None:
    """Free the memory of earlier results that lies idle in the pool of this rank, and in windows of its node.

    Not collective; but only its first rank frees the windows of a node, in which shared results are: call it on every
    rank. As ``torch.accelerator.empty_cache`` on a GPU: results in use keep their memory, and idle memory is free for
    the rest of the program at once. You rarely need this. The pool bounds its idle memory, and after some seconds the
    kernel takes that memory if it is short.

    Example::

        >>> hd.memory.empty_cache()
        >>> hd.memory.memory_stats()["idle_bytes"]
        0
    """
    current.clear()
    for other in list(others):
        other.clear()


def memory_stats() -> dict[str, int | str]:
    """Return the contents and counters of this rank's pool of result memory.

    Not collective. Large results in host memory come from blocks that are used again when the last tensor, view or
    array on them has died.

    Returns:
        A dict of:

        - "limit_bytes": most bytes of all blocks, those in use included.
        - "in_use_bytes", "idle_bytes": bytes of blocks on which there are tensors, and of the others.
        - "in_use_blocks", "idle_blocks": numbers of these blocks.
        - "num_allocations", "num_reuses": numbers of results for which a block was made, and used again.
        - "num_evictions": number of blocks that were dropped to stay within the limit, in use or idle.
        - "num_alloc_retries": number of blocks for which there was memory only after idle ones were freed.
        - "window_bytes": bytes of the windows that the ranks of this node share, held and idle, of all groups of this
          rank: memory of the node, not of each rank.
        - "problem": why there is no pool: "switched off" by HPCDIST_CACHE=0 or without a world; else "".

    Example::

        >>> whole = hd.concat(x)                   # 64 MiB
        >>> hd.memory.memory_stats()["in_use_bytes"]
        67108864
    """
    return current.stats() | {"window_bytes": sum(other.nbytes() for other in list(others))}


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, fixed: bool = False) -> Tensor:
    """Allocate a tensor as ``torch.empty`` does; if it is large and in host memory, from the pool.

    Its storage may be larger than the tensor, by less than 1/16.

    Args:
        fixed: whether its storage need not be resizable: it never is after ``Tensor.numpy()``.
    """
    nbytes = prod(shape) * dtype.itemsize
    pooled = nbytes >= LEAST and current.limit and torch.device(device).type == "cpu" and not _observed()
    x = current.take(nbytes, shape, dtype, fixed) if pooled else None
    if x is None:
        x = torch.empty(shape, dtype=dtype, device=device)
        if pooled and nbytes >= _HUGE:
            advise(x.data_ptr(), nbytes, mmap.MADV_HUGEPAGE)
    return x


def holds(nbytes: int, device: torch.device) -> bool:
    """Return whether the pool has blocks for results of `nbytes` on a device; see empty()."""
    return LEAST <= nbytes <= current.limit and not current.problem and device.type == "cpu"


def _observed() -> bool:
    """Return whether torch passes its operations on to something that may not know storages."""
    return bool(torch_names.mode_count()) or torch_names.transform() is not None
