"""The facts of one rank that it finds out alone: its launch, limits, software, hardware and folders.

They are plain data: ``--json`` prints them. Each function returns those of one subject, and examine.py adds those that
the ranks find out together.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import resource
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import DataLoader

from hpcdist.activity.procstat import started
from hpcdist.comm import devices, launcher, rendezvous
from hpcdist.doctor.table import Facts
from hpcdist.errors import reason
from hpcdist.process import cgroups, host_memory
from hpcdist.process.versions import __version__

__all__ = [
    *("PREFIX", "before_mpi", "cores", "gpus", "launch", "made", "members", "mount_of", "network", "sees", "software"),
    *("try_folder", "try_worker"),
]

PREFIX = "hpcdist-doctor-"  # of the files that the doctor makes
# Variables that are kept, beside those of the launchers. None is secret: --json shows them.
_KEPT = (
    *("OMPI_MCA_mpi_", "OMPI_MCA_io", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "CUDA_VISIBLE_DEVICES"),
    *("NCCL_", "GLOO_SOCKET_", "OMP_", "HDF5_", "HPCDIST_", "MASTER_", "MPI4PY_RC_"),
    *("TMPDIR", "RDMAV_FORK_SAFE", "IBV_FORK_SAFE", "SLURM_CPU_BIND", "SLURM_GPUS_PER_TASK", "UCX_NET_DEVICES"),
)
_DEV, _SYS = Path("/dev"), Path("/sys")
_CAP_IPC_LOCK = 14  # linux/capability.h: this process may lock memory beyond the limit
_NETWORK = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "dvs", "fhgfs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"),
        *("ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "virtiofs", "wekafs"),
    }
)  # and those of FUSE, but for the local ones:
_LOCAL_FUSE = ("fuse.fuse-overlayfs", "fuse.squashfuse", "fuse.squashfuse_ll", "fuse.mergerfs", "fuseblk")
_VENDORS = {"0x1002": "AMD", "0x8086": "Intel"}  # of PCI devices
_TRIAL = 2**16  # bytes written to a folder
_WORKER_SECONDS = 20


def launch(environ: Mapping[str, str]) -> Facts:
    """Return what is known without MPI; the rank is the launcher's number."""
    return {
        "rank": launcher.number(environ),
        "node": 0,
        "host": socket.gethostname(),
        "id": secrets.token_hex(8),  # of this rank alone: host and pid are the same in several containers
        "pid": os.getpid(),
        "start": time.clock_gettime(time.CLOCK_BOOTTIME) - started(os.getpid()) / os.sysconf("SC_CLK_TCK"),
        "environ": {
            name: value
            for name, value in sorted(environ.items())
            if name in launcher.VARIABLES or name.startswith(_KEPT)
        },
    }


def before_mpi(temporary: str) -> Facts:
    """Return the memory that this process can have, its limits (None is unlimited), and the folders that MPI needs."""
    files, most_files = (_limit(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    capabilities = re.search(r"CapEff:\s*(\w+)", _read(Path("/proc/self/status")))
    return {
        "memory": {
            "host": host_memory.capacity()[1],
            "available": host_memory.available(),
            **_tightest(cgroups.memory()),
        },
        "limits": {
            "locked": _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
            "locks_freely": bool(capabilities and int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1),
            "files": files,
            "most_files": most_files,
        },
        "shm": _space("/dev/shm"),
        "temporary": try_folder(temporary),
    }


def _tightest(groups: Sequence[tuple[Path, float]]) -> Facts:
    """Return the lowest limit of control groups, its folder, and what is the same wherever that group is seen."""
    folder, limit = min(groups, key=lambda found: found[1], default=(None, None))
    return {
        "limit": limit,
        "group": None if folder is None else str(folder),
        "group_id": None if folder is None else cgroups.identity(folder),
    }


def _limit(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def software(leads: bool) -> Facts:
    """Return what must be the same on all nodes, and the file systems of the environment and the current folder.

    Args:
        leads: whether this is the lowest rank of its node, which also compares the sources of hpcdist.
    """
    current: dict[str, Any] = {}
    mounts = {"environment": mount_of(sys.prefix)}
    with suppress(OSError):  # the current folder has been removed
        current["folder"] = os.getcwd()
        mounts["current"] = mount_of(current["folder"])
        current.update(_space(current["folder"]))
    try:
        import h5py
    except Exception as error:  # also an h5py that was built for another numpy or MPI
        hdf5: dict[str, Any] = {"error": f"h5py cannot be imported: {reason(error)}"}
    else:
        parallel = bool(h5py.get_config().mpi)
        hdf5 = {"h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version, "parallel": parallel}
    return {
        "versions": {"Python": platform.python_version(), "hpcdist": __version__, "numpy": numpy.__version__},
        "sources": _digest(Path(__file__).parent.parent) if leads else None,
        "prefix": sys.prefix,
        "kernel": platform.release(),
        "mounts": {name: mount for name, mount in mounts.items() if mount},
        "current": current,
        "hdf5": hdf5,
    }


def _digest(root: Path) -> str:
    """Return a checksum of the sources of hpcdist: a checkout may change without its version."""
    checksum = xxhash.xxh3_64()
    for path in sorted(root.rglob("*.py")):
        checksum.update(str(path.relative_to(root)).encode())
        checksum.update(path.read_bytes())
    return checksum.hexdigest()[:8]


def try_worker() -> dict[str, Any]:
    """Read two batches through a DataLoader's worker, forked while MPI runs; return what was read, or the error."""
    loader: DataLoader[int] = DataLoader(
        range(2),  # type: ignore[arg-type]
        num_workers=1, multiprocessing_context="fork", timeout=_WORKER_SECONDS,
    )  # fmt: skip
    try:
        return {"read": [int(batch) for batch in loader]}
    except (RuntimeError, OSError) as error:
        return {"error": reason(error)}


def cores() -> Facts:
    """Return the cores of this process and of the machine, and the number of torch's threads.

    "cores" are the CPUs of the kernel: hardware threads. "physical" has the lowest hardware thread of each of their
    physical cores, "numa" their NUMA domains with the number of hardware threads of each.
    """
    mine, system = sorted(os.sched_getaffinity(0)), _SYS / "devices" / "system"
    domains = {path.parent.name: members(_read(path)) for path in sorted(system.glob("node/node[0-9]*/cpulist"))}
    siblings = {core: members(_read(system / f"cpu/cpu{core}/topology/thread_siblings_list")) for core in mine}
    return {
        "cores": mine,
        "cpus": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "physical": sorted({min(siblings[core], default=core) for core in mine}),
        "numa": {name: len(inside) for name, inside in domains.items() if set(inside) & set(mine)},
        "cpu_time": _tightest(cgroups.cpus()),
    }


def _read(path: Path) -> str:
    """Return a file of the kernel; "" if this system, or this container, does not have it."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def members(text: str) -> list[int]:
    """Return the numbers of a list of the kernel's.

    Example::

        >>> members("0-2,8")
        [0, 1, 2, 8]
    """
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def gpus() -> Facts:
    """Return the versions of torch and NCCL, the GPUs visible to this process, and those of the node."""
    files = list(_DEV.glob("nvidia[0-9]*"))
    gpu: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gloo": dist.is_gloo_available(),
        "nccl": devices.nccl_version() if dist.is_nccl_available() else None,
        "in_node": len(files),
        "others": _other_gpus(),
        "gpus": [],
    }
    try:
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        gpu["gpus"] = [
            {"name": p.name, "id": devices.identity(i), "bytes": p.total_memory, "near": _near(p)}
            for i, p in enumerate(properties)
        ]
    except (RuntimeError, AssertionError) as error:  # such as a driver that is too old, or a GPU in exclusive mode
        gpu["error"] = reason(error)
    if 0 < len(gpu["gpus"]) < len(files):
        gpu["openable"] = sum(map(_openable, files))
    return {"gpu": gpu}


def _other_gpus() -> list[str]:
    """Return the GPUs of AMD and Intel in this node, such as "AMD /dev/dri/renderD128"; and AMD's compute driver."""
    found = [f"AMD {_DEV / 'kfd'}"] if (_DEV / "kfd").exists() else []
    for path in sorted((_DEV / "dri").glob("renderD*")):
        vendor = _VENDORS.get(_read(_SYS / "class" / "drm" / path.name / "device" / "vendor"))
        found += [f"{vendor} {path}"] if vendor else []
    return found


def _openable(path: Path) -> bool:
    """Whether this process may use a GPU: a control group may forbid it, which CUDA_VISIBLE_DEVICES does not."""
    with suppress(OSError):
        path.open("rb+", buffering=0).close()
        return True
    return False


def _near(properties: Any) -> str:
    """Return the CPUs near a GPU, as the kernel lists them; "" if it does not know them."""
    numbers = [getattr(properties, f"pci_{name}_id", -1) for name in ("domain", "bus", "device")]
    folder = _SYS / "bus/pci/devices" / "{:04x}:{:02x}:{:02x}.0".format(*numbers)
    return "" if _read(folder / "numa_node") in ("", "-1") else _read(folder / "local_cpulist")


def network() -> Facts:
    """Return this node's interfaces, their addresses and Mbit/s, and its InfiniBand ports."""
    ports = [_port(folder) for folder in sorted((_SYS / "class" / "infiniband").glob("*/ports/*"))]
    return {
        "interfaces": rendezvous.interfaces(),
        "speeds": {name: found.speed for name, found in psutil.net_if_stats().items() if found.speed > 0},
        "rdma": {"ports": ports},
    }


def _port(folder: Path) -> dict[str, Any]:
    """Return device, port, state ("ACTIVE"), Gbit/s and link layer of an InfiniBand port: RoCE, Omni-Path, EFA, too."""
    speed = re.match(r"[\d.]+", _read(folder / "rate"))  # "200 Gb/sec (4X HDR)"
    return {
        "device": folder.parent.parent.name,
        "port": folder.name,
        "state": _read(folder / "state").rpartition(":")[2].strip(),  # "4: ACTIVE"
        "rate": float(speed[0]) if speed else 0.0,
        "layer": _read(folder / "link_layer"),
    }


def mount_of(folder: str) -> dict[str, Any] | None:
    """Return point, type, source and options of the mount that holds a folder, and whether it is on the network."""
    path = Path(os.path.realpath(folder))
    holding = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    if not holding:
        return None
    found = max(reversed(holding), key=lambda mount: len(mount.mountpoint))  # of several in one place, the last
    fuse = found.fstype.startswith("fuse") and found.fstype not in _LOCAL_FUSE
    return {
        "point": found.mountpoint,
        "type": found.fstype,
        "source": found.device,
        "options": sorted(found.opts.split(",")),
        "network": found.fstype in _NETWORK or fuse,
    }


def _space(folder: str) -> dict[str, Any]:
    """Return the space of a folder's file system, and whether this process may write there."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return {"error": reason(error)}
    return {
        "bytes": found.f_blocks * found.f_frsize,
        "free": found.f_bavail * found.f_frsize,
        "writable": os.access(folder, os.W_OK | os.X_OK),
    }


def try_folder(folder: str) -> dict[str, Any]:
    """Write a file in a folder, lock it as HDF5 does and read it; return what was found."""
    found: dict[str, Any] = {"folder": folder, **_space(folder), "mount": mount_of(folder)}
    data = secrets.token_bytes(_TRIAL)
    try:
        with made(folder, data) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                found["locks"] = f"{errno.errorcode.get(error.errno or 0, error.errno)}: {reason(error)}"
            if not sees(file.name, data):
                found["error"] = f"{folder}: the data read differ from those written"
    except OSError as error:
        found["error"] = f"{folder}: {reason(error)}"
    return found


@contextmanager
def made(folder: str, data: bytes) -> Iterator[Any]:
    """A context in which there is a file with these contents in a folder."""
    with tempfile.NamedTemporaryFile(prefix=PREFIX, dir=folder) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        yield file


def sees(path: str, data: bytes) -> bool:
    """Whether this rank sees a file with these contents."""
    with suppress(OSError):
        return Path(path).read_bytes() == data
    return False
