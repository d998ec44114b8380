"""Small messages between the watching threads of a job, outside MPI."""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

from hpcdist.activity import procstat

KEY = 32  # bytes
_DIGEST = 16  # bytes
_REFUSAL = 0.2  # seconds in which a host refuses a datagram
_BUFFER = 2**20  # bytes on their way to a rank: the answers of many ranks at once
_HEAD = struct.Struct(f"<{_DIGEST}sH")  # a message begins with its digest and the length of its compressed text
# Messages read at once, and seconds to rest after none of them was this job's: any user of the nodes can send UDP
# datagrams, and must not keep a core busy with them.
_BATCH, _PAUSE = 32, 0.02


class Datagrams:
    """This rank's receiver of messages, and its sends to other ranks.

    On one node each rank reads from a pipe, which the others open through /proc. It has no name, no port and no file,
    and only processes of this user can open it. Otherwise they are UDP datagrams, on the addresses that
    :func:`rendezvous.meet` has found. Each carries a keyed digest; one rank draws the key, and the others get it over
    MPI.

    Args:
        key: secret of the job.
        address: address of this host in the network that the nodes share; None on one node.

    Attributes:
        address: address for the other ranks.
    """

    def __init__(self, key: bytes, address: str | None) -> None:
        self._key = key
        self._socket: socket.socket | None = None
        self._pipe: list[int] = []
        if address is None:
            self._pipe += os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self.address = procstat.address(self._pipe[1])
        else:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._socket.bind((address, 0))
            self._socket.setblocking(False)
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            self.address = list(self._socket.getsockname())
        self._rest = b""

    def fileno(self) -> int:
        return self._pipe[0] if self._socket is None else self._socket.fileno()

    def expect_all(self) -> None:
        """Make room for the answers of many ranks at once.

        Only a rank that asks needs it. Linux gives a user 64 MiB of pipes on a node. If 64 ranks had 1 MiB each, each
        new pipe of this user, in any program, would hold 8 KiB instead of 64.
        """
        with suppress(OSError):
            if self._pipe:
                fcntl.fcntl(self._pipe[0], fcntl.F_SETPIPE_SZ, _BUFFER)

    def send(self, address: Sequence[Any], message: dict[str, Any]) -> bool:
        """Send a message, which is lost if the other rank does not exist, or has too many; False if it is too long."""
        body = zlib.compress(pickle.dumps(message))
        part = _HEAD.pack(self._digest(body), len(body)) + body
        if len(part) > select.PIPE_BUF:  # writes to a pipe are atomic up to this size
            return False
        with suppress(OSError):
            if self._socket is not None:
                self._socket.sendto(part, tuple(address))
                return True
            # It is opened for reading, too: without readers, writing may end this process.
            fd = procstat.opened(address)
            try:
                os.write(fd, part)
            finally:
                os.close(fd)
        return True

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that arrived from ranks of this job."""
        messages: list[dict[str, Any]] = []
        with suppress(BlockingIOError):
            for _ in range(_BATCH):
                data = self._rest + os.read(self.fileno(), select.PIPE_BUF)
                while len(data) >= _HEAD.size:
                    digest, length = _HEAD.unpack_from(data)
                    body = data[_HEAD.size : _HEAD.size + length]
                    if len(body) < length:
                        break
                    data = data[_HEAD.size + length :]
                    if compare_digest(digest, self._digest(body)):
                        messages.append(pickle.loads(zlib.decompress(body)))
                    elif self._socket is not None:  # a stranger's datagram: none of it is looked at again
                        break
                self._rest = data if self._socket is None else b""  # a datagram is received whole
        if not messages:
            time.sleep(_PAUSE)
        return messages

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
