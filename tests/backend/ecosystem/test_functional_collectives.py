"""Functional collectives, eager and compiled."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from training import check_close

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


def _blocks(rank, size):
    """A rank's tensor of one row for each rank, of 2 columns for each rank."""
    return torch.arange(2.0 * size * size, dtype=torch.float64).view(size, 2 * size) + 100 * rank


def _rows(source, dest):
    """How many rows `source` sends to `dest`: some none."""
    return (source + 2 * dest) % 3


def test_eager_and_compiled(rank, size, findings):
    """Compiled, in one graph with what comes before and after. For other values and groups, see tests/backend."""
    group, blocks = dist.group.WORLD, [_blocks(r, size) for r in range(size)]
    torch._dynamo.reset()
    sent, received = [_rows(rank, r) for r in range(size)], [_rows(r, rank) for r in range(size)]
    ragged = torch.arange(float(sum(sent))) + 100 * rank

    def step(x):
        y = funcol.all_reduce(x + 1, "sum", group)
        z = funcol.all_gather_tensor(x, 0, group)
        most = x.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)  # which the compiler makes a functional one of
        back = funcol.reduce_scatter_tensor(x, "avg", 1, group)
        both = funcol.reduce_scatter_tensor_coalesced([x, 2 * x], "sum", [0, 0], group)
        uneven = funcol.all_to_all_single(ragged, received, sent, group)
        return [y * 2, z, most, back, *both, uneven, funcol.broadcast(x, size - 1, group) + 0]

    total, starts = sum(blocks[1:], blocks[0]), [sum(_rows(r, dest) for dest in range(rank)) for r in range(size)]
    wanted = [2 * (total + size), torch.cat(blocks), blocks[-1], (total / size)[:, 2 * rank : 2 * rank + 2]]
    wanted += [total[rank : rank + 1], 2 * total[rank : rank + 1]]
    wanted += [torch.cat([torch.arange(float(_rows(r, rank))) + starts[r] + 100 * r for r in range(size)]), blocks[-1]]
    for call in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        check_close(findings, [y + 0 for y in call(blocks[rank])], wanted, f"{call}")
