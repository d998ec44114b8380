"""hpcdist tune: rules from made-up times, a real run, a file of other places, and bad files."""

import json
import re
from pathlib import Path

from launch import commands, mpirun

from hpcdist.comm import tuning

# With made-up times, as shares of those of the other algorithms, in five rounds; plans by these rules; a real run.
PROGRAM = """
    import os, sys
    import torch
    import hpcdist as hd
    import hpcdist.tools.tune as tune
    from hpcdist.tools.timing import Timing

    SENDS = {"concat": [0.5] * 5, "gather": [0.96] * 5, "split": [0.6, 0.7, 0.8, 1.3, 1.4], "redistribute": [1] * 5}

    def made_up(contenders, case, rounds, seconds):
        for contender in contenders:
            assert case.correct(contender.call(case)), contender.name
        faster = case.verb != "concat" or (len({*case.rows}) > 1 and sum(case.nbytes) < 2**19)
        shares = {"sends": SENDS[case.verb]} if faster else {}
        return [Timing(c.name, 1, [1e-3 * x for x in shares.get(c.name, [1] * 5)]) for c in contenders]

    def run(totals, held_out, *words):
        tune.TOTALS, tune.HELD_OUT = totals, held_out
        sys.argv = ["tune", *words]
        try:
            tune.run(tune.parser(), tune.main)
        except SystemExit as end:
            assert not end.code, end.code

    real, tune.measure = tune.measure, made_up
    run([2**14, 2**16, 2**23], [2**15, 2**16], "-o", "tune.json")  # MPICH: sends by default from 2**17 on
    os.environ["HPCDIST_TUNE"] = "tune.json"
    with hd.init() as world:
        skewed, even = (hd.plan(hd.concat, torch.ones(n)) for n in (10000 if world.rank else 2000, 12000))
        if world.rank == 0:
            print("|", skewed, "|", even, "|")
    del os.environ["HPCDIST_TUNE"]
    tune.measure = real
    run([2**14], [2**16], "--seconds", "0", "-o", "real.json")
"""
HERE = {"nodes": 3, "ranks_per_node": 2, "total": 5, "skew": 0}
OTHER = {**HERE, "algorithm": "sends", "segment": 0}
SAMPLE = {**HERE, "operation": "gatherv", "us": {"mpi": 1.0}}


def contents(**changes):
    """A file with a rule and a sample of 3 nodes, and with those of this node that a run replaces."""
    rules, samples = ([row, {**row, "nodes": 1}] for row in (OTHER, SAMPLE))
    found = {"format": tuning.FORMAT, "fingerprint": tuning.fingerprint()}
    found |= {"rules": {"gatherv": rules}, "samples": samples}
    return json.dumps(found | changes)


def test_rules(tmp_path):
    """For skewed concats from 16 KiB up to 8 MiB, not for gather (4 %) and split (noise); hd.init() reads them. Then a
    real run, in which the rules of another machine do not stay."""
    file, real = tmp_path / "tune.json", tmp_path / "real.json"
    file.write_text(contents())
    real.write_text(contents(fingerprint={"mpi": "another one"}))
    job = mpirun(2, code=PROGRAM, cwd=tmp_path)
    assert (job.status, job.err) == (0, ""), job
    found = json.loads(file.read_text())
    first, second = found["rules"].pop("allgatherv")
    assert found["rules"] == {"gatherv": [OTHER], "scatterv": [], "alltoallv": []}
    assert (first["total"], first["skew"], first["algorithm"]) == (2**14, 1.5, "sends")
    assert (second["total"], second["skew"]) == (2**23, 1.5) and second["algorithm"] != "sends"
    assert found["samples"][0] == SAMPLE and len(found["samples"]) == 1 + 3 * 2 * 3 + 3
    assert {row["nodes"] for row in found["samples"][1:]} == {1}
    us = next(row["us"] for row in found["samples"][1:] if row["skew"] == 1.5)
    assert (us["sends"], us["mpi"]) == (500, 1000)
    table, skewed, even, _ = job.out.split("|")
    for line in (
        r"allgatherv +16.0 KiB +1.5 +sends",
        r"allgatherv +32.0 KiB +100:1 +sends +sends +0% \(0 us\) +100% \(500 us\)",
        r"allgatherv +64.0 KiB +1:1 +(\S.*) +(\S.*) +0% \(0 us\) +0% \(0 us\)",
        r"gatherv +64.0 KiB +100:1 +mpi +sends +4% \(40 us\) +4% \(40 us\)",
        r"Within 5 % or 20 us of the fastest: 10 of 14 by these rules, 8 by the default",
        r"An allgatherv of 100:1 takes at most 0.50 times as long as an even one of this total",
    ):
        assert re.search(f"^{line}$", table, re.MULTILINE), table
    assert {path.name for path in tmp_path.iterdir()} == {"tune.json", "real.json"}
    says = "sends is taken from 16,384 bytes and a skew of 1.5 on (tune.json: for 16,384 bytes, sends takes 500 us"
    assert says in skewed
    assert "MPI_Allgatherv" in even

    found = json.loads(real.read_text())
    assert found["fingerprint"] == tuning.fingerprint()
    assert [row["operation"] for row in found["samples"]] == [
        "allgatherv", "allgatherv", "gatherv", "gatherv", "scatterv", "scatterv", "alltoallv",
    ]  # fmt: skip
    for row in found["samples"]:
        assert {"mpi", "sends"} <= {*row["us"]} and min(row["us"].values()) > 0
        assert (row["total"], row["skew"], row["nodes"], row["ranks_per_node"]) in [(2**14, s, 1, 2) for s in (1, 1.5)]
    _, differs = tuning.read(str(real))
    assert differs == ""


NCCL = """
    import sys
    from pathlib import Path
    from types import SimpleNamespace
    import hpcdist.tools.compare as compare, hpcdist.tools.tune as tune
    from hpcdist.routes import select
    from hpcdist.runtime.cli import run

    sys.path.append(sys.argv[1])
    select.ROUTES["nccl"] = ("nccl_rules", "STAND_IN")
    tune.VERBS, tune.TOTALS, tune.HELD_OUT = {"nccl allgatherv": "concat"}, [2**14], [2**15]
    tune.accelerator = SimpleNamespace(KIND="gpu", shared_gpu=lambda gpus: "ranks 0 and 1")
    tune._report = lambda place, found, checks: f"{len(checks)} checks"
    Path("shapes.txt").write_text("concat int64 3 5\\nconcat int64 4\\ngather int64 3 5")
    for tool, words in (tune, ["-o", "tune.json"]), (compare, ["--shapes", "shapes.txt", "--seconds", "0"]):
        sys.argv = ["", *words]
        try:
            run(tool.parser(), tool.main)
        except SystemExit as end:
            assert not end.code, end.code
"""


def test_route_nccl(tmp_path):
    """Where it can run, tune measures its algorithms, and compare shows them; a stand-in of NCCL runs them here."""
    routes = Path(__file__).parents[1] / "routes"
    job = mpirun(2, code=NCCL.replace("sys.argv[1]", repr(str(routes))), cwd=tmp_path)
    assert (job.status, job.err) == (0, ""), job
    assert "2 checks" in job.out and "rules of nccl allgatherv hold for such jobs alone" in job.out
    samples = json.loads((tmp_path / "tune.json").read_text())["samples"]
    assert [(x["operation"], x["skew"], {*x["us"]}) for x in samples] == [
        ("nccl allgatherv", 1.0, {"broadcasts", "fused", "padded", "sends"}),
        ("nccl allgatherv", 1.5, {"broadcasts", "padded", "sends"}),
    ]
    cases = json.loads((tmp_path / "compare.json").read_text())["cases"]
    timed = [
        {row["name"] for row in case["timings"] if "algorithm" in row["name"] and not row["skipped"]} for case in cases
    ]
    ragged = {f"algorithm {name}" for name in ("broadcasts", "padded", "sends")}
    assert timed == [ragged, ragged | {"algorithm fused"}, set()]


def test_bad_input_is_one_line_with_a_code(tmp_path):
    """The file stays as it was."""
    texts = {"text": "hello", "version": contents(format="hpcdist tune 2"), "list": "[]"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    bad = {name: rf"{name}: .*\[HD402\]" for name in texts} | {"missing/tune.json": r"missing.*\[HD4\d\d\]"}
    jobs = commands(2, *(["hpcdist.tools.tune", "-o", name] for name in bad), cwd=tmp_path)
    jobs += commands(0, ["hpcdist.tools.tune"], cwd=tmp_path)
    for job, expected in zip(jobs, [*bad.values(), r"two ranks or more.*\[HD505\]"], strict=True):
        assert (job.status, job.out, job.err.count("\n")) == (2, "", 1), job
        assert re.search(expected, job.err), job.err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == texts
