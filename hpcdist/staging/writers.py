"""Two ways to bring bytes into a file that is laid out already. The file is the same.

posix: every rank writes at the bytes' places; of compressed datasets, rank 0 writes chunks that all ranks compress.
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
from hpcdist.control import codec
from hpcdist.errors import FileError
from hpcdist.files import raw
from hpcdist.files.h5 import Dataset, Layout, stored_dtype
from hpcdist.files.raw import Digest
from hpcdist.layout import Box

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["NAMES", "Writer", "active", "fit_for", "fit_for_path", "missing", "opened"]

NAMES = ("auto", "mpio", "posix")
_AHEAD = 2**23  # bytes that are written before the disk begins
_LONGEST = 200  # bytes of a path that Open MPI's MPI-IO bears, with what it puts behind it
_STEP = 2**22  # bytes that mpio writes at a time; a call costs more there than a system call


class Writer(Protocol):
    """One rank's hold on a file that a job is writing. `i` is a dataset, by its place in the layout."""

    def write(self, place: int, data: memoryview, digest: Digest | None = None) -> None:
        """Write bytes of datasets at their place in the file. On this rank alone."""

    def write_filtered(self, i: int, box: Box | None, data: memoryview | None) -> None:
        """Write a box of whole chunks, or nothing, into a compressed dataset. Collective."""

    def close(self) -> None:
        """Collective."""


def missing(name: str) -> str | None:
    """Why a writer cannot be used here, and how to get it; None if it can."""
    import h5py

    if name != "mpio" or h5py.get_config().mpi:
        return None
    return f"h5py {h5py.__version__} was built without MPI (README, Install on a cluster, says how it is built with it)"


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
    return (
        ("posix", reason)
        if reason
        else ("mpio", f"h5py {h5py.__version__} has parallel HDF5 {h5py.version.hdf5_version}")
    )


def fit_for(name: str, filters: Mapping[str, Any]) -> str:
    """The writer for datasets with these filters, "posix" instead of what "auto" stands for if need be.

    Where HDF5 writes chunks of several ranks through MPI-IO, ranks write into each other's pages.

    Raises:
        ValueError: MPI-IO was asked for, and cannot write them.
    """
    if name == "mpio" and filters:
        raise ValueError("writer mpio does not compress; use auto or posix")
    return "posix" if filters else name


def fit_for_path(name: str, path: str) -> str:
    """The active writer for a file, "posix" instead of what "auto" stands for if need be.

    Open MPI up to 5.0.9 writes a path into 256 bytes, and the process aborts (its issue 13565).

    Raises:
        FileError: MPI-IO was asked for, and cannot open it.
    """
    from mpi4py import MPI

    if active(name)[0] == "posix" or MPI.get_vendor()[0] != "Open MPI" or len(os.fsencode(path)) <= _LONGEST:
        return active(name)[0]
    if name == "mpio":
        told = f"more than {_LONGEST} bytes, which Open MPI's MPI-IO does not bear: use writer auto or posix"
        raise FileError(f"{path}: the path has {told}")
    return "posix"


def opened(
    name: str, comm: MPI.Intracomm, datasets: Sequence[Dataset], place: Layout, hints: Mapping[str, str]
) -> Writer:
    """Open a file for writing. Collective over `comm`; every rank has seen that it can open the file."""
    return _Mpio(comm, datasets, place, hints) if name == "mpio" else _Posix(comm, datasets, place)


class _Posix:
    def __init__(self, comm: MPI.Intracomm, datasets: Sequence[Dataset], place: Layout) -> None:
        self._comm = comm
        self._path = place.path
        self._datasets = datasets
        self._fd = os.open(place.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def write(self, place: int, data: memoryview, digest: Digest | None = None) -> None:
        for start in range(0, len(data), _AHEAD):
            raw.write_at(self._fd, place + start, data[start : start + _AHEAD], digest)
            raw.start_writeback(self._fd, place + start, _AHEAD)

    def write_filtered(self, i: int, box: Box | None, data: memoryview | None) -> None:
        dataset = self._datasets[i]
        from mpi4py import MPI

        mine: list[_Chunk] = []
        problem: Exception | None = None
        try:
            mine = [] if box is None or data is None else list(_filtered(dataset, box, data))
        except Exception as error:  # told when no rank waits for this one
            problem = error
        if self._comm.rank:
            self._comm.Send([_packed(mine), MPI.BYTE], 0)
        for source in range(self._comm.size) if self._comm.rank == 0 else ():
            chunks = mine if source == 0 else self._received(source)
            try:
                if problem is None:
                    self._write_chunks(dataset.name, chunks)
            except Exception as error:  # the others' chunks are to be received all the same
                problem = error
        if problem is not None:
            raise problem

    def _received(self, source: int) -> list[_Chunk]:
        from mpi4py import MPI

        status = MPI.Status()
        self._comm.Probe(source, status=status)
        message = bytearray(status.Get_count(MPI.BYTE))
        self._comm.Recv([message, MPI.BYTE], source)
        return _unpacked(message)

    def _write_chunks(self, name: str, chunks: list[_Chunk]) -> None:
        import h5py

        if chunks:
            with h5py.File(self._path, "r+", locking=False) as file:
                for offset, mask, content in chunks:
                    file[name].id.write_direct_chunk(offset, content, mask)

    def close(self) -> None:
        os.close(self._fd)


# Where a chunk begins in the dataset, which filters left it as it was, and what the others made of it.
_Chunk = tuple[tuple[int, ...], int, bytes]


def _filtered(dataset: Dataset, box: Box, data: memoryview) -> Iterator[_Chunk]:
    """The chunks of a box, as HDF5's own filters make them, and where each belongs: by way of a file in memory."""
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


def _packed(chunks: list[_Chunk]) -> bytes:
    """Chunks as one message: the length of what follows as text, where and how long each is; and their contents."""
    head = codec.encode([(offset, mask, len(content)) for offset, mask, content in chunks])
    return b"".join([len(head).to_bytes(8, "little"), head, *(content for _, _, content in chunks)])


def _unpacked(message: bytearray) -> list[_Chunk]:
    start = 8 + int.from_bytes(message[:8], "little")
    chunks = []
    for offset, mask, length in codec.decode(message[8:start]):
        chunks.append((offset, mask, bytes(message[start : start + length])))
        start += length
    return chunks


class _Mpio:
    def __init__(
        self, comm: MPI.Intracomm, datasets: Sequence[Dataset], place: Layout, hints: Mapping[str, str]
    ) -> None:
        import h5py
        from mpi4py import MPI

        self._fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)  # to tell the system what MPI-IO has written
        info = MPI.Info.Create(dict(hints))
        self._file = h5py.File(place.path, "r+", driver="mpio", comm=comm, info=info)
        info.Free()
        held = sorted((at, d.nbytes(), d.name) for d, at in zip(datasets, place.data, strict=True) if at is not None)
        self._starts = [at for at, nbytes, _ in held if nbytes]
        self._data = [(at + nbytes, self._file[name].id) for at, nbytes, name in held if nbytes]

    def write(self, place: int, data: memoryview, digest: Digest | None = None) -> None:
        if digest is not None:
            digest.update(data)
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
                        raise self._told(error, nbytes) from error
                    place, data = place + nbytes, data[nbytes:]
                    if place - begun >= _AHEAD:
                        raw.start_writeback(self._fd, begun, place - begun)
                        begun = place

    def _told(self, error: OSError, nbytes: int) -> OSError:
        """HDF5 keeps to itself what MPI-IO says of a write that has failed; that there is no space can be seen."""
        try:
            free = os.fstatvfs(self._fd)
        except OSError:
            return error
        if free.f_bavail * free.f_frsize < nbytes:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return error

    def write_filtered(self, i: int, box: Box | None, data: memoryview | None) -> None:
        raise NotImplementedError("writer mpio does not compress")  # fit_for() has chosen another one

    def close(self) -> None:
        os.close(self._fd)
        self._file.close()


def _write(dataset: Any, box: Box, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Write bytes that are stored as they are."""
    from h5py import h5s

    space = dataset.get_space()
    if box.shape:
        space.select_hyperslab(box.offset, box.shape)
    dataset.write(h5s.create_simple((box.size(),)), space, data, dataset.get_type())
