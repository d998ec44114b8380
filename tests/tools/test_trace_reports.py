"""hpcdist.tools.trace: who waits for whom, compared with a plain computation; its files and errors; and real runs."""

import gzip
import json
import os
import random
import re
import socket
import time
from collections import defaultdict

import pytest
import torch
from launch import finished

from hpcdist.tools.trace import main, read

JOB = "20261125T021530-1a2b3c4d"
START = 1_795_572_641_423_831_342  # ns
CONCAT = "concat at train.py:12 (mpi)"
CALLS = [["concat", "train.py:12", "mpi"], ["gather", "train.py:15", ""], ["send", "", "mpi"]]


def write(folder, rank, rows, **fields):
    """Write the file of a rank as the recording does."""
    header = {"format": "hpcdist trace 1", "job": JOB, "rank": rank, "world_size": 3, "host": f"n{rank // 2}"}
    header |= {"pid": 100 + rank, "program": ["train.py", "--fast"], "dropped": 0, "finished": True, "calls": CALLS}
    header |= {"error_ns": 700 * rank, "clock": [[START, START], [START + 10**9, START + 10**9]]}
    header |= {"groups": {str(2**61): [0, 1, 2], "5": [2, 0]}} | fields
    path = folder / f"trace-{header['job']}-rank-{rank}.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [header, *rows]))
    return path


def made_up(seed):
    """The rows of 3 ranks: collectives of two groups in any order, messages, ends before the last arrival."""
    some = random.Random(seed)
    ranks = [[], [], []]
    for number in range(1, 60):
        for group, members in ((2**61, [0, 1, 2]), (5, [2, 0])):
            for rank in members:
                begin = START + number * 1000 + some.randrange(900)
                size = some.choice([0, 8, some.randrange(10**6)])
                call = (number + rank) % 2 if number % 5 == 0 else number % 2  # ranks call from different lines, too
                ranks[rank].append([call, group, number, None, 7, begin, begin + some.randrange(1, 1500), size])
    for rank, rows in enumerate(ranks):
        rows.append([2, 2**61, 0, 1 - min(rank, 1), 7, START + 5, START + 500, 64])
        rows.sort(key=lambda row: row[6] or 0)
    return ranks


@pytest.mark.parametrize("seed", range(3))
def test_waits_are_those_of_a_plain_computation(tmp_path, seed):
    ranks = made_up(seed)
    for rank, rows in enumerate(ranks):
        write(tmp_path, rank, rows)
    write(tmp_path, 0, [[2 - (row[0] or 0), *row[1:]] for row in ranks[0]], calls=CALLS[::-1])  # numbered otherwise
    arrived = defaultdict(list)
    for rank, rows in enumerate(ranks):
        for _, group, number, _, _, begin, _, size in rows:
            if number:
                arrived[group, number].append((begin, rank, size))
    trace = read(tmp_path)
    found = {(row.rank, row.group, row.number, row.begin): row for row in trace.rows}
    assert len(found) == sum(map(len, ranks)) == len(trace.rows)
    waits = 0
    for rank, rows in enumerate(ranks):
        for call, group, number, _, _, begin, end, size in rows:
            row = found[rank, group, number, begin]
            name, site, route = CALLS[call or 0]
            assert trace.calls[row.call] == name + (site and f" at {site}") + (route and f" ({route})")
            if not number:
                assert (row.last, row.waited) == (-1, 0)
                continue
            latest, last, _ = max(arrived[group, number])
            waits += (expected := max(0, min(latest, end or 0) - (begin or 0)))
            most = max(size for _, _, size in arrived[group, number])
            assert (row.last, row.waited, row.payload, row.largest) == (last, expected, size, most)
    assert waits > 10_000


def run(capsys, *words):
    """What the command prints, and its status."""
    status = 0
    try:
        main([*map(str, words)])
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    return out, err, status


def three(folder, late=400, **fields):
    """Ten concats: rank 2 arrives `late` ms after the others, who end 1 ms later; ragged, rank 2 holds half."""
    for rank in range(3):
        rows = []
        for number in range(1, 11):
            at = START + number * 10**9
            begin = at + (late * 10**6 if rank == 2 else 0)
            rows.append([0, 2**61, number, None, 7, begin, at + (late + 1) * 10**6, [100, 100, 200][rank]])
        write(folder, rank, rows, **fields)


def test_the_report_names_the_slow_rank_first(tmp_path, capsys):
    three(tmp_path)
    out, err, status = run(capsys, tmp_path)
    assert (err, status) == ("", 0)
    first, second, *_ = lines = out.splitlines()
    assert first == f"train.py --fast: 3 ranks on 2 nodes, 9.401 s, run {JOB}; clocks agree within 1.4 us"
    assert second == f"The others wait most for rank 2: 8.000 of 8.000 s of waiting, 8.000 s of it in {CONCAT}"
    assert [line.split() for line in lines[5:8]] == [
        ["2", "8.000", "0.000", "0.010", "2.0", "KiB"],
        ["0", "0.000", "4.000", "4.010", "1000", "B"],
        ["1", "0.000", "4.000", "4.010", "1000", "B"],
    ]
    (site,) = (line.split() for line in lines if line.startswith("concat at"))
    assert " ".join(site) == f"{CONCAT} 30 2.677 2.667 rank 2 in 100% 133 B 1.500"
    assert [line.split() for line in lines if line.startswith(("128 B", "256 B"))] == [
        ["128", "B", "20"],
        ["256", "B", "10"],
    ]
    three(tmp_path, late=0)  # without waiting no rank is named
    out, _, status = run(capsys, tmp_path)
    assert status == 0 and "wait most" not in out and out.count("%") == 0


def test_a_call_of_which_a_row_was_dropped_is_not_judged(tmp_path, capsys):
    """Rank 0 lacks its first row: that rank 1 waited 0.4 s for rank 2 there is not counted, either."""
    three(tmp_path)
    path = tmp_path / f"trace-{JOB}-rank-0.jsonl"
    head, _, *rows = path.read_text().splitlines(keepends=True)
    path.write_text(head + "".join(rows))
    assert "for rank 2: 7.200 of 7.200 s" in run(capsys, tmp_path)[0]


def test_what_a_trace_lacks_is_told_and_not_judged(tmp_path, capsys):
    three(tmp_path)
    one = [0, 2**61, 11, None, 7, START + 11 * 10**9, None, 8]  # under way when the file was written
    clock = [[START, START], [START + 12 * 10**9, START]]
    write(tmp_path, 0, [one], finished=False, dropped=9, clock=clock)
    (tmp_path / f"trace-{JOB}-rank-1.jsonl").write_text("")  # killed
    out, err, status = run(capsys, tmp_path)
    assert (err, status) == ("", 0)
    assert out.splitlines()[2:5] == [
        "rank 1: killed before it could write",
        "rank 0: the oldest calls were dropped",
        "rank 0: ended early, see the job's message",
    ]
    trace = read(tmp_path)
    assert trace.rows.end.max() == START + 12 * 10**9
    judged = trace.rows[trace.rows.last != -1]  # only the last call, which rank 2 had not reached
    assert [(row.number, row.rank, row.last, row.waited) for row in judged] == [(11, 0, 2, 10**9)]
    assert trace.rows.waited.sum() == 10**9


def test_a_rank_that_never_arrives_is_the_one_that_is_waited_for(tmp_path, capsys):
    """Of a job that hangs, the others have a call without an end."""
    clock = [[START, START], [START + 60 * 10**9, START + 60 * 10**9]]
    three(tmp_path, finished=False, clock=clock)
    for rank in (0, 2):
        with open(tmp_path / f"trace-{JOB}-rank-{rank}.jsonl", "a") as file:
            file.write(f"[1, {2**61}, 11, null, 7, {START + (20 + rank) * 10**9}, null, 8]\n")
    out, _, _ = run(capsys, tmp_path)
    second = "The others wait most for rank 1: 78.000 of 86.000 s of waiting, 78.000 s of it in gather at train.py:15"
    assert out.splitlines()[1:3] == [second, "ranks 0-2: ended early, see the job's message"]
    trace = read(tmp_path)
    assert [(row.rank, row.last, row.waited) for row in trace.rows[trace.rows.call == 1]] == [
        (0, 1, 40 * 10**9),
        (2, 1, 38 * 10**9),
    ]


def test_bad_input_is_one_line_with_a_fix(tmp_path, capsys):
    def refused(what, code, *words):
        out, err, status = run(capsys, *(words or [tmp_path]))
        assert (out, status, err.count("\n")) == ("", 2, 1), err
        assert re.search(what, err) and f"[{code}]" in err, err

    def again():
        for path in tmp_path.iterdir():
            path.unlink() if path.is_file() else path.rmdir()
        three(tmp_path)
        return tmp_path / f"trace-{JOB}-rank-1.jsonl"

    refused("run the program with HPCDIST_TRACE=", "HD401", tmp_path / "missing")
    refused("run the program with HPCDIST_TRACE=", "HD401")
    again().unlink()
    refused("2 files of 3 ranks; copy the files of all nodes", "HD510")
    for rank in range(3):
        write(tmp_path, rank, [])
    refused("no call was traced", "HD401")
    again()
    three(tmp_path, job="20261126T000000-00000000")
    refused("choose one by --job: 20261126T000000-00000000, " + JOB, "HD510")
    assert run(capsys, tmp_path, "--job", JOB)[2] == 0
    frame = [["init", "run.py:1", ""], ["finalize", "train.py:3", ""]]
    three(tmp_path, job="20261126T000000-00000000", calls=frame)  # of a world that init() has replaced
    assert JOB in run(capsys, tmp_path)[0]
    for text in ("\0\n", "[1]\n", '{"format": "x"}\n', "{}\n", "[[\n"):
        again().write_text(text)
        refused("rank-1.jsonl: cannot be read: ", "HD402")
    for damage in (("[0, ", "[9, "), ("[0, ", "[0, 0, "), (", 100]", ", 100"), (", 7, ", ', "x", '), (", 7,", ", x,")):
        path = again()
        head, *rows = path.read_text().splitlines(keepends=True)
        path.write_text(head + "".join(rows).replace(*damage, 1))
        refused("rank-1.jsonl: cannot be read: ", "HD402")
    path = again()
    path.write_text(path.read_text().replace("hpcdist trace 1", "hpcdist trace 2"))
    refused("not in 'hpcdist trace 1'; read it with the hpcdist that wrote it", "HD402")
    again()
    (tmp_path / "report.html").mkdir()
    refused("report.html: is a folder", "HD401")


def test_a_thousand_ranks(tmp_path, capsys):
    world = range(1000)
    for rank in world:
        begin = START + (10**9 if rank == 777 else 0)
        row = [0, 9, 1, None, 7, begin, START + 10**9 + 5, 8]
        write(tmp_path, rank, [row], world_size=1000, groups={"9": [*world]})
    out, _, status = run(capsys, tmp_path)
    assert status == 0 and "rank 777: 999.000 of 999.000 s" in out and "(the first 16 of 1000)" in out
    page = (tmp_path / "report.html").read_text()
    cells = re.findall(r"<title>ranks (\d+)-(\d+): (\S+) s for ranks (\d+)-(\d+)</title>", page)
    assert len(cells) == 63 and {cell[3:] for cell in cells} == {("768", "783")} and cells[-1][:2] == ("992", "999")
    assert sum(float(cell[2]) for cell in cells) == pytest.approx(999)
    assert not re.findall(r"<(?:script|link|img)|url\(|src=|href=", page)


def events(folder):
    found = json.loads(gzip.decompress((folder / "perfetto.json.gz").read_bytes()))
    return found["traceEvents"]


def test_the_merged_trace_has_the_profiles_of_torch(tmp_path, capsys):
    """A real one, of this process, whose clock is made to be 5 s behind and to lose 1 ms per s."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        before = time.time_ns()
        with torch.profiler.record_function("stamp"):
            torch.ones(1000, device="cpu").sum()
        after = time.time_ns()
    mine = tmp_path / "tb" / "mine.pt.trace.json"  # as tensorboard_trace_handler() names it
    mine.parent.mkdir()
    profile.export_chrome_trace(str(mine))
    (tmp_path / "again.json.gz").write_bytes(gzip.compress(mine.read_bytes()))
    (tmp_path / "other.json").write_text("{}")
    three(tmp_path)
    ahead = [[before + 5 * 10**9, before], [before + 15 * 10**9 + 10**7, before + 10 * 10**9]]
    rows = [[0, 2**61, 1, None, 7, before + 5 * 10**9 - 500, after + 5 * 10**9, 8]]
    write(tmp_path, 1, rows, pid=os.getpid(), host=socket.gethostname(), clock=ahead)
    out, _, status = run(capsys, tmp_path)
    assert status == 0 and "other.json: cannot be read: " in out
    found = events(tmp_path)
    (call,) = (event for event in found if event["pid"] == 1 and event["name"] == CONCAT)
    stamps = [event for event in found if event["name"] == "stamp"]
    assert len(stamps) == 2
    for stamp in stamps:
        assert stamp["pid"] == 1 and call["tid"] != stamp["tid"]
        assert call["ts"] <= stamp["ts"] and stamp["ts"] + stamp["dur"] <= call["ts"] + call["dur"] + 50


PROGRAM = """
    import time, torch, hpcdist as hd, torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile
    with hd.init() as world:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            for step in range(10):
                time.sleep(0.1 * (world.rank == 1))
                hd.concat(torch.ones(10 * world.rank, 100))
                dist.all_reduce(torch.ones(8))
            if world.rank == 0:
                hd.send(torch.ones(3), dest=2)
            elif world.rank == 2:
                hd.recv(source=0)
        found.export_chrome_trace(f"traces/{world.rank}.json")
"""


def test_a_real_run(tmp_path, capsys):
    """Rank 1 of 3 sleeps 0.1 s before each concat."""
    finished(3, code=PROGRAM, cwd=tmp_path, env={"HPCDIST_TRACE": "traces"})
    out, err, status = run(capsys, tmp_path / "traces")
    assert (err, status) == ("", 0)
    assert re.search(r"^The others wait most for rank 1: .* of it in concat at <string>:8 \(mpi\)$", out, re.M), out
    assert re.search(r"^concat at .* rank 1 in \d+% +3.9 KiB +2.000$", out, re.MULTILINE), out
    sizes = re.findall(r"^(\d\S* K?i?B) +\d+$", out, re.MULTILINE)
    assert sizes == ["0 B", "16 B", "32 B", "4.0 KiB", "8.0 KiB"], out
    assert "cannot be read" not in out
    found = events(tmp_path / "traces")
    for rank in range(3):
        mine = [event for event in found if event["pid"] == rank and event["ph"] == "X"]
        ours = [event for event in mine if str(event["tid"]).startswith("calls of")]
        assert sum(event["name"].startswith("all_reduce at ") for event in ours) == 10
        assert {event["name"].split()[0] for event in ours} >= {"concat", "send" if rank == 0 else "concat"}
        begins = sorted(event["ts"] for event in ours if event["name"].startswith("concat"))
        ones = sorted(event["ts"] for event in mine if event["name"] == "aten::ones")  # two in each step
        assert begins[0] < ones[1] < begins[1] < ones[3] < begins[2], (begins, ones)
