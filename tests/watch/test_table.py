"""What is said of made-up ranks: pure functions."""

from __future__ import annotations

import _thread
import contextlib
import fcntl
import functools
import json
import os
import re
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
import typing_extensions

from hpcdist import activity
from hpcdist.activity import ANYBODY, NOBODY, Entry, InCall, SharedRecord, ThreadStatus, callsite, start
from hpcdist.watch.hang_table import WAITS, Report, chain, made_progress, missing, of_json, table, verdict
from hpcdist.watch.status_query import KEY, Datagrams, _described

TEAM = 77
CALL = Entry(100.0, TEAM, 5, "concat() at train.py:12")
BEFORE = Entry(90.0, TEAM, 4, "gather() at train.py:11")


def report(
    rank: int, call: Entry | None, last: Entry | None = BEFORE, doing: str = WAITS, waited: float = 9.0
) -> Report:
    return Report(rank, f"node{rank // 2}", 1000 + rank, [ThreadStatus(7, call, last, 95.0, waited)], doing)


def test_who_has_not_come() -> None:
    reports = {
        0: report(0, CALL),
        1: report(1, None, doing="in Python, at train.py:30 in load"),
        2: report(2, CALL._replace(number=6), CALL),  # has gone on already
        3: report(3, CALL, doing="stopped"),
        4: report(4, CALL, doing="dead"),
        5: report(5, CALL._replace(team=78)),  # in another team's call of the same number
        6: report(6, CALL, doing="in I/O, read of /data/x"),
        7: report(7, None, None, doing="in Python, at train.py:1 in <module>"),
    }
    assert missing(CALL, range(8), reports) == [1, 3, 4, 5, 7]
    assert missing(CALL, [6, 2, 0], reports) == []  # a group of these ranks
    assert missing(CALL._replace(number=-1 - 1), [4, 5, 6], reports) == [5]  # receives from rank 1 of the group
    for nobody in (ANYBODY, NOBODY):
        assert missing(CALL._replace(number=-1 - nobody), range(8), reports) == []


def test_whom_those_wait_for_that_have_not_come() -> None:
    """Rank 0 receives from 3, which receives from 2, which is in a call that 1 has not come to; 4 receives from 5 and 5
    from 4."""
    receives = {0: 3, 3: 2, 4: 5, 5: 4}
    reports = {rank: report(rank, CALL._replace(number=-1 - source)) for rank, source in receives.items()}
    reports |= {1: report(1, None, doing="stopped"), 2: report(2, CALL)}
    team = range(3)
    ranks = lambda number: range(6) if number == TEAM else team  # noqa: E731
    reports[2].threads[0].call = CALL._replace(team=78)
    assert chain(CALL._replace(number=-1 - 3), ranks, reports) == [3, 2, 0, 1]
    assert chain(CALL._replace(number=-1 - 5), ranks, reports) == [5, 4]


def test_async_op_that_differs() -> None:
    """The team in the background of another has the number behind that one's."""
    front, back = CALL._replace(team=TEAM - 1), CALL._replace(team=TEAM, text="concat() at train.py:20")
    assert verdict(front, [1], {1: report(1, back)}) == (
        "rank 1 (node0, pid 1001) has not reached this call: it is in concat() at train.py:20 with async_op, and this "
        "call is without it: async_op must agree [HD301]"
    )
    assert "without async_op, and this call is with it" in verdict(back, [0], {0: report(0, front)})
    assert "async_op" not in verdict(front, [1], {1: report(1, back._replace(team=99))})


def test_what_is_said_of_them() -> None:
    reports = {1: report(1, None, doing="in Python, at a.py:3 in f"), 2: report(2, CALL, doing="dead")}
    reports[1].stack = ["  File a.py", "    f()"]
    lines = verdict(CALL, [1, 2], reports).splitlines()
    assert lines == [
        "rank 1 (node0, pid 1001) has not reached this call: it is in Python, at a.py:3 in f; it was after gather() at "
        "train.py:11 [HD601]",
        "rank 2 (node1, pid 1002) is dead: its process has ended without finalize(), by a signal or os._exit; "
        "it was in concat() at train.py:12 [HD604]",
        "rank 1 is here:",
        "  File a.py",
        "    f()",
    ]
    same = verdict(CALL, [], {0: report(0, CALL), 1: report(1, CALL)}).splitlines()
    assert same == [
        "all its ranks have reached this call: the transfer itself hangs (network, or file system) [HD602]",
        "ranks 0, 1: in concat() at train.py:12",
    ]
    assert (
        verdict(CALL._replace(number=-1 - ANYBODY), [], reports) == "no rank has sent what this call receives [HD606]"
    )


def test_a_rank_whose_record_cannot_be_read_is_unknown() -> None:
    """It is silent, on another host. What the others have finished, all that is known."""
    silent = Report(2, "node1", 1002, doing="does not answer: it is stopped, or ...", known=False)
    reports = {0: report(0, CALL), 1: report(1, CALL._replace(number=6), CALL), 2: silent}
    row = re.split(r" {2,}", table(reports.values(), 103.25).splitlines()[3])
    assert row == ["2", "node1", "1002", "unknown", "unknown", "does not answer: it is stopped, or ..."]
    assert missing(CALL, range(3), reports) == [2]
    who = "rank 2 (node1, pid 1002) does not answer: it is stopped, or ...; its calls are unknown"
    done = ", and the last one that the others have finished is gather() at train.py:11"
    assert verdict(CALL, [2], reports, lambda team: range(3)) == f"{who}{done} [HD601]"
    reports[0] = report(0, CALL, None)
    assert verdict(CALL, [2], reports, lambda team: range(3)) == f"{who} [HD601]"
    silent.doing = "dead"
    assert "or os._exit; its calls are unknown [HD604]" in verdict(CALL, [2], reports)


def test_a_rank_that_is_in_the_call_and_does_not_answer() -> None:
    text = verdict(CALL, [1], {1: report(1, CALL, doing="running, but does not answer: ...")})
    assert "is in this call, and running, but does not answer: ...; it was in concat() at train.py:12" in text


def test_ranks_that_wait_for_each_other() -> None:
    """0 receives from 1, 1 from 2, and 2 is in a collective to which 0 has not come."""
    receives = {rank: CALL._replace(number=-1 - rank - 1, text=f"recv() at train.py:{rank}") for rank in (0, 1)}
    reports = {rank: report(rank, call) for rank, call in receives.items()}
    reports[2] = report(2, CALL)
    team = lambda team: range(3)  # noqa: E731
    absent = chain(receives[0], team, reports)
    assert verdict(receives[0], absent, reports, team).splitlines()[len(absent) :] == [
        "they wait for each other: rank 1 is in recv() at train.py:1 and waits for rank 2; rank 2 is in concat() at "
        "train.py:12 and waits for rank 0; rank 0 is in recv() at train.py:0 and waits for rank 1 [HD601]"
    ]
    reports[2] = report(2, None, doing="in Python, at a.py:3 in f")  # all wait for this one
    assert "each other" not in verdict(receives[0], chain(receives[0], team, reports), reports, team)


def test_ranks_in_calls_of_different_numbers() -> None:
    text = verdict(CALL, [1], {1: report(1, CALL._replace(number=3, text="broadcast() at train.py:9"))})
    assert "it is in broadcast() at train.py:9, which is call 3 of the group, where this is call 5 [HD601]" in text


def test_threads_that_use_one_group() -> None:
    """The record of three dcp.async_save at once, and that of one call in the background, which is none of these."""
    thread = lambda number, verb: ThreadStatus(7, Entry(1.0, TEAM, number, f"{verb}() at a.py:1"), None, 0.0)  # noqa: E731
    reports = {
        rank: Report(rank, "h", 1, [thread(5, "gather"), thread(6, "all_gather"), thread(7, "all_gather")])
        for rank in range(2)
    }
    text = verdict(reports[0].threads[0].call or CALL, [], reports)
    assert text.startswith(
        "several threads of a rank are in calls of this group at once (of rank 0: gather() at a.py:1, all"
    )
    assert "on 2 of 2 ranks" in text and text.endswith("[HD601]") and "transfer" not in text
    reports = {0: Report(0, "h", 1, [thread(-1 - NOBODY, "gather().wait"), thread(5, "gather")])}
    assert "several threads" not in verdict(reports[0].threads[1].call or CALL, [], reports)
    for report in reports.values():
        report.threads.append(thread(-1 - NOBODY, "all_gather().wait"))
    assert "several threads" in verdict(reports[0].threads[1].call or CALL, [], reports)


def test_the_tensors_of_a_call_that_hangs() -> None:
    reports = {rank: report(rank, CALL) for rank in range(3)}
    for rank in range(3):
        reports[rank].threads[0].tensors = f"{8192 - rank // 2} x torch.float32"
    reports[3] = report(3, CALL._replace(number=6, text="send() at train.py:13"), CALL)
    assert verdict(CALL, [], reports).splitlines() == [
        "all its ranks have reached this call: if the differences below are a mistake, they are the cause; else "
        "the transfer itself hangs (network, or file system) [HD602]",
        "ranks 0, 1: in concat() at train.py:12, of 8192 x torch.float32",
        "rank 2: in concat() at train.py:12, of 8191 x torch.float32",
        "rank 3: in send() at train.py:13",
    ]


def test_how_tensors_are_described() -> None:
    x, bits = torch.empty(3, 5), torch.empty(7, dtype=torch.int8)
    assert _described(([x, x, bits], None, 3)) == "2 tensors of 15 x torch.float32, 7 x torch.int8"
    assert _described([torch.empty(n) for n in range(9)]).endswith("3 x torch.float32, and 5 other sizes")
    assert _described(None) == ""


def test_the_table() -> None:
    reports = [report(1, None, None, "in Python, at a.py:3 in f"), report(0, CALL)]
    head, *rows = [re.split(r" {2,}", line) for line in table(reports, 103.25).splitlines()]
    assert head == ["rank", "host", "pid", "last call finished", "is in", "for", "what it does"]
    assert rows == [
        ["0", "node0", "1000", "gather() at train.py:11, 8.2 s ago", "concat() at train.py:12", "3.2 s", "waits"],
        ["1", "node0", "1001", "none", "no call", "in Python, at a.py:3 in f"],
    ]


def test_a_thousand_ranks_that_wait_are_not_all_shown() -> None:
    reports = [report(rank, CALL) for rank in range(1000)] + [report(1000, None, doing="stopped")]
    lines = table(reports, 101.0).splitlines()
    assert len(lines) == 1 + 16 + 1 + 1
    assert lines[-1] == "and 984 more that wait"
    assert "stopped" in lines[-2]


@pytest.mark.parametrize(("waited", "expected"), [(1.0, True), (9.0, False)])
def test_a_call_in_which_a_rank_makes_progress(waited: float, expected: bool) -> None:
    reports = {0: report(0, CALL), 1: report(1, CALL, waited=waited), 2: report(2, None, waited=0.0)}
    assert made_progress(CALL, reports, 5.0) is expected
    reports[1].doing = "dead"
    assert not made_progress(CALL, reports, 5.0)


def test_a_report_travels_as_json() -> None:
    for one in (
        report(3, CALL, doing="dead"),
        Report(1, "h", 2),
        Report(1, "h", 2, [ThreadStatus(7, None, None, 0.0)]),
    ):
        assert of_json(json.loads(json.dumps(asdict(one)))) == one


class _Team:
    number = TEAM
    begun = 0


def test_the_record_of_calls() -> None:
    record = SharedRecord(2)
    record.announce(1, 0)
    start(record, 1)
    try:
        team = _Team()
        x = torch.ones(3)
        with InCall("concat", team, tensors=x), InCall("inner", team):  # type: ignore[arg-type]
            inside = record.read(1).threads[0]
            assert activity.thread_records[0].tensors is x
        assert activity.thread_records[0].tensors is None  # which would keep its memory
        with InCall("é" * 400, team, peer=3):  # type: ignore[arg-type]
            outside = record.read(1).threads[0]
        after = record.read(1).threads[0]
    finally:
        start(None)
    assert inside.call is not None and inside.last is None
    assert (inside.call.team, inside.call.number) == (TEAM, 1)
    assert inside.call.text.startswith("concat() at ") and "test_table.py:" in inside.call.text
    assert outside.last == inside.call and outside.call is not None
    assert outside.call.number == -4 and outside.call.text.startswith("é" * 199)
    assert after.call is None and after.last == outside.call
    assert record.read(0).pid == 0


def test_a_thread_record_belongs_to_one_thread() -> None:
    """Also of threads that Python's threading does not know, as torch's; and of more than there are records."""
    record, team, count = SharedRecord(1), _Team(), activity._THREADS + 6
    start(record, 0)
    begun, go_on = threading.Semaphore(0), threading.Event()

    def call(name: str, ended: Any) -> None:
        with InCall(name, team, text=name.encode()):  # type: ignore[arg-type]
            begun.release()
            go_on.wait(30)
        ended.release()

    def round_(count: int) -> list[str]:
        go_on.clear()
        ended = threading.Semaphore(0)
        for i in range(count):
            _thread.start_new_thread(call, (f"call {i}", ended))
        assert all(begun.acquire(timeout=30) for _ in range(count))
        found = [entry.text for thread in activity.thread_records if (entry := thread.current()) is not None]
        go_on.set()
        assert all(ended.acquire(timeout=30) for _ in range(count))
        return found

    try:
        assert sorted(round_(count)) == sorted(f"call {i}" for i in range(count))
        assert len(record.read(0).threads) == activity._THREADS
        assert all(thread.call is None and thread.last is not None for thread in record.read(0).threads)
        deadline = time.monotonic() + 30
        while len(activity._free) < count and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread's own ends after it
        assert sorted(round_(count)) == sorted(f"call {i}" for i in range(count))
        assert len(activity.thread_records) == count
    finally:
        start(None)


def test_only_messages_with_the_jobs_key_are_taken() -> None:
    key = bytes(range(KEY))
    with_key, other, forged = (Datagrams(k, None) for k in (key, key, bytes(KEY)))
    pid, _, device, inode = with_key.address
    try:
        with_key.expect_all()
        other.send(with_key.address, {"a": 1})
        forged.send(with_key.address, {"a": 2})
        other.send(with_key.address, {"a": "x" * 100_000})
        other.send(with_key.address, {"a": os.urandom(5000).hex()})  # too long
        other.send([pid, 10**6, device, inode], {"a": 3})  # nothing is there
        other.send([pid, other.fileno(), device, inode], {"a": 3})  # another file is there now
        other.send(with_key.address, {"a": 4})
        assert with_key.receive() == [{"a": 1}, {"a": "x" * 100_000}, {"a": 4}]
        assert with_key.receive() == other.receive() == []
    finally:
        for one in (with_key, other, forged):
            one.close()


def test_ranks_leave_the_users_pipes_alone() -> None:
    """A user may have 64 MiB of them on a node; then each new one is small, in every program."""
    ranks = [Datagrams(bytes(KEY), None) for _ in range(2)]
    reader, writer = os.pipe()
    try:
        usual = fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ)
        ranks[0].expect_all()
        asking, other = (fcntl.fcntl(rank.fileno(), fcntl.F_GETPIPE_SZ) for rank in ranks)
        assert (asking, other) == (2**20, usual)
    finally:
        for rank in ranks:
            rank.close()
        os.close(reader)
        os.close(writer)


def test_over_udp() -> None:
    key = bytes(KEY)
    one, two = Datagrams(key, "127.0.0.1"), Datagrams(key, "127.0.0.1")
    try:
        one.send(two.address, {"from": 0})
        assert two.receive() == [{"from": 0}]
        one.send(two.address, {"from": "0" * 30_000})
        assert two.receive() == [{"from": "0" * 30_000}]
    finally:
        one.close()
        two.close()


def test_a_flood_of_udp_datagrams_takes_no_core() -> None:
    """Any user of the nodes can send them."""
    one, ended = Datagrams(bytes(KEY), "127.0.0.1"), threading.Event()
    sent = 0

    def flood() -> None:
        nonlocal sent
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as attacker:
            while not ended.is_set():
                attacker.sendto(os.urandom(40), tuple(one.address))
                sent += 1

    attacker = threading.Thread(target=flood)
    attacker.start()
    try:
        used, end = time.thread_time(), time.monotonic() + 2
        while time.monotonic() < end:
            assert one.receive() == []
        used = time.thread_time() - used
    finally:
        ended.set()
        attacker.join()
        one.close()
    assert sent > 10_000
    assert used < 0.4, used


def test_what_is_kept_for_each_place_is_bounded() -> None:
    """A program may make its code as it runs."""
    for turn in range(callsite._MOST_PLACES + 100):
        text = eval(compile("where('concat')", f"made-{turn}.py", "eval"), {"where": callsite.where})
        assert text.decode() == f"concat() at made-{turn}.py:1"
    assert len(callsite._texts) <= callsite._MOST_PLACES
    assert len(callsite._inside) <= callsite._MOST_PLACES


def test_the_line_is_the_users_behind_what_wraps_a_call() -> None:
    """torch's deprecated functions, for example, whose decorator is neither torch's nor the user's."""
    # As in a torch that was built from source, and in what it has compiled.
    names = {"__name__": "torch.made", "where": callsite.where}
    exec(compile("def verb(*args): return where('verb')", "/tmp/torchinductor_me/ab/cab.py", "exec"), names)
    verb: Any = names["verb"]
    calls: list[Callable[[], bytes]] = [
        verb,
        typing_extensions.deprecated("use another one", category=None)(verb),
        typing_extensions.deprecated("use another one")(verb),
        torch.no_grad()(verb),
        contextlib.contextmanager(lambda: iter([None]))()(verb),
        functools.partial(functools.singledispatch(verb), 0),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls:
            assert call().decode() == f"verb() at {callsite.place(sys._getframe())}"
