"""The network: the interfaces of each node, and which pair of nodes reaches which by them."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from hpcdist.comm import rendezvous
from hpcdist.control import objects
from hpcdist.doctor.findings import Facts, Finding, by_node, each

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["gather", "judge", "reach"]

_CONNECT_SECONDS = 1.5  # an address that does not answer by then is not the one to use
_ALL_PAIRS = 32  # nodes; of more, each tries those at distance 1, 2, 4, 8, ...
_AT_ONCE = 32  # connections
_TOKEN = 16  # bytes


def gather() -> Facts:
    """This node's interfaces, and the IPv4 addresses of those that have one."""
    return {
        "interfaces": rendezvous.interfaces(),
        "links": [name for _, name in socket.if_nameindex()],
    }


def reach(leaders: MPI.Intracomm, facts: Facts) -> dict[str, dict[str, bool]]:
    """Try every address of the other nodes. Collective over a rank of each node.

    Returns:
        The node (its lowest rank) -> address -> whether it answered.
    """
    token = secrets.token_bytes(_TOKEN)
    addresses = [a for a in facts["interfaces"].values() if not a.startswith("127.")]
    with socket.create_server(("", 0), backlog=max(128, leaders.size)) as listener:
        threading.Thread(target=_answer, args=(listener, token), daemon=True).start()
        doors = objects.all_gather_object(leaders, (facts["node"], listener.getsockname()[1], token, addresses))
        size, mine = leaders.size, leaders.rank
        steps = range(1, size) if size <= _ALL_PAIRS else [2**k for k in range(size.bit_length()) if 2**k < size]
        tries = [(doors[(mine + step) % size], address) for step in steps for address in doors[(mine + step) % size][3]]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = list(pool.map(lambda a: _reached(a[1], a[0][1], a[0][2]), tries))
        leaders.Barrier()  # nobody stops listening before all have tried
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
    found: dict[str, dict[str, bool]] = {str(doors[(mine + step) % size][0]): {} for step in steps}
    for (door, address), answered in zip(tries, answers, strict=True):
        found[str(door[0])][address] = answered
    return found


def _answer(listener: socket.socket, token: bytes) -> None:
    with suppress(OSError):  # it is closed
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(token)


def _reached(address: str, port: int, token: bytes) -> bool:
    """Whether it is that node that answers: an address such as 172.17.0.1 belongs to every node that runs Docker."""
    try:
        with socket.create_connection((address, port), _CONNECT_SECONDS) as connection:
            return connection.recv(_TOKEN, socket.MSG_WAITALL) == token
    except OSError:
        return False


def judge(ranks: Sequence[Facts]) -> list[Finding]:
    """All findings about the network."""
    known = [facts for facts in ranks if "interfaces" in facts]
    if not known:
        return []
    nodes = [node[0] for node in by_node(known).values()]
    good = _good(nodes)
    return [*_interfaces(nodes), *_pairs(nodes, good), *_named(known, nodes, good)]


def _interfaces(nodes: Sequence[Facts]) -> list[Finding]:
    def text(facts: Facts) -> str:
        return ", ".join(f"{name} {address}" for name, address in facts["interfaces"].items()) or "none with an address"

    shown = "; ".join(f"{facts['host']}: {text(facts)}" for facts in nodes[:8])
    more = f"; and {len(nodes) - 8} more nodes" if len(nodes) > 8 else ""
    return [Finding("interfaces", "ok", shown + more)]


def _good(nodes: Sequence[Facts]) -> list[str]:
    """The names of interfaces by which every node is reached by all that tried."""
    names = [name for name in nodes[0]["interfaces"] if all(name in facts["interfaces"] for facts in nodes)]
    return [name for name in names if all(_reaches(a, b, b["interfaces"][name]) for a in nodes for b in nodes)]


def _reaches(a: Facts, b: Facts, address: str) -> bool:
    """Whether node `a` reached that address of node `b`, or did not try."""
    if a["node"] == b["node"]:
        return True
    tried = a.get("reach", {}).get(str(b["node"]))
    return True if tried is None else bool(tried.get(address))


def _export(good: Sequence[str]) -> str:
    return f"export GLOO_SOCKET_IFNAME={good[0]} NCCL_SOCKET_IFNAME={good[0]}" if good else ""


def _pairs(nodes: Sequence[Facts], good: Sequence[str]) -> list[Finding]:
    if len(nodes) == 1:
        return [Finding("network", "ok", "one node: the loopback interface")]
    bad = [
        f"{a['host']} does not reach {b['host']}"
        for a in nodes
        for b in nodes
        if not any(_reaches(a, b, address) for address in b["interfaces"].values())
    ]
    if bad:
        more = f", and {len(bad) - 4} more pairs" if len(bad) > 4 else ""
        fix = "open the nodes' ephemeral ports (net.ipv4.ip_local_port_range) to each other, or leave such a node out"
        return [Finding("network", "broken", ", ".join(bad[:4]) + more, fix)]
    tried = sum(len(facts.get("reach", {})) for facts in nodes)
    text = f"all {tried} pairs of nodes that were tried reach each other"
    if not good:
        return [Finding("network", "ok", f"{text}, by interfaces of different names, which hpcdist.init() finds")]
    address = f"{nodes[0]['interfaces'][good[0]]}, {nodes[1]['interfaces'][good[0]]}, ..."
    return [Finding("network", "ok", f"{text} by {good[0]} ({address}); for other programs: {_export(good)}")]


def _named(ranks: Sequence[Facts], nodes: Sequence[Facts], good: Sequence[str]) -> list[Finding]:
    """The interfaces that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name."""
    found = []
    has_gpus = any(facts.get("gpu", {}).get("gpus") for facts in ranks)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if not any(variable in facts["environ"] for facts in ranks):
            continue
        said = each(ranks, lambda facts, v=variable: f"{v}={facts['environ'].get(v, '')}")  # type: ignore[misc]
        problem = _problem(variable, ranks, nodes)
        if problem is None:
            found.append(Finding(variable, "ok", said))
            continue
        fix = f"unset {variable}: hpcdist.init() finds the interface by itself"
        fix += f"; or {_export(good)}" if good and len(nodes) > 1 else ""
        used = variable == "GLOO_SOCKET_IFNAME" or has_gpus
        found.append(Finding(variable, "broken" if used else "warning", f"{said}: {problem}", fix))
    return found


def _problem(variable: str, ranks: Sequence[Facts], nodes: Sequence[Facts]) -> str | None:
    for facts in ranks:
        value = facts["environ"].get(variable, "")
        if value and not _named_by(variable, value, facts):
            there = ", ".join(facts["interfaces"]) or "none"
            return f"no such interface with an address on {facts['host']}, which has {there}"
    for a in nodes:
        for b in nodes:
            names = _named_by(variable, b["environ"].get(variable, ""), b)
            if names and not any(_reaches(a, b, b["interfaces"][name]) for name in names):
                return f"{a['host']} does not reach {b['host']} by it"
    return None


def _named_by(variable: str, value: str, facts: Facts) -> list[str]:
    """The interfaces of a node that such a value stands for: gloo takes names; NCCL takes prefixes, "=" before exact
    names and "^" before those to be left out."""
    words = value.lstrip("^=").split(",")
    if variable == "GLOO_SOCKET_IFNAME":
        return words if all(word in facts["interfaces"] for word in words) else []
    exact, without = "=" in value[:2], value.startswith("^")
    return [
        name
        for name in facts["interfaces"]
        if any(name == word if exact else name.startswith(word) for word in words) != without
    ]
