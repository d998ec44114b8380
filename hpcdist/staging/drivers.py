"""Two drivers that write bytes to a file that is laid out already. The file is the same.

posix: every rank writes with system calls; of compressed datasets, rank 0 writes chunks that all ranks compress.
mpio: HDF5 writes through MPI-IO.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hpcdist import layout
from hpcdist.comm.team import Team
from hpcdist.control import codec
from hpcdist.errors import FileError, refusal
from hpcdist.files import raw
from hpcdist.files.h5 import Dataset, FileMap, stored_dtype
from hpcdist.files.raw import Digest
from hpcdist.layout import Box
from hpcdist.staging.exchange import Bytes, all_to_all

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["NAMES", "Driver", "active", "for_filters", "for_path", "missing", "open_driver", "write_ahead"]

NAMES = ("auto", "mpio", "posix")
_AHEAD = 2**22  # bytes that are written before the disk starts: with more, the sync at the end has more to do
_LONGEST = 200  # bytes of a path that Open MPI's MPI-IO can use, with the suffix that it adds
_STEP = 2**22  # bytes that mpio writes at a time; a call costs more there than a system call


class Driver(Protocol):
    """A file that a job is writing, open on one rank. `i` is the number of a dataset in the file's map."""

    def write(self, place: int, data: memoryview, digest: Digest | None = None) -> None:
        """Write bytes of datasets at a position of the file. On this rank alone."""

    def write_filtered(self, i: int, box: Box | None, data: memoryview | None) -> None:
        """Write a box of whole chunks, or nothing, into a compressed dataset. Collective."""

    def close(self) -> None:
        """Close the file. Collective."""


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


def for_filters(name: str, filters: Mapping[str, Any]) -> str:
    """Choose the driver for datasets with these filters: instead of "auto", "posix" if there are any.

    Where HDF5 writes chunks of several ranks through MPI-IO, ranks write into each other's pages.

    Raises:
        ValueError: MPI-IO was asked for, and cannot write them.
    """
    if name == "mpio" and filters:
        raise refusal(ValueError, "HD421", "writer mpio does not compress; use auto or posix")
    return "posix" if filters else name


def for_path(name: str, path: str) -> str:
    """Choose the driver for a file: instead of "auto", "posix" if MPI-IO cannot open it.

    Open MPI up to 5.0.9 writes a path into 256 bytes, and the process aborts (its issue 13565).

    Raises:
        FileError: MPI-IO was asked for, and cannot open it.
    """
    from mpi4py import MPI

    if active(name)[0] == "posix" or MPI.get_vendor()[0] != "Open MPI" or len(os.fsencode(path)) <= _LONGEST:
        return active(name)[0]
    if name == "mpio":
        limit = f"more than {_LONGEST} bytes, which Open MPI's MPI-IO cannot open"
        raise FileError("HD421", f"{path}: the path has {limit}: use writer auto or posix")
    return "posix"


def open_driver(
    name: str, team: Team, datasets: Sequence[Dataset], file_map: FileMap, hints: Mapping[str, str]
) -> Driver:
    """Open a file for writing. Collective; every rank has checked that it can open the file."""
    return _Mpio(team.comm, datasets, file_map, hints) if name == "mpio" else _Posix(team, datasets, file_map)


def write_ahead(fd: int, place: int, data: memoryview, digest: Digest | None = None) -> None:
    """Write bytes at a position of an open file with system calls, and let the disk start meanwhile."""
    for start in range(0, len(data), _AHEAD):
        raw.write_at(fd, place + start, data[start : start + _AHEAD], digest)
        raw.start_writeback(fd, place + start, _AHEAD)


class _Posix:
    def __init__(self, team: Team, datasets: Sequence[Dataset], file_map: FileMap) -> None:
        self._team = team
        self._path = file_map.path
        self._datasets = datasets
        self._fd = os.open(file_map.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def write(self, place: int, data: memoryview, digest: Digest | None = None) -> None:
        write_ahead(self._fd, place, data, digest)

    def write_filtered(self, i: int, box: Box | None, data: memoryview | None) -> None:
        dataset = self._datasets[i]
        chunks: list[_Chunk] = []
        problem: Exception | None = None
        try:
            chunks = [] if box is None or data is None else list(_filtered(dataset, box, data))
        except Exception as error:  # raised when no rank waits for this one
            problem = error
        nothing = np.empty(0, np.uint8)
        blocks = [_packed(chunks) if rank == 0 else nothing for rank in range(self._team.size)]
        arrived = all_to_all(self._team, blocks)
        if problem is not None:
            raise problem
        if self._team.rank == 0:
            self._write_chunks(dataset.name, [chunk for block in arrived for chunk in _unpacked(block)])

    def _write_chunks(self, name: str, chunks: list[_Chunk]) -> None:
        import h5py

        if chunks:
            with h5py.File(self._path, "r+", locking=False) as file:
                for offset, mask, content in chunks:
                    file[name].id.write_direct_chunk(offset, content, mask)

    def close(self) -> None:
        os.close(self._fd)


# The offset of a chunk in the dataset, the mask of the filters that were skipped, and the filtered bytes.
_Chunk = tuple[tuple[int, ...], int, bytes]


def _filtered(dataset: Dataset, box: Box, data: memoryview) -> Iterator[_Chunk]:
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


def _packed(chunks: list[_Chunk]) -> Bytes:
    """Encode chunks as one message: the length of the header; the header, as text; and the chunks' bytes."""
    head = codec.encode([(offset, mask, len(content)) for offset, mask, content in chunks])
    message = bytearray().join([len(head).to_bytes(8, "little"), head, *(content for _, _, content in chunks)])
    return np.frombuffer(message, np.uint8)


def _unpacked(message: Bytes) -> list[_Chunk]:
    start = 8 + int.from_bytes(message[:8].tobytes(), "little")
    chunks = []
    for offset, mask, length in codec.decode(message[8:start].tobytes()):
        chunks.append((offset, mask, message[start : start + length].tobytes()))
        start += length
    return chunks


class _Mpio:
    def __init__(
        self, comm: MPI.Intracomm, datasets: Sequence[Dataset], file_map: FileMap, hints: Mapping[str, str]
    ) -> None:
        import h5py
        from mpi4py import MPI

        self._fd = os.open(
            file_map.path, os.O_RDONLY | os.O_CLOEXEC
        )  # to start the writeback of what MPI-IO has written
        info = MPI.Info.Create(dict(hints))
        self._file = h5py.File(file_map.path, "r+", driver="mpio", comm=comm, info=info)
        info.Free()
        held = sorted((at, d.nbytes(), d.name) for d, at in zip(datasets, file_map.data, strict=True) if at is not None)
        self._starts = [at for at, nbytes, _ in held if nbytes]
        self._data = [(at + nbytes, self._file[name].id) for at, nbytes, name in held if nbytes]

    def write(self, place: int, data: memoryview, digest: Digest | None = None) -> None:
        begun, end = place, place + len(data)
        while place < end:
            k = bisect_right(self._starts, place) - 1
            stop, dataset = self._data[k]
            size = dataset.dtype.itemsize
            first, last = (place - self._starts[k]) // size, (min(end, stop) - self._starts[k]) // size
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
                        raw.start_writeback(self._fd, begun, place - begun)
                        begun = place

    def _reason(self, error: OSError, nbytes: int) -> OSError:
        """Find out whether a write failed for lack of space: HDF5 does not pass on the error of MPI-IO."""
        try:
            free = os.fstatvfs(self._fd)
        except OSError:
            return error
        if free.f_bavail * free.f_frsize < nbytes:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return error

    def write_filtered(self, i: int, box: Box | None, data: memoryview | None) -> None:
        raise NotImplementedError("writer mpio does not compress")  # for_filters() has chosen another one

    def close(self) -> None:
        try:
            self._file.close()  # first: collective
        finally:
            os.close(self._fd)


def _write(dataset: Any, box: Box, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Write the bytes of a box as they are."""
    from h5py import h5s

    space = dataset.get_space()
    if box.shape:
        space.select_hyperslab(box.offset, box.shape)
    dataset.write(h5s.create_simple((box.size(),)), space, data, dataset.get_type())
