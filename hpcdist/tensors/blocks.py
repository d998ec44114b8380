"""Blocks of a tensor, one message per rank: the boxes of each message, and where they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.layout import Box
from hpcdist.layout.box import Shards, summed
from hpcdist.tensors import pool
from hpcdist.tensors.storage import copyable


class Blocks:
    """The boxes of a tensor that each rank sends or receives, as one message per rank.

    Args:
        shape: shape of the tensor.
        boxes: for each rank, the boxes of the tensor in its message.
        dtype: dtype of the tensor.

    Attributes:
        counts, displs: size and offset in bytes of each message if all are packed in rank order.
        nbytes: total size of all messages.
    """

    def __init__(self, shape: Sequence[int], boxes: Sequence[Sequence[Box]], dtype: torch.dtype) -> None:
        self.shape, self.boxes, self.dtype = tuple(shape), boxes, dtype
        self.counts = [dtype.itemsize * sum(prod(box.shape) for box in message) for message in boxes]
        self.displs = layout.displs(self.counts)
        self.nbytes = sum(self.counts)

    @cached_property
    def in_place(self) -> list[int] | None:
        """Offset in bytes of each message in a contiguous tensor if each is one run of its memory, else None."""
        offsets, whole = [], layout.whole(self.shape)
        for boxes, count in zip(self.boxes, self.counts, strict=True):
            start = layout.run_start(boxes[0], whole) if count else 0
            if start is None or (count and len(boxes) > 1):
                return None
            offsets.append(start * self.dtype.itemsize)
        return offsets

    def displs_in(self, messages: Tensor, x: Tensor) -> list[int]:
        """Return the offset of each message in `messages`, which is `x` itself or a buffer of packed messages."""
        return self.in_place if messages is x and self.in_place is not None else self.displs

    def buffer(self, x: Tensor) -> Tensor:
        """Return memory for the messages: `x` itself if each is one run of it, else a new buffer to pack them."""
        if self.in_place is not None and x.is_contiguous():
            return x
        return pool.empty([self.nbytes // x.itemsize], x.dtype, x.device, fixed=True)

    def pack(self, x: Tensor) -> Tensor:
        """Return the messages: `x` itself, or one packed copy."""
        messages = self.buffer(x)
        if messages is not x:
            for part, box in self._pairs(messages):
                part.copy_(copyable(x[box.slices()]))
        return messages

    def unpack(self, messages: Tensor, x: Tensor) -> None:
        """Copy the messages into `x`, unless they arrived there."""
        if messages is not x:
            for part, box in self._pairs(messages):
                copyable(x[box.slices()]).copy_(part)

    def add(self, messages: Tensor, x: Tensor) -> None:
        """Add packed messages to `x`; their boxes may overlap."""
        for part, box in self._pairs(messages):
            x[box.slices()].add_(part.to(x.dtype))

    def recv_buffer(self, out: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the tensor (`out`, or new memory) and the memory that receives its messages: the same if possible."""
        if out is not None:
            x = out
        elif self.nbytes < pool.LEAST:  # asked here: this is on the way of every small call
            x = torch.empty(self.shape, dtype=self.dtype, device=device)
        else:
            x = pool.empty(self.shape, self.dtype, device)
        return x, self.buffer(x)

    def _pairs(self, messages: Tensor) -> list[tuple[Tensor, Box]]:
        """Return (the part of the packed messages, its box in the tensor) for all boxes."""
        every = [box for boxes in self.boxes for box in boxes if box.size()]
        parts = torch.split(copyable(messages), [box.size() for box in every]) if every else ()
        return [(part.view(box.shape), box) for part, box in zip(parts, every, strict=True)]


@lru_cache(maxsize=256)
def blocks(shape: tuple[int, ...], dim: int, extents: tuple[int, ...], dtype: torch.dtype) -> Blocks:
    """Cut a tensor along `dim` into one block per rank; cached for repeated calls.

    Args:
        shape: shape of a block; the entry at `dim` is ignored.
        extents: extent of each rank's block along `dim`.
    """
    shape = (*shape[:dim], sum(extents), *shape[dim + 1 :])
    return Blocks(shape, [[box] for box in Shards(shape, dim, summed(extents))], dtype)
