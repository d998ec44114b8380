"""The rules by which algorithms are chosen: of the code, and of a file."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from launch import finished
from mpi4py import MPI

import hpcdist as hd
from hpcdist.comm import tuning
from hpcdist.comm.tuning import Place, Rule, Rules, Sample, Tuned, merged, read
from hpcdist.routes import c10d, mpi
from hpcdist.runtime.world import team_of

RULES = {"allgatherv": [Rule(100, 0, "sends"), Rule(100, 4, "ring", 64), Rule(1000, 0, "mpi")]}
ROW = {"nodes": 1, "ranks_per_node": 2, "total": 0, "skew": 0, "algorithm": "mpi", "segment": 0}
US = Sample("allgatherv", 0, 1, {"ring": 10, "mpi": 20})
CODE = """
import os, sys, warnings
import torch, hpcdist as hd
for name in sys.argv[1:]:
    os.environ["HPCDIST_TUNE"] = f"{name}.json"
    said = []
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with hd.init():
                said = [str(w.message) for w in found if "HPCDIST_TUNE" in str(w.message)]
                said.append(str(hd.plan(hd.concat, torch.ones(1000))))
    except Exception as error:
        said.append(f"{type(error).__name__} {error}")
    text = "; ".join(said).replace(chr(10), " ")
    os.write(1, f"{name}: {text}\\n".encode())
"""
RING = {"allgatherv": [Rule(0, 0, "ring", 64)]}


def test_the_rule_of_the_largest_total_and_then_skew_is_taken():
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
    # Where an algorithm cannot be, the next one is taken.
    assert rules.choose("allgatherv", 100, 50, lambda name: name != "ring").algorithm == "sends"
    # MPI may count in C ints: the data of a collective, and the extents of a type.
    assert not any(mpi.MPI_ROUTE.usable(None, name, 1e10, 1) for name in ("mpi", "typed"))


def test_a_ring_of_many_ranks_needs_data_for_its_steps():
    """16 nodes x 64 ranks: even calls from 128 KiB per rank on, skewed ones from 1 MB. Two nodes take windows."""
    many, two, one = Rules(Place(16, 64), 1024, None), Rules(Place(2, 4), 8, None), Rules(Place(1, 4), 4, None)
    for rules, total, largest, expected in [
        (many, 2**26, 2**16, "mpi"),
        (many, 2**27, 2**17, "ring"),
        (many, 2**20, 2**19, "ring"),
        (two, 2**20, 2**17, "window"),
        (two, 2**20 - 1, 2**17, "mpi"),
        (one, 10**6 - 1, 10**6 // 4, "mpi"),
    ]:
        assert rules.choose("allgatherv", total, largest).algorithm == expected, (total, largest)


def test_the_skew_counts_the_ranks_that_there_are():
    """4 + 1 ranks on two nodes: half of the bytes on one of 5 ranks are a skew of 2.5, not of 4."""
    rules = Rules(Place.of([0, 0, 0, 0, 1]), 5, Tuned("file", {Place(2, 4): RULES}, {}))
    assert rules.choose("allgatherv", 100, 50).algorithm == "sends"
    assert rules.choose("allgatherv", 100, 80).algorithm == "ring"


def test_route_nccl_has_rules_of_its_own():
    own = {"nccl allgatherv": [Rule(100, 0, "padded"), Rule(1000, 2, "sends"), Rule(2000, 0, "fused")]}
    team = SimpleNamespace(size=4, rules=Rules(Place(1, 4), 4, Tuned("my.json", {Place(1, 4): own}, {})))
    for total, largest, expected, why in [
        (96, 24, "fused", ""),
        (97, 40, "broadcasts", ""),
        (100, 25, "padded", "padded is taken from 100 bytes on, by my.json"),
        (1000, 900, "sends", "sends is taken from 1,000 bytes and a skew of 2 on, by my.json"),
        (2001, 501, "padded", "padded is taken from 100 bytes on, by my.json"),  # fused cannot be
    ]:
        assert c10d.NCCL.rule(team, "allgatherv", total, largest).algorithm == expected, total
        assert c10d.NCCL.method(team, "allgatherv", total, largest).reason == why
        assert mpi.MPI_ROUTE.rule(team, "allgatherv", total, largest).algorithm == "mpi"


def test_a_file_is_read_as_it_was_written(tmp_path):
    """Tuned at two places, and at the first one again."""
    found = None
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


# Changes of a file, and what init() or a plan then says on two ranks: a file that cannot be used is one error.
FILES = {
    "format": (
        {"format": "hpcdist tune 7"},
        ["[HD114]", "its format is 'hpcdist tune 7', expected 'hpcdist tune 1'"],
    ),
    "algorithm": ({"rules": {"allgatherv": [ROW | {"algorithm": "magic"}]}}, ["[HD114]", "magic"]),
    "operation": ({"rules": {"reduce": [ROW]}}, ["[HD114]", "reduce"]),
    "column": ({"rules": {"allgatherv": [{"nodes": 1, "total": 0}]}}, ["[HD114]", "ranks_per_node"]),
    "total": ({"rules": {"allgatherv": [ROW | {"total": "many"}]}}, ["[HD114]", "many"]),
    "rules": ({"rules": []}, ["[HD114]", "items"]),
    "segment": ({"rules": {"allgatherv": [ROW | {"segment": -5}]}}, ["[HD114]", "segment is -5"]),
    "infinite": ({"rules": {"allgatherv": [ROW | {"total": float("inf")}]}}, ["[HD114]", "infinity"]),
    "samples": ({"samples": [1]}, ["[HD114]", "TypeError"]),
    "missing": ({}, ["[HD114]", "HPCDIST_TUNE: missing.json: FileNotFoundError"]),
    "text": (None, ["[HD114]", "JSONDecodeError"]),
    "good": (
        {},
        ["a ring of MPI messages in pieces", "is taken (good.json: for 0 bytes, ring takes 10 us, mpi takes 20 us)"],
    ),
    "places": (merged(None, Place(1, 4), {}, [US]), []),
    "another": ({"fingerprint": {"wire": "mlx5_0"}}, ["MPI_Allgatherv"]),  # another machine
}


def test_files(tmp_path):
    made = merged(None, Place(1, 2), RING, [US])
    for name, (change, _) in FILES.items():
        if name == "another":
            change = {"fingerprint": made["fingerprint"] | change["fingerprint"]}
        (tmp_path / f"{name}.json").write_text("{" if change is None else json.dumps(made | change))
    (tmp_path / "missing.json").unlink()
    job = finished(2, "-c", CODE, *FILES, cwd=tmp_path)
    for name, (_, texts) in FILES.items():
        lines = [line for line in job.out.splitlines() if line.startswith(f"{name}: ")]
        assert len(lines) == 2 and all(text in line for line in lines for text in texts), (name, lines)
    for why in ("wire is", "it was not measured on nodes: 1, ranks per node: 2"):
        assert job.out.count(f"do not apply: {why}") == 1, job.out


@pytest.mark.parametrize("algorithm", tuning.ALGORITHMS["alltoallv"])
def test_a_forced_redistribute_is_right(world, rank, size, findings, algorithm):
    """Into new memory, into an `out` that is strided on one rank alone, and back by its gradient."""
    whole = torch.arange((size + 1) * (2 * size + 1) * 300.0).view(size + 1, -1, 300)
    layouts = [hd.Split(0), hd.Split(1), hd.Split(2), hd.Split(1, counts=[2 * size + 1] + [0] * (size - 1))]
    group = world.comm.Dup()
    with team_of(group).forced("alltoallv", Rule(0, 0, algorithm), {}):
        for src, dst in itertools.permutations(layouts, 2):
            x, expected = (hd.local(whole, layout).clone() for layout in (src, dst))
            said = hd.plan(hd.redistribute, x, src, dst, group=group)
            findings.check(size == 1 or said.methods[0] == tuning.ALGORITHMS["alltoallv"][algorithm], said)
            findings.same(hd.redistribute(x.requires_grad_(), src, dst, group=group), expected, f"{src} to {dst}")
            out = torch.empty(expected.shape[::-1] if rank == 0 else expected.shape, dtype=x.dtype)
            out = out.permute(2, 1, 0) if rank == 0 else out
            with torch.no_grad():
                findings.same(hd.redistribute(x, src, dst, group=group, out=out), expected, f"out, {src} to {dst}")
            y = hd.redistribute(x, src, dst, group=group)
            (y * expected).sum().backward()
            findings.same(x.grad, x.detach(), f"gradient, {src} to {dst}")
    group.Free()


def test_a_single_rank_sends_itself_no_pieces(findings):
    """A message to itself that nobody receives would wait for ever, if it is large."""
    x = torch.arange(2**20)
    with team_of(MPI.COMM_SELF).forced("allgatherv", Rule(0, 0, "ring", 2**18), {}):
        findings.same(hd.concat(x, group=MPI.COMM_SELF), x, "alone")
