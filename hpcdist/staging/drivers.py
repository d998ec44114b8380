"""Write bytes to a file that is laid out already, by one of two drivers. The file is the same.

posix (PartFile): every rank writes with system calls. mpio (MpioFile): HDF5 writes through MPI-IO.
"""

from __future__ import annotations

import errno
import os
import struct
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdist import layout
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import refusal
from hpcdist.formats import plain
from hpcdist.formats.contents import Dataset, FileMap
from hpcdist.formats.known import format_of
from hpcdist.formats.paths import check_shared
from hpcdist.layout import Box
from hpcdist.layout.box import Ints

if TYPE_CHECKING:
    from mpi4py import MPI

NAMES = ("auto", "mpio", "posix")
_AHEAD = 2**22  # bytes that are written before the disk starts: with more, the sync at the end has more to do
_LONGEST = 200  # bytes of a path that Open MPI's MPI-IO can use, with the suffix that it adds
_STEP = 2**22  # bytes that mpio writes at a time; a call costs more there than a system call
ROUND = 2**20  # bytes of edges that a rank sends at a time
_SHARE = 16  # consecutive pages that belong to one rank
_HEAD = struct.Struct("qq")  # of a run of edges: its position and its bytes


def missing() -> str | None:
    """Explain why mpio cannot be used here, and how to get it; None if it can."""
    import h5py

    if h5py.get_config().mpi:
        return None
    return f"h5py {h5py.__version__} was built without MPI (docs/start/install.md describes the build with MPI)"


def active() -> tuple[str, str]:
    """The writer that is used for ``writer="auto"`` here, and why. On this rank alone; no file is touched.

    Returns:
        ("mpio", why) or ("posix", why).

    Example::

        >>> hd.staging.writer()
        ('mpio', 'h5py 3.16.0 has parallel HDF5 1.10.8')
    """
    import h5py

    if (reason := missing()) is not None:
        return "posix", reason
    return "mpio", f"h5py {h5py.__version__} has parallel HDF5 {h5py.version.hdf5_version}"


def takes_path(path: str) -> bool:
    """Whether MPI-IO can open a path: Open MPI up to 5.0.9 writes it into 256 bytes, and aborts (its issue 13565)."""
    from mpi4py import MPI

    return MPI.get_vendor()[0] != "Open MPI" or len(os.fsencode(path)) <= _LONGEST


class Edges:
    """This rank's bytes for pages that its runs do not fill, kept in memory up to `limit` bytes, then in `folder`.

    No two ranks write the same page, because clients of a shared file system may write back whole pages. A rank writes
    the pages that its runs fill, and sends its bytes for other pages to the one rank that owns the page. Pages that
    hold anything but the data of one array belong to rank 0, which has made the file.

    Args:
        page: size of a page in bytes; 1 if no page is shared with a process on another host.
    """

    def __init__(self, page: int, folder: Path, limit: int) -> None:
        self._page, self._limit, self._taken = page, limit, 0
        self._data = tempfile.SpooledTemporaryFile(max_size=limit, dir=str(folder))  # noqa: SIM115
        self._rows: list[Ints] = []
        self._size = 0

    def cut(self, places: Ints, nbytes: int) -> Ints:
        """Cut runs of `nbytes` each at the first and the last border between pages.

        Returns:
            For each the first byte, where the pages begin and end that it fills, and its end.
        """
        size, ends = self._page, places + nbytes
        first = np.minimum(-(-places // size) * size, ends)
        return np.array([places, first, np.maximum(first, ends // size * size), ends]).T

    def add(self, cuts: Ints, *data: memoryview) -> None:
        """Keep what runs have before and after the pages that they fill: see :meth:`cut`."""
        rows = cuts.reshape(-1, 2)
        self._data.seek(self._size)  # not behind what a write that failed has left
        for part in data:
            self._data.write(part)
        self._size = self._data.tell()
        self._rows.append(rows[rows[:, 0] < rows[:, 1]])

    def _runs(self) -> Iterator[tuple[int, bytes]]:
        """Yield the runs: position and bytes of each."""
        self._data.seek(0)
        for rows in self._rows:
            for start, end in rows.tolist():
                yield start, self._data.read(end - start)

    def take(self) -> list[tuple[int, bytes]]:
        """Return the runs kept since the last call: (position, bytes) of each.

        Raises:
            ValueError: more than `limit` bytes were kept in all.
        """
        self._taken += self._size
        if self._taken > self._limit:
            text = "bytes of short runs lie in pages that several hosts write: more than window"
            raise refusal(ValueError, "HD419", f"{self._taken:,} {text}={self._limit:,}")
        found = list(self._runs())
        self._rows, self._size = [], 0
        return found

    def settle(
        self, team: Team, arrays: Sequence[tuple[int, int]], write: Callable[[int, memoryview], object]
    ) -> Exception | None:
        """Send everything to its owner, which writes it. Collective.

        Args:
            arrays: first byte and end of each array in the file, in any order.

        Returns:
            The error on this rank, if there was one; the others have received all of their bytes.
        """
        table = sorted(of for of in arrays if of[0] < of[1])

        def owner(place: int) -> int:
            number = place // self._page
            at = bisect_right(table, number * self._page, key=itemgetter(0)) - 1
            alone = at >= 0 and (number + 1) * self._page <= table[at][1]
            return number // _SHARE % team.size if alone else 0

        runs, problem, more = self._runs(), None, True
        while more:
            sends, size = [bytearray() for _ in range(team.size)], 0
            for place, run in runs:
                sends[owner(place)] += _HEAD.pack(place, len(run)) + run
                size += len(run)
                if size >= ROUND:
                    break
            arrived = _exchanged(team.comm, sends)
            more = not objects.everywhere(team.comm, size < ROUND)
            try:
                for place, data in arrived:
                    write(place, memoryview(data))
            except Exception as error:  # reported when no rank waits for this one
                problem = problem or error
        self.close()
        return problem

    def close(self) -> None:
        """Free all of it. Closing again does nothing."""
        self._data.close()
        self._rows = []


def _exchanged(comm: MPI.Comm, sends: Sequence[bytearray]) -> list[tuple[int, bytearray]]:
    """Send runs to each rank; return those that arrive, in the order of the file, adjacent ones joined. Collective."""
    from mpi4py import MPI

    counts = np.array(list(map(len, sends)))
    arriving = np.empty_like(counts)
    comm.Alltoall(counts, arriving)
    got, at, runs = bytearray(int(arriving.sum())), 0, list[tuple[int, bytearray]]()
    comm.Alltoallv([b"".join(sends), counts.tolist(), MPI.BYTE], [got, arriving.tolist(), MPI.BYTE])
    while at < len(got):
        place, nbytes = _HEAD.unpack_from(got, at)
        at += _HEAD.size + nbytes
        runs.append((place, got[at - nbytes : at]))
    joined = list[tuple[int, bytearray]]()
    for place, run in sorted(runs):
        if joined and joined[-1][0] + len(joined[-1][1]) == place:
            joined[-1][1].extend(run)
        else:
            joined.append((place, run))
    return joined


class PartFile:
    """A file that is laid out, and to which one rank writes, with system calls, once it is open.

    Args:
        name: the name that the file will have.
        window: bytes of memory for data in pages of other ranks.
    """

    def __init__(self, name: str, laid: FileMap, window: int) -> None:
        self.name, self.map, self.fd = name, laid, -1
        self.edges = Edges(laid.page, Path(os.path.realpath(name)).parent, window)
        self.checksums = format_of(name).checksums

    def see(self) -> None:
        """Check that this rank sees the file, which another one has laid out: see check_shared()."""
        path = self.map.path
        check_shared(path, lambda: None if os.path.exists(path) else "not seen by this rank")

    def open(self) -> None:
        """Open the file, which this rank must see."""
        self.see()
        self.fd = os.open(self.map.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def write(self, place: int, data: memoryview, digest: Any = None) -> None:
        """Write bytes at a position of the file, and let the disk start meanwhile."""
        for start in range(0, len(data), _AHEAD):
            plain.write_at(self.fd, place + start, data[start : start + _AHEAD], digest)
            if len(data) >= self.map.page:  # else other bytes of the page may follow, and would wait
                plain.start_writeback(self.fd, place + start, _AHEAD)

    def close(self) -> None:
        """Close the file. Closing it again does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class MpioFile(PartFile):
    """A file that HDF5 writes through MPI-IO. Opening and closing it are collective."""

    def __init__(self, name: str, laid: FileMap, window: int, comm: MPI.Intracomm, datasets: Sequence[Dataset]) -> None:
        super().__init__(name, laid, window)
        held = zip(datasets, laid.data, strict=True)
        self._held = sorted((at, at + d.nbytes(), d.name) for d, at in held if d.nbytes())
        self._comm = comm
        self._file: Any = None

    def open(self) -> None:
        """Open the file, which all ranks see."""
        import h5py

        # The first: no rank may wait for this one.
        self._file = h5py.File(self.map.path, "r+", driver="mpio", comm=self._comm)
        self.fd = os.open(
            self.map.path, os.O_RDONLY | os.O_CLOEXEC
        )  # to start the writeback of what MPI-IO has written

    def write(self, place: int, data: memoryview, digest: Any = None) -> None:
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
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()  # first: collective
        finally:
            super().close()


def _write(dataset: Any, box: Box, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Write the bytes of a box as they are."""
    from h5py import h5s

    space = dataset.get_space()
    if box.shape:
        space.select_hyperslab(box.offset, box.shape)
    dataset.write(h5s.create_simple((box.size(),)), space, data, dataset.get_type())
