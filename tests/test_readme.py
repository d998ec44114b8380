"""The README's program prints what the README says, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

from launch import mpirun

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_program_prints_what_the_readme_says(tmp_path: Path) -> None:
    program = re.search(r"```python\n(# shards\.py\n.*?)```", README, re.DOTALL)
    output = re.search(r"\$ mpirun -n 3 python shards\.py\n(.*?)```", README, re.DOTALL)
    assert program is not None
    assert output is not None
    (tmp_path / "shards.py").write_text(program[1])
    job = mpirun(3, "shards.py", cwd=tmp_path)
    assert job.status == 0, job.err
    assert job.out == output[1]


def test_the_programs_length() -> None:
    program = re.search(r"```python\n# shards\.py\n(.*?)```", README, re.DOTALL)
    assert program is not None
    assert len([line for line in program[1].splitlines() if line.strip()]) <= 12


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    for link in links:
        assert (Path(__file__).parent.parent / link).exists(), link
