"""The software: the versions on the nodes, the start of Python, TMPDIR, and DataLoader workers under this MPI."""

from __future__ import annotations

import importlib
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any, Literal

import xxhash
from torch.utils.data import DataLoader

from hpcdist.doctor.filesystems import describe
from hpcdist.doctor.findings import Facts
from hpcdist.doctor.topics import Ranks, Section, Verdict, agree, each, error_of, grouped, topic
from hpcdist.errors import reason
from hpcdist.runtime.cli import ranks_text, show_bytes
from hpcdist.versions import __version__

__all__ = ["gather", "judge", "try_worker"]

_PACKAGES = ("numpy", "mpi4py")  # torch, NCCL and h5py have topics of their own
_MIN_TEMPORARY = 2**24  # bytes
_SLOW_START = 30.0  # seconds
_SOCKET = 107  # characters of the path of a socket: linux/un.h, sun_path
_LONGEST = len("/torch-shm-dir-123456/manager.sock")  # what torch and multiprocessing add to TMPDIR
_COPY_ON_FORK = (5, 12)  # the first Linux in which a child does not take pages away that InfiniBand uses
_FORK_SAFE = ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE")
_WORKER_SECONDS = 20
_SAME = "one environment for all nodes, in a folder that they share; load the same modules in the job script"


def gather(leads: bool) -> Facts:
    """Collect the versions of what must be the same on all nodes.

    Args:
        leads: whether this is the lowest rank of its node, which also compares the sources of hpcdist.
    """
    versions = {"Python": platform.python_version(), "hpcdist": __version__}
    versions |= {name: importlib.import_module(name).__version__ for name in _PACKAGES}
    return {
        "versions": versions,
        "sources": _digest() if leads else None,
        "prefix": sys.prefix,
        "kernel": platform.release(),
    }


def _digest() -> str:
    """Return a checksum of the sources of hpcdist: a checkout may change without its version."""
    root = Path(__file__).parent.parent
    checksum = xxhash.xxh3_64()
    for path in sorted(root.rglob("*.py")):
        checksum.update(str(path.relative_to(root)).encode())
        checksum.update(path.read_bytes())
    return checksum.hexdigest()[:8]


def try_worker() -> dict[str, Any]:
    """Read two batches through a DataLoader's worker, forked while MPI runs; return the seconds or the error."""
    begin = time.perf_counter()
    loader: DataLoader[int] = DataLoader(
        range(2),  # type: ignore[arg-type]
        num_workers=1, multiprocessing_context="fork", timeout=_WORKER_SECONDS,
    )  # fmt: skip
    try:
        read = [int(batch) for batch in loader]
    except (RuntimeError, OSError) as error:
        return {"error": reason(error)}
    return {"seconds": time.perf_counter() - begin} if read == [0, 1] else {"error": f"it read {read}, not [0, 1]"}


@topic("versions", "versions")
def _versions(ranks: Ranks) -> Verdict:
    names = list(ranks[0]["versions"])
    differ = [name for name in names if not agree(ranks, lambda facts, name=name: facts["versions"].get(name))]  # type: ignore[misc]
    if differ:
        text = each(ranks, lambda facts: ", ".join(f"{name} {facts['versions'].get(name)}" for name in differ))
        incompatible = "hpcdist" in differ or len({_minor(facts["versions"]["Python"]) for facts in ranks}) > 1
        return "broken" if incompatible else "warning", text, _SAME
    sources = [facts for facts in ranks if facts["sources"] is not None]
    if sources and not agree(sources, lambda facts: facts["sources"]):
        text = each(sources, lambda facts: f"sources {facts['sources']} on {facts['host']}")
        return "broken", f"hpcdist {ranks[0]['versions']['hpcdist']} of different sources: {text}", f"git pull; {_SAME}"
    return "ok", ", ".join(f"{name} {version}" for name, version in ranks[0]["versions"].items())


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


@topic("start of Python", "start", "prefix")
def _start(ranks: Ranks) -> Verdict:
    slowest = max(ranks, key=lambda facts: float(facts["start"]))
    mount = slowest.get("mounts", {}).get("environment")
    where = f"the environment {slowest['prefix']}{f' ({describe(mount)})' if mount else ''}"
    text = f"Python, torch and hpcdist started in {slowest['start']:.1f} s"
    if slowest["start"] < _SLOW_START:
        return "ok", f"{text} from {where}"
    fix = (
        f"a copy on each node: env=$(srun --ntasks-per-node=1 python -m hpcdist.stage_env {slowest['prefix']}); "
        'srun "$env/bin/python" ...; or a container image: apptainer build env.sif'
    )
    return "warning", f"{text} on rank {slowest['rank']} on {slowest['host']}: many small files, from {where}", fix


@topic("TMPDIR", "temporary")
def _temporary(ranks: Ranks) -> Verdict:
    """Judge the folder for temporary files: sockets in it have short names only, and each node needs its own."""
    fix = "export TMPDIR=/tmp in the job script"
    for group in grouped(ranks, lambda facts: (facts["host"], facts["temporary"]["folder"], _lack(facts["temporary"]))):
        first, folder, lack = group[0], group[0]["temporary"]["folder"], _lack(group[0]["temporary"])
        who = f"{ranks_text(facts['rank'] for facts in group)} on {first['host']}"
        if lack is not None:
            there = "bytes" in first["temporary"]
            look = f"ls -ld {folder}; df -h {folder}" if there else f"srun --ntasks-per-node=1 mkdir -p '{folder}'"
            verdict: Literal["warning", "broken"] = "warning" if "size" in first.get("mpi", {}) else "broken"
            return verdict, f"{who}: {folder}: {lack}", f"{look}; or {fix}"
        if len(folder) + _LONGEST > _SOCKET:
            text = f"{folder} has {len(folder)} characters, and sockets in it at most {_SOCKET - _LONGEST}: "
            return "broken", f"{text}DataLoader workers and some MPI libraries fail", fix
    remote = next((facts for facts in ranks if (facts["temporary"].get("mount") or {}).get("network")), None)
    if remote is not None:
        text = f"{remote['temporary']['folder']} is on {describe(remote['temporary']['mount'])}"
        return "warning", f"{text}: MPI's and Python's own files travel over the network", fix
    return "ok", each(ranks, lambda facts: str(facts["temporary"]["folder"]))


def _lack(temporary: Facts) -> str | None:
    """Return why MPI may fail in a folder for temporary files; None if it has no reason to."""
    if "error" in temporary:
        return f"cannot be written to: {temporary['error']}"
    return f"{show_bytes(temporary['free'])} free" if temporary["free"] < _MIN_TEMPORARY else None


@topic("DataLoader workers", "worker")
def _workers(ranks: Ranks) -> Verdict:
    """Judge a worker that was forked while MPI ran."""
    fix = "DataLoader(..., multiprocessing_context='forkserver', persistent_workers=True)"
    failed = error_of(ranks, "worker")
    if failed is not None:
        return "broken", f"forked under this MPI, {ranks_text(failed[1])}: {failed[0]}", f"{fix}, or num_workers=0"
    for facts in ranks:
        kernel = tuple(map(int, re.findall(r"\d+", facts["kernel"])[:2]))
        safe = any(facts["environ"].get(name) for name in _FORK_SAFE)
        if facts.get("rdma", {}).get("ports") and kernel < _COPY_ON_FORK and not safe:
            text = (
                f"with InfiniBand and Linux {facts['kernel']} on {facts['host']}, a fork may take pages away from MPI"
            )
            return "warning", text, f"export RDMAV_FORK_SAFE=1 IBV_FORK_SAFE=1; or {fix}"
    slowest = max(facts["worker"]["seconds"] for facts in ranks)
    return "ok", f"forked under this MPI, one read its data in {slowest * 1e3:.0f} ms; it must not call hpcdist"


@topic("torch", "gpu")
def _torch(ranks: Ranks) -> Verdict:
    text = each(ranks, lambda facts: f"torch {facts['gpu']['torch']}")
    if not agree(ranks, lambda facts: facts["gpu"]["torch"]):
        return "broken", text, _SAME
    if not all(facts["gpu"]["gloo"] for facts in ranks):
        fix = "pip install torch from PyPI or pytorch.org: their builds have gloo"
        return "broken", f"{text}, built without gloo, which hpcdist.init() needs", fix
    return "ok", text


judge = Section("software", _versions, _torch, _start, _temporary, _workers)
