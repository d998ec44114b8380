"""Messages from rank to rank, matched to receives by group, source and tag.

All groups share one communicator, since a group may be new to all ranks but the two that talk: MPI matches source and
communicator, and what comes for another receive is kept here until that one asks for it.
"""

from __future__ import annotations

import struct
import threading
from bisect import insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.errors import HpcdistError
from hpcdist.tensors.storage import of_bytes

__all__ = ["INLINE", "Envelope", "Unexpected", "bytes_of", "conflict", "sealed"]

_HEAD = struct.Struct("<qqqq")  # the group's key, the tag, the message's number, the bytes of its content
_NOT_YET = 0xFF  # each byte of a head that has not come: no number of bytes
INLINE = 2**16  # bytes of content that travel with the envelope: what nobody has asked for yet takes memory


class Envelope(NamedTuple):
    """What a rank learns first of a message.

    Attributes:
        key, tag: of the group, and what the sender has given.
        number: by which the sender knows what follows.
        source: the world's rank of the sender.
        nbytes: length of the content.
        serial: the how manyth it is of those that have come.
        content: the content itself; None if it follows by itself.
    """

    key: int
    tag: int
    number: int
    source: int
    nbytes: int
    serial: int
    content: Tensor | None


def sealed(key: int, tag: int, number: int, content: Tensor) -> list[Tensor]:
    """The messages that bring a content: the envelope with it, or the envelope and then the content."""
    inline = content.numel() <= INLINE
    envelope = torch.empty(_HEAD.size + inline * content.numel(), dtype=torch.uint8, device="cpu")
    envelope[: _HEAD.size] = of_bytes(_HEAD.pack(key, tag, number, content.numel()))
    if not inline:
        return [envelope, content]
    envelope[_HEAD.size :] = content
    return [envelope]


class Unexpected:
    """The messages that have come, and that no receive has taken yet; for any number of threads.

    A signal's handler may raise anywhere here: nothing that has come is lost then, nor there twice.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        self._of_key: dict[int, list[Envelope]] = {}
        self._coming: tuple[Tensor, int, int] | None = None  # a message, its source and number, until it is kept
        self._count = 0

    def take(self, key: int, source: int | None, tag: int | None, taken: list[Envelope]) -> bool:
        """Put the first message of a group from `source` with `tag`, None being any, into `taken`, if one has come.

        What one rank has sent comes in its order.

        Raises:
            HpcdistError: something damaged has come.
        """
        with self._lock:
            self._receive()
            waiting = self._of_key.get(key, [])
            for i, envelope in enumerate(waiting):
                if source in (None, envelope.source) and tag in (None, envelope.tag):
                    taken.append(envelope)
                    del waiting[i]
                    return True
        return False

    def give_back(self, envelope: Envelope) -> None:
        """It was taken, and is to be received by another one."""
        with self._lock:
            waiting = self._of_key.setdefault(envelope.key, [])
            if envelope.serial not in [other.serial for other in waiting]:
                insort(waiting, envelope, key=lambda other: other.serial)

    def drop(self, key: int) -> None:
        """The group has ended: what has come for it is for nobody."""
        with self._lock:
            if self._comm != MPI.COMM_NULL:
                self._receive()
            self._of_key.pop(key, None)

    def _receive(self) -> None:
        """Take in all that has come."""
        status = MPI.Status()
        self._keep()
        while self._comm.Iprobe(MPI.ANY_SOURCE, 0, status):
            content = torch.empty(status.Get_elements(MPI.BYTE), dtype=torch.uint8, device="cpu")
            content[: _HEAD.size] = _NOT_YET
            self._count += 1
            self._coming = content, status.Get_source(), self._count
            self._comm.Recv([bytes_of(content), MPI.BYTE], status.Get_source(), 0)
            self._keep()

    def _keep(self) -> None:
        """Keep the message that is coming in, if it has come."""
        if self._coming is None:
            return
        content, source, serial = self._coming
        if bool((content[: _HEAD.size] != _NOT_YET).any()):
            try:
                envelope = _opened(content, source, serial)
            except HpcdistError:
                self._coming = None
                raise
            waiting = self._of_key.setdefault(envelope.key, [])
            if not waiting or waiting[-1].serial != serial:
                waiting.append(envelope)
        self._coming = None


def _opened(message: Tensor, source: int, serial: int) -> Envelope:
    if message.numel() < _HEAD.size:
        raise HpcdistError(f"a message of rank {source} is damaged: it has {message.numel()} bytes")
    key, tag, number, nbytes = _HEAD.unpack(message[: _HEAD.size].numpy().tobytes())
    content = message[_HEAD.size :]
    if nbytes < 0 or (nbytes <= INLINE and content.numel() != nbytes):
        raise HpcdistError(f"a message of rank {source} is damaged: {content.numel()} bytes, {nbytes} announced")
    return Envelope(key, tag, number, source, nbytes, serial, content if nbytes <= INLINE else None)


def bytes_of(x: Tensor) -> Any:
    """The bytes of a tensor in host memory, as mpi4py takes them: a request keeps them, and the tensor, alive."""
    return x.numpy()


def conflict(one: Sequence[int | None], other: Sequence[int | None]) -> bool:
    """Whether a message could be taken by two receives that ask for these (key, source, tag), None being any."""
    return all(a == b or a is None or b is None for a, b in zip(one, other, strict=True))
