"""Small messages between the watching threads of a job, beside MPI: only when somebody asks what the others are at.

Datagrams. On one node they are local ones, without a file or a port; else UDP, on the address by which the nodes have
met. Each carries a keyed digest: the key is the job's own, drawn by one rank and given to the others over MPI.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

__all__ = ["KEY", "Wire"]

KEY = 32  # bytes
_DIGEST = 16  # bytes
_REFUSAL = 0.2  # seconds until a host has said that nobody has an address
_LONGEST = 32_000  # bytes of a message: what a datagram carries everywhere


class Wire:
    """This rank's end.

    Args:
        key: the job's secret.
        name: of this end on this node; no other one may have it.
        address: of this host, in the network that the nodes share; None on one node.

    Attributes:
        address: what the others send to, as JSON has it.
    """

    def __init__(self, key: bytes, name: str, address: str | None) -> None:
        self._key = key
        if address is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(f"\0{name}")  # an abstract name: it goes with the process
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
        """Send, if the other end is there and has room; nobody is told if not."""
        body = json.dumps(message).encode()[:_LONGEST]
        to = f"\0{address}" if isinstance(address, str) else tuple(address)
        with suppress(OSError):
            self._socket.sendto(self._digest(body) + body, to)

    def receive(self) -> list[dict[str, Any]]:
        """All that has come from the job's own ranks."""
        found = []
        with suppress(BlockingIOError):
            while True:
                data = self._socket.recv(_LONGEST + _DIGEST)
                digest, body = data[:_DIGEST], data[_DIGEST:]
                if compare_digest(digest, self._digest(body)):
                    with suppress(ValueError):  # was cut
                        found.append(json.loads(body))
        return found

    def refused(self, address: Any) -> bool:
        """Whether nobody has that end any more, as its host says; one that says nothing may be down."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.settimeout(_REFUSAL)
            probe.connect(tuple(address))
            try:
                probe.send(b"")  # no digest: nobody reads it
                probe.recv(1)
            except ConnectionRefusedError:
                return True
        return False

    def close(self) -> None:
        self._socket.close()

    def _digest(self, body: bytes) -> bytes:
        return blake2b(body, key=self._key, digest_size=_DIGEST).digest()
