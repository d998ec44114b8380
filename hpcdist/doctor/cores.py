"""The cores: which ranks are bound to which, and how many threads compete for them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from hpcdist import cgroups
from hpcdist.doctor.findings import Facts
from hpcdist.doctor.topics import Ranks, Section, Verdict, by_node, each, grouped, topic
from hpcdist.runtime.cli import plural, ranks_text

__all__ = ["gather", "judge", "members", "show_cores"]

_YES = ("1", "true", "yes", "y", "enabled")
_SYSTEM = Path("/sys/devices/system")
_BIND = "srun --cpus-per-task=N --cpu-bind=cores, mpirun --bind-to core --map-by slot:PE=N"


def gather() -> Facts:
    """Collect the cores of this process and of the machine, and the number of torch's threads.

    "cores" are the CPUs of the kernel: hardware threads. "physical" has the lowest hardware thread of each of their
    physical cores, "numa" their NUMA domains, and "domains" the number of hardware threads of each domain.
    """
    cores = sorted(os.sched_getaffinity(0))
    limits = sorted(cgroups.cpus(), key=lambda found: found[1])
    domains = _domains()
    of_core = {core: domain for domain, inside in domains.items() for core in inside}
    return {
        "cores": cores,
        "cpus": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "physical": sorted({_physical(core) for core in cores}),
        "numa": sorted({of_core.get(core, 0) for core in cores}),
        "domains": {str(domain): len(inside) for domain, inside in domains.items()},
        "cpu_quota": limits[0][1] if limits else None,
        "cpu_group": str(limits[0][0]) if limits else None,
        "cpu_group_id": cgroups.identity(limits[0][0]) if limits else None,
    }


def _physical(core: int) -> int:
    try:
        siblings = members((_SYSTEM / f"cpu/cpu{core}/topology/thread_siblings_list").read_text())
    except OSError:  # such as a container that hides it
        siblings = []
    return min(siblings, default=core)


def _domains() -> dict[int, list[int]]:
    """Return the CPUs of each NUMA domain that has some."""
    found = {}
    for folder in (_SYSTEM / "node").glob("node[0-9]*"):
        with suppress(OSError):
            found[int(folder.name[4:])] = members((folder / "cpulist").read_text())
    return {domain: inside for domain, inside in sorted(found.items()) if inside}


def members(text: str) -> list[int]:
    """Return the numbers of a list of the kernel's.

    Example::

        >>> members("0-2,8")
        [0, 1, 2, 8]
    """
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def show_cores(cores: Sequence[int]) -> str:
    """Return cores as text, such as "cores 0-3"."""
    return ranks_text(cores).replace("rank", "core")


def _bound(node: Ranks) -> list[list[Facts]]:
    """Return the ranks of a node in groups of equal cores."""
    return grouped(node, lambda facts: tuple(facts["cores"]))


@topic("cores", "cores")
def _binding(ranks: Ranks) -> Verdict:
    groups = [group for node in by_node(ranks) for group in _bound(node)]
    crowded = [group for group in groups if len(group) > len(group[0]["cores"])]
    if not crowded:
        return _overlaps(ranks) or ("ok", _places(ranks))
    sharing = crowded[0]
    cores, cpus = sharing[0]["cores"], sharing[0]["cpus"]
    text = f"{ranks_text(f['rank'] for f in sharing)} on {sharing[0]['host']} share {show_cores(cores)}"
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


def _overlaps(ranks: Ranks) -> Verdict:
    """Judge ranks of a node whose cores are neither the same nor disjoint."""
    for node in by_node(ranks):
        owner: dict[int, Facts] = {}
        for group in _bound(node):
            first = group[0]
            other = next((owner[core] for core in first["cores"] if core in owner), None)
            if other is not None:
                common = sorted(set(first["cores"]) & set(other["cores"]))
                names = ranks_text([first["rank"], other["rank"]])
                text = f"{names} on {first['host']} are bound to other cores, but share {show_cores(common)}"
                return "warning", text, f"cores of its own for each rank: {_BIND}; no taskset in the job script"
            owner.update(dict.fromkeys(first["cores"], first))
    return None


def _places(ranks: Ranks) -> str:
    """Describe the cores that the ranks of each node are bound to."""
    texts = {}
    for node in by_node(ranks):
        groups = _bound(node)
        counts = sorted({len(facts["cores"]) for facts in node})
        most = max(map(len, groups))
        text = f"bound to {' or '.join(map(str, counts))} each" + (f", shared by {most}" if most > 1 else "")
        if len(groups) == 1:
            text = f"{plural(len(node), 'rank')} on {show_cores(node[0]['cores'])}"
            text += ", not bound to one each" if len(node) > 1 else ""
        texts[node[0]["node"]] = text
    return each(ranks, lambda facts: texts[facts["node"]])


def _yields(facts: Facts) -> bool:
    """Whether a rank that waits in MPI yields its core to another one. MPICH does."""
    if "Open MPI" not in facts.get("mpi", {}).get("library", ""):
        return True
    environ: Mapping[str, str] = facts["environ"]
    default = environ.get("OMPI_MCA_mpi_oversubscribe", "0")  # set by mpirun if it detects too many ranks
    return environ.get("OMPI_MCA_mpi_yield_when_idle", default).lower() in _YES


@topic("hardware threads", "physical")
def _siblings(ranks: Ranks) -> Verdict:
    """Judge ranks that are bound to different hardware threads of one physical core."""
    for node in by_node(ranks):
        owner: dict[int, Facts] = {}
        for group in _bound(node):
            first = group[0]
            shared = [core for core in first["physical"] if core in owner]
            if shared and not set(owner[shared[0]]["cores"]) & set(first["cores"]):
                other = owner[shared[0]]
                text = f"{ranks_text([first['rank'], other['rank']])} on {first['host']} are bound to hardware threads"
                fix = f"srun --hint=nomultithread --cpu-bind=cores, or --threads-per-core=1; {_BIND.split(', ')[1]}"
                return "warning", f"{text} of the same physical core, that of CPU {shared[0]}", fix
            owner.update(dict.fromkeys(first["physical"], first))
    return "ok", each(ranks, _thread_text)


def _thread_text(facts: Facts) -> str:
    count = len(facts["cores"]) / max(1, len(facts["physical"]))
    return "one a core" if count == 1 else f"{count:g} a physical core"


@topic("NUMA", "numa")
def _numa(ranks: Ranks) -> Verdict:
    """Judge ranks that are bound across NUMA domains though their cores would fit into one."""
    for facts in ranks:
        touched = facts["numa"]
        bound = len(facts["cores"]) < facts["cpus"]
        if bound and len(touched) > 1 and len(facts["cores"]) <= min(facts["domains"][str(d)] for d in touched):
            text = f"rank {facts['rank']} on {facts['host']} has {show_cores(facts['cores'])}, in NUMA domains "
            text += f"{', '.join(map(str, touched))}: half of its memory may be far away"
            return (
                "warning",
                text,
                "srun --distribution=block:block --cpu-bind=cores, mpirun --map-by numa --bind-to core",
            )
    return "ok", each(ranks, lambda facts: plural(max(1, len(facts["domains"])), "domain"))


@topic("CPU quota", "cpus", "threads")
def _quota(ranks: Ranks) -> Verdict:
    """Judge control groups that limit the CPU time of the ranks in them, which torch does not see."""
    limited = [facts for facts in ranks if facts.get("cpu_quota") is not None and facts["cpu_quota"] < facts["cpus"]]
    for group in grouped(limited, lambda facts: (facts["node"], facts["cpu_group_id"])):
        first, quota = group[0], group[0]["cpu_quota"]
        threads = sum(facts["threads"] for facts in group)
        if threads > quota:
            text = (
                f"{plural(len(group), 'rank')} on {first['host']} compute with {plural(threads, 'thread')}, where the "
            )
            text += f"control group {first['cpu_group']} allows the time of {quota:g} of {first['cpus']} CPUs: the "
            text += "kernel stops them for a part of every 100 ms"
            fix = f"export OMP_NUM_THREADS={max(1, int(quota / len(group)))}; for more: docker run --cpus=N, kubectl "
            return "warning", text, f"{fix}limits.cpu, srun --cpus-per-task=N"
    if not limited:
        return "ok", "no control group limits the CPU time"
    return "ok", f"the time of {min(facts['cpu_quota'] for facts in limited):g} CPUs, enough for all threads"


@topic("threads", "threads", "physical")
def _threads(ranks: Ranks) -> Verdict:
    most = max(facts["threads"] for facts in ranks)
    for node in by_node(ranks):
        cores = len({core for facts in node for core in facts["cores"]})
        physical = len({core for facts in node for core in facts["physical"]})
        threads = sum(facts["threads"] for facts in node)
        if len(node) > 1 and threads > max(physical, len(node)):
            unset = "OMP_NUM_THREADS" not in node[0]["environ"]
            text = f"{len(node)} ranks with {most} threads each on {physical} cores of {node[0]['host']}"
            text += f" ({cores} hardware threads)" if physical < cores else ""
            text += ", because OMP_NUM_THREADS is not set" if unset else ""
            return "warning", text, f"export OMP_NUM_THREADS={max(1, physical // len(node))}"
    return "ok", f"torch computes with {plural(most, 'thread')} a rank"


judge = Section("cores", _binding, _siblings, _numa, _quota, _threads)
