"""Send an archive from the ranks that read it to all ranks that unpack it, window by window, in bounded memory.

The main thread sends and receives, which keeps MPI going; another one reads ahead, and a third one unpacks. Before each
window all ranks agree that none has failed.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Full, Queue
from typing import TYPE_CHECKING

import xxhash

from hpcdist.control import objects
from hpcdist.errors import FileError, described, reason
from hpcdist.stage_env.archive import Source
from hpcdist.stage_env.unpack import Unpacker

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["VERB", "send"]

VERB = "stage_env"
_DEPTH = 2  # windows that a rank reads ahead, or has not unpacked yet
_DIGEST = 16  # bytes of a window's checksum, which follows the data
_NAP = 0.1  # seconds after which a rank looks whether its unpacking has failed


def send(
    comm: MPI.Intracomm,
    source: Source,
    unpacker: Unpacker | None,
    readers: int,
    moved: Callable[[int], object],
) -> None:
    """Read an archive, from the first byte that a rank needs, and unpack it. Collective over `comm`.

    Args:
        comm: ranks that unpack; the first `readers` of them read the windows in turn.
        source: the same on all ranks.
        unpacker: None on a rank that reads only.
        moved: called with the number of bytes after each window.

    Raises:
        RankError: on all ranks, if one of them cannot read, or unpack; how much was unpacked is in the journals.
    """
    from mpi4py import MPI

    offset = source.nbytes if unpacker is None else unpacker.journal.offset
    first = min(objects.all_gather_object(comm, offset, VERB)) // source.window
    count = -(-source.nbytes // source.window)
    readers = min(readers, comm.size)
    pool = _Pool(source.window + _DIGEST)
    turns = [index for index in range(first, count) if index % readers == comm.rank]
    with _Reading(source, turns, pool) as reading, _Unpacking(unpacker, first * source.window, pool) as unpacking:
        for index in range(first, count):
            mine = reading.next() if index % readers == comm.rank else None
            _agree(comm, unpacking.problem or reading.problem)
            nbytes = min(source.window, source.nbytes - index * source.window)
            window = mine or pool.take()
            comm.Bcast([window, nbytes + _DIGEST, MPI.BYTE], index % readers)
            unpacking.put(window, nbytes)
            moved(nbytes)
        unpacking.finish()
        _agree(comm, unpacking.problem)


def _agree(comm: MPI.Intracomm, problem: str | None) -> None:
    """Raise a RankError on all ranks if there is a problem on one."""
    from mpi4py import MPI

    failed = bytearray([problem is not None])
    comm.Allreduce(MPI.IN_PLACE, [failed, MPI.BYTE], MPI.BOR)
    if failed[0]:
        problems = enumerate(objects.all_gather_object(comm, problem, VERB))
        objects.raise_problems(VERB, {rank: text for rank, text in problems if text is not None})


def _text(error: Exception) -> str:
    return f"{socket.gethostname()}: {described(error, 'HD901')}"


class _Pool:
    """Buffers that are used again: new memory takes longer than what is read into it."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: deque[bytearray] = deque()

    def take(self) -> bytearray:
        try:
            return self._free.pop()
        except IndexError:
            return bytearray(self._nbytes)

    def give(self, buffer: bytearray) -> None:
        self._free.append(buffer)


class _Reading:
    """A context in which a thread reads windows of the source, each with its checksum, `_DEPTH` of them ahead."""

    def __init__(self, source: Source, turns: list[int], pool: _Pool) -> None:
        self.problem: str | None = None
        self._source, self._pool = source, pool
        self._thread = ThreadPoolExecutor(1)
        self._turns = iter(turns)
        self._fd = -1
        self._waiting: deque[Future[bytearray]] = deque()
        for _ in range(_DEPTH):
            self._ask()

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        if self._fd >= 0:
            os.close(self._fd)

    def _ask(self) -> None:
        index = next(self._turns, None)
        if index is not None:
            self._waiting.append(self._thread.submit(self._read, index))

    def next(self) -> bytearray | None:
        """Return the next window; None if it cannot be read, with the `problem`."""
        future = self._waiting.popleft()
        self._ask()
        try:
            return future.result()
        except Exception as error:
            self.problem = _text(error)
            return None

    def _read(self, index: int) -> bytearray:
        source, buffer = self._source, self._pool.take()
        if self._fd < 0:
            self._fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
        begin = index * source.window
        data = memoryview(buffer)[: min(source.window, source.nbytes - begin)]
        try:
            found = os.fstat(self._fd)
            if (found.st_size, int(found.st_mtime)) != (source.size, source.written):
                raise FileError("HD407", f"{source.path}: was changed meanwhile: try again")
            _fill(self._fd, source, begin, data)
        except OSError as error:
            raise FileError("HD402", f"{source.path}: cannot be read: {reason(error)}") from error
        digest = xxhash.xxh3_128_digest(data)
        if source.sums and digest.hex() != source.sums[index]:
            raise FileError("HD404", f"{source.path}: damaged at byte {begin}: remove it, and it is packed again")
        buffer[len(data) : len(data) + _DIGEST] = digest
        return buffer


def _fill(fd: int, source: Source, begin: int, data: memoryview) -> None:
    """Fill `data` from what is sent: source.head, the file, and zeros after it."""
    done = len(head) if (head := source.head[begin : begin + len(data)]) else 0
    data[:done] = head
    while done < len(data):
        got = os.preadv(fd, [data[done:]], begin + done - len(source.head))
        if not got:
            break
        done += got
    data[done:] = bytes(len(data) - done)


class _Unpacking:
    """A context in which a thread unpacks the windows that it is given, from the one that begins at `offset`.

    Without an unpacker, it drops them.
    """

    def __init__(self, unpacker: Unpacker | None, offset: int, pool: _Pool) -> None:
        self.problem: str | None = None
        self._unpacker, self._pool = unpacker, pool
        self._queue: Queue[tuple[bytearray, int] | None] = Queue(_DEPTH)
        self._over = threading.Event()  # nothing is unpacked any more
        self._stream = _Stream(self._queue, offset, pool)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Unpacking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.stopped = True
        self.finish()

    def _run(self) -> None:
        try:
            if self._unpacker is not None:
                self._stream.seek(self._unpacker.journal.offset)
                self._unpacker.run(self._stream)
        except _StoppedError:
            pass
        except Exception as error:
            self.problem = _text(error)
        finally:
            self._over.set()

    def put(self, window: bytearray, nbytes: int) -> None:
        """Hand over a window; waits while there are too many."""
        if not self._hand_over((window, nbytes)):
            self._pool.give(window)

    def _hand_over(self, item: tuple[bytearray, int] | None) -> bool:
        while not self._over.is_set():
            try:
                self._queue.put(item, timeout=_NAP)
                return True
            except Full:
                continue
        return False

    def finish(self) -> None:
        """Wait until all is unpacked, or nothing more can be."""
        self._hand_over(None)
        self._thread.join()


class _StoppedError(Exception):
    """No more windows come: another rank has failed."""


class _Stream:
    """The bytes of the windows in a queue, as a file that can be read forwards."""

    def __init__(self, queue: Queue[tuple[bytearray, int] | None], offset: int, pool: _Pool) -> None:
        self.stopped = False
        self._queue, self._pool = queue, pool
        self._buffer = bytearray()
        self._at, self._end = 0, 0  # of the data in the buffer
        self._offset = offset
        self._over = False

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int) -> None:
        """Skip what comes before `offset`."""
        while self._offset < offset and self._available():
            self._take(offset - self._offset)

    def read(self, size: int) -> bytes:
        if self._available() >= size:
            return bytes(self._take(size))
        parts = bytearray()
        while len(parts) < size and self._available():
            parts += self._take(size - len(parts))
        return bytes(parts)

    def _take(self, size: int) -> memoryview:
        size = min(size, self._end - self._at)
        taken = memoryview(self._buffer)[self._at : self._at + size]
        self._at += size
        self._offset += size
        return taken

    def _available(self) -> int:
        """The number of bytes that are at hand; 0 at the end. Waits for the next window if there are none."""
        if self._at == self._end and not self._over:
            if self._end:
                self._pool.give(self._buffer)
            item = self._queue.get()
            if self.stopped:
                raise _StoppedError
            if item is None:
                self._over, self._at, self._end = True, 0, 0
            else:
                self._buffer, self._end = item
                self._at = 0
                data = memoryview(self._buffer)[: self._end]
                if xxhash.xxh3_128_digest(data) != bytes(self._buffer[self._end : self._end + _DIGEST]):
                    raise FileError("HD404", f"the archive was damaged on its way, at byte {self._offset}")
        return self._end - self._at
