"""The tables and pictures of the benchmarks are those of the samples, and so is each figure in the pages' prose."""

import json
import re
import sys
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
from launch import finished

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def made():
    """The programs of benchmarks/ that read results, and the records."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import plot
        import report
        import results
    finally:
        sys.path.pop(0)
    return SimpleNamespace(plot=plot, report=report, results=results, records=results.load_all())


def test_tables_and_pictures_are_those_of_the_samples(made):
    written = made.report.pages(made.records) | made.plot.pictures(made.records)
    assert len(written) > 15
    assert [path.name for path, text in written.items() if path.read_text() != text] == []
    pictures = {path for path in written if path.suffix == ".svg"}
    assert {*(ROOT / "benchmarks" / "results").glob("*.svg")} == pictures


def test_backend_mpi_beside_gloo(made):
    ratios = [ratio.median for _, ratio in made.report.by_gloo(made.records)]
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    assert f"In all {len(ratios)} cases" in text and f"a median of {median(ratios):.1f} times" in text
    assert min(ratios) > 1


def test_figures_of_readme_and_of_the_page():
    """They are those of the tables in benchmarks/README.md."""
    table, readme, page = (
        (ROOT / name).read_text() for name in ("benchmarks/README.md", "README.md", "docs/benchmarks.md")
    )
    concat = "`concat` of 64 MiB: mpi4py's time / [hpcdist's](docs/tune/routes.md#algorithms)"
    step = "DDP step, 1 million parameters"
    rows = (
        ("concat with out=, 64 MiB, against mpi4py, preallocated", concat, 4),
        (f"{step}, against gloo", f"{step}: gloo's time / hpcdist's", 4),
        (
            "concat, out=, 8 B: more than mpi4py, preallocated",
            "`concat` of 8 B on 2 ranks: hpcdist's time - mpi4py's",
            2,
        ),
    )
    for row, said, number in rows:
        (line,) = (line for line in table.splitlines() if line.startswith(f"| {row} "))
        figures = re.findall(r"([\d.]+(?: us)?)(?:\*\*)? \(", line)
        mpich, openmpi = figures[: number // 2], figures[number // 2 :]
        assert len(figures) == number and f"| {said} | {', '.join(mpich)} | {', '.join(openmpi)} |" in readme
    steps = [
        float(figure)
        for line in table.splitlines()
        if line.startswith("| DDP step")
        for figure in re.findall(r"([\d.]+)(?:\*\*)? \(", line)
    ]
    assert f"A DDP step took {min(steps):.2f} to {max(steps):.1f} times as long" in " ".join(page.split())


def test_the_page_says_which_way_by_hand_is_the_fastest(made):
    """The text of its picture names the number of hand-written versions, and the fastest."""
    (record,) = (r for r in made.records if r.name == "mpich-np2-concat")
    case = record.case(64 * 2**20, "16:1")
    shown = [name for name in made.plot.WAYS if case.timing(name) and "hpcdist" not in name]
    assert made.results.best(case, shown) == made.results.BASELINE
    assert ["zero", "one", "two", "three", "four", "five", "six", "seven"][len(shown)] + " hand-written" in (
        ROOT / "docs" / "benchmarks.md"
    ).read_text()


def test_where_it_is_slower(made):
    """The cells of the heat maps of small calls, and how many cells of plain and of shared calls are faster."""
    report = made.report
    cells = report.cells(made.records)
    small = [cell for _, size, cell in cells if size in report.SIZES[:3]]
    assert len(small) > 50
    low, high = (1 / most(cell.median for cell in small) for most in (max, min))
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", " ".join(page.split()))
    assert f"8 B to 64 KiB took {int(10 * low) / 10} to {high:.0f} times as long as the best hand-written way" in text
    plain = report.share([cell for row, _, cell in cells if row != report.SHARED])
    shared = report.share([cell for row, _, cell in cells if row == report.SHARED])
    assert re.search(f"hpcdist is faster in {plain} cases.* {shared}\\b", text)


def test_plans_beside_calls():
    """The figures of docs/do/plans.md are those of the table."""
    table, page = ((ROOT / name).read_text() for name in ("benchmarks/README.md", "docs/do/plans.md"))
    rows = re.findall(r"^\| concat(?: plan)?, out=, 8 B.*", table, re.MULTILINE)
    found = [figure for row in rows for figure in re.findall(r"([\d.]+) us(?:\*\*)? \(", row)]
    assert len(found) == 4
    assert [figure for figure in found if not re.search(rf"\b{figure}\b", page)] == []


def test_start_up_in_prose(made):
    """What each further rank costs, in MEASUREMENTS.md."""
    rounds = json.loads((ROOT / "benchmarks" / "results" / "stage-env.json").read_text())["rounds"]
    starts = {n: [found["start from the shared folder"] for found in rounds[n]] for n in ("2", "32")}
    seconds, requests = ((median(s[i] for s in starts["32"]) - median(s[i] for s in starts["2"])) / 30 for i in (0, 1))
    text = " ".join((ROOT / "benchmarks" / "MEASUREMENTS.md").read_text().split())
    assert f"sends {requests:.0f} requests to the server, and takes {seconds:.1f} s longer" in text


def test_small_calls_beside_mpi_that_exchanges_the_sizes(made):
    """The page's sentence on calls of 8 B, on 2 and 4 ranks, with both MPIs."""
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    slower: dict[str, list[float]] = {"concat": [], "split": [], "gather under Open MPI": [], "gather": []}
    for record in made.records:
        if record.verb in slower and record.world_size in made.report.RANKS:
            name = record.verb + " under Open MPI" * (record.verb == "gather" and record.mpi.startswith("Open MPI"))
            case = record.case(8, "even")
            slower[name].append(1 / made.results.ratio(case, made.results.MPI4PY_NEW, made.results.HPCDIST_NEW).median)
    assert all(slower.values()) and max(slower["concat"] + slower["gather"]) < 1 / 0.95
    assert (
        "a `concat` of 8 B takes about as long or less. A `split` takes up to "
        f"{max(slower['split']):.1f} times as long, and a `gather` under Open MPI up to "
        f"{max(slower['gather under Open MPI']):.1f} times." in text
    )


def test_the_data_loader_in_small(made, tmp_path):
    """The benchmark runs, each file is read once, and the formula of how well keep="file" shuffles is right."""
    options = ["--size", "16M", "--rounds", "1", "--seconds", "1", "--only", "bytes,memory,shuffle"]
    options += ["--folder", tmp_path, "--json", tmp_path / "found.json"]
    finished(2, ROOT / "benchmarks" / "data.py", *options)
    record = made.results.load(tmp_path / "found.json")
    amounts = {amount.name: amount.spread.median for amount in record.amounts}
    read = [value for name, value in amounts.items() if name.startswith("bytes read by calls")]
    assert len(read) == 6 and all(value >= 1 for value in read)
    formula = {name: value for name, value in amounts.items() if name.endswith(": by the formula")}
    assert len(formula) == 4 and len(record.cases) == 3
    for name, value in formula.items():
        assert abs(amounts[name.removesuffix(": by the formula")] - value) < 0.06, name
