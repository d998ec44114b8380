"""The settings that :func:`hpcdist.init` makes for the whole job, and the keywords of public functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import torch

from hpcdist.comm.tuning import Tuned

if TYPE_CHECKING:
    import torch.distributed as dist
    from mpi4py import MPI
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import TypeVar

ROUTES = ("auto", "nccl", "gloo", "mpi", "hdf5")
"""The values of ``route=``."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The values that do not change until the world ends.

    Attributes:
        device: device of this rank's tensors: one GPU per rank, or the CPU.
        own_gpus: whether every rank has a GPU to itself, and NCCL can be used.
        timeout: deadline of every call.
        nodes: number of nodes.
        node_of, memory: index of the node of each rank of the world, and its host_memory.capacity().
        tuned: rules of the file HPCDIST_TUNE, which rank 0 has read.
        staging: folder through which route "hdf5" moves data; rank 0's is used.
        child_environ: environment for a child process that runs MPI on its own, outside the job.
        making_group: makes a context in which gloo and NCCL find their network interfaces.
    """

    device: torch.device
    own_gpus: bool
    timeout: timedelta
    nodes: int
    node_of: tuple[int, ...] = field(repr=False)
    memory: tuple[tuple[int, int], ...] = field(repr=False)
    tuned: Tuned | None = field(repr=False)
    staging: str
    child_environ: Mapping[str, str] = field(repr=False)
    making_group: Callable[[], AbstractContextManager[None]] = field(repr=False)


GroupLike: TypeAlias = "dist.ProcessGroup | MPI.Comm | DeviceMesh"
"""The values of ``group=``."""

if TYPE_CHECKING:
    S = TypeVar("S", Tensor, list[Any], tuple[Any, ...], dict[Any, Any], default=Tensor)
    """A tensor or structure: the result is of the same kind as the argument; a tensor, if that is None."""


class Keywords(TypedDict, total=False):
    """The keywords of every collective on tensors."""

    group: GroupLike | None
    route: str
    out: Tensor | None


class StructureKeywords(Keywords, total=False):
    """Those of a collective that takes structures, too."""

    allow_pickle: bool


class SharedKeywords(StructureKeywords, total=False):
    """Those of a collective whose result the ranks of a node can share."""

    shared: bool
