"""The network: the interfaces of each node, and which nodes reach each other through them."""

from __future__ import annotations

import secrets
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from ipaddress import IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING

from hpcdist.comm import rendezvous
from hpcdist.control import objects
from hpcdist.doctor.findings import Facts
from hpcdist.doctor.topics import Ranks, Section, Verdict, each, incomplete, per_node, some, topic

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["gather", "gloo_problem", "good_interfaces", "judge", "reach"]

_CONNECT_SECONDS = 1.5  # an address that takes longer to answer counts as unreachable
_ALL_PAIRS = 32  # nodes; with more, each node tries those at distance 1, 2, 4, 8, ...
_THREADS = 32  # that connect at the same time
_TOKEN = 16  # bytes
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def gather() -> Facts:
    """Collect this node's interfaces, and the IPv4 and global IPv6 addresses of those that have one."""
    try:
        text = Path("/proc/net/if_inet6").read_text()
    except OSError:  # a kernel without IPv6
        text = ""
    links = [name for _, name in socket.if_nameindex()]
    return {"interfaces": rendezvous.interfaces(), "ipv6": _global_ipv6(text), "links": links}


def _global_ipv6(text: str) -> dict[str, str]:
    """Return the IPv6 address of each interface that has one that is valid beyond its link, from /proc/net/if_inet6."""
    rows = [line.split() for line in text.splitlines()]  # address, index, length of prefix, scope, flags, name
    return {row[5]: str(IPv6Address(int(row[0], 16))) for row in rows if row[3] == "00"}


def reach(leaders: MPI.Intracomm, facts: Facts) -> dict[str, dict[str, bool]]:
    """Connect to every address of the other nodes. Collective over one rank of each node.

    Returns:
        node (its lowest rank) -> address -> whether it answered.
    """
    token = secrets.token_bytes(_TOKEN)
    addresses = [a for a in facts["interfaces"].values() if not a.startswith("127.")]
    with socket.create_server(("", 0), backlog=max(128, leaders.size)) as listener:
        threading.Thread(target=_answer, args=(listener, token), daemon=True).start()
        servers = objects.all_gather_object(leaders, (facts["node"], listener.getsockname()[1], token, addresses))
        size, mine = leaders.size, leaders.rank
        steps = range(1, size) if size <= _ALL_PAIRS else [2**k for k in range(size.bit_length()) if 2**k < size]
        others = [servers[(mine + step) % size] for step in steps]
        tries = [(server, address) for server in others for address in server[3]]
        with ThreadPoolExecutor(_THREADS) as pool:
            answers = list(pool.map(lambda a: _reached(a[1], a[0][1], a[0][2]), tries))
        leaders.Barrier()  # all have tried before any stops listening
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
    found: dict[str, dict[str, bool]] = {str(server[0]): {} for server in others}
    for (server, address), answered in zip(tries, answers, strict=True):
        found[str(server[0])][address] = answered
    return found


def _answer(listener: socket.socket, token: bytes) -> None:
    with suppress(OSError):  # the listener is closed
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(token)


def _reached(address: str, port: int, token: bytes) -> bool:
    """Whether the right node answers: an address such as 172.17.0.1 belongs to every node that runs Docker."""
    try:
        with socket.create_connection((address, port), _CONNECT_SECONDS) as connection:
            return connection.recv(_TOKEN, socket.MSG_WAITALL) == token
    except OSError:
        return False


@topic("interfaces", "interfaces")
def _interfaces(ranks: Ranks) -> Verdict:
    texts = []
    for facts in per_node(ranks):
        found = ", ".join(f"{name} {address}" for name, address in facts["interfaces"].items())
        texts.append(f"{facts['host']}: {found or 'none with an address'}")
    return "ok", some(texts, 8, "nodes")


def good_interfaces(nodes: Sequence[Facts]) -> list[str]:
    """Return the names of interfaces through which every node was reached by all that tried."""
    names = [name for name in nodes[0]["interfaces"] if all(name in facts["interfaces"] for facts in nodes)]
    return [name for name in names if all(_reaches(a, b, b["interfaces"][name]) for a in nodes for b in nodes)]


def _reaches(a: Facts, b: Facts, address: str) -> bool:
    """Whether node `a` reached `address` of node `b`, or did not try."""
    if a["node"] == b["node"]:
        return True
    tried = a.get("reach", {}).get(str(b["node"]))
    return True if tried is None else bool(tried.get(address))


def _export(good: Sequence[str]) -> str:
    return f"export GLOO_SOCKET_IFNAME={good[0]} NCCL_SOCKET_IFNAME={good[0]}" if good else ""


def _without_ipv4(nodes: Sequence[Facts]) -> list[Facts]:
    """Return the nodes that have an address of IPv6, but none of IPv4 of their own, as that of docker0 is not."""
    count = Counter(address for facts in nodes for address in facts["interfaces"].values())
    own = [[a for a in facts["interfaces"].values() if count[a] == 1 and not a.startswith("127.")] for facts in nodes]
    return [facts for facts, mine in zip(nodes, own, strict=True) if facts.get("ipv6") and not mine]


@topic("IPv6", "ipv6")
def _ipv6(ranks: Ranks) -> Verdict:
    """Judge nodes that have addresses of IPv6 alone: hpcdist.init() connects the nodes by IPv4."""
    nodes = per_node(ranks)
    if incomplete(ranks):
        return None
    if len(nodes) == 1:
        return "ok", "one node: the loopback interface"
    without = _without_ipv4(nodes)
    if without:
        name, address = next(iter(without[0]["ipv6"].items()))
        hosts = ",".join(facts["host"] for facts in without)
        text = f"{hosts}: {address} on {name}, but no address of IPv4, by which hpcdist.init() connects the nodes"
        return "broken", text, f"as root on each node: ip addr add 10.0.0.N/24 dev {name}; or srun --exclude={hosts}"
    return "ok", "every node has an address of IPv4"


@topic("network", "interfaces")
def _pairs(ranks: Ranks) -> Verdict:
    nodes = per_node(ranks)
    if incomplete(ranks):
        return None
    good = good_interfaces(nodes)
    if len(nodes) == 1:
        return "ok", "one node: the loopback interface"
    if _without_ipv4(nodes):
        return None  # the finding about IPv6 tells
    bad = [
        f"{a['host']} does not reach {b['host']}"
        for a in nodes
        for b in nodes
        if not any(_reaches(a, b, address) for address in b["interfaces"].values())
    ]
    if bad:
        fix = "open the nodes' ephemeral ports (net.ipv4.ip_local_port_range) to each other, or exclude such a node"
        return "broken", some(bad, 4, "pairs"), fix
    tried = sum(len(facts.get("reach", {})) for facts in nodes)
    text = f"all {tried} pairs of nodes that were tried reach each other"
    if not good:
        return "ok", f"{text}, through interfaces of different names, which hpcdist.init() finds"
    address = f"{nodes[0]['interfaces'][good[0]]}, {nodes[1]['interfaces'][good[0]]}, ..."
    return "ok", f"{text} through {good[0]} ({address}); for other programs: {_export(good)}"


def _named(variable: str, ranks: Ranks) -> Verdict:
    """Judge the interfaces that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names."""
    if not any(variable in facts["environ"] for facts in ranks):
        return None
    nodes = per_node(ranks)
    good = good_interfaces(nodes)
    text = each(ranks, lambda facts: f"{variable}={facts['environ'].get(variable, '')}")
    problem = _problem(variable, ranks, nodes)
    if problem is None:
        return "ok", text
    fix = f"unset {variable}: hpcdist.init() finds the interface by itself"
    fix += f"; or {_export(good)}" if good and len(nodes) > 1 else ""
    used = variable == "GLOO_SOCKET_IFNAME" or any(facts.get("gpu", {}).get("gpus") for facts in ranks)
    return "broken" if used else "warning", f"{text}: {problem}", fix


def _problem(variable: str, ranks: Ranks, nodes: Sequence[Facts]) -> str | None:
    for facts in ranks:
        value = facts["environ"].get(variable, "")
        if value and not _named_by(variable, value, facts):
            there = ", ".join(facts["interfaces"]) or "none"
            return f"no such interface with an address on {facts['host']}, which has {there}"
    for a in nodes:
        for b in nodes:
            names = _named_by(variable, b["environ"].get(variable, ""), b)
            if names and not any(_reaches(a, b, b["interfaces"][name]) for name in names):
                return f"{a['host']} does not reach {b['host']} through it"
    return None


def _named_by(variable: str, value: str, facts: Facts) -> list[str]:
    """Return the interfaces of a node that a value selects.

    gloo takes names; NCCL takes prefixes, "=" before exact names and "^" before those to exclude.
    """
    words = value.lstrip("^=").split(",")
    if variable == "GLOO_SOCKET_IFNAME":
        return words if all(word in facts["interfaces"] for word in words) else []
    exact, without = "=" in value[:2], value.startswith("^")
    return [
        name
        for name in facts["interfaces"]
        if any(name == word if exact else name.startswith(word) for word in words) != without
    ]


def gloo_problem(ranks: Ranks) -> str | None:
    """Return why gloo would fail or hang with the interface that GLOO_SOCKET_IFNAME names; None if it would not."""
    return _problem("GLOO_SOCKET_IFNAME", ranks, per_node(ranks))


_NAMED = (topic(name, "interfaces")(partial(_named, name)) for name in _VARIABLES)
judge = Section("network", _interfaces, _ipv6, _pairs, *_NAMED)
