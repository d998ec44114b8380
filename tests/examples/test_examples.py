"""The example programs print what one process would find."""

import re
from textwrap import dedent

import pytest
from launch import finished, mpirun


def test_one_rank_has_nobody_to_send_to():
    job = finished(0, "-m", "hpcdist.examples.primitives")
    assert "send, recv          | [1]                           | -\n" in job.out


def test_train_ddp_learns_what_one_process_does(tmp_path):
    """It compares itself with one process."""
    env = {"HPCDIST_STAGING": str(tmp_path)}
    job = mpirun(2, "-m", "hpcdist.examples.train_ddp", "--epochs", "2", cwd=tmp_path, env=env)
    wanted = """\
    2 ranks, backend mpi: each has 12 samples of a step
    epoch 0: loss 0.2074
    epoch 1: loss 0.0737
    one process learns the same weights
    """
    assert (job.status, job.out) == (0, dedent(wanted)), job
    assert not list(tmp_path.iterdir()), "a file is left"


def test_a_training_goes_on_after_a_kill_on_another_number_of_ranks(tmp_path):
    """From the last complete save, which may be one before the save that was under way."""
    killed = mpirun(3, "-m", "hpcdist.examples.train_fsdp", "--die-after", "7", cwd=tmp_path)
    assert killed.status != 0
    assert killed.out.startswith("3 ranks, from step 0\n")
    assert not (tmp_path / "weights.safetensors").exists()
    job = finished(2, "-m", "hpcdist.examples.train_fsdp", cwd=tmp_path)
    assert re.fullmatch(
        r"2 ranks, from step [36]\nweights.safetensors: one process has learnt the same weights\n", job.out
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.h5", "weights.safetensors"]


@pytest.mark.parametrize("np", [1, 2, 3, 4])
def test_contrastive_has_the_gradients_of_one_process(np):
    """It compares each step's with one process'."""
    job = finished(np, "-m", "hpcdist.examples.contrastive", "--steps", "2")
    lines = ["step 0: loss 2.8205, the gradients of one process", "step 1: loss 2.6707, the gradients of one process"]
    assert job.out.splitlines() == lines
