"""Host buffers for data in transit: reused, and pinned where a GPU copies from or to them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from hpcdist.tensors import pool
from hpcdist.tensors.storage import bits

__all__ = ["Scratch"]


class Scratch:
    """Host buffers that are reused in every round: new memory costs more than a copy into it."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._held: list[Tensor] = []
        self._next = 0

    def reset(self) -> None:
        """Make all buffers available again."""
        self._next = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Take a contiguous buffer; its contents are undefined."""
        nbytes = prod(shape) * dtype.itemsize
        if self._next == len(self._held):
            self._held.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
        if self._held[self._next].numel() < nbytes:
            if self._pinned:
                self._held[self._next] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
            else:
                self._held[self._next] = pool.empty([nbytes], torch.uint8, "cpu", fixed=True)
        self._next += 1
        return self._held[self._next - 1][:nbytes].view(dtype).view(shape)

    def on_host(self, x: Tensor) -> Tensor:
        """Return `x` in contiguous host memory: `x` itself if it is already there, else one copy."""
        if not x.is_cuda and x.is_contiguous():
            return x
        block = self.take(x.shape, x.dtype)
        if x.is_cuda:
            bits(block).copy_(bits(x).contiguous())
        else:
            bits(block).copy_(bits(x))
        return block
