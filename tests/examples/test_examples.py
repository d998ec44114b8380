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


def test_train_digits_has_one_curve_on_every_number_of_ranks(tmp_path):
    """To 1e-9 of float64; also if it stops in the middle of an epoch and goes on, on another number of ranks."""
    example = "-m", "hpcdist.examples.train_digits", "."
    whole = [_losses(finished(np, *example, cwd=tmp_path)) for np in (1, 2, 3)]
    stopped = _losses(finished(3, *example, "--stop-after", "40", cwd=tmp_path))
    assert len(stopped) == 1
    for losses in (*whole[1:], stopped + _losses(finished(2, *example, cwd=tmp_path))):
        assert losses == pytest.approx(whole[0], rel=1e-9)
    assert len(whole[0]) == 3 and whole[0][2] < whole[0][0] / 4


def test_train_digits_names_the_package_that_it_needs(tmp_path):
    code = """
        import sys
        sys.modules["sklearn"] = None
        sys.argv[1:] = ["."]
        from hpcdist.examples import train_digits
        train_digits.main()
    """
    job = mpirun(2, code=code, cwd=tmp_path)
    assert job.status == 1 and "train_digits needs scikit-learn: pip install scikit-learn" in job.err, job
    assert "Traceback" not in job.err


def _losses(job):
    """The losses that it has printed."""
    return [float(loss) for loss in re.findall(r"^epoch \d+: loss (\S+)$", job.out, re.MULTILINE)]
