"""torch.distributed's own primitives after hd.init(): every one, on backends mpi and nccl, blocking and not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import whole_of
from collective import Findings
from torch import Tensor

pytestmark = pytest.mark.mpi

SHAPES = [(5,), (2, 3), (0,)]  # of a block
DTYPES = [torch.float32, torch.float64, torch.int64, torch.bfloat16]
_UNTOUCHED = 77

# torch 2.13 gave two of them a new name and deprecates the old one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# How the operands of all ranks are folded along dim 0.
OPERATIONS = {
    "SUM": lambda x: x.sum(0),
    "AVG": lambda x: (x.sum(0) / x.shape[0]).to(x.dtype),
    "MIN": lambda x: x.amin(0),
    "MAX": lambda x: x.amax(0),
    "PRODUCT": lambda x: x.prod(0),
}


def operands(operation, size, shape, dtype):
    """What `size` ranks reduce, by rank: each place has a result of its own, for which the value of each rank counts.

    All are exact in bfloat16, with its 8 bits: sum and avg are whole numbers below 256, products are powers of two.
    The ranks take turns in having the smallest and the largest value.
    """
    count = int(torch.Size(shape).numel())
    place = torch.arange(count).repeat(size, 1)
    turn = (place + torch.arange(size)[:, None]) % size
    values = 2 ** torch.where(turn == 0, place, 1) if operation == "PRODUCT" else place + 2 * turn
    return values.to(dtype).view(size, *shape)


class Turn:
    """One call: what this rank has, the room for what it gets, and the whole, of which every rank knows all.

    whole[r] is what rank r has, one block for each rank; a primitive that takes one block takes the first.
    """

    def __init__(self, world, backend, later, kind, root, op):
        self.rank, self.size, self.root = world.rank, world.world_size, root
        self.backend, self.later, self.op = backend, later, op
        self.dtype, shape = kind
        blocks = (self.size, *shape)
        every = operands(op, self.size, blocks, self.dtype) if op else whole_of((self.size, *blocks), self.dtype)
        self.whole = every
        device = world.device if backend == "nccl" else torch.device("cpu")
        self.mine = every[self.rank].to(device, copy=True)
        self.room = torch.full_like(self.mine, _UNTOUCHED)
        self.block, self.out = self.mine[0], self.room[0]
        self.context = f"{backend} {self.dtype} {shape} root {root} {op} {'async' if later else 'blocking'}"

        self.reduction = getattr(dist.ReduceOp, op or "SUM")

    def folded(self, block):
        return OPERATIONS[self.op](self.whole[:, block])

    def at_root(self, x):
        return x if self.rank == self.root else None


def _ring(t):
    """To the next rank, from the one before. Every second rank receives first: a send may wait for its recv."""
    give, take = (dist.isend, dist.irecv) if t.later else (dist.send, dist.recv)
    steps = [
        lambda: give(t.block, (t.rank + 1) % t.size),
        lambda: take(t.out, (t.rank - 1) % t.size),
    ]
    return [step() for step in (steps[::-1] if t.rank % 2 else steps)]


Row = tuple[Callable[[Turn], Any], str, Callable[[Turn], Tensor | None]]
ROOTED = {  # the call; where its result is (block: in place); the oracle, None where a rank gets nothing
    "broadcast": (lambda t: dist.broadcast(t.block, t.root, async_op=t.later), "block", lambda t: t.whole[t.root, 0]),
    "scatter": (
        lambda t: dist.scatter(t.out, t.at_root([*t.mine]), t.root, async_op=t.later),
        "out",
        lambda t: t.whole[t.root, t.rank],
    ),
    "gather": (
        lambda t: dist.gather(t.block, t.at_root([*t.room]), t.root, async_op=t.later),
        "room",
        lambda t: t.at_root(t.whole[:, 0]),
    ),
    "reduce": (
        lambda t: dist.reduce(t.block, t.root, t.reduction, async_op=t.later),
        "block",
        lambda t: t.at_root(t.folded(0)),
    ),
}
PRIMITIVES = ROOTED | {
    "all_gather": (
        lambda t: dist.all_gather([*t.room], t.block, async_op=t.later), "room", lambda t: t.whole[:, 0]
    ),
    "all_gather_single": (
        lambda t: _all_gather_single(t.room.flatten(0, 1), t.block, async_op=t.later), "room", lambda t: t.whole[:, 0]
    ),
    "all_reduce": (
        lambda t: dist.all_reduce(t.block, t.reduction, async_op=t.later), "block", lambda t: t.folded(0)
    ),
    "reduce_scatter": (
        lambda t: dist.reduce_scatter(t.out, [*t.mine], t.reduction, async_op=t.later),
        "out",
        lambda t: t.folded(t.rank),
    ),
    "reduce_scatter_single": (
        lambda t: _reduce_scatter_single(t.out, t.mine.flatten(0, 1), t.reduction, async_op=t.later),
        "out",
        lambda t: t.folded(t.rank),
    ),
    "send and recv": (_ring, "out", lambda t: t.whole[(t.rank - 1) % t.size, 0]),  # or isend and irecv
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*unbatched P2P")
@pytest.mark.parametrize("later", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("backend", ["mpi", pytest.param("nccl", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", PRIMITIVES)
def test_every_primitive(name, backend, later, world):
    findings = Findings(world.comm)
    for dtype in DTYPES:
        turns = [
            Turn(world, backend, later, (dtype, shape), root, op)
            for shape in SHAPES
            for root in (range(world.world_size) if name in ROOTED else [0])
            for op in (OPERATIONS if "reduce" in name else [""])
        ]
        # All are under way before the first is waited for, unless they block.
        started = [(turn, _start(PRIMITIVES[name], turn)) for turn in turns]
        for turn, outcome in started:
            _check(findings, name, turn, _finish(outcome, later))
    findings.settle()


def _start(row, turn):
    try:
        return row[0](turn)
    except (RuntimeError, ValueError) as error:
        return error


def _finish(outcome, later):
    """Wait for what has been started; the error, or what is wrong with the handles."""
    if isinstance(outcome, Exception):
        return outcome
    handles = [item for item in (outcome if isinstance(outcome, list) else [outcome]) if isinstance(item, dist.Work)]
    try:
        for handle in handles:
            handle.wait()
    except (RuntimeError, ValueError) as error:
        return error
    return None if bool(handles) == later else f"async_op={later} gave {outcome!r}"


def _check(findings, name, turn, wrong):
    (_, place, oracle), context = PRIMITIVES[name], f"{name} {turn.context}"
    if name == "send and recv" and turn.size == 1 and not (turn.later and turn.backend == "mpi"):
        findings.check(isinstance(wrong, Exception), f"{context}: torch refuses to send to the rank itself")
        return
    findings.check(wrong is None, f"{context}: {wrong!r}")
    expected, got = oracle(turn), getattr(turn, place).cpu()
    if expected is not None and turn.backend == "nccl" and turn.op == "AVG" and turn.dtype.is_floating_point:
        # NCCL multiplies by 1/size before it adds, and rounds each time; two places differ by more than that.
        near = torch.allclose(got, expected, rtol=(turn.size + 1) * torch.finfo(turn.dtype).eps / 4)
        findings.check(near and got.dtype == expected.dtype, f"{context}: {got}, expected about {expected}")
    elif expected is not None:
        findings.same(got, expected, context)
    kept = 1 if place == "block" else 0
    findings.same(turn.mine[kept:].cpu(), turn.whole[turn.rank, kept:], f"{context}: the input was changed")
