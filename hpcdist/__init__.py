"""MPI-launched PyTorch: start torch.distributed from an MPI job; gather, concat, split and stage ragged tensors.

Importing this package starts no MPI and reads no environment; :func:`init` does.
"""

from hpcdist import staging
from hpcdist.concat import concat
from hpcdist.errors import FileError, HpcdistError, LaunchError, RankError
from hpcdist.gather import gather
from hpcdist.split import split
from hpcdist.world import World, current, finalize, init

__all__ = [
    "FileError",
    "HpcdistError",
    "LaunchError",
    "RankError",
    "World",
    "concat",
    "current",
    "finalize",
    "gather",
    "init",
    "split",
    "staging",
]
__version__ = "0.1.0"
