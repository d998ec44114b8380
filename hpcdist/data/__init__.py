"""Samples of files as shuffled batches on every rank, each byte read once.

>>> data = hd.data.open("train.h5", fields=["x", "y"])
>>> loader = hd.data.Loader(data, batch_size=64)
>>> for x, y in loader.epoch(0):
...     ...
"""

from hpcdist.data.dataset import Dataset, open
from hpcdist.data.loader import Loader
from hpcdist.data.sampler import Sampler

__all__ = ["Dataset", "Loader", "Sampler", "open"]
