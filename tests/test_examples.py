"""The example programs print what the README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import mpirun

README = (Path(__file__).parent.parent / "README.md").read_text()

EXAMPLES = [  # the ranks, and the arguments of python
    (3, "-m hpcdist.examples.primitives"),
]


@pytest.mark.parametrize(("np", "args"), EXAMPLES, ids=[args for _, args in EXAMPLES])
def test_an_example_prints_what_the_readme_says(np: int, args: str, tmp_path: Path) -> None:
    output = re.search(rf"^\$ mpirun -n {np} python {re.escape(args)}\n(.*?)```", README, re.DOTALL | re.MULTILINE)
    assert output is not None, "not in the README"
    job = mpirun(np, *args.split(), cwd=tmp_path)
    assert job.status == 0, job.err
    assert job.out == output[1]


def test_one_rank_has_nobody_to_send_to() -> None:
    job = mpirun(1, "-m", "hpcdist.examples.primitives")
    assert job.status == 0, job.err
    assert "send, recv          | [1]                | -\n" in job.out
