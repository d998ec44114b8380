"""Programs written for torchrun, as docs/clients shows them, end as torchrun ends them: the same parameters and values."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from launch import Job, mpirun, run
from pages import parse

DOCS = Path(__file__).parents[2] / "docs" / "clients"
PROGRAMS = {name: text for page in sorted(DOCS.glob("*.md")) for name, text in parse(page.name, page.read_text()).programs.items()}
ENV = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def same(ours: Path, theirs: Path) -> None:
    """Bitwise: two ranks, so that each sum has two terms, in either order."""
    found, expected = (torch.load(folder / "end.pt") for folder in (ours, theirs))
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_as_under_torchrun(name: str, tmp_path: Path) -> None:
    """The whole program, by the backend that it asks for; then from the middle on, by MPI."""
    program = tmp_path / name
    program.write_text(PROGRAMS[name])

    def ended(job: Job) -> None:
        assert job.status == 0, job.out + job.err

    ended(run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", name, "theirs"], tmp_path, ENV))
    ended(mpirun(2, "-m", "hpcdist.run", name, "ours", cwd=tmp_path, env=ENV, quick=False))
    same(tmp_path / "ours", tmp_path / "theirs")
    (tmp_path / "ours" / "end.pt").unlink()
    ended(mpirun(2, "-m", "hpcdist.run", "--mpi", name, "ours", "--resume", cwd=tmp_path, env=ENV, quick=False))
    same(tmp_path / "ours", tmp_path / "theirs")
