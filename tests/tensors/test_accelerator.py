"""The kind of accelerator for which torch was built."""

import pytest
import torch

from hpcdist.tensors import accelerator


@pytest.mark.parametrize(
    ("built_for", "kind"),
    [("cuda", ("cuda", "nccl")), ("xpu", ("xpu", "xccl")), ("mps", ("cuda", "nccl")), (None, ("cuda", "nccl"))],
)
def test_kind_and_library(built_for, kind, monkeypatch):
    """Of others, no GPUs are found."""
    device = None if built_for is None else torch.device(built_for)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    assert accelerator.kind() == kind
