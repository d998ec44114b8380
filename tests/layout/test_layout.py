"""Who holds which rows: integers only."""

import pytest
import torch

from hpcdist import layout


@pytest.mark.parametrize("extent", [0, 1, 2, 3, 5, 7, 8, 100, 2**40 + 3])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_block_and_chunk(extent, parts):
    """As numpy and torch cut; beyond their arrays, too."""
    block, chunk = (layout.counts_of(rule, extent, parts) for rule in ("block", "chunk"))
    assert layout.counts_of(None, extent, parts) == block
    assert len(block) == len(chunk) == parts and sum(block) == sum(chunk) == extent
    assert max(block) - min(block) <= 1 and block == sorted(block, reverse=True)
    if extent < 1000:
        lengths = [len(piece) for piece in torch.arange(extent).chunk(parts)]
        assert chunk == lengths + [0] * (parts - len(lengths))
    assert layout.displs(block) == [sum(block[:i]) for i in range(parts)]
