"""The examination of a job: what is asked, in which order, on every rank.

The facts of a rank: rank, node (its lowest rank), host, environ; mpi, cores, gpu, shm, hdf5, interfaces, as the modules
of these names gather them; reach and staging on one rank of each node; sees, init, file and cuda_aware.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from hpcdist import staging
from hpcdist.control import objects
from hpcdist.doctor import cores, files, gpus, launch, network, timing
from hpcdist.doctor.findings import Facts, Finding, by_value, each, ranks_text
from hpcdist.doctor.supervisor import Line
from hpcdist.routes.cuda_aware import mpi_takes_gpu_memory
from hpcdist.runtime import world
from hpcdist.runtime.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["examine", "judge", "started"]


def judge(ranks: Sequence[Facts]) -> list[Finding]:
    """What the facts of all ranks come to."""
    parts = (launch, cores, gpus, network, files)
    return [*(finding for part in parts for finding in part.judge(ranks)), *started(ranks)]


def examine(line: Line, facts: Facts, folder: str | None, first: bool, limit: float) -> None:
    """Examine this rank, and the job as far as the ranks come together. In a process of its own.

    Args:
        facts: what is known of this rank; more comes to it.
        folder: for staging, if one is asked for.
        first: this process tells for all, if MPI does not join them to one job.
        limit: seconds for what may hang.
    """
    comm = launch.start_mpi(line, facts)
    joined = comm is not None and not facts["mpi"]["alone"]
    if not joined and not first:
        return
    line.stage("this rank's hardware", "look at nvidia-smi and dmesg on that node")
    facts.update(**cores.gather(), **gpus.gather(), **network.gather(), **files.gather())
    line.facts([facts])
    if comm is None or not joined:
        _stage_folder(line)
        facts["staging"] = files.try_folder(folder or world.staging_folder(1))
        line.facts([facts])
        return
    _examine_job(line, comm, facts, folder, limit)
    line.stage("MPI_Finalize", "look at the findings about MPI", together=True)
    from mpi4py import MPI

    MPI.Finalize()


def _examine_job(line: Line, comm: MPI.Intracomm, facts: Facts, folder: str | None, limit: float) -> None:
    """What the ranks do together. Collective over `comm`."""
    everyone = _tell(line, comm, facts)
    nodes = len({other["node"] for other in everyone})
    leads = facts["node"] == facts["rank"]
    leaders = comm.Split(0 if leads else 1, comm.rank)
    assert isinstance(leaders, type(comm))
    if leads and nodes > 1:
        line.stage("network", "look for a firewall between the nodes", together=True)
        facts["reach"] = network.reach(leaders, facts)
    leaders.Free()
    folder = objects.all_gather_object(comm, os.path.abspath(folder or world.staging_folder(nodes)))[0]
    _try_staging(line, comm, facts, folder, leads)
    everyone = _tell(line, comm, facts)
    here = _start(line, facts, folder, limit)
    everyone = _tell(line, comm, facts)
    if here is None or not all("seconds" in other["init"] for other in everyone):
        return
    if any(objects.all_gather_object(here.team.comm, here.device.type == "cuda")):
        line.stage("CUDA-aware MPI", "look at the findings about GPUs", together=True)
        facts["cuda_aware"] = mpi_takes_gpu_memory(here.team)
    if all("error" not in other.get("staging", {}) and other["sees"] for other in everyone):
        facts["file"] = _try_file(line, here)
    _tell(line, comm, facts)
    rows = timing.gather(line, here)
    if here.rank == 0:
        line.found(timing.judge(rows))
    line.stage("hpcdist.finalize()", "look at the findings about routes", together=True)
    here.finalize()


def _tell(line: Line, comm: MPI.Intracomm, facts: Facts) -> list[Facts]:
    """The facts of all ranks; rank 0 has them told even if what comes next does not end. Collective."""
    line.stage("all ranks together", "look for a rank that is stopped, or a node that is overloaded", together=True)
    everyone: list[Facts] = objects.all_gather_object(comm, facts)
    if comm.rank == 0:
        line.facts(everyone)
    return everyone


def _stage_folder(line: Line) -> None:
    line.stage("staging folder", "a file system that does not answer: df FOLDER; export HPCDIST_STAGING=another")


def _try_staging(line: Line, comm: MPI.Intracomm, facts: Facts, folder: str, leads: bool) -> None:
    """One rank of each node writes in the folder; all look whether they see what rank 0 has made. Collective."""
    _stage_folder(line)
    if leads:
        facts["staging"] = files.try_folder(folder)
    made = objects.all_gather_object(comm, files.put(folder) if comm.rank == 0 else None)[0]
    facts["sees"] = files.look(made)
    comm.Barrier()
    if comm.rank == 0 and made is not None:
        os.unlink(made[0])


def _start(line: Line, facts: Facts, folder: str, limit: float) -> World | None:
    """hpcdist.init(), or None if this rank cannot. What it says is kept, whatever the other ranks do."""
    line.stage("hpcdist.init()", "look at the findings about the network", together=True)
    begin = time.perf_counter()
    try:
        here = world.init(timeout=limit, staging=folder)
    except Exception as error:
        facts["init"] = {"error": " ".join(str(error).split()) or type(error).__name__}
        line.facts([facts])
        return None
    device = str(here.device.type)
    facts["init"] = {"seconds": time.perf_counter() - begin, "device": device, "own_gpus": here.settings.own_gpus}
    return here


def started(ranks: Sequence[Facts]) -> list[Finding]:
    """What hpcdist.init() has said."""
    known = [facts for facts in ranks if "init" in facts]
    wrong = by_value([f for f in known if "error" in f["init"]], lambda facts: str(facts["init"]["error"]))
    if wrong:
        text, where = next(iter(wrong.items()))
        fix = "what it says, and the findings above"
        return [Finding("hpcdist.init()", "broken", f"{ranks_text(where)}: {text}", fix)]
    if not known:
        return []
    seconds = max(facts["init"]["seconds"] for facts in known)
    backend = "cpu:gloo,cuda:nccl" if known[0]["init"]["own_gpus"] else "gloo"
    devices = each(known, lambda facts: str(facts["init"]["device"]))
    return [Finding("hpcdist.init()", "ok", f"in {seconds:.2f} s; torch.distributed runs {backend}; device {devices}")]


def _try_file(line: Line, here: World) -> dict[str, Any]:
    """Write an HDF5 file of all ranks' and read it again. Collective."""
    line.stage("HDF5 file", "OMPI_MCA_io=romio321, or staging.save(writer='posix') without MPI-IO", together=True)
    name = objects.all_gather_object(here.comm, f"{files.PREFIX}{secrets.token_hex(8)}.h5")[0]
    path = os.path.join(here.staging, name)
    shard = torch.arange(1000, device="cpu") + 1000 * here.rank
    begin = time.perf_counter()
    try:
        staging.save(path, {"x": shard})
        if not torch.equal(staging.load(path, "x"), shard):
            return {"error": f"{path}: what was written is not what is read"}
        return {"seconds": time.perf_counter() - begin, "writer": staging.writer()[0]}
    except Exception as error:
        return {"error": " ".join(str(error).split())}
    finally:
        if here.rank == 0:
            with suppress(OSError):
                os.unlink(path)
