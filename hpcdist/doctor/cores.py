"""The cores: which ranks are bound to which, and how many threads compete for them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from hpcdist.doctor.findings import Facts, Finding, by_node, ranks_text

__all__ = ["gather", "judge"]

_YES = ("1", "true", "yes", "y", "enabled")


def gather() -> Facts:
    """The cores that this process may run on, those of the machine, and the threads that torch computes with."""
    return {
        "cores": sorted(os.sched_getaffinity(0)),
        "cpus": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }


def judge(ranks: Sequence[Facts]) -> list[Finding]:
    """All findings about cores and threads."""
    known = [facts for facts in ranks if "cores" in facts]
    return [*_binding(known), *_threads(known)] if known else []


def _binding(ranks: Sequence[Facts]) -> list[Finding]:
    crowds: list[list[Facts]] = []  # ranks that share fewer cores than they are
    for node in by_node(ranks).values():
        places: dict[tuple[int, ...], list[Facts]] = {}
        for facts in node:
            places.setdefault(tuple(facts["cores"]), []).append(facts)
        crowds += [here for cores, here in places.items() if len(here) > len(cores)]
    if not crowds:
        return [Finding("cores", "ok", _places(ranks))]
    crowd = crowds[0]
    cores, cpus = crowd[0]["cores"], crowd[0]["cpus"]
    text = f"{ranks_text(f['rank'] for f in crowd)} on {crowd[0]['host']} share {_cores(cores)}"
    if len(cores) < cpus:
        fix = (
            "a core for each rank: mpirun --bind-to core, srun --cpus-per-task=N --cpu-bind=cores; or look for a "
            "taskset or a container that allows no more"
        )
        return [Finding("cores", "warning", f"{text}, of the {cpus} of this machine", fix)]
    if not all(_yields(facts) for facts in crowd):
        fix = "as many ranks as cores; or export OMPI_MCA_mpi_yield_when_idle=1, or mpirun --oversubscribe"
        return [Finding("cores", "warning", f"{text}, and Open MPI waits there without yielding the core", fix)]
    return [Finding("cores", "ok", f"{text}; a rank that waits yields its core")]


def _places(ranks: Sequence[Facts]) -> str:
    """Where the ranks of each node are bound, the same said once."""
    said: dict[str, list[int]] = {}
    for node in by_node(ranks).values():
        cores = {tuple(facts["cores"]) for facts in node}
        if len(cores) == 1:
            text = f"{len(node)} rank{'s' * (len(node) > 1)} on {_cores(node[0]['cores'])}, not bound to one each"
            if len(node) == 1:
                text = f"1 rank on {_cores(node[0]['cores'])}"
        else:
            text = f"bound to {sum(map(len, cores)) / len(node):g} each"
        said.setdefault(text, []).extend(facts["rank"] for facts in node)
    return "; ".join(text if len(said) == 1 else f"{text} ({ranks_text(where)})" for text, where in said.items())


def _cores(cores: Sequence[int]) -> str:
    return ranks_text(cores).replace("rank", "core")


def _yields(facts: Facts) -> bool:
    """Whether a rank that waits in MPI gives its core to another one. MPICH does."""
    if "Open MPI" not in facts.get("mpi", {}).get("library", ""):
        return True
    environ = facts["environ"]
    default = environ.get("OMPI_MCA_mpi_oversubscribe", "0")  # what mpirun says when it knows
    return environ.get("OMPI_MCA_mpi_yield_when_idle", default).lower() in _YES


def _threads(ranks: Sequence[Facts]) -> list[Finding]:
    most = max(facts["threads"] for facts in ranks)
    for node in by_node(ranks).values():
        cores = len({core for facts in node for core in facts["cores"]})
        threads = sum(facts["threads"] for facts in node)
        if len(node) > 1 and threads > max(cores, len(node)):
            unset = "OMP_NUM_THREADS" not in node[0]["environ"]
            text = f"{len(node)} ranks with {most} threads each on {cores} cores of {node[0]['host']}"
            text += ", because OMP_NUM_THREADS is not set" if unset else ""
            return [Finding("threads", "warning", text, f"export OMP_NUM_THREADS={max(1, cores // len(node))}")]
    return [Finding("threads", "ok", f"torch computes with {most} thread{'s' * (most > 1)} a rank")]
