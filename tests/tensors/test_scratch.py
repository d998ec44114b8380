"""Host memory that is taken again and again."""

from __future__ import annotations

import torch

from hpcdist.tensors.storage import Scratch


def test_memory_is_used_again() -> None:
    scratch, first = Scratch(pinned=False), []
    for shape in ((3, 4), (2, 2), (4, 4)):
        scratch.reset()
        one, other = scratch.take(shape, torch.int16), scratch.take((5,), torch.float64)
        assert (one.shape, one.dtype) == (shape, torch.int16)
        first.append(other.data_ptr())
        x = torch.arange(6).view(2, 3)
        assert scratch.on_host(x) is x
        assert scratch.on_host(x.t()).view(-1).tolist() == [0, 3, 1, 4, 2, 5]
    assert len(set(first)) == 1
