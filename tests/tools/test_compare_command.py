"""hpcdist compare: a run of small cases and its files, two files compared, a trace, and bad input."""

import json
import re
from html.parser import HTMLParser

import pytest
from launch import commands, finished

COMPARE = "hpcdist.tools.compare"
SHAPES = """
concat float32 8x3 2x3   # the last shape is that of all further ranks

gather int64 5
split bfloat16 0x2 9x2
redistribute uint8 4x7
"""


class Parts(HTMLParser):
    """What a page loads from elsewhere, and its elements."""

    def __init__(self):
        super().__init__()
        self.loads = []
        self.tags = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")]


PROGRAM = """
    import torch, hpcdist as hd, torch.distributed as dist
    with hd.init(trace="traces") as world:
        for step in range(3):
            hd.concat(torch.ones(10 + 90 * world.rank, 2))
            hd.split(torch.ones(7) if world.rank == 0 else None)
            hd.gather(torch.ones(0))
            hd.redistribute(torch.ones(4, 4), hd.Split(0), hd.Split(1))
            dist.all_gather([torch.ones(3, dtype=torch.uint8) for _ in range(2)], torch.ones(3, dtype=torch.uint8))
"""
_CASE = '{"format": "hpcdist compare 1", "cases": [{"case": "concat int64 3", "nbytes": 24, "timings": [%s]}]}'
FILES = {
    "shapes.txt": SHAPES,
    "bad.txt": "concat float32 3\nscan float32 3\n",
    "none.txt": "# nothing\n",
    "other.json": '{"format": "hpcdist tune 1"}',
    "empty.json": '{"format": "hpcdist compare 1", "cases": []}',
    "damaged.json": _CASE % '{"smples": []}',
    "alone.json": _CASE % "",
    "large.txt": "concat int64 999999999999",
}
BAD = {
    "one file": (["a.json"], r"expected two files.* \[HD505\]"),
    "nothing": ([], r"expected two files, or --shapes, or --like \[HD505\]"),
    "two kinds": (["a.json", "b.json", "--like", "traces"], r"expected two files, or --shapes, or --like \[HD505\]"),
    "no such file": (["a.json", "b.json"], r"a.json: no such file \[HD401\]"),
    "another kind": (["other.json", "other.json"], r"other.json: is not in 'hpcdist compare 1' \[HD402\]"),
    "not JSON": (["bad.txt", "other.json"], r"bad.txt: cannot be read: .* \[HD402\]"),
    "nothing in common": (["empty.json", "empty.json"], r"a case in common \[HD505\]"),
    "a verb": (["--shapes", "bad.txt"], r"'scan float32 3': expected concat or .* \[HD505\]"),
    "no case": (["--shapes", "none.txt"], r"none.txt: has no case \[HD505\]"),
    "no shapes": (["--shapes", "missing.txt"], r"missing.txt: no such file \[HD401\]"),
    "no trace": (["--like", "missing"], r"missing: no call was traced.* \[HD401\]"),
    "damaged": (["damaged.json", "damaged.json"], r"damaged.json: cannot be read: .* \[HD402\]"),
    "without ours": (["alone.json", "alone.json"], r"alone.json: cannot be read: 'hpcdist' \[HD402\]"),
    "too large": (["--shapes", "large.txt"], r"allocate memory.* \[HD\d+\]"),
    "no folder": (["--shapes", "shapes.txt", "-o", "missing/a.json"], r"missing.* \[HD4\d\d\]"),
}
LIKE = [COMPARE, "--like", "traces", "--seconds", 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("compare")
    for name, text in FILES.items():
        (found / name).write_text(text)
    finished(2, code=PROGRAM, cwd=found)
    return found


@pytest.fixture(scope="module")
def jobs(folder):
    """How the commands ended, on two ranks."""
    lines = {
        "run": [COMPARE, "--shapes", "shapes.txt", "-o", "old.html", "--seconds", 0],
        "like": LIKE,
        **{name: [COMPARE, *words] for name, (words, _) in BAD.items()},
    }
    return dict(zip(lines, commands(2, *lines.values(), cwd=folder), strict=True))


@pytest.mark.both
def test_a_run_and_two_files(folder, jobs):
    """The second of which is the first one with other times; on one rank."""
    one, record = jobs["run"], json.loads((folder / "old.json").read_text())
    assert (one.status, one.err) == (0, ""), one
    assert record["format"] == "hpcdist compare 1" and "2 ranks on 1 node" in record["machine"]
    lines = [line.partition("#")[0].strip() for line in SHAPES.splitlines()]
    assert [case["case"] for case in record["cases"]] == [*filter(None, lines)]
    assert [case["nbytes"] for case in record["cases"]] == [120, 80, 36, 56]
    for case in record["cases"]:
        names = {timing["name"]: timing for timing in case["timings"]}
        assert len(names) == 9 and {name.split()[0].rstrip(",") for name in names} == {"hpcdist", "mpi4py", "torch"}
        for name, timing in names.items():
            assert (timing["skipped"] is None) == (len([s for s in timing["samples"] if s]) >= 5), timing
            assert not timing["skipped"] or name == "torch, sizes known" or timing["skipped"] == "not for redistribute"
            assert one.out.count(f"\n{name}  ") == sum(
                t["skipped"] is None for c in record["cases"] for t in c["timings"] if t["name"] == name
            )
    page = Parts()
    page.feed((folder / "old.html").read_text())
    assert page.loads == [] and page.tags.count("svg") == 1 and page.tags.count("table") == 4
    assert page.tags.count("rect") == 12  # three kinds in four cases

    for case in record["cases"][:2]:
        for timing in case["timings"]:
            timing["samples"] = [sample and sample / 1000 for sample in timing["samples"]]
    record["cases"].pop()
    (folder / "new.json").write_text(before := json.dumps(record))
    two, other = commands(1, [COMPARE, "old.json", "new.json"], LIKE, cwd=folder)
    assert (two.status, two.err) == (0, ""), two
    assert two.out.startswith("new against old: 3 cases\nhpcdist takes 0.00 to 1.00 times its time in old.")
    faster = len(re.findall(r" 0.001 +faster$", two.out, re.MULTILINE))
    assert faster == sum(t["skipped"] is None for case in record["cases"][:2] for t in case["timings"]) > 12
    assert " and 0 slower\n" in two.out and not (folder / "change.json").exists()
    assert (folder / "change.html").exists() and (folder / "new.json").read_text() == before
    assert other.status == 2 and "traces: is of 2 ranks; compare on as many [HD505]" in other.err


def test_the_calls_of_a_trace(folder, jobs):
    assert (jobs["like"].status, jobs["like"].err) == (0, ""), jobs["like"]
    cases = [case["case"] for case in json.loads((folder / "compare.json").read_text())["cases"]]
    assert sorted(cases) == ["concat int64 10 100", "concat uint8 3", "split uint8 14"]


def test_bad_input_is_one_line_with_a_code(jobs):
    for name, (_, expected) in BAD.items():
        job = jobs[name]
        assert (job.status, job.out, job.err.count("\n")) == (2, "", 1), job
        assert re.search(expected, job.err), job.err


@pytest.mark.parametrize(
    "line",
    ["concat", "concat float32", "concat float32 3y", "concat float32 -3", "concat complex64 3",
     "concat float32 3x2 3x4", "concat float32 3 3 3", "redistribute float32 3", "concat float32 3 x"],
)  # fmt: skip
def test_bad_lines(line):
    from hpcdist.errors import InputError
    from hpcdist.tools.compare import parse

    assert parse("concat float32 3x2 0x2", 3) == ("concat", "float32", [[3, 2], [0, 2], [0, 2]])
    with pytest.raises(InputError, match=r"HD505"):
        parse(line, 2)
