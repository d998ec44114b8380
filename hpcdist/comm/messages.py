"""Messages of MPI: the memory of tensors in pieces that one message may hold; and the matching of send and recv.

They match by group, source and tag. All groups share one communicator, since a group may be new to all ranks except the
two that communicate: MPI matches source and communicator, and a message for a later receive is kept here.
"""

from __future__ import annotations

import struct
import threading
from bisect import insort
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist import layout
from hpcdist.errors import HpcdistError
from hpcdist.layout import limits
from hpcdist.tensors import accelerator
from hpcdist.tensors.storage import of_bytes

_HEAD = struct.Struct("<qqqq")  # the group's key, the tag, the message's number, the bytes of its content
_NOT_YET = 0xFF  # each byte of a head that has not arrived: as a number of bytes it is invalid
INLINE = 2**16  # bytes of content sent with the envelope at most: messages that wait for a receive take memory


def start(comm: MPI.Intracomm, sends: list[tuple[int, Tensor]], recvs: list[tuple[int, Tensor]]) -> list[MPI.Request]:
    """Start to exchange messages. A pair of ranks may exchange several, which arrive in order."""
    # MPI keeps the order of messages between two ranks: pieces need no tags.
    requests = [comm.Irecv(piece, source, 0) for source, block in recvs for piece in pieces(memory(block))]
    return requests + [comm.Isend(piece, dest) for dest, block in sends for piece in pieces(memory(block))]


def memory(message: Tensor) -> Any:
    """Return the memory of a message as an mpi4py buffer; on a GPU, after pending work on it."""
    if not message.is_cpu:
        accelerator.synchronize(message.device)
    return MPI.buffer.fromaddress(message.data_ptr(), message.nbytes)


def pieces(memory: Any, most: int | None = None) -> list[list[Any]]:
    """Cut an mpi4py buffer into what one message may hold, or into `most` bytes each; an empty one is one piece."""
    ranges = layout.pieces(len(memory), most or limits.PIECE) or [(0, 0)]
    return [[memory[start : start + length], MPI.BYTE] for start, length in ranges]


class Envelope(NamedTuple):
    """The first part of a message.

    Attributes:
        key, tag: key of the group, and the sender's tag.
        number: number by which the sender identifies the content.
        source: the world's rank of the sender.
        nbytes: length of the content.
        serial: position among the messages that have arrived.
        content: the content itself; None if it follows separately.
    """

    key: int
    tag: int
    number: int
    source: int
    nbytes: int
    serial: int
    content: Tensor | None


def with_envelope(key: int, tag: int, number: int, content: Tensor) -> list[Tensor]:
    """Return the messages for a content: the envelope with the content, or the envelope and then the content."""
    inline = content.numel() <= INLINE
    envelope = torch.empty(_HEAD.size + inline * content.numel(), dtype=torch.uint8, device="cpu")
    envelope[: _HEAD.size] = of_bytes(_HEAD.pack(key, tag, number, content.numel()))
    if not inline:
        return [envelope, content]
    envelope[_HEAD.size :] = content
    return [envelope]


class Unexpected:
    """The messages that have arrived, and that no receive has taken yet; for any number of threads.

    If a signal's handler raises here, no message is lost or duplicated.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        self._of_key: dict[int, list[Envelope]] = {}
        self._coming: tuple[Tensor, int, int] | None = None  # message being received, its source and serial
        self._count = 0

    def take(self, key: int, source: int | None, tag: int | None, taken: list[Envelope]) -> bool:
        """Move the first message of a group from `source` with `tag`, None being any, to `taken`, if one has arrived.

        Messages of one rank are taken in their order.

        Raises:
            HpcdistError: if a damaged message has arrived.
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
        """Undo take(), for another receive."""
        with self._lock:
            waiting = self._of_key.setdefault(envelope.key, [])
            if envelope.serial not in [other.serial for other in waiting]:
                insort(waiting, envelope, key=lambda other: other.serial)

    def drop(self, key: int) -> None:
        """Drop the messages of a group that has ended."""
        with self._lock:
            if self._comm != MPI.COMM_NULL:
                self._receive()
            self._of_key.pop(key, None)

    def _receive(self) -> None:
        """Receive all messages that have arrived."""
        status = MPI.Status()
        self._keep()
        while self._comm.Iprobe(MPI.ANY_SOURCE, 0, status):
            content = torch.empty(status.Get_elements(MPI.BYTE), dtype=torch.uint8, device="cpu")
            content[: _HEAD.size] = _NOT_YET
            self._count += 1
            self._coming = content, status.Get_source(), self._count
            self._comm.Recv([memory(content), MPI.BYTE], status.Get_source(), 0)
            self._keep()

    def _keep(self) -> None:
        """Keep the message being received, once it has arrived."""
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
        raise HpcdistError("HD901", f"a message of rank {source} is damaged: it has {message.numel()} bytes")
    key, tag, number, nbytes = _HEAD.unpack(message[: _HEAD.size].numpy().tobytes())
    content = message[_HEAD.size :]
    if nbytes < 0 or (nbytes <= INLINE and content.numel() != nbytes):
        raise HpcdistError(
            "HD901", f"a message of rank {source} is damaged: {content.numel()} bytes, {nbytes} announced"
        )
    return Envelope(key, tag, number, source, nbytes, serial, content if nbytes <= INLINE else None)
