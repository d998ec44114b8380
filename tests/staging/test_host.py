"""Parts of a tensor in host memory; the way of GPU memory with everything of CUDA played by the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from cases import whole_of

from hpcdist import layout
from hpcdist.staging import pieces


class Stream:
    """A stream whose copies are done when an event that was recorded behind them is waited for."""

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record_event(self) -> Any:
        return mock.Mock(synchronize=self.synchronize)

    def synchronize(self) -> None:
        for target, source in self.pending:
            self.copy(target, source)
        self.pending.clear()

    copy = staticmethod(torch.Tensor.copy_)


@pytest.fixture
def cuda() -> Iterator[Stream]:
    """Every tensor claims to be on a GPU, and copies that need not block are late."""
    stream, empty = Stream(), torch.empty

    def late(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            stream.pending.append((target, source))
            return target
        return Stream.copy(target, source)

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    with (
        mock.patch.object(torch.Tensor, "is_cpu", property(lambda x: False)),
        mock.patch.object(torch.Tensor, "copy_", late),
        mock.patch.object(torch.accelerator, "current_stream", return_value=stream),
        mock.patch.object(torch, "empty", unpinned),
    ):
        yield stream


@pytest.mark.parametrize("limit", [1, 5, 100])
@pytest.mark.parametrize("strided", [False, True])
def test_from_and_to_gpu_memory(limit: int, strided: bool, cuda: Stream) -> None:
    whole, memory = whole_of((5, 4), torch.int32), set()
    x, out = (
        (whole.t().contiguous().t(), torch.zeros_like(whole.t()).t()) if strided else (whole, whole.clone().zero_())
    )
    parts = list(layout.boxes(layout.whole(whole.shape), limit))
    for part, got, into in zip(parts, pieces.outgoing(x, parts), pieces.incoming(out, parts), strict=True):
        assert got.tolist() == whole[part.slices()].tolist()  # at the time, and before the next one is asked for
        assert got.is_contiguous()
        memory.add(got.data_ptr())
        into.view(-1)[:] = got.reshape(-1)
    assert out.tolist() == whole.tolist()
    assert len(memory) == min(2, len(parts))
    assert list(pieces.outgoing(x, [])) == list(pieces.incoming(x, [])) == []
