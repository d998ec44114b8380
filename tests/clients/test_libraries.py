"""Programs for torchrun, as docs/clients shows them, end as under torchrun: the same parameters, the same values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from launch import Job, mpirun, run
from pages import parse
from settings import environ

DOCS = Path(__file__).parents[2] / "docs" / "clients"
STOP = DOCS.parent / "how-to" / "stop-in-time.md"
STOPS = {name: text for name, text in parse(STOP.name, STOP.read_text()).programs.items() if name.endswith("_stop.py")}
PROGRAMS = {
    name: text for page in DOCS.glob("*.md") for name, text in parse(page.name, page.read_text()).programs.items()
}
ENV = {
    **environ(),
    "HPCDIST_TIMEOUT": "60",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def ended(start: Callable[[], Job]) -> None:
    """Start a job until it ends without the abort that torch 2.13 with gloo meets now and then, also under torchrun."""
    for _ in range(4):
        job = start()
        if "terminate called without an active exception" not in job.err:
            break
    assert job.status == 0, job.out + job.err


def same(ours: Path, theirs: Path) -> None:
    """Bitwise: two ranks, so that each sum has two terms, in either order."""
    found, expected = (torch.load(folder / "end.pt") for folder in (ours, theirs))
    (ours / "end.pt").unlink()
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_as_under_torchrun(name: str, tmp_path: Path) -> None:
    """The whole program, by the backend that it asks for; then from its own checkpoint on, by MPI."""
    for folder in ("program", "theirs", "ours"):
        (tmp_path / folder).mkdir()
    program = str(tmp_path / "program" / name)
    Path(program).write_text(PROGRAMS[name])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program, "theirs"]
    for options, resume in ([], []), (["--mpi"], ["--resume"]):
        ended(partial(run, [*torchrun, *resume], tmp_path, ENV))
        words = ("-m", "hpcdist.run", *options, program, "ours", *resume)
        ended(partial(mpirun, 2, *words, cwd=tmp_path, env=ENV, quick=False))
        same(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", STOPS)
def test_a_program_stops_and_goes_on(name: str, tmp_path: Path) -> None:
    """All ranks at the step at which one has had a signal. Lightning's own handler would wait for the other ranks."""
    (tmp_path / name).write_text(STOPS[name])
    job = mpirun(2, name, "signal", cwd=tmp_path, env=ENV, quick=False)
    assert job.status == 75 and "step 10: rank 1 received SIGTERM" in job.out, job
    job = mpirun(2, name, cwd=tmp_path, env=ENV, quick=False)
    assert job.status == 0 and "step 24: done" in job.out, job
