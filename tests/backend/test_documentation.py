"""The programs in docs/do/torch-distributed.md run as they stand, under the launcher and without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import mpirun

DOC = (Path(__file__).parents[2] / "docs" / "do" / "torch-distributed.md").read_text()


def _program(name: str, folder: Path) -> str:
    """Write a program of the page into a folder."""
    found = re.search(rf"```python\n# {re.escape(name)}\n(.*?)```", DOC, re.DOTALL)
    assert found is not None, f"{name} is not in the page"
    (folder / name).write_text(found[1])
    return name


@pytest.mark.once
@pytest.mark.parametrize("np", [0, 1, 2])
def test_the_script_with_one_other_line(np: int, tmp_path: Path) -> None:
    job = mpirun(np, _program("train.py", tmp_path), cwd=tmp_path)
    assert job.status == 0, job.err
    assert job.out == f"{max(np, 1)} ranks, backend mpi\n"


def test_the_name_alone(tmp_path: Path) -> None:
    """A script that keeps its init_process_group(), with this backend's name."""
    _program("train.py", tmp_path)
    text = (tmp_path / "train.py").read_text()
    assert text.count("hpcdist.init()") == 1
    (tmp_path / "train.py").write_text(text.replace("hpcdist.init()", 'dist.init_process_group("mpi")'))
    job = mpirun(2, "train.py", cwd=tmp_path)
    assert job.status == 0, job.err
    assert job.out == "2 ranks, backend mpi\n"


def test_accelerate(tmp_path: Path) -> None:
    """Also without the variables that accelerate knows, of which srun --mpi=pmix sets none."""
    program = tmp_path / _program("with_accelerate.py", tmp_path)
    text = program.read_text()
    known = ("PMI_", "OMPI_COMM_WORLD_", "MPI_LOCAL")
    unset = f"import os; [os.environ.pop(name) for name in list(os.environ) if name.startswith({known})]\n"
    assert text.count("from accelerate") == 1
    program.write_text(text.replace("from accelerate", unset + "from accelerate"))
    job = mpirun(2, "with_accelerate.py", cwd=tmp_path)
    assert job.status == 0, job.err
    assert job.out == "2 processes, backend gloo is accelerate's label\n"
