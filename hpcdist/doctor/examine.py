"""The examination of a job: what is asked, in which order, on every rank.

The facts of a rank: rank, node (its lowest rank), host, environ; mpi, cores, gpu, shm, hdf5, interfaces, as the modules
of these names gather them; reach and staging on one rank of each node; sees, file and cuda_aware.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpcdist import staging, world
from hpcdist.doctor import cores, files, gpus, launch, network, timing
from hpcdist.doctor.findings import Facts, Finding
from hpcdist.doctor.ward import Line
from hpcdist.errors import reason
from hpcdist.routes.cuda_aware import mpi_takes_gpu_memory
from hpcdist.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["examine", "judge"]


def examine(line: Line, facts: Facts, folder: str | None, first: bool, limit: float) -> None:
    """Examine this rank, and the job as far as the ranks come together. In a process of its own.

    Args:
        facts: what is known of this rank; more comes to it.
        folder: for staging, if one is asked for.
        first: this process tells for all if MPI does not join them to one job.
        limit: seconds for what may hang.
    """
    comm = launch.start_mpi(line, facts)
    joined = comm is not None and not facts["mpi"]["alone"]
    if not joined and not first:
        return
    line.stage("this rank's hardware", "look at nvidia-smi and dmesg on that node")
    facts.update(cores.gather(), **gpus.gather(), **network.gather(), **files.gather())
    line.facts([facts])
    if comm is None or not joined:
        facts["staging"] = files.try_folder(folder or world._staging_folder(1))
        line.facts([facts])
        line.found(judge([facts]))
        return
    _examine_job(line, comm, facts, folder, limit)
    line.stage("MPI_Finalize", "look at the findings about MPI", together=True)
    from mpi4py import MPI

    MPI.Finalize()


def judge(ranks: Sequence[Facts]) -> list[Finding]:
    """What the facts of all ranks come to."""
    parts = (launch, cores, gpus, network, files)
    return [finding for part in parts for finding in part.judge(ranks)]


def _examine_job(line: Line, comm: MPI.Intracomm, facts: Facts, folder: str | None, limit: float) -> None:
    """What the ranks do together. Collective over `comm`."""
    line.stage("all ranks together", "look for a rank that is stopped, or a node that is overloaded", together=True)
    everyone = comm.allgather(facts)
    nodes = sorted({other["node"] for other in everyone})
    leads = facts["node"] == facts["rank"]
    leaders = comm.Split(0 if leads else 1, comm.rank)
    if leads and len(nodes) > 1:
        line.stage("network", "look for a firewall between the nodes", together=True)
        facts["reach"] = network.reach(leaders, facts)
    leaders.Free()
    _try_staging(line, comm, facts, folder or world._staging_folder(len(nodes)), leads)
    _tell(line, comm, facts)
    started = _start(line, comm, facts["staging_folder"], limit)
    if isinstance(started, World):
        _try_world(line, started, facts)
        _tell(line, comm, facts)
        rows = timing.gather(line, started)
        line.stage("hpcdist.finalize()", "report it as a bug of hpcdist", together=True)
        started.finalize()
    everyone = _tell(line, comm, facts)
    if comm.rank == 0:
        line.found(judge(everyone))
        line.found([_init_finding(started), *(timing.judge(rows) if isinstance(started, World) else [])])
    else:
        line.found([])


def _tell(line: Line, comm: MPI.Intracomm, facts: Facts) -> list[Facts]:
    """All ranks' facts, for the case that what comes next does not end."""
    line.stage("all ranks together", "look for a rank that is stopped, or a node that is overloaded", together=True)
    everyone = comm.allgather(facts)
    if comm.rank == 0:
        line.facts(everyone)
    return everyone
