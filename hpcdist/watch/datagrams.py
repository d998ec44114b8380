"""Small messages between the watching threads of a job, beside MPI, for the rare questions about other ranks.

On one node each rank reads from a pipe, which the others open through /proc: it has no name, no port and no file, and
only processes of this user can open it. Else they are UDP datagrams, on the addresses that :func:`rendezvous.meet` has
found. Each message carries a keyed digest; one rank draws the key, and the others get it over MPI.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

from hpcdist.activity.procstat import identity, opened

__all__ = ["KEY", "Datagrams"]

KEY = 32  # bytes
_DIGEST = 16  # bytes
_REFUSAL = 0.2  # seconds until a host has refused a datagram
_BUFFER = 2**20  # bytes on their way to a rank: the answers of many ranks at once
_PART = struct.Struct(f"<{_DIGEST}sHHH")  # of a message: its digest, the part's number, the number of parts, its length
_LONGEST = select.PIPE_BUF - _PART.size  # bytes of a part: what is written to a pipe at once is not mixed with others
_UNFINISHED = 256  # messages of which parts have come
_BATCH, _PAUSE = 128, 0.02  # parts read at once, and seconds to rest after none of them was this job's: any user of the
# nodes can send UDP datagrams, and must not keep a core busy with them


class Datagrams:
    """What this rank receives, and sends to others.

    Args:
        key: secret of the job.
        address: address of this host in the network that the nodes share; None on one node.

    Attributes:
        address: address for the other ranks, as JSON.
    """

    def __init__(self, key: bytes, address: str | None) -> None:
        self._key = key
        self._socket: socket.socket | None = None
        self._pipe: list[int] = []
        if address is None:
            self._pipe += os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self.address = [os.getpid(), self._pipe[1], *identity(self._pipe[1])]
        else:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._socket.bind((address, 0))
            self._socket.setblocking(False)
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            self.address = list(self._socket.getsockname())
        self._rest = b""
        self._unfinished: dict[bytes, dict[int, bytes]] = {}

    def fileno(self) -> int:
        return self._pipe[0] if self._socket is None else self._socket.fileno()

    def expect_all(self) -> None:
        """Make room for the answers of many ranks at once.

        Only a rank that asks needs it. Linux gives a user 64 MiB of pipes on a node: once 64 ranks had a MiB each, each
        new pipe of this user, in any program, would hold 8 KiB instead of 64.
        """
        with suppress(OSError):
            if self._pipe:
                fcntl.fcntl(self._pipe[0], fcntl.F_SETPIPE_SZ, _BUFFER)

    def send(self, address: Sequence[Any], message: dict[str, Any]) -> None:
        """Send a message, which is lost if the other rank does not exist or has too many."""
        body = json.dumps(message).encode()
        digest, count = self._digest(body), -(-len(body) // _LONGEST)
        pieces = [body[i * _LONGEST : (i + 1) * _LONGEST] for i in range(count)]
        parts = [_PART.pack(digest, i, count, len(piece)) + piece for i, piece in enumerate(pieces)]
        with suppress(OSError):
            if self._socket is not None:
                for part in parts:
                    self._socket.sendto(part, tuple(address))
                return
            pid, writer, *expected = address
            fd = opened(pid, writer, expected)  # for reading, too: without readers, writing may end this process
            try:
                for part in parts:
                    os.write(fd, part)
            finally:
                os.close(fd)

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come from ranks of this job."""
        found: list[dict[str, Any]] = []
        with suppress(BlockingIOError):
            for _ in range(_BATCH):
                data = self._rest + os.read(self.fileno(), select.PIPE_BUF)
                while len(data) >= _PART.size:
                    digest, number, count, length = _PART.unpack_from(data)
                    end = _PART.size + length
                    if end > len(data) or (self._socket is not None and end < len(data)):  # a datagram is one part
                        break
                    found += self._take(digest, number, count, data[_PART.size : end])
                    data = data[end:]
                self._rest = data if self._socket is None else b""
        if not found:
            time.sleep(_PAUSE)
        return found

    def _take(self, digest: bytes, number: int, count: int, piece: bytes) -> list[dict[str, Any]]:
        """Keep a part; return the message that it completes, if any."""
        pieces = self._unfinished.setdefault(digest, {})
        pieces[number] = piece
        if len(pieces) < count:
            if len(self._unfinished) > _UNFINISHED:
                del self._unfinished[next(iter(self._unfinished))]
            return []
        del self._unfinished[digest]
        body = b"".join(pieces[i] for i in sorted(pieces))
        return [json.loads(body)] if compare_digest(digest, self._digest(body)) else []

    def refused(self, address: Sequence[Any]) -> bool:
        """Whether the host reports that the socket no longer exists; a host that is down reports nothing."""
        if self._socket is None:
            return False
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.settimeout(_REFUSAL)
            probe.connect(tuple(address))
            try:
                probe.send(b"")  # ignored, since it has no digest
                probe.recv(1)
            except ConnectionRefusedError:
                return True
        return False

    def close(self) -> None:
        for fd in self._pipe:
            os.close(fd)
        if self._socket is not None:
            self._socket.close()

    def _digest(self, body: bytes) -> bytes:
        return blake2b(body, key=self._key, digest_size=_DIGEST).digest()
