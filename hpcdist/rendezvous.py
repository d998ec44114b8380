"""How the ranks of an MPI job find torch's store: no port is ever chosen before it is bound."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed's own, with types

from hpcdist import agree
from hpcdist.errors import LaunchError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["open_store"]

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_CONNECT_SECONDS = 3  # an address that does not answer by then is not the one to use


def open_store(comm: MPI.Intracomm, nodes: int, timeout: timedelta) -> tuple[Store, str | None]:
    """Open a TCPStore on rank 0 and connect every rank to it. Collective over `comm`.

    The kernel picks the port when rank 0 binds it, and MPI tells the others, so that two jobs started at once on one
    host cannot collide. On one node the store listens on the loopback interface alone; else on all of them, and the
    address used is one that every rank has just connected to.

    Returns:
        The store, and the network interface by which this rank reaches it (None where it cannot be told).

    Raises:
        LaunchError: on all ranks, if no address of rank 0's host is reached by all ranks.
    """
    listener: list[socket.socket] = []
    store: list[Store] = []

    def serve() -> tuple[int, list[str]]:
        host = "127.0.0.1" if nodes == 1 else "0.0.0.0"
        listener.append(socket.create_server((host, 0), backlog=max(128, comm.size)))
        port: int = listener[0].getsockname()[1]
        # torch takes the bound socket over; it would itself bind every interface, loopback asked for or not.
        store.append(
            TCPStore(
                host, port, comm.size, True, timeout, wait_for_workers=False, master_listen_fd=listener[0].detach()
            )
        )
        return port, ["127.0.0.1"] if nodes == 1 else _addresses()

    port, addresses = agree.on_root(comm, "init", serve)
    reached = [_local_address(address, port) for address in addresses]
    everywhere = [all(rank) for rank in zip(*comm.allgather([r is not None for r in reached]), strict=True)]
    if not any(everywhere):
        raise LaunchError(
            f"no address of rank 0's host is reached by all {comm.size} ranks: tried {addresses}, port {port}. "
            "A firewall between the nodes, or no common network?"
        )
    chosen = everywhere.index(True)
    if comm.rank != 0:
        store.append(TCPStore(addresses[chosen], port, comm.size, False, timeout, wait_for_workers=False))
    return store[0], _interface(reached[chosen])


def _addresses() -> list[str]:
    """This host's IPv4 addresses that others might reach; those that its name stands for come first."""
    mine = [address for address in _by_interface().values() if not address.startswith("127.")]
    try:
        named = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    except socket.gaierror:
        named = []
    return sorted(dict.fromkeys(mine), key=lambda address: address not in named)


def _by_interface() -> dict[str, str]:
    """interface -> IPv4 address, for those that have one."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an IPv4 address
                found[name] = socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])
    return found


def _local_address(address: str, port: int) -> str | None:
    """The address of this host from which a connection to `address` succeeds."""
    try:
        with socket.create_connection((address, port), _CONNECT_SECONDS) as connection:
            return str(connection.getsockname()[0])
    except OSError:
        return None


def _interface(address: str | None) -> str | None:
    return next((name for name, own in _by_interface().items() if own == address), None)
