"""Checkpoints of torch.distributed.checkpoint (DCP) in one HDF5 file of staging's own format.

>>> import torch.distributed.checkpoint as dcp
>>> from hpcdist.staging.dcp import HDF5Reader, HDF5Writer
>>> dcp.save(state, storage_writer=HDF5Writer("model.h5"))      # each tensor whole, under its name in the state
>>> dcp.load(state, storage_reader=HDF5Reader("model.h5"))      # on any number of ranks, in any placement

DCP plans and agrees through its own process group; these classes use neither MPI nor :func:`hpcdist.init`, so that they
work under any launcher, in a group of some of the ranks, and in the thread of ``dcp.async_save``. Every rank writes its
shards at their place in the file; DCP's coordinator lays the file out and gives it its name when all have finished.
"""

from hpcdist.staging.dcp.reader import HDF5Reader
from hpcdist.staging.dcp.writer import HDF5Writer

__all__ = ["HDF5Reader", "HDF5Writer"]
