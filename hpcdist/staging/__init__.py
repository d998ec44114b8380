"""Save and load tensors larger than any rank's memory: one HDF5 file, written by all ranks at once.

>>> from hpcdist import staging
>>> staging.save("w.h5", {"weight": shard})       # every rank its rows; the file holds the whole tensor
>>> shard = staging.load("w.h5", "weight")        # on any number of ranks, along any dim

``mpirun -n N python -m hpcdist verify FILE`` checks every piece of a file, ``... ls FILE`` lists what it holds.
The format is an ordinary HDF5 file: see :mod:`hpcdist.formats.hdf5`.
"""

from hpcdist.staging import drivers
from hpcdist.staging.load import load
from hpcdist.staging.piecewise import ReadFile, WriteFile, open
from hpcdist.staging.save import save

writer = drivers.active  # last: it has the name of a module

__all__ = ["ReadFile", "WriteFile", "load", "open", "save", "writer"]
