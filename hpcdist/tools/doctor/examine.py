"""Examine a job: the facts of each rank, plain data that ``--json`` prints, and the steps that find them, in order.

First comes what a rank finds out alone, then what the ranks find out together: mpi, node and local_rank; pair and
staging on one rank of each node; sees, init, file and routes.
"""

from __future__ import annotations

import os
import platform
import resource
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy
import psutil
import torch
import torch.distributed as dist
import xxhash

from hpcdist import staging
from hpcdist.collectives.join import concat
from hpcdist.control import objects
from hpcdist.errors import HpcdistError, reason
from hpcdist.launch import launcher, rendezvous
from hpcdist.process import machine
from hpcdist.process.startup import __version__
from hpcdist.routes import select
from hpcdist.runtime import world
from hpcdist.runtime.cli import placed, timed
from hpcdist.runtime.world import World
from hpcdist.tensors import accelerator
from hpcdist.tools.doctor.checks import Facts, known, socket_problem

if TYPE_CHECKING:
    from mpi4py import MPI

_PREFIX = "hpcdist-doctor-"  # of the files that the doctor makes
# Variables that are kept, beside those of the launchers. None is secret: --json shows them.
_KEPT = (
    "OMPI_MCA_mpi_", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "CUDA_VISIBLE_DEVICES", "NCCL_",
    "GLOO_SOCKET_", "OMP_", "HDF5_", "HPCDIST_", "MPI4PY_RC_", "TMPDIR", "SLURM_CPU_BIND", "UCX_TLS",
    "MPIR_CVAR_CH4_NETMOD",
)  # fmt: skip
DEV = Path("/dev")
# File systems without a device that are local all the same; others without one are on the network.
_LOCAL = (
    "tmpfs",
    "ramfs",
    "overlay",
    "zfs",
    "fuse.fuse-overlayfs",
    "fuse.squashfuse",
    "fuse.squashfuse_ll",
    "fuse.mergerfs",
)
_TRIAL = 2**16  # bytes written to a folder
_MIB = 2**20  # bytes of the messages between two nodes, and of a rank in a route
_ROUNDS = 4  # the shortest counts
_ROUTE_ROUNDS = 3  # after a warm-up that is not counted
# How many time limits a step may take. A rank that hangs alone must be found before those that wait for it.
ALONE, TOGETHER = 1, 2

T = TypeVar("T")
Steps = Generator[
    tuple[str, int], None, T
]  # the step that begins: if the examination hangs from now on, it is the reason


def launch(environ: Mapping[str, str]) -> Facts:
    """Return the facts that need no MPI; the rank is the launcher's number."""
    return {
        "rank": launcher.number(environ),
        "node": 0,
        "host": socket.gethostname(),
        "id": secrets.token_hex(8),  # of this rank alone: host and pid are the same in several containers
        "start": time.time() - psutil.Process().create_time(),
        "environ": {
            name: text for name, text in environ.items() if name in launcher.VARIABLES or name.startswith(_KEPT)
        },
    }


def before_mpi(temporary: str) -> Facts:
    """Return the memory that this process can have, its limits (None is unlimited), and the folders that MPI needs."""
    files, most_files = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    group, limit = min(machine.groups(), key=lambda found: found[1], default=(None, None))
    return {
        "memory": {
            "host": machine.capacity()[1],
            "available": machine.available(),
            "limit": limit,
            "group": group and str(group),
            "group_id": group and group.stat().st_ino,  # each container may show its own group by one path
        },
        "limits": {
            "files": files,
            "most_files": most_files,
        },
        "shm": _space("/dev/shm"),
        "temporary": try_folder(temporary),
    }


def software() -> Facts:
    """Return the facts that must be the same on all nodes, and the file system of the environment."""
    try:
        import h5py
    except Exception as error:  # also an h5py that was built for another numpy or MPI
        hdf5: Facts = {"error": f"h5py cannot be imported: {reason(error)}"}
    else:
        parallel = bool(h5py.get_config().mpi)
        hdf5 = {"h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version, "parallel": parallel}
    return {
        "versions": {
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "NCCL": accelerator.library_version() if dist.is_backend_available(accelerator.LIBRARY) else None,
            "hpcdist": f"{__version__} of sources {digest_of(Path(__file__).parents[2])}",
        },
        "prefix": sys.prefix,
        "environment": mount_of(sys.prefix),
        "hdf5": hdf5,
    }


def digest_of(root: Path) -> str:
    """Return a checksum of the sources of hpcdist: a checkout may change without its version."""
    return str(xxhash.xxh3_64_hexdigest(b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))))[:8]


def cores() -> Facts:
    """Return the cores of this process and of the machine, and the number of torch's threads.

    "cores" are the CPUs of the kernel: hardware threads. "physical" has the lowest hardware thread of each of their
    physical cores. "domains" is the number of NUMA domains that have some.
    """
    mine, siblings = sorted(os.sched_getaffinity(0)), "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {
        "cores": mine,
        "cpus": os.cpu_count() or 1,
        "domains": sum(bool(domain & {*mine}) for domain in machine.domains()),
        "threads": torch.get_num_threads(),
        "physical": sorted({min(machine.listed_cores(Path(siblings.format(core))), default=core) for core in mine}),
    }


def gpus() -> Facts:
    """Return the GPUs visible to this process, and the number of those of the node."""
    gpu: Facts = {"in_node": len(list(DEV.glob("nvidia[0-9]*"))), "gpus": []}
    try:
        gpu["gpus"] = [
            {"name": accelerator.properties(i).name, "id": accelerator.identity(i)} for i in range(accelerator.count())
        ]
    except (RuntimeError, AssertionError) as error:  # such as a driver that is too old, or a GPU in exclusive mode
        gpu["error"] = reason(error)
    return {"gpu": gpu}


def mount_of(folder: str) -> Facts | None:
    """Return point and type of the mount that holds a folder, and whether it is on the network."""
    path = Path(os.path.realpath(folder))
    holding = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    if not holding:
        return None
    found = max(reversed(holding), key=lambda mount: len(mount.mountpoint))  # of several in one place, the last
    local = found.fstype in _LOCAL or found in psutil.disk_partitions()
    return {"point": found.mountpoint, "type": found.fstype, "network": not local}


def _space(folder: str) -> Facts:
    """Return the bytes of a folder's file system, and those that are free."""
    try:
        found = psutil.disk_usage(folder)
    except OSError as error:
        return {"error": reason(error)}
    return {"bytes": found.total, "free": found.free}


def try_folder(folder: str) -> Facts:
    """Write a file in a folder and read it; return the facts found."""
    found: Facts = {"folder": folder, **_space(folder), "mount": mount_of(folder)}
    data = secrets.token_bytes(_TRIAL)
    try:
        with made(folder, data) as file:
            if not sees(file.name, data):
                found["error"] = f"{folder}: the data read differ from those written"
    except OSError as error:
        found["error"] = f"{folder}: {reason(error)}"
    return found


@contextmanager
def made(folder: str, data: bytes) -> Iterator[Any]:
    """A context in which there is a file with these contents in a folder."""
    with tempfile.NamedTemporaryFile(prefix=_PREFIX, dir=folder) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        yield file


def sees(path: str, data: bytes) -> bool:
    """Whether this rank sees a file with these contents."""
    with suppress(OSError):
        return Path(path).read_bytes() == data
    return False


def examine(ranks: list[Facts], first: bool, limit: float) -> Steps[None]:
    """Examine this rank, and the job if MPI connects the ranks. Runs in a process of its own.

    Args:
        ranks: facts of this rank, to be completed; on rank 0, those of the other ranks are added.
        first: whether this process examines its node if MPI does not connect the ranks.
        limit: seconds for each step that may hang.
    """
    facts = ranks[0]
    yield "this rank's limits", ALONE
    facts |= before_mpi(facts["environ"].get("TMPDIR") or "/tmp")
    comm = yield from _start_mpi(facts)
    if comm is None and not first:
        return
    yield "this rank's software", ALONE
    facts |= software()
    yield "this rank's hardware", ALONE
    facts |= {**cores(), **gpus(), "interfaces": rendezvous.interfaces()}
    if comm is None:
        yield "staging folder", ALONE
        facts["staging"] = try_folder(world.staging_folder(1))
        return
    yield from _examine_job(comm, ranks, limit)
    yield "MPI_Finalize", TOGETHER
    from mpi4py import MPI

    MPI.Finalize()


def _start_mpi(facts: Facts) -> Steps[MPI.Intracomm | None]:
    """Start MPI as importing mpi4py does, but step by step; return its world, or None if it has one rank of several."""
    yield "MPI library", ALONE
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # so that the library's name is known if its start fails
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        last = str(error).strip().rpartition("\n")[2].strip()
        facts["mpi"] = {"error": f"mpi4py finds no MPI library ({reason(error)}: {last})"}
        return None
    library = launcher.library()
    facts["mpi"] = {"mpi4py": mpi4py.__version__, "library": library}
    yield "MPI_Init", TOGETHER
    if not MPI.Is_initialized():
        level = facts["environ"].get("MPI4PY_RC_THREAD_LEVEL", mpi4py.rc.thread_level)
        MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}", MPI.THREAD_MULTIPLE))
    comm = MPI.COMM_WORLD
    levels = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    alone = launcher.alone(facts["environ"], comm.size, library)
    facts["mpi"].update(size=comm.size, thread_level=levels[MPI.Query_thread()], alone=alone)
    if alone is not None:
        return None
    facts["rank"] = comm.rank
    yield "MPI's first messages", TOGETHER
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    facts["node"] = objects.all_gather_object(local, comm.rank)[0]
    facts["local_rank"] = local.rank
    local.Free()
    return comm


def _examine_job(comm: MPI.Intracomm, ranks: list[Facts], limit: float) -> Steps[None]:
    """Examine the calls of all ranks together. Collective over `comm`."""
    facts = ranks[0]
    leads = facts["node"] == facts["rank"]
    everyone = yield from _share(comm, ranks)
    leaders: MPI.Intracomm = comm.Split(not leads, comm.rank)  # type: ignore[assignment]
    nodes = len({other["node"] for other in everyone})
    if leads and nodes > 1:
        yield "bandwidth between nodes", TOGETHER
        facts["pair"] = _measure_pair(leaders, facts["host"])
    leaders.Free()
    folder = (yield from _gather(comm, os.path.abspath(world.staging_folder(nodes))))[0]
    yield from try_staging(comm, facts, folder)
    yield from _share(comm, ranks)
    yield "hpcdist.init()", TOGETHER
    facts["init"] = _tried(lambda: {"device": world.init(timeout=limit, staging=folder).device.type})
    everyone = yield from _share(comm, ranks)
    if any("error" in other["init"] for other in everyone):
        return
    here = world.current()
    if all(other["sees"] and not known(other, "staging.error") for other in everyone):
        yield "HDF5 file", TOGETHER
        facts["file"] = _tried(lambda: _try_file(here, f"{_PREFIX}{everyone[0]['id']}.h5"))
    facts["routes"] = {}
    for name in select.ROUTES:
        yield f"route {name}", TOGETHER
        absent = select.load(name).missing(world.team_of())
        if name == "gloo":  # else it fails or hangs in its first call
            absent = absent or next(filter(None, map(socket_problem, everyone)), None)
        facts["routes"][name] = {"absent": absent} if absent else _time(here, name)
    yield from _share(comm, ranks)
    yield "hpcdist.finalize()", TOGETHER
    here.finalize()


def _gather(comm: MPI.Intracomm, value: T) -> Steps[list[T]]:
    """Return the values of all ranks, in a step in which they wait for each other. Collective."""
    yield "all ranks together", TOGETHER
    return objects.all_gather_object(comm, value)


def _share(comm: MPI.Intracomm, ranks: list[Facts]) -> Steps[list[Facts]]:
    """Return the facts of all ranks, which rank 0 keeps. Collective."""
    everyone = yield from _gather(comm, ranks[0])
    if comm.rank == 0:
        ranks[1:] = everyone[1:]
    return everyone


def _measure_pair(leaders: MPI.Intracomm, host: str) -> Facts | None:
    """Exchange messages between this node and a second one. Collective over one rank of each node.

    Returns:
        On the first node of each pair: "host" of the second, and "rate" in bytes/s.
    """
    hosts, peer = objects.all_gather_object(leaders, host), leaders.rank ^ 1
    if peer >= leaders.size:
        return None
    data, got, times = bytearray(_MIB), bytearray(_MIB), []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        leaders.Sendrecv(data, peer, recvbuf=got, source=peer)
        times.append(time.perf_counter() - start)
    return {"host": hosts[peer], "rate": _MIB / min(times)} if leaders.rank < peer else None


def try_staging(comm: MPI.Intracomm, facts: Facts, folder: str) -> Steps[None]:
    """Write to the folder on one rank of each node; look on all ranks for a file of rank 0. Collective.

    A rank that hangs in the folder hangs in a step of its own; the ranks wait for each other in another step.
    """
    yield "staging folder", ALONE
    if facts["node"] == facts["rank"]:
        facts["staging"] = try_folder(folder)
    with ExitStack() as files:
        path, data = None, secrets.token_bytes(16)
        if comm.rank == 0 and "error" not in facts["staging"]:
            path = files.enter_context(made(folder, data)).name
        path, data = (yield from _gather(comm, (path, data)))[0]
        yield "staging folder", ALONE
        facts["sees"] = sees(path, data) if path else None
        yield from _gather(comm, None)
        yield "staging folder", ALONE


def _tried(step: Callable[[], Facts]) -> Facts:
    """Return the facts of a step and the seconds that it took, or its error."""
    begin = time.perf_counter()
    try:
        return {**step(), "seconds": time.perf_counter() - begin}
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


def _try_file(here: World, name: str) -> Facts:
    """Write an HDF5 file with all ranks and read it again. Collective."""
    path = os.path.join(here.staging, name)
    shard = torch.arange(1000, device="cpu") + 1000 * here.rank
    try:
        staging.save(path, {"x": shard})
        if not torch.equal(staging.load(path, "x"), shard):
            return {"error": f"{path}: the data read differ from those written"}
        return {"writer": staging.writer()[0]}
    finally:
        if here.rank == 0:
            with suppress(OSError):
                os.unlink(path)


def _time(here: World, name: str) -> Facts:
    """Time a concat of 1 MiB per rank over a route. Collective."""
    x = placed(here, torch.full((_MIB,), here.rank % 128, dtype=torch.uint8, device="cpu"), name)
    expected = torch.arange(here.world_size, device="cpu").remainder(128).repeat_interleave(_MIB)
    try:
        whole = concat(x, route=name)
        seconds = [timed(here, lambda: concat(x, route=name, out=whole)) for _ in range(_ROUTE_ROUNDS)]
    except HpcdistError as error:  # the same on all ranks
        return {"error": str(error)}
    if not torch.equal(whole.cpu(), expected.to(torch.uint8)):
        return {"error": "the data received differ from those sent"}
    return {"seconds": median(seconds)}
