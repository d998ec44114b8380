"""Parts of a tensor in host memory; the way of GPU memory with everything of CUDA played by the host."""

from unittest import mock

import pytest
import torch
from cases import whole_of

from hpcdist import layout
from hpcdist.staging import pieces


class Stream:
    """A stream whose copies are done when an event that was recorded behind them is waited for."""

    def __init__(self):
        self.pending = []

    def record_event(self):
        return mock.Mock(synchronize=self.synchronize)

    def synchronize(self):
        for target, source in self.pending:
            self.copy(target, source)
        self.pending.clear()

    copy = staticmethod(torch.Tensor.copy_)


@pytest.fixture
def cuda():
    """Every tensor claims to be on a GPU, and copies that need not block are late."""
    stream, empty = Stream(), torch.empty

    def late(target, source, non_blocking=False):
        if non_blocking:
            stream.pending.append((target, source))
            return target
        return Stream.copy(target, source)

    def unpinned(*args, pin_memory=False, **kwargs):
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
def test_from_and_to_gpu_memory(limit, strided, cuda):
    whole, memory = whole_of((5, 4), torch.int32), set()
    x = whole.t().contiguous().t() if strided else whole
    out = torch.zeros_like(x)
    parts = list(layout.boxes(layout.whole(whole.shape), limit))
    for part, got, into in zip(parts, pieces.outgoing(x, parts), pieces.incoming(out, parts), strict=True):
        assert got.tolist() == whole[part.slices()].tolist()  # at the time, and before the next one is asked for
        assert got.is_contiguous()
        memory.add(got.data_ptr())
        into.view(-1)[:] = got.reshape(-1)
    assert out.tolist() == whole.tolist()
    assert len(memory) == min(2, len(parts))
    assert list(pieces.outgoing(x, [])) == list(pieces.incoming(x, [])) == []
