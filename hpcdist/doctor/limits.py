"""What the system allows each rank: memory, locked memory, open files."""

from __future__ import annotations

import resource
from pathlib import Path

from hpcdist import cgroups, host_memory
from hpcdist.doctor.findings import Facts
from hpcdist.doctor.topics import Ranks, Section, Verdict, grouped, topic
from hpcdist.runtime.cli import plural, ranks_text, show_bytes

__all__ = ["gather", "judge"]

_LITTLE, _TOO_LITTLE = 2**30, 2**28  # bytes of memory a rank: torch alone takes about a quarter of a GiB
_LOCKED = 2**26  # bytes; with less, InfiniBand registers no buffers
_FILES, _FILES_A_RANK = 256, 4  # open files of a rank: its own and its workers', and its connections to each other rank
_CAP_IPC_LOCK = 14  # linux/capability.h: this process may lock memory beyond the limit


def gather() -> Facts:
    """Collect the memory that this process can have, and its limits; None is unlimited."""
    host = host_memory.capacity()[1]
    folder, limit = min(cgroups.memory(), key=lambda found: found[1], default=(None, host))
    return {
        "memory": {
            "host": host,
            "limit": limit if limit < host else None,
            "group": str(folder) if folder and limit < host else None,
            "group_id": cgroups.identity(folder) if folder and limit < host else None,
            "available": host_memory.available(),
        },
        "limits": {
            "locked": _limit(resource.RLIMIT_MEMLOCK),
            "locks_freely": bool(_capabilities() >> _CAP_IPC_LOCK & 1),
            "files": _limit(resource.RLIMIT_NOFILE),
            "most_files": _limit(resource.RLIMIT_NOFILE, 1),
        },
    }


def _limit(which: int, hard: int = 0) -> int | None:
    found = resource.getrlimit(which)[hard]
    return None if found == resource.RLIM_INFINITY else found


def _capabilities() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


@topic("memory", "memory")
def _memory(ranks: Ranks) -> Verdict:
    """Judge the memory that is left for each rank, by the node and by the control groups."""
    fix = "fewer ranks a node; srun --mem=0 (all memory of the node), --mem-per-cpu=4G; docker run --memory=64g"
    verdicts: list[tuple[float, str]] = []
    for group in grouped(ranks, lambda facts: (facts["node"], facts["memory"]["group_id"])):
        first, found = group[0], group[0]["memory"]
        share = min(facts["memory"]["available"] for facts in group) / len(group)
        text = f"{first['host']}: {show_bytes(found['available'])} free of {show_bytes(found['host'])}"
        if found["limit"] is not None:
            text += f", and the control group {found['group']} may have {show_bytes(found['limit'])}"
        verdicts.append((share, f"{text}, for {plural(len(group), 'rank')}"))
    share, text = min(verdicts)
    if share < _TOO_LITTLE:
        return "broken", f"{text}: the kernel ends processes that need more", fix
    if share < _LITTLE:
        return "warning", f"{text}: little for torch and its data", fix
    return "ok", text


@topic("ulimit -l", "limits")
def _locked(ranks: Ranks) -> Verdict:
    """Judge the memory that a process may lock: InfiniBand locks every buffer that it sends from."""
    using = [facts for facts in ranks if facts.get("rdma", {}).get("ports")]
    limited = [f for f in using if f["limits"]["locked"] is not None and not f["limits"]["locks_freely"]]
    if not limited:
        return "ok", "enough for InfiniBand" if using else "no InfiniBand, which would need to lock memory"
    least = min(facts["limits"]["locked"] for facts in limited)
    who = ranks_text(facts["rank"] for facts in limited if facts["limits"]["locked"] == least)
    text = f"{who} may lock {show_bytes(least)}, where InfiniBand needs unlimited: "
    fix = (
        "ulimit -l unlimited in the job script; docker run --ulimit memlock=-1; for all jobs: LimitMEMLOCK=infinity of "
        "slurmd.service, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
    )
    if least < _LOCKED:
        return "broken", f"{text}MPI and NCCL cannot register buffers", fix
    return "warning", f"{text}large buffers cannot be registered", fix


@topic("ulimit -n", "limits")
def _files(ranks: Ranks) -> Verdict:
    needed = _FILES + _FILES_A_RANK * len(ranks)
    limits = {facts["rank"]: facts["limits"]["files"] for facts in ranks}
    few = {rank: limit for rank, limit in limits.items() if limit is not None and limit < needed}
    if few:
        least = min(few.values())
        most = {facts["limits"]["most_files"] for facts in ranks}
        hard = "unlimited" if most == {None} else str(min(m for m in most if m is not None))
        count = plural(len(ranks), "rank")
        text = f"{ranks_text(few)} may open {least} files; connections to {count} and the workers of a "
        fix = f"ulimit -n $(ulimit -Hn) in the job script, which is {hard} here; docker run --ulimit nofile=65536"
        return "broken" if least < needed // 2 else "warning", f"{text}DataLoader need about {needed}", fix
    found = [limit for limit in limits.values() if limit is not None]
    return "ok", f"{min(found)} open files" if found else "unlimited"


judge = Section("limits", _memory, _locked, _files)
