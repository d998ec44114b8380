"""DistributedDataParallel: its reducer and hooks, as training on one process."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from collective import assert_on_all_ranks, goes_on, several_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from training import check_close, check_same_on_all_ranks, data_of, mlp, mse, shard_of, train

from hpcdist import RankError

SMALL = 2 / 1024  # MiB: several buckets even for a small model


def _alone(data):
    """The model that one process has after training on whole batches."""
    model = mlp()
    train(model, torch.optim.Adam(model.parameters(), 0.01), data)
    return model


def _gradients(model):
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


@pytest.mark.parametrize("view", [False, True], ids=["copied", "views"])
@pytest.mark.parametrize("mib", [SMALL / 8, 25], ids=["several buckets", "one bucket"])
def test_training_equals_that_of_one_process(world, rank, findings, mib, view):
    """Though every rank begins with weights and buffers of its own: rank 0's count."""
    data, own = data_of(world)
    model = mlp(seed=rank)
    model.register_buffer("seen", torch.tensor([rank, 7]))
    ddp = DistributedDataParallel(model, bucket_cap_mb=mib, gradient_as_bucket_view=view)
    findings.same(model.seen, torch.tensor([0, 7]), "a buffer")
    train(ddp, torch.optim.Adam(ddp.parameters(), 0.01), own)
    check_close(findings, model.parameters(), _alone(data).parameters(), "parameters")
    check_same_on_all_ranks(findings, world.comm, list(model.parameters()), "parameters")


FUTURES = {
    "DDP": lambda: _backward(),
    "DDP with a hook": lambda: _backward(default_hooks.allreduce_hook),
    "DDP with a hook that returns its future": lambda: _backward(
        lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    ),
    "future": lambda: dist.all_reduce(torch.ones(4), async_op=True).get_future().wait(),
    "functional": lambda: funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD) + 1,
}


def _backward(hook=None):
    model = DistributedDataParallel(nn.Linear(3, 1), init_sync=False)
    if hook is not None:
        model.register_comm_hook(None, hook)
    model(torch.ones(2, 3)).sum().backward()


@several_ranks
@pytest.mark.parametrize("what", FUTURES)
def test_a_refused_call_is_an_error_for_all_that_read_its_future(what, rank, last):
    """In C++, too, which takes the value of a future for tensors."""
    step = FUTURES[what] if rank == last else lambda: dist.broadcast(torch.ones(1), 0)
    with pytest.raises(RuntimeError) as raised:
        step()
    error = raised.value
    quoted = rank == last and what in ("DDP with a hook", "DDP with a hook that returns its future", "future")
    right = "HD301" in str(error) and isinstance(error, RankError) is not quoted
    assert_on_all_ranks(right, f"{type(error)}: {error}")
    goes_on()


class _Branches(nn.Module):
    """Each rank uses another one of the branches, and nobody the last."""

    def __init__(self, count):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(5, 4, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(4, 3, dtype=torch.float64) for _ in range(count + 1))

    def forward(self, x, branch):
        return self.branches[branch](torch.tanh(self.trunk(x)))


def test_unused_parameters(world, size, findings):
    """The gradient is the mean over all ranks, a parameter that a rank does not use counting as zero; one that no rank
    uses has none."""
    expected = []
    for rank in range(size):
        alone = _Branches(size)
        mse(lambda x: alone(x, rank), shard_of(data_of(world)[0][0], rank, size)).backward()  # noqa: B023
        found = _gradients(alone)
        expected = found if not expected else [a + b for a, b in zip(expected, found, strict=True)]
    ddp = DistributedDataParallel(_Branches(size), find_unused_parameters=True, bucket_cap_mb=SMALL / 8)
    for turn in range(3):
        ddp.zero_grad()
        mse(lambda x: ddp(x, world.rank), data_of(world)[1][0]).backward()
        check_close(findings, _gradients(ddp), [grad / size for grad in expected], f"turn {turn}")
    findings.check(ddp.module.branches[size].weight.grad is None, "a gradient of what nobody uses")


def test_sparse_gradients(world, size, findings):
    """Of an embedding: each rank has rows of its own, and some that others have, too."""

    def table():
        torch.manual_seed(0)
        return nn.Embedding(9, 2, sparse=True, dtype=torch.float64)

    words = torch.arange(3 * size).view(size, 3) * 2 % 9
    alone, ddp = table(), DistributedDataParallel(nn.Sequential(table()))
    for rank in range(size):
        ((alone(words[rank]) ** 2).sum() / size).backward()
    (ddp(words[world.rank]) ** 2).sum().backward()
    got, expected = ddp.module[0].weight.grad, alone.weight.grad
    findings.check(got.is_sparse, f"the gradient is {got.layout}")
    check_close(findings, [got.to_dense()], [expected.to_dense()], "gradient")


def test_a_hook_that_calls_in_its_callbacks(world, findings):
    """PowerSGD reduces one factor, and within the callback of that the other one: as over gloo."""
    found = {}
    for kind, group in (("default", None), ("gloo", dist.new_group(backend="gloo"))):
        ddp = DistributedDataParallel(mlp(), process_group=group)
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        train(ddp, torch.optim.SGD(ddp.parameters(), 0.1), data_of(world, 5)[1])
        found[kind] = [p.detach() for p in ddp.parameters()]
    check_close(findings, found["default"], found["gloo"], "parameters", 1e-9)
    check_same_on_all_ranks(findings, world.comm, found["default"], "parameters")
