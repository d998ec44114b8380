"""Small messages between the watching threads of a job, beside MPI, for the rare questions about other ranks.

On one node they are Unix datagrams, without a file or a port; else UDP, on the addresses that :func:`rendezvous.meet`
has found. Each carries a keyed digest; one rank draws the key, and the others get it over MPI.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

__all__ = ["KEY", "Datagrams"]

KEY = 32  # bytes
_DIGEST = 16  # bytes
_REFUSAL = 0.2  # seconds until a host has refused a datagram
_LONGEST = 32_000  # bytes of a message that fits into a datagram everywhere


class Datagrams:
    """The socket of this rank.

    Args:
        key: secret of the job.
        name: name of the socket, unique on this node.
        address: address of this host in the network that the nodes share; None on one node.

    Attributes:
        address: address for the other ranks, as JSON.
    """

    def __init__(self, key: bytes, name: str, address: str | None) -> None:
        self._key = key
        if address is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(f"\0{name}")  # an abstract name, which ends with the process
            self.address: Any = name
        else:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._socket.bind((address, 0))
            self.address = list(self._socket.getsockname())
        self._socket.setblocking(False)
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)  # the answers of many ranks at once

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, address: Any, message: dict[str, Any]) -> None:
        """Send a message, which is lost if the other socket does not exist or is full."""
        body = json.dumps(message).encode()[:_LONGEST]
        to = f"\0{address}" if isinstance(address, str) else tuple(address)
        with suppress(OSError):
            self._socket.sendto(self._digest(body) + body, to)

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come from ranks of this job."""
        found = []
        with suppress(BlockingIOError):
            while True:
                data = self._socket.recv(_LONGEST + _DIGEST)
                digest, body = data[:_DIGEST], data[_DIGEST:]
                if compare_digest(digest, self._digest(body)):
                    with suppress(ValueError):  # it was cut
                        found.append(json.loads(body))
        return found

    def refused(self, address: Any) -> bool:
        """Whether the host reports that the socket no longer exists; a host that is down reports nothing."""
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
        self._socket.close()

    def _digest(self, body: bytes) -> bytes:
        return blake2b(body, key=self._key, digest_size=_DIGEST).digest()
