"""Memory without a name that processes of a node share: written through one mapping, read through another.

The caller's tensors use private mappings (MAP_PRIVATE). All processes read the same pages. A process that writes in
place gets its own copy of these pages, which no other process sees. With a read-only mapping, such a write would end
the process with SIGSEGV. With a shared mapping, it would change the tensors of the other processes.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

_PAGEMAP = "/proc/self/pagemap"
_CHUNK = 2**20  # bytes of it that are read at once
_PIECE = 2**24  # bytes of memory that are taken at once: some milliseconds
_PRESENT, _SWAPPED, _SHARED = 0x80, 0x40, 0x20  # bits of the last byte of an entry of 8


class SharedBlock:
    """A block of anonymous memory (memfd), which ends with the last process that maps it or has its `fd` open.

    Args:
        nbytes: size, of which nothing is allocated yet.
        fd: descriptor of the block, if another process has made it; owned by this object.

    Raises:
        OSError: if the system does not give it.
    """

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("hpcdist-window", os.MFD_CLOEXEC) if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(self.fd, nbytes)
            self._shared = memoryview(mmap.mmap(self.fd, nbytes))
            readable = mmap.mmap(self.fd, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
            self._private: mmap.mmap | None = readable
            self._address = np.frombuffer(readable, np.uint8).ctypes.data
        except BaseException:
            os.close(self.fd)
            raise

    def allocate(self, start: int, length: int) -> None:
        """Take memory for these bytes now: where it is short, that is an OSError here, and not a SIGBUS later."""
        # In pieces: until it is done, an older kernel begins anew after each signal, such as those of a profiler.
        for at in range(start, start + length, _PIECE):
            os.posix_fallocate(self.fd, at, min(_PIECE, start + length - at))

    def memory(self) -> memoryview:
        """Return its bytes. All processes see writes to them."""
        return self._shared

    def shared(self) -> Tensor:
        """Return the same as a tensor."""
        return torch.from_numpy(np.frombuffer(self._shared, np.uint8))

    def private(self) -> np.ndarray:
        """Return its bytes as a new array. Only this process sees writes to it."""
        assert self._private is not None
        return np.frombuffer(self._private, np.uint8)

    def drop_private_pages(self) -> None:
        """Let :meth:`private` have the contents of :meth:`shared` again, also where this process has written."""
        if self._private is not None and _has_private_pages(self._address, self.nbytes):
            self._private.madvise(mmap.MADV_DONTNEED)

    def release_memory(self) -> None:
        """Give its memory back to the system, though other processes may still map it. No process may use it after
        that."""
        os.ftruncate(self.fd, 0)

    def close(self) -> None:
        """Close it here; the memory is unmapped with the last array and tensor on it."""
        os.close(self.fd)
        self._private = None
        self._shared = memoryview(b"")


def _has_private_pages(start: int, nbytes: int) -> bool:
    """Whether a private mapping of a shared file has pages of this process's own; True where that is not known."""
    with suppress(OSError), open(_PAGEMAP, "rb", buffering=0) as pagemap:
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
