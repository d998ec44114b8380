"""The cores: which ranks are bound to which, and how many threads compete for them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from hpcdist.doctor.findings import Facts
from hpcdist.doctor.topics import Ranks, Verdict, by_node, each, grouped, judging, topic
from hpcdist.runtime.cli import plural, ranks_text

__all__ = ["gather", "judge"]

_YES = ("1", "true", "yes", "y", "enabled")


def gather() -> Facts:
    """Collect the cores of this process and of the machine, and the number of torch's threads."""
    return {
        "cores": sorted(os.sched_getaffinity(0)),
        "cpus": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }


@topic("cores", "cores")
def _binding(ranks: Ranks) -> Verdict:
    groups = [group for node in by_node(ranks) for group in grouped(node, lambda facts: tuple(facts["cores"]))]
    crowded = [group for group in groups if len(group) > len(group[0]["cores"])]
    if not crowded:
        return "ok", _places(ranks)
    sharing = crowded[0]
    cores, cpus = sharing[0]["cores"], sharing[0]["cpus"]
    text = f"{ranks_text(f['rank'] for f in sharing)} on {sharing[0]['host']} share {_cores(cores)}"
    if len(cores) < cpus:
        fix = (
            "one core for each rank: mpirun --bind-to core, srun --cpus-per-task=N --cpu-bind=cores; or look for a "
            "taskset or a container that allows no more"
        )
        return "warning", f"{text}, of the {cpus} of this machine", fix
    if not all(_yields(facts) for facts in sharing):
        fix = "as many ranks as cores; or export OMPI_MCA_mpi_yield_when_idle=1, or mpirun --oversubscribe"
        return "warning", f"{text}, and Open MPI waits there without yielding the core", fix
    return "ok", f"{text}; a rank that waits yields its core"


def _places(ranks: Ranks) -> str:
    """Describe the cores that the ranks of each node are bound to."""
    texts = {}
    for node in by_node(ranks):
        cores = {tuple(facts["cores"]) for facts in node}
        text = f"bound to {sum(map(len, cores)) / len(node):g} each"
        if len(cores) == 1:
            text = f"{plural(len(node), 'rank')} on {_cores(node[0]['cores'])}"
            text += ", not bound to one each" if len(node) > 1 else ""
        texts[node[0]["node"]] = text
    return each(ranks, lambda facts: texts[facts["node"]])


def _cores(cores: Sequence[int]) -> str:
    return ranks_text(cores).replace("rank", "core")


def _yields(facts: Facts) -> bool:
    """Whether a rank that waits in MPI yields its core to another one. MPICH does."""
    if "Open MPI" not in facts.get("mpi", {}).get("library", ""):
        return True
    environ = facts["environ"]
    default = environ.get("OMPI_MCA_mpi_oversubscribe", "0")  # set by mpirun if it detects too many ranks
    return environ.get("OMPI_MCA_mpi_yield_when_idle", default).lower() in _YES


@topic("threads", "threads")
def _threads(ranks: Ranks) -> Verdict:
    most = max(facts["threads"] for facts in ranks)
    for node in by_node(ranks):
        cores = len({core for facts in node for core in facts["cores"]})
        threads = sum(facts["threads"] for facts in node)
        if len(node) > 1 and threads > max(cores, len(node)):
            unset = "OMP_NUM_THREADS" not in node[0]["environ"]
            text = f"{len(node)} ranks with {most} threads each on {cores} cores of {node[0]['host']}"
            text += ", because OMP_NUM_THREADS is not set" if unset else ""
            return "warning", text, f"export OMP_NUM_THREADS={max(1, cores // len(node))}"
    return "ok", f"torch computes with {plural(most, 'thread')} a rank"


judge = judging(_binding, _threads)
