"""A tensor cut into one message a rank: which boxes of it each has, and where they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.layout import Box
from hpcdist.tensors.storage import copyable

__all__ = ["Blocks", "blocks"]


class Blocks:
    """The boxes of a tensor that each rank sends or receives, as one message a rank.

    Args:
        shape: of the tensor.
        boxes: for each rank, the boxes of the tensor that its message consists of.
        dtype: of the tensor.

    Attributes:
        counts, displs: bytes and offset of each message where all are packed in rank order.
        nbytes: bytes of all messages.
        places: the offset of each message in a contiguous tensor, if each is one run of its memory; else None.
    """

    def __init__(self, shape: Sequence[int], boxes: Sequence[Sequence[Box]], dtype: torch.dtype) -> None:
        self.shape, self.boxes, self.dtype = tuple(shape), boxes, dtype
        self.counts = [dtype.itemsize * sum(box.size() for box in of_one) for of_one in boxes]
        self.displs = layout.displs(self.counts)
        self.nbytes = sum(self.counts)
        self.places = self._places()

    def _places(self) -> list[int] | None:
        places = []
        for boxes, count in zip(self.boxes, self.counts, strict=True):
            if not count:
                places.append(0)
                continue
            _, runs, starts = layout.runs(boxes[0], self.shape)
            if len(boxes) > 1 or runs > 1:
                return None
            places.append(next(starts) * self.dtype.itemsize)
        return places

    def displs_in(self, messages: Tensor, x: Tensor) -> list[int]:
        """The offset of each message in `messages`, which is `x` itself or memory in which they are packed."""
        return self.places if messages is x and self.places is not None else self.displs

    def buffer(self, x: Tensor) -> Tensor:
        """Memory for the messages: `x` itself where each is one run of it, else new memory to pack them in."""
        if self.places is not None and x.is_contiguous():
            return x
        return torch.empty(self.nbytes // x.itemsize, dtype=x.dtype, device=x.device)

    def pack(self, x: Tensor) -> Tensor:
        """The messages: `x` itself, or one copy."""
        messages = self.buffer(x)
        if messages is not x:
            for part, box in self._pairs(messages):
                part.copy_(copyable(x[box.slices()]))
        return messages

    def unpack(self, messages: Tensor, x: Tensor) -> None:
        """Copy messages that did not arrive in `x` itself to their places there."""
        if messages is not x:
            for part, box in self._pairs(messages):
                copyable(x[box.slices()]).copy_(part)

    def add(self, messages: Tensor, x: Tensor) -> None:
        """Add packed messages to `x`, where several of them may have a part for one place."""
        for part, box in self._pairs(messages):
            x[box.slices()].add_(part.to(x.dtype))

    def part(self, rank: int, device: torch.device) -> Tensor:
        """New memory for the box of a rank, which has one."""
        return torch.empty(self.boxes[rank][0].shape, dtype=self.dtype, device=device)

    def recv_buffer(self, out: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """The tensor (`out`, or new memory), and memory in which its messages arrive: the same, where that can be."""
        x = torch.empty(self.shape, dtype=self.dtype, device=device) if out is None else out
        return x, self.buffer(x)

    def _pairs(self, messages: Tensor) -> list[tuple[Tensor, Box]]:
        """(the part of the packed messages, the box of the tensor that it is)."""
        every = [box for boxes in self.boxes for box in boxes if box.size()]
        parts = torch.split(copyable(messages), [box.size() for box in every]) if every else ()
        return [(part.view(box.shape), box) for part, box in zip(parts, every, strict=True)]


@lru_cache(maxsize=256)
def blocks(shape: tuple[int, ...], dim: int, extents: tuple[int, ...], dtype: torch.dtype) -> Blocks:
    """A tensor cut along `dim` into one block a rank; made once for calls that repeat.

    Args:
        shape: of a block; its entry at `dim` is ignored.
        extents: the length of each rank's block along `dim`.
    """
    shape = (*shape[:dim], sum(extents), *shape[dim + 1 :])
    boxes = []
    for offset, extent in zip(layout.displs(extents), extents, strict=True):
        start = (0,) * dim + (offset,) + (0,) * (len(shape) - dim - 1)
        boxes.append([Box(start, (*shape[:dim], extent, *shape[dim + 1 :]))])
    return Blocks(shape, boxes, dtype)
