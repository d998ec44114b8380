"""Examine a job: the steps of the examination, in order, on every rank.

The facts of a rank are those of facts.py, and what the ranks find out together: mpi, node and local_rank; reach, pairs
and staging on one rank of each node; sees, worker, init, file, cuda_aware, routes and nccl_network. ``--json`` prints
them.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcdist import staging
from hpcdist.collectives.concat import concat
from hpcdist.comm import launcher, rendezvous
from hpcdist.control import objects
from hpcdist.doctor import facts as own
from hpcdist.doctor.checks import socket_problem
from hpcdist.doctor.supervisor import ProgressPipe
from hpcdist.doctor.table import Facts, known
from hpcdist.errors import HpcdistError, reason
from hpcdist.routes import select
from hpcdist.routes.cuda_aware import mpi_takes_gpu_memory
from hpcdist.runtime import world
from hpcdist.runtime.cli import placed, timed
from hpcdist.runtime.world import World
from hpcdist.runtime.world import environ as variables

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["examine", "log_nccl", "reach", "read_nccl_log", "try_staging"]

_ALL_PAIRS = 32  # nodes; with more, each node tries those at distance 1, 2, 4, 8, ...
_CONNECT_SECONDS = 1.5  # an address that takes longer to answer counts as unreachable
_THREADS = 32  # that connect at the same time
_SMALL, _LARGE = 8, 2**20  # bytes of the messages between two nodes
_ROUNDS = {_SMALL: 30, _LARGE: 4}  # there and back; the shortest counts
_TOTAL_SECONDS = 5.0  # after which no further pairs are tried
_ROUTE_BYTES = 2**20  # a rank
_ROUTE_ROUNDS = 3  # after a warm-up that is not counted


def examine(pipe: ProgressPipe, facts: Facts, folder: str | None, first: bool, limit: float) -> None:
    """Examine this rank, and the job if MPI connects the ranks. Runs in a process of its own.

    Args:
        facts: facts of this rank, to be completed.
        folder: staging folder; None for the default.
        first: whether this process examines its node if MPI does not connect the ranks.
        limit: seconds for each step that may hang.
    """
    pipe.step("this rank's limits", alone=True)
    facts.update(own.before_mpi(facts["environ"].get("TMPDIR") or "/tmp"))
    pipe.facts([facts])
    comm = _start_mpi(pipe, facts)
    if comm is None and not first:
        return
    pipe.step("this rank's software", alone=True)
    facts.update(own.software(facts["node"] == facts["rank"]))
    pipe.step("this rank's hardware", alone=True)
    facts.update(**own.cores(), **own.gpus(), **own.network())
    pipe.facts([facts])
    if comm is None:
        pipe.step("staging folder", alone=True)
        facts["staging"] = own.try_folder(folder or world.staging_folder(1))
        pipe.facts([facts])
        return
    _examine_job(pipe, comm, facts, folder, limit)
    pipe.step("MPI_Finalize")
    from mpi4py import MPI

    MPI.Finalize()


def _start_mpi(pipe: ProgressPipe, facts: Facts) -> MPI.Intracomm | None:
    """Start MPI as importing mpi4py does, but step by step; return its world, or None if it has one rank of several."""
    pipe.step("MPI library", alone=True)
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # so that the library's name is known if its start fails
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        last = str(error).strip().rpartition("\n")[2].strip()
        facts["mpi"] = {"error": f"mpi4py finds no MPI library ({reason(error)}: {last})"}
        return None
    library = " ".join(MPI.Get_library_version().split("\n")[0].strip("\0 ").split())
    facts["mpi"] = {"mpi4py": mpi4py.__version__, "library": library, "standard": list(MPI.Get_version())}
    pipe.facts([facts])
    pipe.step("MPI_Init")
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
    pipe.step("MPI's first messages")
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    facts["node"] = objects.all_gather_object(local, comm.rank)[0]
    facts["local_rank"] = local.rank
    local.Free()
    return comm


def _examine_job(pipe: ProgressPipe, comm: MPI.Intracomm, facts: Facts, folder: str | None, limit: float) -> None:
    """Examine what the ranks do together. Collective over `comm`."""
    everyone = _share(pipe, comm, facts)
    nodes = len({other["node"] for other in everyone})
    leads = facts["node"] == facts["rank"]
    leaders = comm.Split(0 if leads else 1, comm.rank)
    assert isinstance(leaders, type(comm))
    if leads and nodes > 1:
        pipe.step("network")
        facts["reach"] = reach(leaders, facts)
        pipe.step("links between nodes")
        facts["pairs"] = _measure_pairs(leaders, facts)
    leaders.Free()
    folder = _gather(pipe, comm, os.path.abspath(folder or world.staging_folder(nodes)))[0]
    try_staging(pipe, comm, facts, folder)
    pipe.step("DataLoader workers", alone=True)
    facts["worker"] = own.try_worker()
    everyone = _share(pipe, comm, facts)
    nccl_log = log_nccl(variables(), facts)
    pipe.step("hpcdist.init()")
    facts["init"] = _tried(lambda: _init(folder, limit))
    pipe.facts([facts])  # an error is reported even if the other ranks hang
    everyone = _share(pipe, comm, facts)
    if any("error" in other["init"] for other in everyone):
        return
    here = world.current()
    if any(other["init"]["device"] == "cuda" for other in everyone):
        pipe.step("CUDA-aware MPI")
        facts["cuda_aware"] = mpi_takes_gpu_memory(world.team_of())
    if all(other["sees"] and not known(other, "staging.error") for other in everyone):
        pipe.step("HDF5 file")
        facts["file"] = _tried(lambda: _try_file(here))
    facts["routes"] = {}
    for name in select.ROUTES:
        pipe.step(f"route {name}")
        absent = select.load(name).missing(world.team_of())
        if name == "gloo":  # else it fails or hangs in its first call
            absent = absent or socket_problem("GLOO_SOCKET_IFNAME", everyone)
        facts["routes"][name] = {"absent": absent} if absent else _time(here, name)
        pipe.facts([facts])
    facts["nccl_network"] = read_nccl_log(nccl_log)
    _share(pipe, comm, facts)
    pipe.step("hpcdist.finalize()")
    here.finalize()


def _gather(pipe: ProgressPipe, comm: MPI.Intracomm, value: Any) -> list[Any]:
    """Return the values of all ranks, in a step in which they wait for each other. Collective."""
    pipe.step("all ranks together")
    return objects.all_gather_object(comm, value)


def _share(pipe: ProgressPipe, comm: MPI.Intracomm, facts: Facts) -> list[Facts]:
    """Return the facts of all ranks, which rank 0 reports even if the next step hangs. Collective."""
    everyone = _gather(pipe, comm, facts)
    if comm.rank == 0:
        pipe.facts(everyone)
    return everyone


def reach(leaders: MPI.Intracomm, facts: Facts) -> dict[str, dict[str, bool]]:
    """Connect to every address of the other nodes. Collective over one rank of each node.

    Returns:
        node (its lowest rank) -> address -> whether it answered.
    """
    token, size = secrets.token_hex(), leaders.size
    addresses = [a for a in facts["interfaces"].values() if not a.startswith("127.")]
    listener = socket.create_server(("", 0), backlog=max(128, size))
    with listener, rendezvous.answering([listener], token), ThreadPoolExecutor(_THREADS) as threads:
        port = listener.getsockname()[1]
        servers = objects.all_gather_object(leaders, (str(facts["node"]), addresses, {"port": port, "token": token}))
        steps = range(1, size) if size <= _ALL_PAIRS else [2**k for k in range(size.bit_length()) if 2**k < size]
        tries = {}
        for node, others, server in (servers[(leaders.rank + step) % size] for step in steps):
            ask = partial(rendezvous.local_address, seconds=_CONNECT_SECONDS, **server)
            tries[node] = {address: threads.submit(ask, address) for address in others}
        found = {node: {a: answer.result() is not None for a, answer in row.items()} for node, row in tries.items()}
        leaders.Barrier()  # all have tried before any stops listening
    return found


def _measure_pairs(leaders: MPI.Intracomm, facts: Facts) -> list[dict[str, Any]]:
    """Send messages between pairs of nodes, which do not share a node at any moment. Collective over one rank a node.

    Returns:
        On the lower node of each pair: "peer" (node), "latency" (seconds one way), and "rate" (bytes/s) of messages of
        "bytes".
    """
    nodes = objects.all_gather_object(leaders, facts["node"])
    found = []
    begin = time.perf_counter()
    for step in range(1, 1 << (leaders.size - 1).bit_length()):
        if objects.all_gather_object(leaders, time.perf_counter() - begin)[0] > _TOTAL_SECONDS:
            break
        peer = leaders.rank ^ step  # so each pair meets in one step, and each node is in one pair of a step
        if peer < leaders.size:
            latency, seconds = _shortest(leaders, peer, _SMALL), _shortest(leaders, peer, _LARGE)
            if leaders.rank < peer:
                found.append({"peer": nodes[peer], "latency": latency, "rate": _LARGE / seconds, "bytes": _LARGE})
    return found


def _shortest(leaders: MPI.Intracomm, peer: int, size: int) -> float:
    """Send messages to the peer and back; return the seconds of the fastest, one way."""
    data, times = bytearray(size), []
    for _ in range(_ROUNDS[size]):
        begin = time.perf_counter()
        if leaders.rank < peer:
            leaders.Send(data, peer)
        leaders.Recv(data, peer)
        if leaders.rank > peer:
            leaders.Send(data, peer)
        times.append(time.perf_counter() - begin)
    return min(times) / 2


def try_staging(pipe: ProgressPipe, comm: MPI.Intracomm, facts: Facts, folder: str) -> None:
    """Write to the folder on one rank of each node; look on all ranks for a file of rank 0. Collective.

    A rank that hangs in the folder hangs in a step of its own; the ranks wait for each other in another step.
    """
    data = secrets.token_bytes(16)
    pipe.step("staging folder", alone=True)
    if facts["node"] == facts["rank"]:
        facts["staging"] = own.try_folder(folder)
    with ExitStack() as files:
        made = None
        if comm.rank == 0 and "error" not in facts["staging"]:
            made = files.enter_context(own.made(folder, data)).name
        path, data = _gather(pipe, comm, (made, data))[0]
        pipe.step("staging folder", alone=True)
        facts["sees"] = own.sees(path, data) if path else None
        _gather(pipe, comm, None)
        pipe.step("staging folder", alone=True)


def log_nccl(environ: MutableMapping[str, str], facts: Facts) -> str | None:
    """Have NCCL write to a file which network it uses, unless the user reads its messages; return the file.

    NCCL says it nowhere else. It reads the environment when it is first used.
    """
    if "NCCL_DEBUG" in environ:
        return None
    path = os.path.join(tempfile.gettempdir(), f"{own.PREFIX}nccl-{facts['id']}.log")
    environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=path)
    return path


def read_nccl_log(path: str | None) -> str | None:
    """Return the network that NCCL uses ("IB", "Socket", a plugin's name) and remove the file; None if unknown."""
    found = None
    with suppress(OSError):  # NCCL was not used
        found = re.search(r"Using network (.+)", Path(path or "").read_text(errors="replace"))
        os.unlink(path or "")
    return found[1].strip() if found else None


def _tried(step: Callable[[], Facts]) -> Facts:
    """Return what a step has found and the seconds that it took, or its error."""
    begin = time.perf_counter()
    try:
        return {**step(), "seconds": time.perf_counter() - begin}
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


def _init(folder: str, limit: float) -> Facts:
    here = world.init(timeout=limit, staging=folder)
    return {"device": here.device.type, "backend": dist.get_backend_config()}


def _try_file(here: World) -> Facts:
    """Write an HDF5 file with all ranks and read it again. Collective."""
    name = objects.all_gather_object(here.comm, f"{own.PREFIX}{secrets.token_hex(8)}.h5")[0]
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
    """Time a concat of 1 MiB a rank over a route. Collective."""
    x = placed(here, torch.full((_ROUTE_BYTES,), here.rank % 128, dtype=torch.uint8, device="cpu"), name)
    expected = torch.arange(here.world_size, device="cpu").remainder(128).repeat_interleave(_ROUTE_BYTES)
    try:
        whole = concat(x, route=name)
        seconds = [timed(here, lambda: concat(x, route=name, out=whole))[0] for _ in range(_ROUTE_ROUNDS)]
    except HpcdistError as error:  # the same on all ranks
        return {"error": str(error)}
    same = torch.equal(whole.cpu(), expected.to(torch.uint8))
    right = all(objects.all_gather_object(world.team_of().comm, same))
    return {"seconds": median(seconds), "bytes": _ROUTE_BYTES * here.world_size, "right": right}
