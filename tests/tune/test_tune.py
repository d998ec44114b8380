"""hpcdist tune: rules from made-up times, a real run, a file of other places, and bad files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from launch import commands, mpirun

from hpcdist.comm import tuning

# Times as shares of those of the other algorithms, in five rounds.
MADE_UP = """
    import sys
    import hpcdist.tune.__main__ as tune
    from hpcdist.compare.timing import Timing

    tune._TOTALS, tune._HELD_OUT = [2**14, 2**17, 2**20], [2**15, 2**18]
    SENDS = {"concat": [0.5] * 5, "gather": [0.96] * 5, "split": [0.6, 0.7, 0.8, 1.3, 1.4], "redistribute": [2] * 5}

    def measure(contenders, case, rounds, seconds):
        for contender in contenders:
            assert case.correct(contender.call(case)), contender.name
        faster = case.verb != "concat" or (len({*case.rows}) > 1 and sum(case.nbytes) < 2**19)
        shares = {"sends": SENDS[case.verb]} if faster else {}
        return [Timing(c.name, 1, [1e-3 * x for x in shares.get(c.name, [1] * 5)]) for c in contenders]

    tune.measure = measure
    sys.argv = ["tune", "-o", "tune.json"]
    tune.run(tune.parser(), tune.main)
"""
SMALL = """
    import sys
    import hpcdist.tune.__main__ as tune

    tune._TOTALS, tune._HELD_OUT = [2**14], [2**16]
    sys.argv = ["tune", "--seconds", "0"]
    tune.run(tune.parser(), tune.main)
"""
PLANS = """
    import torch, hpcdist as hd
    with hd.init() as world:
        skewed, even = (hd.plan(hd.concat, torch.ones(n)) for n in (20000 if world.rank else 4000, 12000))
        if world.rank == 0:
            print(skewed, even, sep="|")
"""
HERE = {"nodes": 3, "ranks_per_node": 2, "total": 5, "skew": 0}
OTHER = {**HERE, "algorithm": "sends", "segment": 0}
SAMPLE = {**HERE, "operation": "gatherv", "us": {"mpi": 1.0}}


def contents(**changes: Any) -> str:
    """A file with a rule and a sample of 3 nodes, and with those of this node that a run replaces."""
    rules, samples = ([row, {**row, "nodes": 1}] for row in (OTHER, SAMPLE))
    found = {"format": tuning.FORMAT, "fingerprint": tuning.fingerprint()}
    found |= {"rules": {"gatherv": rules}, "samples": samples}
    return json.dumps(found | changes)


def test_rules_are_beyond_noise_and_five_percent(tmp_path: Path) -> None:
    """For skewed concats from 16 KiB up to 1 MiB, not for gather (4 %) and split (noise); hd.init() reads them."""
    file = tmp_path / "tune.json"
    file.write_text(contents())
    job = mpirun(2, code=MADE_UP, cwd=tmp_path)
    assert (job.status, job.err) == (0, ""), job
    found = json.loads(file.read_text())
    first, second = found["rules"].pop("allgatherv")
    assert found["rules"] == {"gatherv": [OTHER], "scatterv": [], "alltoallv": []}
    assert (first["total"], first["skew"], first["algorithm"]) == (2**14, 1.5, "sends")
    assert (second["total"], second["skew"]) == (2**20, 1.5) and second["algorithm"] != "sends"
    assert found["samples"][0] == SAMPLE and len(found["samples"]) == 1 + 3 * 2 * 3 + 3
    assert {row["nodes"] for row in found["samples"][1:]} == {1}
    us = next(row["us"] for row in found["samples"][1:] if row["skew"] == 1.5)
    assert (us["sends"], us["mpi"]) == (500, 1000)
    assert re.search(r"^allgatherv +16.0 KiB +1.5 +sends$", job.out, re.MULTILINE), job.out
    assert re.search(r"^allgatherv +4 +0% +100%$", job.out, re.MULTILINE), job.out
    assert re.search(r"^gatherv +4 +4% +4%$", job.out, re.MULTILINE), job.out
    assert [path.name for path in tmp_path.iterdir()] == ["tune.json"]
    plans = mpirun(2, code=PLANS, cwd=tmp_path, env={"HPCDIST_TUNE": "tune.json"})
    assert plans.status == 0, plans
    skewed, even = plans.out.split("|")
    assert (
        "sends is taken from 16,384 bytes and a skew of 1.5 on (tune.json: for 16,384 bytes, sends takes 500 us"
        in skewed
    )
    assert "MPI_Allgatherv" in even


def test_a_real_run_and_another_fingerprint(tmp_path: Path) -> None:
    """Rules of another machine do not stay."""
    (tmp_path / "tune.json").write_text(contents(fingerprint={"mpi": "another one"}))
    job = mpirun(2, code=SMALL, cwd=tmp_path)
    assert (job.status, job.err) == (0, ""), job
    found = json.loads((tmp_path / "tune.json").read_text())
    assert found["fingerprint"] == tuning.fingerprint()
    assert [row["operation"] for row in found["samples"]] == [
        "allgatherv", "allgatherv", "gatherv", "gatherv", "scatterv", "scatterv", "alltoallv",
    ]  # fmt: skip
    for row in found["samples"]:
        assert {"mpi", "sends"} <= {*row["us"]} and min(row["us"].values()) > 0
        assert (row["total"], row["skew"], row["nodes"], row["ranks_per_node"]) in [(2**14, s, 1, 2) for s in (1, 1.5)]
    _, differs = tuning.read(str(tmp_path / "tune.json"))
    assert differs == ""


def test_bad_input_is_one_line_with_a_code(tmp_path: Path) -> None:
    """The file stays as it was."""
    texts = {"text": "hello", "version": contents(format="hpcdist tune 2"), "list": "[]"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    bad = {name: rf"{name}: .*\[HD402\]" for name in texts} | {"missing/tune.json": r"missing.*\[HD4\d\d\]"}
    jobs = commands(2, *(["hpcdist.tune", "-o", name] for name in bad), cwd=tmp_path)
    jobs += commands(1, ["hpcdist.tune"], cwd=tmp_path)
    for job, expected in zip(jobs, [*bad.values(), r"two ranks or more.*\[HD505\]"], strict=True):
        assert (job.status, job.out, job.err.count("\n")) == (2, "", 1), job
        assert re.search(expected, job.err), job.err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == texts
