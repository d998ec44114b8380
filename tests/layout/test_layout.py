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


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ("blocks", r"expected one of \['block', 'chunk'\], got 'blocks'"),
        ("", "got ''"),
        ([1, 2], r"has 2 entries, expected one for each of 3 ranks"),
        ([], r"has 0 entries, expected one for each of 3 ranks"),
        ([5, -1, 3], r"negative entry: \[5, -1, 3\]"),
        ([1, 2, 3], r"add up to 6, expected 7"),
    ],
)
def test_counts_that_do_not_fit(counts, told):
    with pytest.raises(ValueError, match=told):
        layout.counts_of(counts, 7, 3)


@pytest.mark.parametrize("extent", [0, 1, 6, 7, 8, 100])
@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_pieces_cover_everything_once(extent, limit):
    pieces = layout.pieces(extent, limit)
    assert [row for start, length in pieces for row in range(start, start + length)] == list(range(extent))
    assert all(0 < length <= limit for _, length in pieces)
