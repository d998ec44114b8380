"""What the signatures of public functions say: for type checkers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar

if TYPE_CHECKING:
    import torch.distributed as dist
    from mpi4py import MPI
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["GroupLike", "Keywords", "S", "SharedKeywords", "StructureKeywords"]

GroupLike: TypeAlias = "dist.ProcessGroup | MPI.Comm | DeviceMesh"
"""What a caller may pass as ``group=``."""

S = TypeVar("S", list[Any], tuple[Any, ...], dict[Any, Any])
"""A structure: what comes is of the same kind as what was passed."""


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
