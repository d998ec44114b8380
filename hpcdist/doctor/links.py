"""The links between the nodes: latency and bandwidth of pairs of nodes through MPI, and which are strangely slow."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from hpcdist.control import objects
from hpcdist.doctor import fabric
from hpcdist.doctor.findings import Facts
from hpcdist.doctor.network import good_interfaces
from hpcdist.doctor.topics import Ranks, Section, Verdict, per_node, some, topic
from hpcdist.runtime.cli import plural

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["judge", "large_size", "measure"]

_SMALL, _MIDDLE, _LARGE = 8, 2**16, 2**22  # bytes of the messages
_ROUNDS = {_SMALL: 30, _MIDDLE: 10, _LARGE: 4}  # there and back; the shortest counts
_PAIR_SECONDS = 0.3  # for the large messages of a pair, of which fewer bytes are sent if they would take longer
_TOTAL_SECONDS = 5.0  # after which no further pairs are tried
_ALL_PAIRS = 32  # nodes; with more, each node tries those whose number differs in one bit

_SLOW_PAIR = 0.5  # of what is usual
_SLOW_LINK = 0.25  # of what the link promises: one TCP connection does not fill a fast Ethernet
_LATE_PAIR = 3.0  # times what is usual
_LATE_SECONDS = 20e-6  # beyond what is usual: the switches on a path add some microseconds
_FAR = 1e-3  # seconds
_LOOK = "ibstat, ethtool, dmesg and top there"


def measure(leaders: MPI.Intracomm, facts: Facts) -> list[dict[str, Any]]:
    """Send messages between pairs of nodes, which do not share a node at any moment. Collective over one rank a node.

    Returns:
        On the lower node of each pair: "peer" (node), "latency" (seconds one way), and "rate" (bytes/s) of messages of
        "bytes".
    """
    nodes = objects.all_gather_object(leaders, facts["node"])
    found = []
    begin = time.perf_counter()
    bits = range((leaders.size - 1).bit_length())
    for step in range(1, 1 << len(bits)) if leaders.size <= _ALL_PAIRS else (1 << bit for bit in bits):
        if objects.all_gather_object(leaders, time.perf_counter() - begin)[0] > _TOTAL_SECONDS:
            break
        peer = leaders.rank ^ step  # so each pair meets in one step, and each node is in one pair of a step
        if peer < leaders.size:
            if leaders.rank < peer:
                found.append({"peer": nodes[peer], **_first(leaders, peer)})
            else:
                _second(leaders, peer)
    return found


def _first(leaders: MPI.Intracomm, peer: int) -> dict[str, Any]:
    """Measure a pair of nodes, on its lower one."""
    latency = _shortest(leaders, peer, _SMALL)
    size, seconds = _MIDDLE, _shortest(leaders, peer, _MIDDLE)
    large = large_size(seconds)
    leaders.Send(struct.pack("q", large), peer)
    if large > _MIDDLE:
        size, seconds = large, _shortest(leaders, peer, large)
    return {"latency": latency, "rate": size / seconds, "bytes": size}


def large_size(seconds: float) -> int:
    """Return the bytes of the large messages of a pair whose messages of _MIDDLE bytes take so many seconds."""
    return int(min(_LARGE, _PAIR_SECONDS / (2 * _ROUNDS[_LARGE] * seconds) * _MIDDLE))


def _second(leaders: MPI.Intracomm, peer: int) -> None:
    """Answer :func:`_first`."""
    _shortest(leaders, peer, _SMALL)
    _shortest(leaders, peer, _MIDDLE)
    large = bytearray(8)
    leaders.Recv(large, peer)
    (size,) = struct.unpack("q", large)
    if size > _MIDDLE:
        _shortest(leaders, peer, size)


def _shortest(leaders: MPI.Intracomm, peer: int, size: int) -> float:
    """Send messages to the peer and back; return the seconds of the fastest, one way."""
    data, times = bytearray(size), []
    for _ in range(_ROUNDS.get(size, _ROUNDS[_LARGE])):
        begin = time.perf_counter()
        if leaders.rank < peer:
            leaders.Send(data, peer)
            leaders.Recv(data, peer)
        else:
            leaders.Recv(data, peer)
            leaders.Send(data, peer)
        times.append(time.perf_counter() - begin)
    return min(times) / 2


def _rows(ranks: Ranks) -> list[dict[str, Any]]:
    """Return the measurements of all pairs, with the "hosts" of each."""
    hosts = {facts["node"]: facts["host"] for facts in ranks if facts["node"] == facts["rank"]}
    return [
        {**row, "hosts": (hosts[facts["node"]], hosts[row["peer"]])}
        for facts in ranks
        for row in facts.get("pairs", [])
    ]


def _usual(rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> float:
    """Return the median over the nodes of the highest value of each: a node that is slow to all does not move it."""
    hosts = {host for row in rows for host in row["hosts"]}
    return median(max(value(row) for row in rows if host in row["hosts"]) for host in hosts)


def _culprits(rows: list[dict[str, Any]], slow: list[dict[str, Any]]) -> list[str]:
    """Return the hosts whose pairs are all slow; those of the slow pairs if there are none."""
    hosts = {host for row in slow for host in row["hosts"]}
    guilty = [h for h in hosts if all(row in slow for row in rows if h in row["hosts"])]
    everyone = {host for row in rows for host in row["hosts"]}
    return sorted(guilty if guilty and set(guilty) != everyone else hosts)


def _exclude(hosts: list[str]) -> str:
    return f"srun --exclude={','.join(hosts)}, and tell the centre; {_LOOK}"


@topic("bandwidth between nodes", "interfaces")
def _bandwidth(ranks: Ranks) -> Verdict:
    rows = _rows(ranks)
    if not rows:
        return None
    usual = _usual(rows, lambda row: float(row["rate"]))
    slow = [row for row in rows if row["rate"] < _SLOW_PAIR * usual]
    if slow:
        texts = [f"{' and '.join(row['hosts'])} {row['rate'] / 1e6:.0f} MB/s" for row in slow]
        text = f"{some(texts, 4, 'pairs')}, where {usual / 1e6:.0f} MB/s is usual in this job"
        return "warning", text, _exclude(_culprits(rows, slow))
    nodes = per_node(ranks)
    names = good_interfaces(nodes)
    links = [link for facts in nodes if (link := fabric.promised(facts, names)) is not None]
    text = f"{usual / 1e6:.0f} MB/s from node to node through MPI ({plural(len(rows), 'pair')})"
    if not links:
        return "ok", text
    promised, name = min(links)
    if max(row["rate"] for row in rows) < _SLOW_LINK * promised:
        fix = "see InfiniBand; name the network to MPI: export UCX_NET_DEVICES=mlx5_0:1 (UCX), "
        fix += f"OMPI_MCA_btl_tcp_if_include={names[0] if names else 'ib0'} (Open MPI), FI_PROVIDER=verbs (MPICH)"
        return "warning", f"{text}, where {name} promises {promised / 1e6:.0f}", fix
    return "ok", f"{text}; {name} promises {promised / 1e6:.0f}"


@topic("latency between nodes", "interfaces")
def _latency(ranks: Ranks) -> Verdict:
    rows = _rows(ranks)
    if not rows:
        return None
    usual = -_usual(rows, lambda row: -float(row["latency"]))
    slow = [row for row in rows if row["latency"] > max(_LATE_PAIR * usual, usual + _LATE_SECONDS)]
    text = f"{usual * 1e6:.1f} us from node to node through MPI ({plural(len(rows), 'pair')})"
    if slow:
        texts = [f"{' and '.join(row['hosts'])} {row['latency'] * 1e6:.0f} us" for row in slow]
        text = f"{some(texts, 4, 'pairs')}, where {usual * 1e6:.1f} us is usual in this job"
        return "warning", text, _exclude(_culprits(rows, slow))
    if usual > _FAR:
        fix = "one rank a core: srun --cpus-per-task=1 --cpu-bind=cores; ping from node to node; nodes of one network"
        return "warning", f"{text}: more ranks than cores, or nodes that are far from each other", fix
    return "ok", text


judge = Section("network", _bandwidth, _latency)
