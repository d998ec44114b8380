"""docs/do/data-loader.md says how far samples are apart with keep="file"."""

from pathlib import Path

import numpy as np
import pytest

from hpcdist.data.sampler import Order

PAGE = (Path(__file__).parents[2] / "docs" / "do" / "data-loader.md").read_text()


@pytest.mark.parametrize("window", [2, 4, 16, None])
def test_the_mean_distance_of_consecutive_samples(window):
    """(1 - 1/W) n/3, with W of 128 blocks in a window; n/3 with all blocks in their own order."""
    assert "on average (1 - 1/W) n/3 apart; n/3 in a permutation." in " ".join(PAGE.split())
    order, n = Order(np.arange(0, 6401, 50), window, (0, 0)), 6400
    samples = order(np.arange(n))
    assert sorted(samples.tolist()) == list(range(n))
    found = np.abs(np.diff(samples)).mean()
    assert found == pytest.approx((1 - 1 / (window or np.inf)) * n / 3, rel=0.05)
