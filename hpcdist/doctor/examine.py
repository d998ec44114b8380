"""Examine a job: the steps of the examination, in order, on every rank.

The facts of a rank: rank, id, node (its lowest rank), host, environ; what gather() of each module returns; reach,
pairs, staging and sees_lock on one rank of each node; quotas on rank 0; sees, sees_current, worker, init, file,
cuda_aware, routes and nccl_network. `python -m hpcdist.doctor --json` prints them.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcdist import staging
from hpcdist.control import objects
from hpcdist.doctor import (
    cores,
    fabric,
    files,
    filesystems,
    gpus,
    launch,
    limits,
    links,
    network,
    quotas,
    software,
    timing,
)
from hpcdist.doctor.findings import Facts, Finding
from hpcdist.doctor.supervisor import Line, Outcome
from hpcdist.doctor.topics import Ranks, Section, Verdict, each, error_of, topic
from hpcdist.routes.cuda_aware import mpi_takes_gpu_memory
from hpcdist.runtime import world
from hpcdist.runtime.cli import ranks_text
from hpcdist.runtime.world import World
from hpcdist.runtime.world import environ as variables

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["SECTIONS", "examine", "judge", "judge_all", "judge_end"]

# Stages in which a rank may hang alone: name, and what may help.
_STAGING_FOLDER = "staging folder", "a file system that does not respond: df FOLDER; export HPCDIST_STAGING=another"
_BEFORE_MPI = ("ulimit -n", "TMPDIR", "/dev/shm")  # why MPI or init() may fail
_CURRENT_FOLDER = "current folder", "a file system that does not respond: df .; cd to another folder"


def examine(line: Line, facts: Facts, folder: str | None, first: bool, limit: float) -> None:
    """Examine this rank, and the job if MPI connects the ranks. Runs in a process of its own.

    Args:
        facts: facts of this rank, to be completed.
        folder: staging folder; None for the default.
        first: whether this process examines its node if MPI does not connect the ranks.
        limit: seconds for each step that may hang.
    """
    temporary = facts["environ"].get("TMPDIR") or "/tmp"
    line.stage("this rank's limits", f"a file system that does not respond: df {temporary} /dev/shm")
    facts.update(**limits.gather(), **files.before_mpi(temporary))
    line.facts([facts])
    comm = launch.start_mpi(line, facts)
    joined = comm is not None and not facts["mpi"]["alone"]
    if not joined and not first:
        return
    _gather(line, facts)
    if comm is None or not joined:
        line.stage(*_STAGING_FOLDER)
        facts["staging"] = files.try_folder(folder or world.staging_folder(1))
        _ask_quotas(facts)
        line.facts([facts])
        return
    _examine_job(line, comm, facts, folder, limit)
    line.stage("MPI_Finalize", "look at the findings about MPI", together=True)
    from mpi4py import MPI

    MPI.Finalize()


def _gather(line: Line, facts: Facts) -> None:
    """Collect what this rank knows by itself."""
    line.stage("this rank's software", "a file system that does not respond: df on that node")
    facts.update(**software.gather(facts["node"] == facts["rank"]), **filesystems.gather())
    line.stage("this rank's hardware", "look at nvidia-smi and dmesg on that node")
    facts.update(**cores.gather(), **gpus.gather())
    facts.update(**network.gather(), **fabric.gather(), **files.gather())
    line.facts([facts])


def _examine_job(line: Line, comm: MPI.Intracomm, facts: Facts, folder: str | None, limit: float) -> None:
    """Examine what the ranks do together. Collective over `comm`."""
    everyone = _share(line, comm, facts)
    nodes = len({other["node"] for other in everyone})
    leads = facts["node"] == facts["rank"]
    leaders = comm.Split(0 if leads else 1, comm.rank)
    assert isinstance(leaders, type(comm))
    if leads and nodes > 1:
        line.stage("network", "look for a firewall between the nodes", together=True)
        facts["reach"] = network.reach(leaders, facts)
        line.stage(
            "links between nodes", "name the network to MPI; look for a firewall between the nodes", together=True
        )
        facts["pairs"] = links.measure(leaders, facts)
    leaders.Free()
    folder = objects.all_gather_object(comm, os.path.abspath(folder or world.staging_folder(nodes)))[0]
    _try_staging(line, comm, facts, folder, leads)
    line.stage("DataLoader workers", "DataLoader(..., multiprocessing_context='forkserver'), or num_workers=0")
    facts["worker"] = software.try_worker()
    everyone = _share(line, comm, facts)
    nccl_log = fabric.log_nccl(variables(), facts)
    here = _start(line, facts, folder, limit)
    everyone = _share(line, comm, facts)
    if here is None or not all("seconds" in other["init"] for other in everyone):
        return
    if any(objects.all_gather_object(here.team.comm, here.device.type == "cuda")):
        line.stage("CUDA-aware MPI", "look at the findings about GPUs", together=True)
        facts["cuda_aware"] = mpi_takes_gpu_memory(here.team)
    if all("error" not in other.get("staging", {}) and other["sees"] for other in everyone):
        facts["file"] = _try_file(line, here)
    timing.gather(line, here, everyone, facts)
    facts["nccl_network"] = fabric.read_nccl_log(nccl_log)
    _share(line, comm, facts)
    line.stage("hpcdist.finalize()", "look at the findings about routes", together=True)
    here.finalize()


def _share(line: Line, comm: MPI.Intracomm, facts: Facts) -> list[Facts]:
    """Return the facts of all ranks, which rank 0 reports even if the next step hangs. Collective."""
    _together(line)
    everyone: list[Facts] = objects.all_gather_object(comm, facts)
    if comm.rank == 0:
        line.facts(everyone)
    return everyone


def _together(line: Line) -> None:
    """Begin a stage in which the ranks wait for each other, after one in which a rank may hang alone."""
    line.stage("all ranks together", "look for a rank that is stopped, or a node that is overloaded", together=True)


def _try_staging(line: Line, comm: MPI.Intracomm, facts: Facts, folder: str, leads: bool) -> None:
    """Write to the folder on one rank of each node; look on all ranks for the file of rank 0. Collective."""
    line.stage(*_STAGING_FOLDER)
    if leads:
        facts["staging"] = files.try_folder(folder)
    if comm.rank == 0:
        _ask_quotas(facts)
    facts["sees"] = _look(line, _STAGING_FOLDER, comm, facts, folder, leads)
    _together(line)
    current = objects.all_gather_object(comm, facts["current"].get("folder"))[0]
    if current not in (None, folder):
        line.stage(*_CURRENT_FOLDER)
        facts["sees_current"] = _look(line, _CURRENT_FOLDER, comm, facts, current, False)


def _ask_quotas(facts: Facts) -> None:
    """Add the quotas at the staging folder and at the current one."""
    staging, current = facts["staging"], facts["mounts"].get("current")
    found = quotas.ask(staging["folder"], staging["mount"])
    if current != staging["mount"]:
        found += quotas.ask(facts["current"].get("folder", ""), current)
    facts["quotas"] = found


def _look(
    line: Line, stage: tuple[str, str], comm: MPI.Intracomm, facts: Facts, folder: str, locks: bool
) -> bool | None:
    """Return whether this rank sees a file that rank 0 makes; if `locks`, note whether it sees a lock. Collective.

    The caller has begun `stage`, in which a rank that hangs in the folder hangs alone; the ranks wait in another one.
    """
    mine = files.put(folder) if comm.rank == 0 else None
    held = files.hold(mine)
    _together(line)
    made = objects.all_gather_object(comm, mine)[0]
    line.stage(*stage)
    seen = files.look(made)
    if locks and facts["node"] != 0:
        facts["sees_lock"] = files.sees_lock(made)
    _together(line)
    comm.Barrier()
    line.stage(*stage)
    if held is not None:
        os.close(held)
    if comm.rank == 0 and made is not None:
        os.unlink(made[0])
    return seen


def _start(line: Line, facts: Facts, folder: str, limit: float) -> World | None:
    """Call hpcdist.init(); return None if it fails. The error is reported even if the other ranks hang."""
    line.stage("hpcdist.init()", "look at the findings about the network", together=True)
    begin = time.perf_counter()
    try:
        here = world.init(timeout=limit, staging=folder)
    except Exception as error:
        facts["init"] = {"error": " ".join(str(error).split()) or type(error).__name__}
        line.facts([facts])
        return None
    device = str(here.device.type)
    facts["init"] = {"seconds": time.perf_counter() - begin, "device": device, "backend": dist.get_backend_config()}
    return here


@topic("hpcdist.init()", "init")
def _init(ranks: Ranks) -> Verdict:
    failed = error_of(ranks, "init")
    if failed is not None:
        return "broken", f"{ranks_text(failed[1])}: {failed[0]}", "see this text, and the findings above"
    seconds = max(facts["init"]["seconds"] for facts in ranks)
    backend = ranks[0]["init"]["backend"]
    devices = each(ranks, lambda facts: str(facts["init"]["device"]))
    return "ok", f"in {seconds:.2f} s; torch.distributed runs {backend}; device {devices}"


SECTIONS = (
    *(
        launch.judge,
        Section("job", _init),
        software.judge,
        cores.judge,
        limits.judge,
        gpus.judge,
        network.judge,
        fabric.judge,
    ),
    *(links.judge, filesystems.judge, files.judge, timing.judge),
)


def judge(ranks: Ranks) -> list[Finding]:
    """Return the findings about the facts of all ranks."""
    return [finding for section in SECTIONS for finding in section(ranks)]


def judge_all(outcome: Outcome) -> list[Finding]:
    """Return also the finding about the end of an examination that has failed."""
    found = judge(outcome.facts)
    reasons = [finding.name for finding in found if finding.name in _BEFORE_MPI and finding.verdict != "ok"]
    first = f"first look at {' and '.join(reasons)}, above" if reasons else None
    return found + [replace(end, fix=first or end.fix) for end in outcome.findings]


def judge_end(outcome: Outcome) -> list[Finding]:
    """Return in one finding what another rank than 0 says, which rank 0 may not know, of its examination's end."""
    names = ("hpcdist.init()", *_BEFORE_MPI)
    reasons = [finding for finding in judge(outcome.facts) if finding.name in names and finding.verdict == "broken"]
    fixes = "; ".join(finding.fix or "" for finding in reasons)
    texts = [f"; {finding.name}: {finding.text}" for finding in reasons]
    return [replace(end, text=end.text + "".join(texts), fix=fixes or end.fix) for end in outcome.findings]


def _try_file(line: Line, here: World) -> dict[str, Any]:
    """Write an HDF5 file with all ranks and read it again. Collective."""
    line.stage("HDF5 file", "OMPI_MCA_io=romio321, or staging.save(writer='posix') without MPI-IO", together=True)
    name = objects.all_gather_object(here.comm, f"{files.PREFIX}{secrets.token_hex(8)}.h5")[0]
    path = os.path.join(here.staging, name)
    shard = torch.arange(1000, device="cpu") + 1000 * here.rank
    begin = time.perf_counter()
    try:
        staging.save(path, {"x": shard})
        if not torch.equal(staging.load(path, "x"), shard):
            return {"error": f"{path}: the data read differ from those written"}
        return {"seconds": time.perf_counter() - begin, "writer": staging.writer()[0]}
    except Exception as error:
        return {"error": " ".join(str(error).split())}
    finally:
        if here.rank == 0:
            with suppress(OSError):
                os.unlink(path)
