"""Detect whether the MPI library is CUDA-aware, by a trial, since there is no reliable query."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpcdist.tensors import accelerator

if TYPE_CHECKING:
    from hpcdist.comm.team import Team

__all__ = ["mpi_takes_gpu_memory"]

_SECONDS = 60  # for a child process that imports torch, opens the GPU and sends itself a message

# A library that is not CUDA-aware reads the device pointer as a host address, and the process dies.
_TRIAL = """
import sys
import torch
from mpi4py import MPI
sent = torch.arange(1 << 20, dtype=torch.int32, device=sys.argv[1])
received = torch.zeros_like(sent)
torch.accelerator.synchronize()
memory = [MPI.buffer.fromaddress(t.data_ptr(), t.numel() * 4) for t in (sent, received)]
MPI.COMM_SELF.Sendrecv([memory[0], MPI.BYTE], 0, 0, [memory[1], MPI.BYTE], 0, 0)
torch.accelerator.synchronize()
raise SystemExit(0 if torch.equal(sent, received) else 1)
"""


def mpi_takes_gpu_memory(team: Team) -> bool:
    """Return whether the MPI library of every rank accepts device pointers. Collective; one trial per team.

    Returns:
        The same answer on all ranks. One rank of each node runs the trial in a child process.
    """
    from mpi4py import MPI

    if team.cuda_aware is None:
        node = team.comm.Split_type(MPI.COMM_TYPE_SHARED)
        works = array("b", [node.rank != 0 or _try(team.settings.child_environ)])
        node.Free()
        team.comm.Allreduce(MPI.IN_PLACE, [works, MPI.SIGNED_CHAR], op=MPI.MIN)
        team.cuda_aware = bool(works[0])
    return team.cuda_aware


def _try(environ: Mapping[str, str]) -> bool:
    try:
        child = subprocess.run(
            [sys.executable, "-c", _TRIAL, accelerator.KIND],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False
    return child.returncode == 0
