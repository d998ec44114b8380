"""Two drivers that write bytes to a file that is laid out already. The file is the same.

posix: every rank writes with system calls; of compressed datasets, rank 0 writes chunks that all ranks compress.
mpio: HDF5 writes through MPI-IO.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdist import layout
from hpcdist.formats import plain
from hpcdist.formats.contents import Dataset, FileMap
from hpcdist.formats.hdf5 import stored_dtype
from hpcdist.formats.plain import Digest
from hpcdist.layout import Box

if TYPE_CHECKING:
    from mpi4py import MPI

NAMES = ("auto", "mpio", "posix")
_AHEAD = 2**22  # bytes that are written before the disk starts: with more, the sync at the end has more to do
_LONGEST = 200  # bytes of a path that Open MPI's MPI-IO can use, with the suffix that it adds
_STEP = 2**22  # bytes that mpio writes at a time; a call costs more there than a system call


def missing(name: str) -> str | None:
    """Explain why a driver cannot be used here, and how to get it; None if it can."""
    import h5py

    if name != "mpio" or h5py.get_config().mpi:
        return None
    page = "docs/how-to/install-on-a-cluster.md describes the build with MPI"
    return f"h5py {h5py.__version__} was built without MPI ({page})"


def active(name: str = "auto") -> tuple[str, str]:
    """The writer that is used for ``writer=name`` here, and why. On this rank alone; no file is touched.

    Returns:
        ("mpio", why) or ("posix", why).

    Example::

        >>> hd.staging.writer()
        ('mpio', 'h5py 3.16.0 has parallel HDF5 1.10.8')
    """
    import h5py

    if name != "auto":
        return name, "asked for"
    reason = missing("mpio")
    if reason:
        return "posix", reason
    return "mpio", f"h5py {h5py.__version__} has parallel HDF5 {h5py.version.hdf5_version}"


def takes_path(path: str) -> bool:
    """Whether MPI-IO can open a path: Open MPI up to 5.0.9 writes it into 256 bytes, and aborts (its issue 13565)."""
    from mpi4py import MPI

    return MPI.get_vendor()[0] != "Open MPI" or len(os.fsencode(path)) <= _LONGEST


class Posix:
    """A file that this process writes with system calls, once open() was called."""

    def __init__(self, file_map: FileMap) -> None:
        self.path = file_map.path
        self.fd = -1

    def open(self) -> None:
        self.fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def write(self, place: int, data: memoryview, digest: Digest | None = None) -> None:
        """Write bytes at a position of the file, and let the disk start meanwhile."""
        for start in range(0, len(data), _AHEAD):
            plain.write_at(self.fd, place + start, data[start : start + _AHEAD], digest)
            plain.start_writeback(self.fd, place + start, _AHEAD)

    def close(self) -> None:
        """Close the file. Closing it again does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


# The offset of a chunk in the dataset, the mask of the filters that were skipped, and the filtered bytes.
Chunk = tuple[tuple[int, ...], int, bytes]


def write_chunks(path: str, name: str, chunks: Iterable[Chunk]) -> None:
    """Write filtered chunks into a compressed dataset."""
    import h5py

    with h5py.File(path, "r+", locking=False) as file:
        for offset, mask, content in chunks:
            file[name].id.write_direct_chunk(offset, content, mask)


def filtered(dataset: Dataset, box: Box, data: memoryview) -> Iterator[Chunk]:
    """Yield the chunks of a box as HDF5's own filters make them, by way of a file in memory."""
    import h5py

    dtype = stored_dtype(dataset.dtype)
    with h5py.File("chunks", "w", driver="core", backing_store=False) as file:
        free = (None,) * len(box.shape)
        held = file.create_dataset("x", box.shape, dtype, chunks=dataset.chunks, maxshape=free, **dict(dataset.filters))
        held[...] = np.frombuffer(data, dtype).reshape(box.shape)
        file.flush()
        for chunk in held.iter_chunks():
            at = tuple(part.start for part in chunk)
            mask, content = held.id.read_direct_chunk(at)
            yield tuple(map(sum, zip(at, box.offset, strict=True))), mask, content


class Mpio:
    """A file that HDF5 writes through MPI-IO. Opening and closing it are collective."""

    def __init__(self, comm: MPI.Intracomm, datasets: Sequence[Dataset], file_map: FileMap) -> None:
        self.path, self._comm = file_map.path, comm
        held = zip(datasets, file_map.data, strict=True)
        self._held = sorted((at, at + d.nbytes(), d.name) for d, at in held if at is not None and d.nbytes())
        self.fd = -1
        self._file: Any = None

    def open(self) -> None:
        import h5py

        self._file = h5py.File(self.path, "r+", driver="mpio", comm=self._comm)  # first: no rank may wait for this one
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)  # to start the writeback of what MPI-IO has written

    def write(self, place: int, data: memoryview, digest: Digest | None = None) -> None:
        begun, end = place, place + len(data)
        while place < end:
            start, stop, name = self._held[bisect_right(self._held, place, key=itemgetter(0)) - 1]
            dataset = self._file[name].id
            size = dataset.dtype.itemsize
            first, last = (place - start) // size, (min(end, stop) - start) // size
            for run in layout.run_boxes(dataset.shape, first, last):
                for part in layout.boxes(run, max(1, _STEP // size)):
                    nbytes = part.size() * size
                    try:
                        _write(dataset, part, np.frombuffer(data[:nbytes], np.uint8))
                    except OSError as error:
                        raise self._reason(error, nbytes) from error
                    if digest is not None:  # while it is in the cache, and others write
                        digest.update(data[:nbytes])
                    place, data = place + nbytes, data[nbytes:]
                    if place - begun >= _AHEAD:
                        plain.start_writeback(self.fd, begun, place - begun)
                        begun = place

    def _reason(self, error: OSError, nbytes: int) -> OSError:
        """Find out whether a write failed for lack of space: HDF5 does not pass on the error of MPI-IO."""
        try:
            free = os.fstatvfs(self.fd)
        except OSError:
            return error
        if free.f_bavail * free.f_frsize < nbytes:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return error

    def close(self) -> None:
        """Close the file. Collective; closing it again does nothing."""
        file, fd, self._file, self.fd = self._file, self.fd, None, -1
        try:
            if file is not None:
                file.close()  # first: collective
        finally:
            if fd >= 0:
                os.close(fd)


def _write(dataset: Any, box: Box, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Write the bytes of a box as they are."""
    from h5py import h5s

    space = dataset.get_space()
    if box.shape:
        space.select_hyperslab(box.offset, box.shape)
    dataset.write(h5s.create_simple((box.size(),)), space, data, dataset.get_type())
