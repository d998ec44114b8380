"""NCCL's RAS: how many collectives each rank has launched in each communicator.

A thread of NCCL listens on one port of each host, and answers for all ranks of the job. NCCL 2.28, which torch 2.11
brings, and later ones do so in JSON.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_DEFAULT = "localhost:28028"
_QUESTION = b"set format json\nverbose status\n"
_BLOCK, _MOST = 2**20, 2**26  # bytes that are read at once, and of an answer
_EQUAL = "all ranks have launched as many collectives (send, recv and sizes are not counted)"
_SHOWN = 16  # ranks with the same counts, at most

Process = tuple[str, int]  # a host, as NCCL names it, and a pid


class Communicator(NamedTuple):
    """How many collectives of each name each process has launched in a communicator; and processes that are silent."""

    launched: dict[Process, Counter[str]]
    silent: list[Process]


def address(text: str | None) -> tuple[str, int]:
    """Return host and port of NCCL_RAS_ADDR; a ValueError if it has none."""
    host, _, port = (text or _DEFAULT).rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"got {text!r}")
    return host.strip("[]"), int(port)


def ask(where: tuple[str, int], seconds: float) -> str:
    """Return the answer of NCCL on this host; an OSError if it is not complete after so many seconds."""
    end, answer = time.monotonic() + seconds, bytearray()
    with socket.create_connection(where, seconds) as connection:
        connection.sendall(_QUESTION)
        while len(answer) < _MOST:
            connection.settimeout(max(1e-3, end - time.monotonic()))
            block = connection.recv(_BLOCK)
            if not block:
                break
            answer += block
    return answer.decode(errors="replace")


def communicators(answer: str) -> list[Communicator]:
    """Read an answer; a ValueError if it is not the JSON of NCCL."""
    groups = []
    try:
        for part in json.loads(answer[answer.index("{") :])["communicators"]:
            counts = {_process(rank): rank["collective_counts"].items() for rank in part["ranks"]}
            launched = {process: Counter({name: int(n) for name, n in of}) for process, of in counts.items()}
            groups.append(Communicator(launched, [_process(rank) for rank in part["missing_ranks"]]))
    except (ArithmeticError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(repr(error)) from None
    return groups


def _process(rank: Mapping[str, Any]) -> Process:
    return str(rank["host"]), int(rank["pid"])


def ranks_of(groups: Iterable[Communicator], nodes: Sequence[Mapping[int, int]]) -> dict[Process, int]:
    """Return the rank of each process. NCCL names hosts by their addresses: the pids on each tell which node it is.

    Args:
        nodes: the rank of each pid of each node.
    """
    pids: dict[str, set[int]] = {}
    for communicator in groups:
        for host, pid in (*communicator.launched, *communicator.silent):
            pids.setdefault(host, set()).add(pid)
    places = {host: [node for node in nodes if here <= node.keys()] for host, here in pids.items()}
    return {(host, pid): node[0][pid] for host, node in places.items() if len(node) == 1 for pid in pids[host]}


def compare(
    groups: Sequence[Communicator], ranks: Mapping[Process, int], waiting: Sequence[int]
) -> tuple[set[int], set[int], list[str]]:
    """Return ranks that have launched fewer collectives than a waiting one, silent ranks, and what to show of both."""
    behind, silent, lines = set[int](), set[int](), []
    for communicator in groups:
        counts = {ranks[process]: of for process, of in communicator.launched.items() if process in ranks}
        gone = {ranks[process] for process in communicator.silent if process in ranks}
        most = Counter[str]()
        for rank in counts.keys() & waiting:
            most |= counts[rank]  # the maximum of each name
        late = {rank for rank, of in counts.items() if most - of}
        behind, silent = behind | late, silent | gone
        if late or gone:
            texts: dict[str, list[str]] = {}
            for rank in sorted({*counts, *gone}):
                text = ", ".join(f"{name} {n}" for name, n in counts.get(rank, {}).items() if n)
                texts.setdefault(text or "no answer", []).append(str(rank))
            parts = [f"rank {', '.join(who[:_SHOWN])}{' ...' * (len(who) > _SHOWN)}: {of}" for of, who in texts.items()]
            lines.append(f"collectives launched in a communicator: {'; '.join(parts)}")
    return behind, silent, lines or [_EQUAL]
