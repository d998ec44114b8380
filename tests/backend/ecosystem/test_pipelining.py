"""torch.distributed.pipelining: stages on different ranks, whose schedules send and receive, as on one process."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn import functional
from training import check_close

pytestmark = [pytest.mark.mpi(min_size=2)]

WIDTH, MICRO = 4, 6  # micro-batches of two rows each
DEVICE = torch.device("cpu")


def _layers(count):
    """One layer a stage."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
        return nn.Sequential(*layers).double()


def _data():
    draw = torch.Generator().manual_seed(8)
    x, y = (torch.randn(2 * MICRO, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2))
    return x, y


def _alone(stages):
    model, (x, y) = _layers(stages), _data()
    losses, outputs = [], []
    for part, target in zip(x.chunk(MICRO), y.chunk(MICRO), strict=True):
        outputs.append(model(part))
        losses.append(functional.mse_loss(outputs[-1], target))
        (losses[-1] / MICRO).backward()
    return model, [loss.detach() for loss in losses], torch.cat(outputs).detach()


def _check(findings, schedule, mine, got, stages):
    """A step of the schedule: the first rank gives the input, the last one the targets."""
    alone, losses, output = _alone(stages)
    x, y = _data()
    first, last = 0 in mine, stages - 1 in mine
    found = []
    result = schedule.step(*([x] if first else []), **({"target": y, "losses": found} if last else {}))
    if last:
        check_close(findings, found, losses, "losses")
        check_close(findings, [result.detach()], [output], "output")
    for stage in mine:
        gradients = [p.grad for p in alone[stage].parameters()]
        check_close(findings, [p.grad for p in got[stage].parameters()], gradients, f"gradients of stage {stage}")


@pytest.mark.parametrize(
    ("schedule", "each"),
    [(ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2), (ScheduleInterleavedZeroBubble, 2)],
)
def test_stages_on_each_rank(findings, world, size, schedule, each):
    """Stage s is on rank s modulo the number of ranks: the last rank sends to the first."""
    count = each * size
    model, mine = _layers(count), range(world.rank, count, size)
    stages = [PipelineStage(model[s], s, count, DEVICE) for s in mine]
    step = schedule(stages if each > 1 else stages[0], MICRO, loss_fn=functional.mse_loss)
    _check(findings, step, mine, model, count)
