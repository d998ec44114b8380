"""The tutorial beside what its programs print (test_docs.py): its picture is of its program, and so is each line."""

import re
from pathlib import Path

from pages import parse

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "tutorial.md").read_text()
PROGRAMS = parse("tutorial.md", TEXT).programs


def test_the_picture_is_what_the_program_draws(tmp_path, monkeypatch):
    picture = (DOCS / "pictures" / "tutorial.svg").read_text()
    steps = re.findall(r'fill="#888">(\d+)</text>', picture)
    points = re.findall(r'fill="(#\w+)">(\d\.\d{3})</text>', picture)
    assert len(steps) == len(points) == 8
    ranks = {"#07c": 4, "#d60": 3}
    rows = [f"{step},{ranks[colour]},{bits}\n" for step, (colour, bits) in zip(steps, points, strict=True)]
    monkeypatch.chdir(tmp_path)
    Path("curve.csv").write_text("".join(rows))
    exec(compile(PROGRAMS["plot.py"], "plot.py", "exec"), {})
    assert Path("curve.svg").read_text() == picture


def test_the_line_at_which_the_others_wait_is_the_backward_pass():
    lines = {int(line) for line in re.findall(r"train\.py:(\d+)", TEXT)} | {int(re.search(r"Line (\d+) is", TEXT)[1])}
    assert [PROGRAMS["train.py"].splitlines()[line - 1].split("#")[0].strip() for line in lines] == [
        "bits(model, batch).backward()"
    ]
