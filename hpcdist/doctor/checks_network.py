"""The checks of the network: interfaces, InfiniBand, links between nodes. The docstrings are their meanings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from typing import Any

from hpcdist.doctor.table import (
    Facts,
    Ranks,
    Verdict,
    by_node,
    check,
    grouped,
    incomplete,
    known,
    names,
    some,
)  # fmt: skip
from hpcdist.runtime.cli import plural

__all__ = ["gloo_problem"]

_SLOW_PAIR = 0.5  # of what is usual
_SLOW_LINK = 0.25  # of what the link promises: one TCP connection does not fill a fast Ethernet
_LATE_PAIR = 3.0  # times what is usual
_LATE_SECONDS = 20e-6  # beyond what is usual: the switches on a path add some microseconds
_FAR = 1e-3  # seconds


def _nodes(ranks: Ranks) -> list[Facts]:
    return [group[0] for group in by_node(ranks)]


def _reaches(a: Facts, b: Facts, *addresses: str) -> bool:
    """Whether node `a` reached node `b` by one of the addresses, or did not try."""
    tried = known(a, f"reach.{b['node']}")
    return a is b or tried is None or any(tried.get(address) for address in addresses)


def _export(nodes: Ranks) -> str:
    """Return how to name an interface through which every node was reached by all that tried; "" if there is no such one."""
    for name in nodes[0]["interfaces"]:
        to = [(facts, facts["interfaces"].get(name, "")) for facts in nodes]
        if len(nodes) > 1 and all(address and _reaches(a, b, address) for a in nodes for b, address in to):
            return f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"
    return ""


@check(
    "network", "network", "interfaces",
    fix="open the nodes' ephemeral ports (`net.ipv4.ip_local_port_range`) to each other; give each node an address of "
    "IPv4 (`ip addr add 10.0.0.N/24 dev eth0`, as root); or exclude such a node",
)  # fmt: skip
def _network(ranks: Ranks) -> Verdict:
    """A node does not reach another one by any address of IPv4, by which hpcdist.init() connects them."""
    nodes = _nodes(ranks)
    if incomplete(ranks):
        return None
    if len(nodes) == 1:
        return "ok", "one node: the loopback interface"
    pairs = [(a, b) for a, b in product(nodes, nodes) if not _reaches(a, b, *b["interfaces"].values())]
    if pairs:
        return "broken", some([f"{a['host']} does not reach {b['host']}" for a, b in pairs], 4, "pairs")
    tried = sum(len(facts.get("reach", {})) for facts in nodes)
    way = _export(nodes) or "interfaces of different names, which hpcdist.init() finds"
    return "ok", f"all {tried} pairs of nodes that were tried reach each other; for other programs: {way}"


def _named(variable: str, ranks: Ranks) -> Verdict:
    problem = _problem(variable, ranks)
    value = next((facts["environ"][variable] for facts in ranks if variable in facts["environ"]), None)
    if value is None or problem is None:
        return None if value is None else ("ok", f"{variable}={value}")
    fix = f"unset {variable}: hpcdist.init() finds the interface by itself; {_export(_nodes(ranks))}"
    used = variable == "GLOO_SOCKET_IFNAME" or any(known(facts, "gpu.gpus") for facts in ranks)
    return "broken" if used else "warning", f"{variable}={value}: {problem}", fix.removesuffix("; ")


for _variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
    check(
        "network", _variable, "interfaces", fix=f"`unset {_variable}`: hpcdist.init() finds the interface by itself",
        meaning="It names an interface that is not there, or that does not lead to the other nodes.",
    )(partial(_named, _variable))  # fmt: skip


def _problem(variable: str, ranks: Ranks) -> str | None:
    for facts in ranks:
        if variable in facts["environ"] and not _selected(variable, facts):
            there = ", ".join(facts["interfaces"]) or "none"
            return f"no such interface with an address on {facts['host']}, which has {there}"
    nodes = _nodes(ranks)
    for a, b in product(nodes, nodes):
        chosen = _selected(variable, b) if variable in b["environ"] else []
        if chosen and not _reaches(a, b, *(b["interfaces"][name] for name in chosen)):
            return f"{a['host']} does not reach {b['host']} through it"
    return None


def _selected(variable: str, facts: Facts) -> list[str]:
    """Return the interfaces of a node that the variable selects.

    gloo takes names; NCCL takes prefixes, "=" before exact names and "^" before those to exclude.
    """
    value = facts["environ"][variable]
    words, without = value.lstrip("^=").split(","), value.startswith("^")
    if variable == "GLOO_SOCKET_IFNAME":
        return words if set(words) <= facts["interfaces"].keys() else []
    starts = tuple(f"{word}=" if "=" in value[:2] else word for word in words)  # an exact name has an end
    return [name for name in facts["interfaces"] if f"{name}=".startswith(starts) != without]


def gloo_problem(ranks: Ranks) -> str | None:
    """Return why gloo would fail or hang with the interface that GLOO_SOCKET_IFNAME names; None if it would not."""
    return _problem("GLOO_SOCKET_IFNAME", ranks)


def _active(facts: Facts) -> list[dict[str, Any]]:
    return [port for port in known(facts, "rdma.ports") or [] if port["state"] == "ACTIVE"]


@check(
    "network", "InfiniBand", "rdma",
    fix="`ibstat` there; `srun --exclude=HOST` and tell the centre; meanwhile `export NCCL_IB_DISABLE=1`",
)  # fmt: skip
def _infiniband(ranks: Ranks) -> Verdict:
    """Ports are not ACTIVE, on some nodes (broken) or on all; or a link is slower than on other nodes."""
    groups = grouped(_nodes(ranks), lambda facts: sum(port["rate"] for port in _active(facts)))
    having = any(facts["rdma"]["ports"] for facts in ranks)
    texts = []
    for group in groups:
        found = [
            f"{p['device']}/{p['port']} {p['state']} ({p['layer']}, {p['rate']:g} Gbit/s)"
            for p in group[0]["rdma"]["ports"]
        ]
        hosts = some([facts["host"] for facts in group], 4, "nodes")
        texts.append(f"{hosts}: {', '.join(found) or 'no device'}")
    text = some(texts, 4, "kinds of nodes")
    if not having:
        return "ok", "none: no node has a device"
    if not any(map(_active, ranks)):
        return "warning", text
    counts = {len(_active(facts)) for facts in ranks}
    return ("ok" if len(groups) == 1 else "warning" if len(counts) == 1 else "broken"), text


@check(
    "network", "NCCL network", "gpu", "rdma",
    fix="`unset NCCL_IB_DISABLE NCCL_NET`; `NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET` shows why; see InfiniBand and "
    "`ulimit -l`; Slingshot: `module load aws-ofi-nccl`, `export NCCL_NET='AWS Libfabric'`",
)  # fmt: skip
def _nccl(ranks: Ranks) -> Verdict:
    """NCCL uses sockets between the nodes though they have InfiniBand or Slingshot (its log tells it); or the ranks use
    different networks."""
    users = [facts for facts in ranks if facts["gpu"]["gpus"] and facts["gpu"]["nccl"]]
    if len(by_node(ranks)) == 1 or not users:
        return "ok", "not needed: one node, or no GPUs"
    groups = grouped(users, lambda facts: facts.get("nccl_network"))
    used = [str(group[0].get("nccl_network")) for group in groups]
    if len(used) > 1:
        text = "; ".join(f"{network} ({names(group)})" for network, group in zip(used, groups, strict=True))
        return "broken", f"not the same on all ranks: {text}", "the same environment and NCCL_ variables on all nodes"
    environ = users[0]["environ"]
    off = [f"{name}={environ[name]}" for name in ("NCCL_IB_DISABLE", "NCCL_NET") if name in environ]
    fast = [
        f"{name} is Slingshot, which needs a plugin"
        for f in users
        for name in f["interfaces"]
        if name.startswith("hsn")
    ]
    fast += [f"{port['device']} is active" for facts in users for port in _active(facts)]
    if used == ["Socket"] and fast:
        why = f"because of {', '.join(off)}" if off else f"though {fast[0]}"
        return "warning", f"NCCL moves data between the nodes through sockets, {why}"
    return "ok", "not known before NCCL has run" if used == ["None"] else f"NCCL uses {used[0]}"


Pair = tuple[frozenset[str], float]  # hosts, and what was measured between them


def _pairs(ranks: Ranks, value: str) -> tuple[list[Pair], float]:
    """Return what was measured between pairs of nodes, and what is usual.

    That is the median over the nodes of the best value of each: a node that is slow to all does not move it.
    """
    hosts = {facts["node"]: facts["host"] for facts in ranks}
    rows = [(facts["host"], row) for facts in ranks for row in facts.get("pairs", []) if row["peer"] in hosts]
    found = [(frozenset((host, hosts[row["peer"]])), row[value]) for host, row in rows]
    best = min if value == "latency" else max
    each = [best(number for pair, number in found if host in pair) for host in _hosts(found)]
    return found, median(each) if each else 0.0


def _hosts(found: list[Pair]) -> set[str]:
    return {host for pair, _ in found for host in pair}


def _slow(found: list[Pair], slow: list[Pair], usual: float, show: Callable[[float], str]) -> Verdict:
    """Judge pairs of nodes that are slower than the others; the fix excludes the nodes whose pairs are all slow."""
    guilty = {host for host in _hosts(slow) if all(pair in slow for pair in found if host in pair[0])}
    exclude = ",".join(sorted(guilty if guilty and guilty != _hosts(found) else _hosts(slow)))
    texts = [f"{' and '.join(sorted(pair))} {show(number)}" for pair, number in slow]
    text = f"{some(texts, 4, 'pairs')}, where {show(usual)} is usual in this job"
    return "warning", text, f"srun --exclude={exclude}, and tell the centre; ibstat, ethtool, dmesg and top there"


@check(
    "network", "bandwidth between nodes", "interfaces",
    fix="`srun --exclude=HOST`; see InfiniBand; name the network to MPI: `export UCX_NET_DEVICES=mlx5_0:1` (UCX), "
    "`OMPI_MCA_btl_tcp_if_include=ib0` (Open MPI), `FI_PROVIDER=verbs` (MPICH); in a container: "
    "`docker run --device=/dev/infiniband`",
)  # fmt: skip
def _bandwidth(ranks: Ranks) -> Verdict:
    """Pairs of nodes have less than half of what is usual in this job; or all have less than a quarter of what the link
    promises, because MPI uses another network."""
    found, usual = _pairs(ranks, "rate")
    slow = [pair for pair in found if pair[1] < _SLOW_PAIR * usual]
    if not found or slow:
        return _slow(found, slow, usual, lambda rate: f"{rate / 1e6:.0f} MB/s") if slow else None
    text = f"{usual / 1e6:.0f} MB/s from node to node through MPI ({plural(len(found), 'pair')})"
    promised, link = min(map(_promised, _nodes(ranks)))
    if not link:
        return "ok", text
    far_less = max(rate for _, rate in found) < _SLOW_LINK * promised
    text += f"{', where' if far_less else ';'} {link} promises {promised / 1e6:.0f}"
    return "warning" if far_less else "ok", text


def _promised(facts: Facts) -> tuple[float, str]:
    """Return (bytes/s, name) of the fastest link of a rank's node, InfiniBand or an interface; (0, "") if unknown."""
    links = [(p["rate"] * 1e9 / 8, f"{p['layer']} {p['device']} of {p['rate']:g} Gbit/s") for p in _active(facts)]
    if not links:
        speeds = [(name, facts["speeds"][name]) for name in facts["interfaces"] if name in facts["speeds"]]
        links = [(speed * 1e6 / 8, f"{name} of {speed / 1000:g} Gbit/s") for name, speed in speeds]
    return max(links, key=lambda link: link[0], default=(0.0, ""))


@check(
    "network", "latency between nodes", "interfaces",
    fix="one rank a core: `srun --cpus-per-task=1 --cpu-bind=cores`; `ping` from node to node; nodes of one network",
)  # fmt: skip
def _latency(ranks: Ranks) -> Verdict:
    """Pairs of nodes are 3 times as late as usual; or all take over a millisecond, because there are more ranks than
    cores or the nodes are far apart."""
    found, usual = _pairs(ranks, "latency")
    slow = [pair for pair in found if pair[1] > max(_LATE_PAIR * usual, usual + _LATE_SECONDS)]
    if not found or slow:
        return _slow(found, slow, usual, lambda seconds: f"{seconds * 1e6:.1f} us") if slow else None
    text = f"{usual * 1e6:.1f} us from node to node through MPI ({plural(len(found), 'pair')})"
    if usual > _FAR:
        return "warning", f"{text}: more ranks than cores, or nodes that are far from each other"
    return "ok", text
