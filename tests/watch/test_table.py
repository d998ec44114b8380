"""What is said of made-up ranks: pure functions."""

import contextlib
import fcntl
import functools
import os
import re
import sys
import warnings

import pytest
import torch
import typing_extensions

from hpcdist.activity import ANYBODY, NOBODY, CallEntry, ThreadStatus, callsite
from hpcdist.watch.datagrams import KEY, Datagrams
from hpcdist.watch.hang_table import WAITS, Report, chain, missing, table, verdict

TEAM = 77
CALL = CallEntry(100.0, TEAM, 5, "concat() at train.py:12")
BEFORE = CallEntry(90.0, TEAM, 4, "gather() at train.py:11")


def report(
    rank,
    call,
    last=BEFORE,
    doing=WAITS,
    waited=9.0,
    tensors="",
    stack=(),
):
    thread = ThreadStatus(7, call, last, 95.0, waited, tensors)
    return Report(rank, f"node{rank // 2}", 1000 + rank, [thread], doing, list(stack))


def test_who_has_not_come():
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


def test_whom_those_wait_for_that_have_not_come():
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


IN_F = "in Python, at a.py:3 in f"
VERDICTS = {
    "in Python, and dead": (
        *(CALL, [1, 2], [report(1, None, doing=IN_F, stack=["  File a.py", "    f()"]), report(2, CALL, doing="dead")]),
        ["rank 1 (node0, pid 1001) has not reached this call: it is in Python, at a.py:3 in f; it was after gather() "
        "at train.py:11 [HD601]",
        "rank 2 (node1, pid 1002) is dead: its process has ended without finalize(), by a signal or os._exit; "
        "it was in concat() at train.py:12 [HD604]",
        "rank 1 is here:",
        "  File a.py",
        "    f()"],
    ),
    "all are there": (
        *(CALL, [], [report(0, CALL), report(1, CALL)]),
        ["all its ranks have reached this call: the transfer itself hangs (network, or file system) [HD602]",
        "ranks 0, 1: in concat() at train.py:12"],
    ),
    "a message from anyone": (
        *(CALL._replace(number=-1 - ANYBODY), [], []), ["no rank has sent what this call receives [HD601]"]
    ),
    "there, and silent": (
        *(CALL, [1], [report(1, CALL, doing="running, but does not answer: ...")]),
        ["rank 1 (node0, pid 1001) is in this call, and running, but does not answer: ...; it was in concat() at "
        "train.py:12 [HD601]"],
    ),
    "another number": (
        *(CALL, [1], [report(1, CALL._replace(number=3, text="broadcast() at train.py:9"))]),
        ["rank 1 (node0, pid 1001) has not reached this call: it is in broadcast() at train.py:9, which is call 3 of "
        "the group, where this is call 5 [HD601]"],
    ),
    "other tensors": (
        CALL, [],
        [*(report(r, CALL, tensors=f"{8192 - r // 2} x torch.float32") for r in range(3)),
         report(3, CALL._replace(number=6, text="send() at train.py:13"), CALL)],
        ["all its ranks have reached this call: if the differences below are a mistake, they are the cause; else "
        "the transfer itself hangs (network, or file system) [HD602]",
        "ranks 0, 1: in concat() at train.py:12, of 8192 x torch.float32",
        "rank 2: in concat() at train.py:12, of 8191 x torch.float32",
        "rank 3: in send() at train.py:13"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_what_is_said_of_them(case):
    call, absent, reports, lines = VERDICTS[case]
    assert verdict(call, absent, {report.rank: report for report in reports}).splitlines() == lines


def test_a_rank_whose_record_cannot_be_read_is_unknown():
    """It is silent, on another host."""
    silent = Report(2, "node1", 1002, doing="does not answer: it is stopped, or ...", known=False)
    reports = {0: report(0, CALL), 1: report(1, CALL._replace(number=6), CALL), 2: silent}
    row = re.split(r" {2,}", table(reports.values(), 103.25).splitlines()[3])
    assert row == ["2", "node1", "1002", "unknown", "unknown", "does not answer: it is stopped, or ..."]
    assert missing(CALL, range(3), reports) == [2]
    said = "rank 2 (node1, pid 1002) does not answer: it is stopped, or ...; its calls are unknown"
    assert verdict(CALL, [2], reports, lambda team: range(3)) == f"{said} [HD601]"
    silent.doing = "dead"
    assert "or os._exit; its calls are unknown [HD604]" in verdict(CALL, [2], reports)


def test_ranks_that_wait_for_each_other():
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
    reports[2] = report(2, None, doing=IN_F)  # all wait for this one
    assert "each other" not in verdict(receives[0], chain(receives[0], team, reports), reports, team)


def test_threads_that_use_one_group():
    """The record of three dcp.async_save at once, and that of one call in the background, which is none of these."""

    def said(*calls):
        threads = [
            ThreadStatus(7, CallEntry(1.0, TEAM, number, f"{verb}() at a.py:1"), None, 0.0) for number, verb in calls
        ]
        return verdict(threads[-1].call or CALL, [], {rank: Report(rank, "h", 1, threads) for rank in range(2)})

    text = said((6, "all_gather"), (7, "all_gather"), (5, "gather"))
    assert text.startswith(
        "several threads of a rank are in calls of this group at once (of rank 0: all_gather() at a.py:1, all"
    )
    assert "on 2 of 2 ranks" in text and text.endswith("[HD601]") and "transfer" not in text
    one = [(-1 - NOBODY, "gather().wait"), (5, "gather")]
    assert "several threads" not in said(*one)
    assert "several threads" in said((-1 - NOBODY, "all_gather().wait"), *one)


def test_of_a_thousand_that_wait_not_all_are_shown():
    reports = [report(rank, CALL) for rank in range(1000)] + [report(1000, None, doing="stopped")]
    lines = table(reports, 101.0).splitlines()
    assert len(lines) == 1 + 16 + 1 + 1
    assert lines[-1] == "and 984 more that wait"
    assert "stopped" in lines[-2]


@contextlib.contextmanager
def _datagrams(*keys, address=None):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Datagrams(key, address))) for key in keys]


def test_only_messages_with_the_jobs_key_are_taken():
    key = bytes(range(KEY))
    with _datagrams(key, key, bytes(KEY)) as (with_key, other, forged):
        pid, _, device, inode = with_key.address
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


def test_ranks_leave_the_users_pipes_alone():
    """A user may have 64 MiB of them on a node; then each new one is small, in every program."""
    with _datagrams(bytes(KEY), bytes(KEY)) as ranks:
        ends = os.pipe()
        usual = fcntl.fcntl(ends[0], fcntl.F_GETPIPE_SZ)
        ranks[0].expect_all()
        assert [fcntl.fcntl(rank.fileno(), fcntl.F_GETPIPE_SZ) for rank in ranks] == [2**20, usual]
        for fd in ends:
            os.close(fd)


def test_what_is_kept_for_each_place_is_bounded():
    """A program may make its code as it runs."""
    *kept, most = callsite.texts, callsite.insides, callsite.MOST_PLACES
    for turn in range(most + 100):
        text = eval(compile("where('concat')", f"made-{turn}.py", "eval"), {"where": callsite.where})
        assert text.decode() == f"concat() at made-{turn}.py:1"
    assert max(map(len, kept)) <= most


def test_the_line_is_the_users_behind_what_wraps_a_call():
    """torch's deprecated functions, for example, whose decorator is neither torch's nor the user's."""
    # As in a torch that was built from source, and in what it has compiled.
    names = {"__name__": "torch.made", "where": callsite.where}
    exec(compile("def verb(*args): return where('verb')", "/tmp/torchinductor_me/ab/cab.py", "exec"), names)
    verb = names["verb"]
    calls = [
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
