"""torchmetrics: states of different lengths on the ranks, as the metric of all samples on one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from collective import Findings
from torch import Tensor
from torchmetrics import classification, regression
from training import check_close

import hpcdist as hd

pytestmark = pytest.mark.mpi

CLASSES = 3


def _samples(rank: int, empty: int | None = None) -> tuple[Tensor, Tensor]:
    """Logits and classes; each rank has another number of samples, rank `empty` none."""
    draw = torch.Generator().manual_seed(rank)
    count = 0 if rank == empty else 5 + 4 * rank
    return torch.randn(count, CLASSES, generator=draw, dtype=torch.float64), torch.randint(
        CLASSES, (count,), generator=draw
    )


METRICS: dict[str, tuple[Callable[..., torchmetrics.Metric], Callable[[Tensor, Tensor], tuple[Tensor, ...]]]] = {
    "accuracy": (partial(classification.MulticlassAccuracy, CLASSES), lambda x, y: (x, y)),
    "area under the curve": (partial(classification.MulticlassAUROC, CLASSES), lambda x, y: (x.softmax(1), y)),
    "rank correlation": (regression.SpearmanCorrCoef, lambda x, y: (x[:, 0], x[:, 1])),
    "values": (torchmetrics.CatMetric, lambda x, y: (x[:, 0],)),
}
# torchmetrics has nothing but a row of floating point for a list that is empty: no logits and no classes.
NEVER_EMPTY = ("area under the curve",)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")  # of a rank without samples
@pytest.mark.parametrize("name", METRICS)
def test_a_metric_of_all_ranks(world: hd.World, name: str) -> None:
    """Sums, lists that are concatenated in rank order, and lists that are empty on a rank."""
    make, arguments = METRICS[name]
    findings = Findings(world.comm)
    metric, alone = (make(sync_on_compute=sync).set_dtype(torch.float64) for sync in (True, False))
    for rank in range(world.world_size):
        x, y = _samples(rank, None if name in NEVER_EMPTY else 1)
        for part in range(2):  # two updates
            if len(x):
                alone.update(*arguments(x[part::2], y[part::2]))
                if rank == world.rank:
                    metric.update(*arguments(x[part::2], y[part::2]))
    check_close(findings, [metric.compute()], [alone.compute()], name)
    findings.settle()


def test_a_group_of_some_ranks(world: hd.World) -> None:
    """process_group= leaves the others out."""
    findings, ranks = Findings(world.comm), [world.world_size - 1, 0][: world.world_size]
    group = dist.new_group(ranks)
    metric = torchmetrics.CatMetric(process_group=group)
    metric.update(torch.arange(world.rank + 1.0) + 10 * world.rank)
    if world.rank in ranks:
        expected = torch.cat([torch.arange(rank + 1.0) + 10 * rank for rank in sorted(set(ranks))])
        check_close(findings, [metric.compute().view(-1).sort().values], [expected], "values")
    findings.checked += 1
    findings.settle()
