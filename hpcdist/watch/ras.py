"""NCCL's RAS (from 2.24): how many collectives each rank has launched in each communicator.

A thread of NCCL listens on one port of each host, and answers for all ranks of the job: from NCCL 2.30 on in JSON.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_DEFAULT = "localhost:28028"
_QUESTION = b"set format json\nverbose status\n"
_BLOCK, _MOST = 2**20, 2**26  # bytes that are read at once, and of an answer
_EQUAL = "NCCL's RAS: all ranks have launched as many collectives (it counts no send, recv or sizes)"
_LINES, _SHOWN = 12, 16  # lines of an answer in text, and ranks, that are shown at most

Process = tuple[str, int]  # a host, as NCCL names it, and a pid


class Communicator(NamedTuple):
    """Collectives that each process has launched in a communicator, by their names; and processes that are silent."""

    launched: dict[Process, dict[str, int]]
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
    try:
        return [
            Communicator(
                {_process(rank): _counts(rank["collective_counts"]) for rank in found["ranks"]},
                [_process(rank) for rank in found["missing_ranks"]],
            )
            for found in json.loads(answer[answer.index("{") :])["communicators"]
        ]
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(repr(error)) from None


def _process(rank: Mapping[str, Any]) -> Process:
    return str(rank["host"]), int(rank["pid"])


def _counts(found: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(number) for name, number in found.items()}


def ranks_of(found: Iterable[Communicator], nodes: Sequence[Mapping[int, int]]) -> dict[Process, int]:
    """Return the rank of each process. NCCL names hosts by their addresses: the pids on each tell which node it is.

    Args:
        nodes: the rank of each pid of each node.
    """
    pids: dict[str, set[int]] = {}
    for communicator in found:
        for host, pid in (*communicator.launched, *communicator.silent):
            pids.setdefault(host, set()).add(pid)
    places = {host: [node for node in nodes if here <= node.keys()] for host, here in pids.items()}
    return {(host, pid): places[host][0][pid] for host, here in pids.items() if len(places[host]) == 1 for pid in here}


def compare(
    found: Sequence[Communicator], ranks: Mapping[Process, int], waiting: Sequence[int]
) -> tuple[list[int], list[int], list[str]]:
    """Return ranks that have launched fewer collectives than a waiting one, silent ranks, and what to show of both."""
    behind, silent, lines = set[int](), set[int](), []
    for communicator in found:
        counts = {ranks[process]: of for process, of in communicator.launched.items() if process in ranks}
        gone = {ranks[process] for process in communicator.silent if process in ranks}
        most: dict[str, int] = {}
        for rank in counts.keys() & waiting:
            most |= {name: max(number, most.get(name, 0)) for name, number in counts[rank].items()}
        late = {rank for rank, of in counts.items() if any(of.get(name, 0) < most[name] for name in most)}
        behind, silent = behind | late, silent | gone
        if late or gone:
            texts = {"no answer": sorted(gone)} if gone else {}
            differ = [name for name in most if len({of.get(name) for of in counts.values()}) > 1]
            for rank, of in sorted(counts.items()):
                texts.setdefault(", ".join(f"{name} {of.get(name, 0)}" for name in differ) or "all", []).append(rank)
            parts = [f"{_named(who)}: {text}" for text, who in texts.items()]
            lines.append(f"NCCL's RAS, collectives launched in a communicator: {'; '.join(parts)}")
    return (
        sorted(behind),
        sorted(silent),
        lines or [_EQUAL],
    )


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks[:_SHOWN]))}{more}"


def of_text(answer: str) -> list[str]:
    """Return what to show of an answer that is not JSON: the warnings of NCCL before 2.30."""
    lines = [line for line in answer.partition("Errors\n")[2].splitlines() if line.strip("= ")]
    return [f"NCCL's RAS gave no JSON, which needs NCCL 2.30; its warnings: {len(lines)} lines", *lines[:_LINES]]
