"""What NCCL's RAS answers, recorded on one H200 with NCCL 2.30.7 and 2 ranks, and by stand-in servers."""

import json
import random
import socket
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hpcdist.watch import ras

RECORDED = json.loads(Path(__file__).with_name("ras_answers.json").read_text())
# ranks behind a waiting one, silent ranks, and what is shown of them
SAYS = {
    "sleep": ([1], [], "rank 0: AllReduce 3; rank 1: AllReduce 2"),
    "busy": ([1], [], "rank 0: Broadcast 1, AllReduce 2; rank 1: Broadcast 1, AllReduce 1"),
    "other": ([0], [], "rank 0: Broadcast 1, AllReduce 2; rank 1: Broadcast 2, AllReduce 2"),
    "subgroup": ([1], [], "rank 0: AllReduce 2; rank 1: AllReduce 1"),
    "stopped": ([], [1], "rank 0: Broadcast 1, AllReduce 2; rank 1: no answer"),
    "killed": ([], [1], "rank 0: Broadcast 1, AllReduce 2; rank 1: no answer"),
    **dict.fromkeys(("p2p", "sizes", "compute"), ([], [], "as many collectives")),
}


def judged(name, waiting=(0, 1)):
    found = ras.communicators(json.dumps(RECORDED[name]))
    first = min(pid for one in found for _, pid in (*one.launched, *one.silent))
    nodes = [dict.fromkeys(range(40), 7), {first: 0, first + 1: 1}]
    behind, silent, lines = ras.compare(found, ras.ranks_of(found, nodes), waiting)
    return sorted(behind), sorted(silent), lines


@pytest.mark.parametrize("name", SAYS)
def test_recorded_answers(name):
    behind, silent, text = SAYS[name]
    got = judged(name)
    assert (got[0], got[1], len(got[2])) == (behind, silent, 1) and text in got[2][0]


def test_only_a_rank_that_waits_makes_others_late():
    """Rank 0 is ahead, but has launched something just now."""
    assert judged("sleep", waiting=[1])[:2] == ([], [])


def test_counts_that_cross():
    answer = json.loads(json.dumps(RECORDED["other"]))
    answer["communicators"][0]["ranks"][0]["collective_counts"]["AllReduce"] += 1
    found = ras.communicators(json.dumps(answer))
    ranks = ras.ranks_of(found, [{894: 0, 895: 1}])
    behind, _, (line,) = ras.compare(found, ranks, [0, 1])
    assert behind == {0, 1} and "rank 0: Broadcast 1, AllReduce 3; rank 1: Broadcast 2, AllReduce 2" in line


def test_hosts_are_known_by_their_pids():
    """Two nodes have the same pid; a process of no rank, and hosts that could be either, are left out."""
    found = [ras.Communicator({key: Counter() for key in (("a", 1), ("b", 1), ("b", 2))}, [("c", 3)])]
    assert ras.ranks_of(found, [{1: 0, 9: 1}, {1: 2, 2: 3}]) == {("b", 1): 2, ("b", 2): 3}
    assert ras.ranks_of(found, [{1: 0, 3: 1}, {1: 2, 2: 3}]) == {("b", 1): 2, ("b", 2): 3, ("c", 3): 1}


@pytest.mark.parametrize("seed", range(3))
def test_damaged_answers(seed):
    """Cut off, or with a value of another kind anywhere: refused, or read."""
    chance, text = random.Random(seed), json.dumps(RECORDED["subgroup"])
    spoilt = [text[: chance.randrange(len(text))] for _ in range(50)]
    for _ in range(200):
        at = chance.randrange(len(text))
        spoilt.append(text[:at] + chance.choice('0"[]{},:x') + text[at + 1 :])
    spoilt += [
        RECORDED["text"],
        "",
        "OK\n",
        "{}",
        "[]",
        '{"communicators": 3}',
        '{"communicators": [[]]}',
        text.replace("1003", "1e999"),
        text.replace("1003", "Infinity"),
        "{" * 10**5,
        "\0",
    ]
    for answer in spoilt:
        try:
            found = ras.communicators(answer)
        except ValueError:
            continue
        ras.compare(found, ras.ranks_of(found, [{1003: 0, 1004: 1}]), [0, 1])


@contextmanager
def serving(answer):
    """A server of one connection."""
    with socket.create_server(("localhost", 0)) as listener:

        def serve():
            with suppress(OSError), listener.accept()[0] as connection:
                answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[:2]
        listener.close()


def answers(data):
    def answer(connection):
        assert connection.recv(100) == b"set format json\nverbose status\n"
        connection.sendall(data)

    return answer


def test_an_answer_of_1024_ranks():
    count = {"Broadcast": 1, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 2}
    ranks = [{**RECORDED["sleep"]["communicators"][0]["ranks"][0], "pid": pid} for pid in range(1024)]
    for rank in ranks:
        rank["collective_counts"] = dict(count)
    ranks[700]["collective_counts"]["AllReduce"] = 1
    one = {"ranks": ranks, "missing_ranks": []}
    data = b"OK\n" + json.dumps({"communicators": [one] * 9}).encode()
    assert len(data) > 2_500_000
    with serving(answers(data)) as where:
        found = ras.communicators(ras.ask(where, 60))
        behind, _, lines = ras.compare(found, ras.ranks_of(found, [{p: p for p in range(1024)}]), range(1024))
    assert behind == {700} and max(map(len, lines)) < 300


def drip(connection):
    """An answer without an end."""
    while True:
        connection.sendall(b"x")
        time.sleep(0.01)


def test_servers_that_do_not_answer():
    """Nobody there, one that says nothing, one that never ends: an OSError in time."""
    with socket.create_server(("localhost", 0)) as nobody:
        where = nobody.getsockname()[:2]
    with pytest.raises(ConnectionRefusedError):
        ras.ask(where, 1)
    for answer in (lambda connection: time.sleep(1), drip):
        with serving(answer) as where, pytest.raises((TimeoutError, ConnectionError)):
            ras.ask(where, 0.1)


def test_addresses():
    assert [ras.address(text) for text in (None, "", "node:5", "[::1]:28028")] == [
        *[("localhost", 28028)] * 2, ("node", 5), ("::1", 28028),
    ]  # fmt: skip
    for wrong in ("28028", "host:", "host:x", "host:0", "host:65536", ":5", "host:-5"):
        with pytest.raises(ValueError, match="got"):
            ras.address(wrong)
