"""The rendezvous of an MPI job's ranks, and torch's store. No port is chosen before it is bound."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed as dist
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from hpcdist.control import objects
from hpcdist.errors import LaunchError
from hpcdist.tensors import accelerator

if TYPE_CHECKING:
    from mpi4py import MPI

_CONNECT_SECONDS = (0.5, 3)  # first try of all addresses; second, if no address was reached by all ranks


@dataclass
class Meeting:
    """The place where the ranks of a job connect.

    Attributes:
        host: address of rank 0's host that every rank has connected to.
        own: address of this host in the same network, "127.0.0.1" on one node.
        shares_files: whether the ranks are on one node, and can open rank 0's files.
    """

    host: str
    own: str
    shares_files: bool = False


def meet(comm: MPI.Intracomm, nodes: int) -> Meeting:
    """Find an address of rank 0's host that all ranks reach. Collective over `comm`.

    On one node they can open a file without a name, and no process listens. If the system forbids that, as between
    containers, rank 0 listens on the loopback interface during this call. On several nodes it listens on all
    interfaces. The kernel picks the port when rank 0 binds it, and the others get it over MPI. Therefore two jobs that
    start at once on one host cannot collide.

    Raises:
        LaunchError: on all ranks, if no address of rank 0's host is reached by all ranks.
    """
    if nodes == 1 and (file := objects.node_file(comm)) is not None:
        os.close(file)
        return Meeting("127.0.0.1", "127.0.0.1", shares_files=True)
    listener: list[socket.socket] = []

    def serve() -> tuple[int, list[str], str]:
        host = "127.0.0.1" if nodes == 1 else "0.0.0.0"
        listener.append(socket.create_server((host, 0), backlog=max(128, comm.size)))
        addresses = ["127.0.0.1"] if nodes == 1 else _addresses()
        return listener[0].getsockname()[1], addresses, secrets.token_hex()

    port, addresses, token = objects.run_on_root(comm, "init", serve)
    with ThreadPoolExecutor(len(addresses) + 1) as threads, ExitStack() as over:
        if listener:
            done = threading.Event()
            over.callback(done.set)
            threads.submit(_answer, listener[0], token, done)
        for seconds in _CONNECT_SECONDS:
            ask = partial(_local_address, port=port, token=token, seconds=seconds)
            reached = list(threads.map(ask, addresses))
            everywhere = list(map(all, zip(*objects.all_gather_object(comm, reached), strict=True)))
            if any(everywhere):
                break
    if not any(everywhere):
        raise LaunchError(
            "HD107",
            f"no address of rank 0's host is reached by all {comm.size} ranks: tried {addresses}, port {port}. "
            "A firewall between the nodes, or no common network?",
        )
    chosen = everywhere.index(True)
    return Meeting(addresses[chosen], reached[chosen] or "")


def open_store(comm: MPI.Intracomm, meeting: Meeting, timeout: timedelta) -> Store:
    """Open torch's store, a new one in each call. Collective over `comm`.

    On one node it is a FileStore on a file without a name, which no other user can open. On several nodes it is a
    TCPStore on rank 0, at the meeting's address. A rank without a GPU connects when torch first uses it: for groups of
    backend "mpi" never.
    """
    if meeting.shares_files:
        return _file_store(objects.open_on_root(comm), timeout)
    stores: list[TCPStore] = []

    def serve() -> int:
        stores.append(served(meeting.host, comm.size, timeout))
        return stores[0].port

    port = objects.run_on_root(comm, "init", serve)
    if stores:
        return stores[0]
    connect = partial(TCPStore, meeting.host, port, comm.size, False, timeout, wait_for_workers=False)
    return connect() if accelerator.count() else LateStore(connect)


def served(host: str, size: int, timeout: timedelta, multi_tenant: bool = False) -> TCPStore:
    """Open a store that listens on this host, at a port that the kernel picks."""
    listener = socket.create_server((host, 0), backlog=max(128, size))
    port = listener.getsockname()[1]
    return TCPStore(
        *(host, port, size, True, timeout),
        # torch takes the bound socket over; it would itself bind every interface, loopback asked for or not.
        wait_for_workers=False, multi_tenant=multi_tenant, master_listen_fd=listener.detach(),
    )  # fmt: skip


def variables(comm: MPI.Intracomm, meeting: Meeting) -> dict[str, str]:
    """Return the variables of gloo and NCCL for the interface by which this rank reaches rank 0; none if unknown."""
    from mpi4py import MPI

    name = next((name for name, own in interfaces().items() if own == meeting.own), None)
    if name is None:
        return {}  # gloo takes what the host's name resolves to, on Debian 127.0.1.1
    chosen = {GLOO: name}
    # NCCL keeps its first interface until the process ends, and a world of more ranks may have several nodes.
    if meeting.host == "127.0.0.1" and comm.size == MPI.COMM_WORLD.size:
        chosen["NCCL_SOCKET_IFNAME"] = name  # else its own rendezvous would listen on another one
    return chosen


class LateStore(Store):
    """A store to which this rank connects when torch first uses it."""

    _latest: Store  # torch keeps the part in C++ alone

    def __init__(self, connect: Callable[[], Store]) -> None:
        super().__init__()
        self._connect, LateStore._latest = connect, self

    @cached_property
    def connected(self) -> Store:
        return self._connect()


def _passing_on(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.connected, name)(*args)


for _name in {*dir(Store)} - {*dir(object), "timeout", "set_timeout"}:
    setattr(LateStore, _name, _passing_on(_name))
for _called, _name in {"deleteKey": "delete_key", "getNumKeys": "num_keys"}.items():  # as C++ calls them
    setattr(LateStore, _called, _passing_on(_name))

_end_earlier: list[Callable[[], None]] = []


def _file_store(file: int, timeout: timedelta) -> Store:
    """Open a store in a file, by its descriptor, which is closed when this process opens its next store.

    A store opens its path at each operation, and when it is destroyed, and continues to read where it ended. A group
    that the program keeps from an earlier world must find no file, least of all the next world's. So the path leads
    through a thread that ends before its descriptor is used again; a child process does not share either.
    """
    while _end_earlier:
        _end_earlier.pop()()
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="hpcdist-store", daemon=True)
    thread.start()
    task = f"/proc/{os.getpid()}/task/{thread.native_id}"
    store = FileStore(f"{task}/fd/{file}", -1)
    store.set_timeout(timeout)

    def end() -> None:
        store.set_timeout(timedelta(milliseconds=1))  # torch waits for the file until then
        over.set()
        thread.join()
        while os.path.exists(task):  # the system ends it a little later than Python
            time.sleep(0)
        os.close(file)

    _end_earlier.append(end)
    return store


class Nodes:
    """The nodes of a communicator, in the order of the lowest rank on each. Collective over `comm`.

    A context that frees `local` at its end.

    Attributes:
        local: a communicator of the ranks of this node.
        local_rank, local_size: the rank of this process in `local`, and the size of that.
        index, count: the index of this node, and the number of nodes.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self.local = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = self.local.rank, self.local.size
        leaders = objects.all_gather_object(comm, objects.all_gather_object(self.local, comm.rank)[0])
        order = sorted(set(leaders))
        self.index, self.count = order.index(leaders[comm.rank]), len(order)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.local.Free()


def in_torch_order(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Duplicate `comm`; if the caller has initialised torch.distributed, in its order of ranks. Collective.

    Raises:
        LaunchError: on all ranks, if torch.distributed has other ranks.
    """
    place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    all_ = objects.all_gather_object(comm, place)
    if all(entry is None for entry in all_):
        return comm.Dup()
    sizes = sorted({entry[1] for entry in all_ if entry is not None} - {comm.size})
    if sizes:
        raise LaunchError(
            "HD106",
            f"torch.distributed was started before hpcdist.init() with {sizes[0]} ranks, where MPI has {comm.size}. "
            "hpcdist needs the ranks of an MPI job. Start the program with mpirun or srun, and leave torch.distributed "
            "to hpcdist.init(), or initialise it with the ranks of the communicator that you pass to hpcdist.init()",
        )
    ranks = sorted(entry[0] for entry in all_ if entry is not None)
    if ranks != list(range(comm.size)):
        raise LaunchError(
            "HD106",
            "torch.distributed was initialised before hpcdist.init(), but with other ranks; (rank, size) by "
            f"MPI rank: {all_}",
        )
    ordered = comm.Split(0, dist.get_rank())
    assert isinstance(ordered, type(comm))
    return ordered


def _addresses() -> list[str]:
    """Return the IPv4 addresses of this host that others might reach; first those that its name resolves to."""
    addresses = [address for address in interfaces().values() if not address.startswith("127.")]
    try:
        named = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    except socket.gaierror:
        named = []
    return sorted(dict.fromkeys(addresses), key=lambda address: address not in named)


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one."""
    return {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in reversed(addresses)  # the first one counts
        if address.family == socket.AF_INET
    }


GLOO = "GLOO_SOCKET_IFNAME"


def socket_problem(environ: Mapping[str, str], host: str, there: Iterable[str]) -> str | None:
    """Return why the interfaces that the user has named for gloo would not do, given those of a host; None if they
    would, or none is named."""
    if set(environ.get(GLOO, "").split(",")) <= {"", *there}:
        return None
    return f"{host} has no such interface with an address, only {', '.join(there) or 'none'}"


def _answer(listener: socket.socket, token: str, over: threading.Event) -> None:
    """Send `token` to whoever connects to rank 0, until it is over; then close the listener.

    An address that several hosts have, such as that of docker0, may lead elsewhere.
    """
    listener.settimeout(0.01)
    with listener:
        while not over.is_set():
            with suppress(OSError):  # there is no connection, or it was closed again
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(token.encode())


def _local_address(address: str, port: int, token: str, seconds: float) -> str | None:
    """Return the address of this host from which `address` is reached; None if rank 0 does not answer there."""
    try:
        with socket.create_connection((address, port), seconds) as connection:
            answer = connection.recv(len(token), socket.MSG_WAITALL)
            return str(connection.getsockname()[0]) if answer == token.encode() else None
    except OSError:
        return None
