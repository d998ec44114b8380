"""MPI-launched PyTorch: start torch.distributed from an MPI job; gather, concat, split and stage ragged tensors.

Importing this package starts no MPI and reads no environment; :func:`init` does.
"""

from hpcdist import staging
from hpcdist.concat import concat
from hpcdist.errors import FileError, HpcdistError, LaunchError, RankError
from hpcdist.gather import gather
from hpcdist.handle import Handle
from hpcdist.layout import Block, Box, Boxes, Layout, Replicate, Split
from hpcdist.redistribute import Plan, local, plan_redistribute, redistribute
from hpcdist.split import split
from hpcdist.world import World, current, finalize, init

__all__ = [
    "Block",
    "Box",
    "Boxes",
    "FileError",
    "Handle",
    "HpcdistError",
    "LaunchError",
    "Layout",
    "Plan",
    "RankError",
    "Replicate",
    "Split",
    "World",
    "concat",
    "current",
    "finalize",
    "gather",
    "init",
    "local",
    "plan_redistribute",
    "redistribute",
    "split",
    "staging",
]
__version__ = "0.1.0"
