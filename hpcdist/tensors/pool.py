"""The memory of large results in host memory: kept when they die, and used again for later ones.

The kernel clears and maps new memory page by page, which takes several times as long as to copy data into it. A block
of the pool is an ordinary storage of torch, and a result is a tensor of its own on it. Nothing tells when the last
tensor, storage or array on a block dies: a block is asked, when one is needed, whether the pool alone refers to it.

All blocks together are bounded, those in use and those that lie idle: the pool never keeps more memory than its bound
from the rest of the program. A block in use that it drops is freed with its last tensor, like any other. What has been
idle for some seconds is given to the kernel lazily.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from math import prod
from typing import Protocol

import torch
from torch import Tensor
from torch._C import _functorch

from hpcdist.errors import refusal
from hpcdist.process import host_memory
from hpcdist.tensors import host_pages
from hpcdist.tensors.reusable import Block, problem

__all__ = [
    *("LEAST", "Cache", "add", "empty", "empty_cache", "holds", "limit_of", "memory_stats", "remove"),
    *("start", "stop", "sweep"),
]

LEAST = 2**20  # bytes; for less, new memory is as fast
IDLE = 1.0  # seconds after which an idle block is given to the kernel lazily
_SHARE = 8  # the pool has this fraction of the memory that a rank can have
_SLACK = 4  # a block may be larger than a result, by less than 1 part in 2**_SLACK
_SWEPT = 2**26  # bytes of new blocks after which idle ones are given to the kernel lazily at once
_ASKED = 2**12  # bytes of a result for each block that is asked before a new one is made: less time than its pages take


class Pool:
    """Blocks of memory, in use and idle. Any thread may use it.

    Args:
        limit: bytes of all blocks at most; 0 for no pool.

    Attributes:
        total: bytes of all blocks.
        made, reused, evicted, retried: see memory_stats().
        problem: why there is no pool, if so.
        populated: what makes new memory.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = self.made = self.reused = self.evicted = self.retried = 0
        self.populated = host_pages.Populated()
        self._classes: dict[int, list[Block]] = {}  # by the largest size of each class, the latest used last
        self._sizes: dict[int, int] = {}  # the size of each class that was needed first
        self._numbers = count(1)
        self._new = 0  # bytes of new blocks since idle ones were last swept for them
        self._lock = threading.RLock()
        self._working = False
        self.problem = problem() if limit else "switched off"

    @contextmanager
    def _exclusive(self) -> Iterator[bool]:
        """Hold the lock; False if this thread has it already: a signal handler or finalizer has interrupted it."""
        with self._lock:
            if self._working:
                yield False
                return
            try:
                self._working = True
                yield True
            finally:
                self._working = False

    def take(self, nbytes: int, shape: Sequence[int], dtype: torch.dtype, fixed: bool = False) -> Tensor | None:
        """Return a tensor on a block of its size or slightly more; None if the pool cannot have one. See empty()."""
        if self.problem or nbytes > self.limit:
            return None
        size = _class_of(nbytes)
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
        blocks = self._classes.get(size, [])
        for i in range(len(blocks) - 1, max(-1, len(blocks) - 1 - nbytes // _ASKED), -1):
            block = blocks[i]
            if block.nbytes >= nbytes and block.is_idle():
                del blocks[i]
                if not block.is_intact() or not (fixed or block.storage.resizable()):
                    self.total -= block.nbytes
                    continue
                blocks.append(block)
                block.used, block.idle, block.lazy = next(self._numbers), None, False
                self.reused += 1
                return block.tensor(shape, dtype)
        return None

    def _make(self, size: int, nbytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor on a new block; drop others beyond the limit, those first that were used longest ago."""
        try:
            block = Block(nbytes)
        except RuntimeError:  # beyond a limit of the process, or what the kernel commits
            self.clear()
            block = Block(nbytes)
            self.retried += 1
        x = block.tensor(shape, dtype)
        self.populated.prepare(block.address, nbytes)
        dropped = []
        with self._exclusive() as allowed:
            if allowed:
                block.used = next(self._numbers)
                self.made += 1
                self.total += nbytes
                self._classes.setdefault(size, []).append(block)
            while allowed and self.total > self.limit:
                oldest = min((blocks for blocks in self._classes.values() if blocks), key=lambda of: of[0].used)
                dropped.append(oldest.pop(0))
                self.total -= dropped[-1].nbytes
            self.evicted += len(dropped)
        return x  # what was dropped is unmapped here, without the lock

    def _drop(self, wanted: Callable[[Block], bool]) -> None:
        """Drop the idle blocks that are `wanted`."""
        dropped = []
        with self._exclusive() as allowed:
            for blocks in self._classes.values() if allowed else ():
                for i in reversed(range(len(blocks))):
                    if blocks[i].is_idle() and wanted(blocks[i]):
                        dropped.append(blocks.pop(i))
                        self.total -= dropped[-1].nbytes

    def clear(self) -> None:
        """Free all idle blocks."""
        self._drop(lambda block: True)

    def sweep(self, idle: float) -> None:
        """Let the kernel take the pages of the blocks that have been idle for some seconds."""
        due, now = [], time.monotonic()

        def changed(block: Block) -> bool:
            if not block.lazy:
                if not block.is_intact():
                    return True
                block.idle = now if block.idle is None else block.idle
                if now - block.idle >= idle:
                    block.lazy = True
                    due.append((block.address, block.nbytes, block.storage))  # is not idle to others until then
            return False

        self._drop(changed)
        while due:
            address, nbytes, storage = due.pop()
            host_pages.free_lazily(address, nbytes)
            del storage  # only now may the block be used again

    def unswept(self) -> bool:
        """Return whether a sweep may have something to do, now or later."""
        with self._lock:
            return any(not block.lazy for blocks in self._classes.values() for block in blocks)

    def stats(self) -> dict[str, int | str]:
        with self._lock:
            blocks = [block for of_class in self._classes.values() for block in of_class]
            idle = [block for block in blocks if block.is_idle()]
        in_use = sum(block.nbytes for block in blocks) - sum(block.nbytes for block in idle)
        return {
            "limit_bytes": self.limit,
            "in_use_bytes": in_use,
            "idle_bytes": sum(block.nbytes for block in idle),
            "lazily_freed_bytes": sum(block.nbytes for block in idle if block.lazy),
            "in_use_blocks": len(blocks) - len(idle),
            "idle_blocks": len(idle),
            "num_allocations": self.made,
            "num_reuses": self.reused,
            "num_evictions": self.evicted,
            "num_alloc_retries": self.retried,
            "num_huge_page_blocks": self.populated.count,
            "problem": self.problem,
        }


def _class_of(nbytes: int) -> int:
    """Return the largest size of the class of a size: 2**_SLACK classes between two powers of two."""
    step = 1 << max(0, nbytes.bit_length() - 1 - _SLACK)
    return -(-nbytes // step) * step


class Cache(Protocol):
    """Other memory that is kept for later results; see :class:`hpcdist.comm.windows.Windows`."""

    def nbytes(self) -> int: ...
    def clear(self) -> None: ...
    def sweep(self, idle: float) -> bool: ...


_pool = Pool(0)
_others: dict[int, Cache] = {}  # of which list() is one step: any thread may add and remove


def add(cache: Cache) -> None:
    """Let empty_cache(), memory_stats() and sweep() regard other memory, too, until remove()."""
    _others[id(cache)] = cache


def remove(cache: Cache) -> None:
    _others.pop(id(cache), None)


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
    nbytes = host_memory.parse(text)
    if nbytes is None:
        raise refusal(ValueError, "HD114", f"HPCDIST_CACHE is {text!r}, expected bytes such as 512M or 2G, or 0")
    return nbytes


def start(limit: int) -> None:
    """Begin with an empty pool of at most `limit` bytes; 0 for none."""
    global _pool
    _pool = Pool(limit)


def stop() -> None:
    """Free what is idle, and pool no memory any more. Tensors keep theirs for as long as they live."""
    start(0)


def _forget() -> None:
    """In a child process: a thread that is not there may hold the lock, and windows are its parent's."""
    stop()
    _others.clear()


os.register_at_fork(after_in_child=_forget)


def sweep() -> bool:
    """Let the kernel take what has been idle for some seconds; return whether to come again in about a second."""
    _pool.sweep(IDLE)
    again = [cache.sweep(IDLE) for cache in list(_others.values())]
    return _pool.unswept() or any(again)


def empty_cache() -> None:
    """Free the memory of earlier results that lies idle in the pool of this rank, and in windows of its node.

    Not collective; but only its first rank frees the windows of a node, in which shared results are: call it on every
    rank. As ``torch.accelerator.empty_cache`` on a GPU: results that are alive keep their memory, and what the rest of
    the program cannot have otherwise is free at once. Rarely needed: what is idle is bounded, and after some seconds
    the kernel takes what is in the pool by itself if memory is short.

    Example::

        >>> hd.memory.empty_cache()
        >>> hd.memory.memory_stats()["idle_bytes"]
        0
    """
    _pool.clear()
    for cache in list(_others.values()):
        cache.clear()


def memory_stats() -> dict[str, int | str]:
    """Return what the pool of result memory of this rank holds, and what it has done.

    Not collective. Large results in host memory come from blocks that are used again when the last tensor, view or
    array on them has died.

    Returns:
        A dict of:

        - "limit_bytes": most bytes of all blocks, those in use included.
        - "in_use_bytes", "idle_bytes": bytes of blocks on which there are tensors, and of the others.
        - "lazily_freed_bytes": bytes of idle blocks that the kernel takes if memory is short.
        - "in_use_blocks", "idle_blocks": numbers of these blocks.
        - "num_allocations", "num_reuses": numbers of results for which a block was made, and used again.
        - "num_evictions": number of blocks that were dropped to stay within the limit, in use or idle.
        - "num_alloc_retries": number of blocks for which there was memory only after idle ones were freed.
        - "num_huge_page_blocks": number of results whose memory was made in huge pages.
        - "window_bytes": bytes of the windows that the ranks of this node share, held and idle, of all groups of this
          rank: memory of the node, not of each rank.
        - "problem": why there is no pool: "switched off" by HPCDIST_CACHE=0 or without a world; else "".

    Example::

        >>> whole = hd.concat(x)                   # 64 MiB
        >>> hd.memory.memory_stats()["in_use_bytes"]
        67108864
    """
    return _pool.stats() | {"window_bytes": sum(cache.nbytes() for cache in list(_others.values()))}


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, fixed: bool = False) -> Tensor:
    """Allocate a tensor as ``torch.empty`` does; if it is large and in host memory, from the pool.

    Its storage may be larger than the tensor, by less than 1/16.

    Args:
        fixed: whether its storage need not be resizable: it never is after ``Tensor.numpy()``.
    """
    nbytes = prod(shape) * dtype.itemsize
    pooled = nbytes >= LEAST and _pool.limit and torch.device(device).type == "cpu" and not _observed()
    if not pooled:
        return torch.empty(shape, dtype=dtype, device=device)
    x = _pool.take(nbytes, shape, dtype, fixed)
    if x is None:
        x = torch.empty(shape, dtype=dtype, device=device)
        _pool.populated.prepare(x.data_ptr(), nbytes)
    return x


def holds(nbytes: int, device: torch.device) -> bool:
    """Return whether the pool has blocks for results of `nbytes` on a device; see empty()."""
    return LEAST <= nbytes <= _pool.limit and not _pool.problem and device.type == "cpu"


def _observed() -> bool:
    """Return whether torch passes its operations on to something that may not know storages."""
    return bool(torch._C._len_torch_dispatch_stack()) or _functorch.peek_interpreter_stack() is not None
