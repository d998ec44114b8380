"""The rules by which algorithms are chosen: of the code, and of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from collective import Findings
from launch import mpirun
from mpi4py import MPI

import hpcdist as hd
from hpcdist.comm import mpi, tuning
from hpcdist.comm.tuning import Place, Rule, Rules, Sample, Tuned, merged, read
from hpcdist.runtime.world import team_of

RULES = {
    "allgatherv": [
        Rule(100, 0, "sends"),
        Rule(100, 4, "ring", 64),
        Rule(1000, 0, "mpi"),
    ],
}
ROW = {"nodes": 1, "ranks_per_node": 2, "total": 0, "skew": 0, "algorithm": "mpi", "segment": 0}
US = Sample("allgatherv", 0, 1, {"ring": 10, "mpi": 20})
CODE = """
import warnings
import torch, hpcdist as hd
try:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        world = hd.init()
    print(*[str(w.message) for w in found if "HPCDIST_TUNE" in str(w.message)])
    print(hd.plan(hd.concat, torch.ones(1000)))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.once
def test_the_rule_of_the_largest_total_and_then_skew_is_taken() -> None:
    rules = Rules(Place(1, 8), 8, Tuned("file", {Place(1, 8): RULES}, {}))
    for total, largest, expected in [
        (0, 0, "mpi"),
        (99, 99, "mpi"),
        (100, 49, "sends"),
        (100, 50, "ring"),
        (999, 999, "ring"),
        (1000, 1000, "mpi"),
    ]:
        assert rules.choose("allgatherv", total, largest).algorithm == expected, (total, largest)
    assert rules.choose("gatherv", 100, 100).algorithm == "mpi"
    assert rules.choose("allgatherv", 100, 50).segment == 64


@pytest.mark.once
def test_rules_of_other_places_do_not_apply() -> None:
    tuned = Tuned("file", {Place(2, 4): RULES}, {})
    assert Rules(Place(1, 8), 8, tuned).choose("allgatherv", 100, 50) == Rules(Place(1, 8), 8, None).choose(
        "allgatherv", 100, 50
    )
    assert Rules(Place(2, 4), 8, tuned).choose("allgatherv", 100, 50).algorithm == "ring"


@pytest.mark.once
def test_the_skew_counts_the_ranks_that_there_are() -> None:
    """4 + 1 ranks on two nodes: half of the bytes on one of 5 ranks are a skew of 2.5, not of 4."""
    rules = Rules(Place.of([0, 0, 0, 0, 1]), 5, Tuned("file", {Place(2, 4): RULES}, {}))
    assert rules.choose("allgatherv", 100, 50).algorithm == "sends"
    assert rules.choose("allgatherv", 100, 80).algorithm == "ring"


@pytest.mark.once
def test_the_next_rule_is_taken_where_an_algorithm_cannot_be() -> None:
    rules = Rules(Place(1, 8), 8, Tuned("file", {Place(1, 8): RULES}, {}))
    assert rules.choose("allgatherv", 100, 50, lambda name: name != "ring").algorithm == "sends"
    assert rules.choose("gatherv", 100, 50, lambda name: name != "mpi").algorithm == "sends"


@pytest.mark.once
def test_every_algorithm_has_a_name_and_a_function() -> None:
    for operation, names in tuning.ALGORITHMS.items():
        assert list(names) == list(mpi.MPI_ROUTE.algorithms[operation])


@pytest.mark.once
def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Tuned at two places, and at the first one again."""
    found: Any = None
    for place, rules in [
        (Place(1, 4), {"gatherv": [Rule(8, 0, "sends")]}),
        (Place(2, 4), RULES),
        (Place(1, 4), {"allgatherv": [Rule(0, 0, "ring", 5)]}),
    ]:
        found = merged(found, place, rules, [Sample("gatherv", 5, 1.5, {"mpi": place.nodes})])
    file = tmp_path / "tune.json"
    file.write_text(json.dumps(found))
    tuned, differs = read(str(file))
    assert not differs
    assert tuned.rules == {
        Place(1, 4): {"gatherv": [Rule(8, 0, "sends")], "allgatherv": [Rule(0, 0, "ring", 5)]},
        Place(2, 4): RULES,
    }
    assert [sample["us"]["mpi"] for sample in found["samples"]] == [2, 1]
    assert tuned.samples == {Place(n, 4): [Sample("gatherv", 5, 1.5, {"mpi": n})] for n in (2, 1)}
    old = found | {"fingerprint": found["fingerprint"] | {"mpi": "other"}}
    assert merged(old, Place(1, 1), {}, [])["rules"] == {}


@pytest.mark.once
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "hpcdist tune 7"}, "its format is 'hpcdist tune 7', expected 'hpcdist tune 1'"),
        ({"rules": {"allgatherv": [ROW | {"algorithm": "magic"}]}}, "magic"),
        ({"rules": {"reduce": [ROW]}}, "reduce"),
        ({"rules": {"allgatherv": [{"nodes": 1, "total": 0}]}}, "ranks_per_node"),
        ({"rules": {"allgatherv": [ROW | {"total": "many"}]}}, "many"),
        ({"rules": []}, "items"),
        ({"rules": {"allgatherv": [ROW | {"segment": -5}]}}, "segment is -5"),
        ({"rules": {"allgatherv": [ROW | {"total": float("inf")}]}}, "infinity"),
        ({"samples": [1]}, "TypeError"),
        (None, "JSONDecodeError"),
        ("missing", "HPCDIST_TUNE: tune.json: FileNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_error(tmp_path: Path, change: Any, text: str) -> None:
    file = tmp_path / "tune.json"
    found = merged(None, Place(1, 2), RULES, [])
    if change != "missing":
        file.write_text("{" if change is None else json.dumps(found | change))
    job = mpirun(2, code=CODE, cwd=tmp_path, env={"HPCDIST_TUNE": "tune.json"})
    assert job.out.count("[HD114]") == 2, job.out
    assert job.out.count(text) >= 2, job.out


@pytest.mark.once
def test_a_plan_shows_the_rule_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tune.json"
    file.write_text(json.dumps(merged(None, Place(1, 2), {"allgatherv": [Rule(0, 0, "ring", 64)]}, [US])))
    job = mpirun(2, code=CODE, cwd=tmp_path, env={"HPCDIST_TUNE": "tune.json"})
    assert job.out.count("a ring of MPI messages in pieces") == 2, job.out
    assert job.out.count("is taken (tune.json: for 0 bytes, ring takes 10 us, mpi takes 20 us)") == 2, job.out


@pytest.mark.once
def test_a_file_without_these_nodes_and_ranks_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_text(json.dumps(merged(None, Place(1, 4), {}, [US])))
    job = mpirun(2, code=CODE, cwd=tmp_path, env={"HPCDIST_TUNE": "tune.json"})
    assert job.out.count("do not apply: it was not measured on nodes: 1, ranks per node: 2") == 1, job.out


@pytest.mark.once
def test_a_file_of_another_machine_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "tune.json"
    found = merged(None, Place(1, 2), {"allgatherv": [Rule(0, 0, "ring", 64)]}, [])
    file.write_text(json.dumps(found | {"fingerprint": found["fingerprint"] | {"wire": "mlx5_0"}}))
    job = mpirun(2, code=CODE, cwd=tmp_path, env={"HPCDIST_TUNE": "tune.json"})
    assert job.out.count("do not apply: wire is") == 1, job.out
    assert job.out.count("MPI_Allgatherv") == 2, job.out


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["mpi", "sends", "ring"])
def test_a_forced_algorithm_is_taken_and_right(world: hd.World, algorithm: str) -> None:
    findings, size = Findings(world.comm), world.world_size
    counts = [1000 * rank for rank in range(size)] if size > 1 else [1000]
    whole = torch.arange(sum(counts) * 3).view(-1, 3)
    start = sum(counts[: world.rank])
    mine = whole[start : start + counts[world.rank]]
    with tuning.forced(team_of(), "allgatherv", algorithm, 1000):
        said = hd.plan(hd.concat, mine)
        findings.check(said.methods == (tuning.ALGORITHMS["allgatherv"][algorithm],), said)
        findings.same(hd.concat(mine), whole, algorithm)
        findings.same(hd.concat(mine.t(), 1), whole.t().contiguous(), f"{algorithm}, dim 1")
    findings.settle()


@pytest.mark.mpi
def test_a_single_rank_sends_itself_no_pieces(world: hd.World) -> None:
    """A message to itself that nobody receives would wait for ever, if it is large."""
    findings, x = Findings(world.comm), torch.arange(2**20)
    with tuning.forced(team_of(MPI.COMM_SELF), "allgatherv", "ring", 2**18):
        findings.same(hd.concat(x, group=MPI.COMM_SELF), x, "alone")
    findings.settle()
