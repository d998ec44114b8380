"""Arrays that are plain bytes at an offset of a file: read boxes of them, write bytes, compute checksums.

Every system call is positioned, so any number of processes can work on one file at once; buffers stay within the
caller's window. A checksum is computed block by block, while the block is in the cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.errors import refusal
from hpcdist.layout import Box
from hpcdist.tensors.storage import as_bytes, bits

# Bytes that are written at once: half of a second-level cache, so that a block is still there to be hashed. Nor does
# the page cache take memory in larger pieces then, for which a virtual machine may wait: see benchmarks/README.md.
BLOCK = 2**19
NEAR = 2**14  # bytes: runs that begin at this distance at most are read together, with what lies between them
_TOGETHER = 2**22  # bytes that are read so at once: more leave the caches, and each time takes some 50 us

_sync_file_range = ctypes.CDLL(None).sync_file_range
_sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_LARGEST = 2**16  # bytes: a preferred block may be a stripe of many MiB, which no client caches as one page


def digest(data: bytes | memoryview = b"") -> Any:
    """Begin a checksum, with these bytes: XXH3, 64 bits."""
    import xxhash

    return xxhash.xxh3_64(data)


def page_size(folder: Path) -> int:
    """The size of what two ranks must not both write: a page of memory, or the file system's block."""
    return max(mmap.PAGESIZE, min(os.stat(folder).st_blksize, _LARGEST))


def memory(x: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    return memoryview(as_bytes(x).numpy())  # type: ignore[arg-type]


def read_at(fd: int, offset: int, into: memoryview, digest: Any = None) -> None:
    """Fill `into` from the file.

    Raises:
        OSError: the file cannot be read; EOFError: it ends before.
    """
    done, step = 0, len(into) if digest is None else BLOCK
    while done < len(into):
        block = into[done : done + step]
        got = os.preadv(fd, [block], offset + done)
        if got == 0:
            raise refusal(EOFError, "HD404", f"the file ends at byte {offset + done}, in the middle of the data")
        if digest is not None:
            digest.update(block[:got])
        done += got


def write_at(fd: int, offset: int, data: memoryview, digest: Any = None) -> None:
    """Write all of `data` at `offset`.

    Raises:
        OSError: it cannot be written; how much of it was is unknown.
    """
    done = 0
    while done < len(data):
        block = data[done : done + BLOCK]
        put = os.pwrite(fd, block, offset + done)
        if digest is not None:
            digest.update(block[:put])
        done += put


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Start the transfer of newly written pages to the disk, so that the sync at the end has less to do.

    Nothing waits for it, and the pages stay in the cache. Errors show at the sync. posix_fadvise(POSIX_FADV_DONTNEED)
    starts the disk, too. But it also drops pages that are on the disk from the cache, and waits until every core of the
    node has emptied its list of pages (mm/fadvise.c).
    """
    _sync_file_range(fd, offset, nbytes, _WRITE)


def forget(fd: int) -> None:
    """Drop a file from the system's cache, so that it is read from the disk or the server."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class Raw:
    """An array in a file: plain bytes in C order, in this machine's byte order.

    Attributes:
        path, offset: the file, and the first byte of the array in it.
        shape, dtype: of the array.
    """

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self, fd: int, box: Box, out: Tensor, window: int) -> None:
        """Read a box into `out`, a CPU tensor of its shape and of this dtype, with any strides.

        Straight into place if `out` is contiguous and no runs are read together; else by way of a buffer of at most
        `window` bytes.
        """
        if box.size() == 0:
            return
        cover = self.cover(box)
        if cover == box and out.is_contiguous():
            self.read_runs(fd, box, out)
            return
        limit = max(1, min(window, _TOGETHER) // self.dtype.itemsize)
        buffer = torch.empty(min(limit, cover.size()), dtype=self.dtype, device="cpu")
        for part in layout.boxes(cover, limit):
            held = part.intersect(box)
            if held.size():
                found = buffer[: part.size()].view(part.shape)
                self.read_runs(fd, part, found)
                bits(out)[held.slices(box.offset)] = bits(found)[held.slices(part.offset)]

    def cover(self, box: Box) -> Box:
        """Return what is read for a box: runs that are near each other extended by all that lies between them."""
        for dim, count in enumerate(box.shape):
            if count > 1 and prod(self.shape[dim + 1 :]) * self.dtype.itemsize <= NEAR:
                rest = self.shape[dim + 1 :]
                return Box((*box.offset[: dim + 1], *(0,) * len(rest)), (*box.shape[: dim + 1], *rest))
        return box

    def read_runs(self, fd: int, box: Box, out: Tensor, digest: Any = None) -> None:
        """Read a box run by run into contiguous memory."""
        target = memory(out)
        size = layout.runs(box, self.shape)[0] * self.dtype.itemsize
        for i, start in enumerate(layout.run_starts(box, self.shape).tolist()):
            read_at(fd, self.offset + start * self.dtype.itemsize, target[i * size : (i + 1) * size], digest)
