"""Messages from rank to rank, matched to receives by group, source and tag.

All groups share one communicator, since a group may be new to all ranks but the two that talk: MPI matches source and
communicator, and what comes for another receive is kept here until that one asks for it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.buffers import of_bytes
from hpcdist.errors import HpcdistError

__all__ = ["INLINE", "Envelope", "Unexpected", "bytes_of", "conflict", "sealed"]

_HEAD = struct.Struct("<qqqq")  # the group's key, the tag, the message's number, the bytes of its content
INLINE = 2**16  # bytes of content that travel with the envelope: what nobody has asked for yet takes memory


class Envelope(NamedTuple):
    """What a rank learns first of a message.

    Attributes:
        key, tag: of the group, and what the sender has given.
        number: by which the sender knows what follows.
        source: the world's rank of the sender.
        nbytes: length of the content.
        content: the content itself; None if it follows by itself.
    """

    key: int
    tag: int
    number: int
    source: int
    nbytes: int
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
    """The messages that have come, and that no receive has taken yet; for any number of threads."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        self._of_key: dict[int, list[Envelope]] = {}

    def take(self, key: int, source: int | None, tag: int | None) -> Envelope | None:
        """The first message of a group from `source` with `tag`, None being any; None if there is none yet.

        What one rank has sent comes in its order.

        Raises:
            HpcdistError: something damaged has come.
        """
        with self._lock:
            self._receive()
            waiting = self._of_key.get(key, [])
            for i, envelope in enumerate(waiting):
                if source in (None, envelope.source) and tag in (None, envelope.tag):
                    del waiting[i]
                    if not waiting:
                        del self._of_key[key]
                    return envelope
        return None

    def _receive(self) -> None:
        """Take in all that has come."""
        status = MPI.Status()
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, 0, status)) is not None:
            content = torch.empty(status.Get_elements(MPI.BYTE), dtype=torch.uint8, device="cpu")
            message.Recv([bytes_of(content), MPI.BYTE])
            envelope = _opened(content, status.Get_source())
            self._of_key.setdefault(envelope.key, []).append(envelope)


def _opened(message: Tensor, source: int) -> Envelope:
    if message.numel() < _HEAD.size:
        raise HpcdistError(f"a message of rank {source} is damaged: it has {message.numel()} bytes")
    key, tag, number, nbytes = _HEAD.unpack(message[: _HEAD.size].numpy().tobytes())
    content = message[_HEAD.size :]
    if nbytes < 0 or (nbytes <= INLINE and content.numel() != nbytes):
        raise HpcdistError(f"a message of rank {source} is damaged: {content.numel()} bytes, {nbytes} announced")
    return Envelope(key, tag, number, source, nbytes, content if nbytes <= INLINE else None)


def bytes_of(x: Tensor) -> Any:
    """The bytes of a tensor in host memory, as mpi4py takes them: a request keeps them, and the tensor, alive."""
    return x.numpy()


def conflict(one: Sequence[int | None], other: Sequence[int | None]) -> bool:
    """Whether a message could be taken by two receives that ask for these (key, source, tag), None being any."""
    return all(a == b or a is None or b is None for a, b in zip(one, other, strict=True))
