"""The example programs print what one process would find."""

import re
from textwrap import dedent

import pytest
import torch
from launch import commands, mpirun
from torch import nn

import hpcdist as hd
from hpcdist.examples.column_parallel import ROWS, ColumnParallelLinear

pytestmark = pytest.mark.once


def test_one_rank_has_nobody_to_send_to():
    job = mpirun(0, "-m", "hpcdist.examples.primitives")
    assert job.status == 0, job.err
    assert "send, recv          | [1]                           | -\n" in job.out


# By the number of ranks: the module, and what rank 0 prints. Some compare themselves with one process, and fail if they
# differ.
WORKED = {
    3: {
        "sequences": """\
        texts and tokens of each rank: [2, 3, 2], [10, 7, 12]
        text-0: [0, 1, -1, 3, 4, -1, 6]
        text-1: [100]
        text-2: [200, 201]
        text-3: [300, 301, -1]
        text-4: [400, 401]
        text-5: [500, 501, -1, 503, 504, -1]
        text-6: [600, 601, -1]
        accuracy 0.621, loss 0.0379 a token
        """,
        "column_parallel": """\
        output: (5, 10) (5, 10) (5, 10), as on one process
        input's gradient: (5, 4) (5, 4) (5, 4), as on one process
        weight's gradient: (4, 4) (3, 4) (3, 4), as on one process
        bias's gradient: (4,) (3,) (3,), as on one process
        """,
    },
    4: {
        "embeddings": """\
        by rows: rank 0 [0:3, 0:6], rank 1 [3:6, 0:6], rank 2 [6:8, 0:6], rank 3 [8:10, 0:6]
        by columns: rank 0 [0:10, 0:2], rank 1 [0:10, 2:4], rank 2 [0:10, 4:5], rank 3 [0:10, 5:6]
        by tiles: rank 0 [0:5, 0:3], rank 1 [0:5, 3:6], rank 2 [5:10, 0:3], rank 3 [5:10, 3:6]
        columns to tiles, bytes received: 20 of 60, 40 of 60, 60 of 60, 40 of 60
        words [7, 0, 9, 4, 4]: by rows, columns and tiles the same as in the whole table
        """,
    },
    2: {
        "train_ddp --epochs 2": """\
        2 ranks, backend mpi: each has 12 samples of a step
        epoch 0: loss 0.2074
        epoch 1: loss 0.0737
        one process learns the same weights
        """,
    },
}


@pytest.mark.once  # they rest on what other tests run under every MPI
@pytest.mark.parametrize("np", WORKED)
def test_worked_examples(np, tmp_path):
    lines = [f"hpcdist.examples.{name}".split() for name in WORKED[np]]
    for job, output in zip(
        commands(np, *lines, cwd=tmp_path, env={"HPCDIST_STAGING": str(tmp_path)}), WORKED[np].values(), strict=True
    ):
        assert (job.status, job.out) == (0, dedent(output)), job
    assert not list(tmp_path.iterdir()), "a file is left"


@pytest.mark.mpi
def test_the_column_parallel_layer_can_follow_itself(findings):
    """And trains with loss.backward(), as any module: which factor comes in where shows only behind another layer."""
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(4, 5).double(), nn.Tanh(), nn.Linear(5, 7).double())
    parts = nn.Sequential(ColumnParallelLinear(whole[0]), nn.Tanh(), ColumnParallelLinear(whole[2]))
    x = torch.randn(3, 4).double()
    for model in (whole, parts):
        model(x).square().sum().backward()
    for got, want in zip(parts.parameters(), whole.parameters(), strict=True):
        findings.check(torch.allclose(got.grad, hd.local(want.grad, ROWS), rtol=1e-12, atol=1e-12), got.grad)


def test_a_training_goes_on_after_a_kill_on_another_number_of_ranks(tmp_path):
    """From the last complete save, which may be one before the save that was under way."""
    killed = mpirun(3, "-m", "hpcdist.examples.train_fsdp", "--die-after", "7", cwd=tmp_path)
    assert killed.status != 0
    assert killed.out.startswith("3 ranks, from step 0\n")
    assert not (tmp_path / "weights.safetensors").exists()
    job = mpirun(2, "-m", "hpcdist.examples.train_fsdp", cwd=tmp_path)
    assert job.status == 0, job.err
    assert re.fullmatch(
        r"2 ranks, from step [36]\nweights.safetensors: one process has learnt the same weights\n", job.out
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.h5", "weights.safetensors"]
