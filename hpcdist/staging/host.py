"""Parts of a tensor in contiguous host memory, one after the other; from and to a GPU through two pinned buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpcdist.layout import Box
from hpcdist.tensors.pinned import Scratch
from hpcdist.tensors.storage import bits

__all__ = ["incoming", "outgoing"]


def outgoing(x: Tensor, parts: Sequence[Box]) -> Iterator[Tensor]:
    """Yield each part of `x` in contiguous host memory, valid until the next one is asked for.

    Views of a CPU tensor where they are contiguous, else one copy. Of a GPU tensor, the next part is copied while the
    caller works on this one.
    """
    if not x.is_cuda:
        scratch = Scratch(pinned=False)
        for part in parts:
            scratch.reset()
            yield scratch.on_host(x[part.slices()])
        return
    buffers = _Pinned(x, parts)
    stream = torch.cuda.current_stream(x.device)
    ready: list[torch.cuda.Event] = []
    for i in range(len(parts) + 1):
        if i < len(parts):
            bits(buffers.part(i)).copy_(bits(x[parts[i].slices()]).contiguous(), non_blocking=True)
            ready.append(stream.record_event())
        if i > 0:
            ready[i - 1].synchronize()
            yield buffers.part(i - 1)


def incoming(out: Tensor, parts: Sequence[Box]) -> Iterator[Tensor]:
    """Yield contiguous host memory for each part of `out`, which is copied there when the caller, having filled it,
    asks for the next. All copies are complete when the iterator ends.

    Views of a CPU tensor where they are contiguous, else one copy. Of a GPU tensor, a part is copied while the caller
    fills the next.
    """
    if not out.is_cuda:
        scratch = Scratch(pinned=False)
        for part in parts:
            scratch.reset()
            target = out[part.slices()]
            buffer = target if target.is_contiguous() else scratch.take(part.shape, out.dtype)
            yield buffer
            if buffer is not target:
                bits(target).copy_(bits(buffer))
        return
    buffers = _Pinned(out, parts)
    stream = torch.cuda.current_stream(out.device)
    free: list[torch.cuda.Event] = []
    for i, part in enumerate(parts):
        if i > 1:
            free[i - 2].synchronize()
        yield buffers.part(i)
        bits(out[part.slices()]).copy_(bits(buffers.part(i)), non_blocking=True)
        free.append(stream.record_event())
    stream.synchronize()


class _Pinned:
    """Two pinned buffers that the parts of a tensor use in turn."""

    def __init__(self, x: Tensor, parts: Sequence[Box]) -> None:
        self._dtype = x.dtype
        self._parts = parts
        size = max((part.size() for part in parts), default=0)
        self._memory = torch.empty((min(2, len(parts)), size), dtype=x.dtype, pin_memory=True, device="cpu")

    def part(self, i: int) -> Tensor:
        """The buffer of part i, in its shape."""
        shape = self._parts[i].shape
        return self._memory[i % 2][: self._parts[i].size()].view(shape)
