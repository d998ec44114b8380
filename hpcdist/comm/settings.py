"""What :func:`hpcdist.init` has settled for the whole job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch

__all__ = ["ROUTES", "Settings"]

ROUTES = ("auto", "nccl", "gloo", "mpi", "hdf5")
"""What a caller may pass as ``route=``."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What does not change until the world ends.

    Attributes:
        device: where this rank's tensors belong: one GPU a rank, or the CPU.
        own_gpus: every rank has a GPU to itself, and NCCL can be used.
        timeout: the deadline of every call.
        nodes: the number of nodes.
        one_system: all ranks see each other's processes: one node, and no containers with their own numbers.
        node_of, memory: of each rank of the world, the index of its node, and its memory.capacity().
        staging: the folder through which route "hdf5" moves data; rank 0's is used.
        child_environ: the environment for a child process that runs MPI on its own, outside the job.
    """

    device: torch.device
    own_gpus: bool
    timeout: timedelta
    nodes: int
    one_system: bool
    node_of: tuple[int, ...] = field(repr=False)
    memory: tuple[tuple[int, int], ...] = field(repr=False)
    staging: str
    child_environ: Mapping[str, str] = field(repr=False)
