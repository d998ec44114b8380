"""Host memory through which data pass on their way: reused, and pinned where a GPU copies from or to it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from hpcdist.tensors.storage import bits

__all__ = ["Scratch"]


class Scratch:
    """Host memory that is used again in every round: new memory costs more than a copy into it."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._held: list[Tensor] = []
        self._next = 0

    def reset(self) -> None:
        """All that was taken is free again."""
        self._next = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Contiguous memory; its contents are not defined."""
        nbytes = prod(shape) * dtype.itemsize
        if self._next == len(self._held):
            self._held.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
        if self._held[self._next].numel() < nbytes:
            self._held[self._next] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned, device="cpu")
        self._next += 1
        return self._held[self._next - 1][:nbytes].view(dtype).view(shape)

    def on_host(self, x: Tensor) -> Tensor:
        """`x` in contiguous host memory: itself where it is, else one copy."""
        if not x.is_cuda and x.is_contiguous():
            return x
        block = self.take(x.shape, x.dtype)
        if x.is_cuda:
            bits(block).copy_(bits(x).contiguous())
        else:
            bits(block).copy_(bits(x))
        return block
