"""gather, concat and split on every route against plain indexing of one whole tensor."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import DTYPES, EXTENTS, STRIDES, Index, copy_of, extents_of, part, same_bits, strides_for, whole_of
from collective import Findings, assert_on_all_ranks, raises_on_all_ranks
from mpi4py import MPI
from torch import Tensor

import hpcdist as hd
from hpcdist import layout

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:ComplexHalf")]

ROUTES = ("mpi", "gloo", "auto")
SHAPES = [(1,), (1, 3), (2, 1, 3), (2, 3, 1, 2)]  # the extent along dim is put in
Group = dist.ProcessGroup | MPI.Comm | None


def _shapes(extent: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """The shape of a whole tensor of 1 to 4 dims, and each dim; in turns counted from the front and from the back."""
    turns = 0
    for shape in SHAPES:
        for dim in range(len(shape)):
            turns += 1
            yield (*shape[:dim], extent, *shape[dim + 1 :]), dim if turns % 2 else dim - len(shape)


class Battery:
    """The three verbs on one whole tensor, and what each rank must hold afterwards."""

    def __init__(self, world: hd.World, route: str, group: Group = None, rank: int = -1) -> None:
        self.findings = Findings(world.comm)
        self.options: dict[str, Any] = {"route": route, "group": group}
        self.rank = world.rank if rank < 0 else rank  # in the group
        self.context = ""

    def run(self, whole: Tensor, dim: int, extents: tuple[int, ...], root: int) -> None:
        """`whole` may have any strides: the shards are views of it."""
        self.context = f"{whole.dtype} {tuple(whole.shape)} dim {dim} extents {extents} root {root} {self.options}"
        before = copy_of(whole)
        shard = part(whole, dim, extents, self.rank)
        self.receives(hd.gather(shard, dim, root, **self.options), before, self.rank == root, "gather")
        self.receives(hd.concat(shard, dim, **self.options), before, True, "concat")
        counts = list(extents) if self.rank in (root, 0) else None
        mine = hd.split(whole if self.rank == root else None, dim, root, counts, **self.options)
        self.receives(mine, part(before, dim, extents, self.rank), True, "split")
        self.findings.same(whole, before, f"input changed: {self.context}")

    def receives(self, result: Tensor | None, expected: Tensor, receiver: bool, verb: str) -> None:
        if not receiver:
            self.findings.check(result is None, f"{verb} {self.context}: got a result, expected None")
            return
        self.findings.same(result, expected, f"{verb} {self.context}")
        if isinstance(result, Tensor):
            self.findings.check(result.is_contiguous(), f"{verb} {self.context}: the result is not contiguous")
            self.findings.check(not result.requires_grad, f"{verb} {self.context}: the result has a gradient")

    def settle(self) -> None:
        self.findings.settle()


@pytest.mark.parametrize("case", EXTENTS)
@pytest.mark.parametrize("route", ROUTES)
def test_every_shape_dim_and_root(world: hd.World, route: str, case: str) -> None:
    """1-d to 4-d, each dim from the front and the back, each root; the dtypes take turns."""
    extents = extents_of(case, world.world_size)
    battery = Battery(world, route)
    dtypes = list(DTYPES)
    for turn, (shape, dim) in enumerate(_shapes(sum(extents))):
        for root in range(world.world_size):
            dtype = dtypes[(turn * world.world_size + root) % len(dtypes)]
            battery.run(whole_of(shape, dtype, salt=turn), dim, extents, root)
    battery.settle()


@pytest.mark.parametrize("case", EXTENTS)
@pytest.mark.parametrize("route", ROUTES)
def test_every_dtype(world: hd.World, route: str, case: str) -> None:
    """Bit for bit, also for the dtypes that neither MPI nor gloo knows; the roots take turns."""
    extents = extents_of(case, world.world_size)
    battery = Battery(world, route)
    for turn, dtype in enumerate(DTYPES):
        root = turn % world.world_size
        battery.run(whole_of((sum(extents), 3), dtype, salt=turn), 0, extents, root)
        battery.run(whole_of((3, sum(extents), 2), dtype, salt=turn), 1, extents, root)
    battery.settle()


@pytest.mark.parametrize("route", ROUTES)
def test_every_kind_of_strides(world: hd.World, route: str) -> None:
    """Transposed, stepped, offset, expanded, lazily conjugated and negated: the values travel, not the memory."""
    extents = extents_of("ragged", world.world_size)
    battery = Battery(world, route)
    rows = sum(extents)
    for dtype in (torch.float32, torch.complex64, torch.bool):
        for name in strides_for(dtype):
            for turn, (shape, dim) in enumerate([((rows,), 0), ((rows, 3), 0), ((3, rows), 1), ((2, rows, 3), -2)]):
                whole = STRIDES[name](whole_of(shape, dtype, salt=turn))
                battery.run(whole, dim, extents, turn % world.world_size)
    battery.settle()


@pytest.mark.parametrize("route", ROUTES)
def test_other_extents_of_zero(world: hd.World, route: str) -> None:
    """No element anywhere, though there are rows."""
    extents = extents_of("ragged", world.world_size)
    battery = Battery(world, route)
    for shape, dim in [((0, sum(extents)), 1), ((sum(extents), 0), 0), ((2, sum(extents), 0), 1)]:
        battery.run(whole_of(shape, torch.float32), dim, extents, world.world_size - 1)
    battery.settle()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.uint64], ids=str)
def test_0d_shards_are_stacked(world: hd.World, route: str, dtype: torch.dtype) -> None:
    findings = Findings(world.comm)
    whole = whole_of((world.world_size,), dtype)
    for dim in (0, -1):
        for root in range(world.world_size):
            result = hd.gather(whole[world.rank], dim, root, route=route)
            if world.rank == root:
                findings.same(result, whole, "gather")
            else:
                findings.check(result is None, "gather gave a result")
        findings.same(hd.concat(whole[world.rank].clone(), dim, route=route), whole, "concat")
    findings.settle()


@pytest.mark.parametrize("route", ROUTES)
def test_integers_of_other_libraries(world: hd.World, route: str) -> None:
    """dim, root and counts as NumPy's integers."""
    findings = Findings(world.comm)
    extents = extents_of("ragged", world.world_size)
    whole = whole_of((2, sum(extents)), torch.int32)
    root = np.int64(world.world_size - 1)
    on_root = world.rank == root
    result = hd.gather(part(whole, 1, extents, world.rank), np.int32(1), root, route=route)
    findings.check(not on_root or same_bits(result, whole), "gather")
    mine = hd.split(whole if on_root else None, np.int64(-1), root, np.array(extents), route=route)
    findings.same(mine, part(whole, 1, extents, world.rank), "split")
    findings.settle()


# --- split -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("rule", [None, "block", "chunk"])
def test_split_by_a_rule(world: hd.World, route: str, rule: str | None) -> None:
    findings = Findings(world.comm)
    size = world.world_size
    for extent in (0, 1, size - 1, size, size + 1, 3 * size + 2):
        quotient, rest = divmod(extent, size)
        extents = tuple(quotient + (rank < rest) for rank in range(size))
        if rule == "chunk":
            lengths = [len(piece) for piece in torch.arange(extent).chunk(size)]
            extents = tuple(lengths + [0] * (size - len(lengths)))
        for shape, dim in [((extent,), 0), ((extent, 3), 0), ((2, extent), -1), ((2, extent, 2), 1)]:
            whole = whole_of(shape, torch.float64)
            for root in range(size):
                told = rule if world.rank == root or root % 2 else None  # the others may pass the same, or None
                if told is None and world.rank != root and rule is None and root % 2:
                    told = "block"
                mine = hd.split(whole if world.rank == root else None, dim, root, told, route=route)
                findings.same(mine, part(whole, dim, extents, world.rank), f"{shape} dim {dim} root {root}")
    findings.settle()


@pytest.mark.parametrize("case", EXTENTS)
def test_split_where_every_rank_has_the_whole(world: hd.World, case: str) -> None:
    """root=None: a view of x, and nothing is communicated: only one rank calls it here at a time."""
    findings = Findings(world.comm)
    extents = extents_of(case, world.world_size)
    for shape, dim in _shapes(sum(extents)):
        whole = whole_of(shape, torch.int16)
        expected = part(whole, dim, extents, world.rank)
        mine = hd.split(whole, dim, None, extents)
        findings.same(mine, expected, f"{shape} dim {dim}")
        findings.check(mine.data_ptr() == expected.data_ptr(), "it is a view")
        block = tuple(layout.block(sum(extents), world.world_size))
        findings.same(hd.split(whole, dim, None), part(whole, dim, block, world.rank), "block")
    if world.rank == 0:
        hd.split(torch.zeros(world.world_size), root=None)
    findings.settle()


@pytest.mark.parametrize(
    ("x", "options", "told"),
    [
        (None, {}, "x must be a torch.Tensor"),
        (torch.tensor(1), {}, "0-d"),
        (torch.zeros(3), {"dim": 1}, "dim is 1, expected -1 to 0"),
        (torch.zeros(3), {"counts": [1]}, "counts"),
        (torch.zeros(3), {"counts": "half"}, "counts is not a known rule"),
        (torch.zeros(3), {"out": torch.zeros(1)}, "with root=None each part is a view of x"),
    ],
)
def test_split_where_every_rank_has_the_whole_tells_this_rank(
    world: hd.World, x: Any, options: dict[str, Any], told: str
) -> None:
    caught = ""
    try:
        hd.split(x, root=None, **options)
    except ValueError as error:
        caught = str(error)
    assert_on_all_ranks(world.comm, told in caught, f"expected {told!r} in {caught!r}")


# --- out= ------------------------------------------------------------------------------------------------------------


def _outs(expected: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, out, the memory around it): filled with other values than the result will have."""
    for name in ("contiguous", "transposed", "stepped", "offset"):
        out = STRIDES[name](whole_of(tuple(expected.shape), expected.dtype, salt=99))
        yield name, out, out if out._base is None else out._base


@pytest.mark.parametrize("case", ["ragged", "zero in the middle", "all zero", "all on one rank"])
@pytest.mark.parametrize("route", ROUTES)
def test_out(world: hd.World, route: str, case: str) -> None:
    """The result is `out`, whatever its strides, and nothing besides it is written."""
    findings = Findings(world.comm)
    extents = extents_of(case, world.world_size)
    for turn, (shape, dim) in enumerate(_shapes(sum(extents))):
        root = turn % world.world_size
        whole = whole_of(shape, torch.int32)
        shard = part(whole, dim, extents, world.rank)
        expected = {"gather": whole, "concat": whole, "split": shard}
        for verb, wanted in expected.items():
            for name, out, around in _outs(wanted):
                where = f"{verb} into a {name} out, {shape} dim {dim}"
                untouched = around.clone()
                untouched.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(wanted)
                if verb == "split":
                    x = whole if world.rank == root else None
                    result = hd.split(x, dim, root, extents, out=out, route=route)
                elif verb == "concat":
                    result = hd.concat(shard, dim, out=out, route=route)
                else:
                    result = hd.gather(shard, dim, root, out=out if world.rank == root else None, route=route)
                if verb == "gather" and world.rank != root:
                    findings.check(result is None, where)
                    continue
                findings.check(result is out, f"{where}: the result is not out")
                findings.same(out, wanted, where)
                findings.same(around, untouched, f"{where}: written besides it")
    findings.settle()


@pytest.mark.parametrize("route", ROUTES)
def test_out_on_some_ranks_only(world: hd.World, route: str) -> None:
    findings = Findings(world.comm)
    extents = extents_of("ragged", world.world_size)
    whole = whole_of((sum(extents), 2), torch.float32)
    shard = part(whole, 0, extents, world.rank)
    for chosen in range(world.world_size):
        out = torch.zeros_like(whole) if world.rank == chosen else None
        findings.same(hd.concat(shard, out=out, route=route), whole, f"concat, out on rank {chosen}")
        part_out = torch.zeros_like(shard) if world.rank == chosen else None
        mine = hd.split(whole if world.rank == 0 else None, counts=extents, out=part_out, route=route)
        findings.same(mine, shard, f"split, out on rank {chosen}")
        findings.check(part_out is None or mine is part_out, "out is returned")
    findings.settle()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", ["even", "ragged", "zero first", "all on one rank"])
def test_x_is_the_part_of_out_where_it_belongs(world: hd.World, route: str, case: str) -> None:
    """In place, as MPI_IN_PLACE would do it; whatever the order of out's strides."""
    findings = Findings(world.comm)
    extents = extents_of(case, world.world_size)
    for (shape, dim), name in zip(_shapes(sum(extents)), itertools.cycle(("contiguous", "transposed", "stepped"))):
        whole = whole_of(shape, torch.float32)
        for root in range(world.world_size):
            for verb in ("concat", "gather"):
                out = STRIDES[name](whole_of(shape, torch.float32, salt=5))
                x = part(out, dim, extents, world.rank)
                x.copy_(part(whole, dim, extents, world.rank))
                if verb == "concat":
                    findings.same(hd.concat(x, dim, out=out, route=route), whole, f"concat {shape} dim {dim}")
                elif world.rank == root:
                    findings.same(hd.gather(x, dim, root, out=out, route=route), whole, f"gather {shape} dim {dim}")
                else:
                    hd.gather(x, dim, root, route=route)
            x = STRIDES[name](copy_of(whole)) if world.rank == root else None
            out = None if x is None else part(x, dim, extents, world.rank)
            mine = hd.split(x, dim, root, extents, out=out, route=route)
            findings.same(mine, part(whole, dim, extents, world.rank), f"split {shape} dim {dim}")
            findings.check(x is None or same_bits(x, whole), "x changed, though out lies where the part already is")
    findings.settle()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shared_through", ["torch", "numpy"])
def test_x_is_another_part_of_out(world: hd.World, route: str, shared_through: str) -> None:
    """It is overwritten while the result arrives, but what arrives are its old values."""
    findings = Findings(world.comm)
    size, rows = world.world_size, 5000
    whole = whole_of((size * rows,), torch.float32)
    extents = (rows,) * size
    for turn in range(size):
        elsewhere = (world.rank + turn) % size
        out = torch.from_numpy(np.zeros(size * rows, dtype=np.float32))
        x = part(out, 0, extents, elsewhere)
        if shared_through == "numpy":
            x = torch.from_numpy(x.numpy())  # a storage of its own over the same memory
        x.copy_(part(whole, 0, extents, world.rank))
        findings.same(hd.concat(x, out=out, route=route), whole, f"concat, shard at {elsewhere}")
        x.copy_(part(whole, 0, extents, world.rank))
        result = hd.gather(x, root=turn, out=out if world.rank == turn else None, route=route)
        findings.check(world.rank != turn or same_bits(result, whole), f"gather, shard at {elsewhere}")
        x = copy_of(whole) if world.rank == turn else None
        into = None if x is None else part(x, 0, extents, (turn + 1) % size)
        if into is not None and shared_through == "numpy":
            into = torch.from_numpy(into.numpy())
        mine = hd.split(x, root=turn, out=into, route=route)
        findings.same(mine, part(whole, 0, extents, world.rank), "split into another part of x")
    findings.settle()


# --- ownership -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", ["even", "ragged", "all on one rank"])
def test_results_own_their_memory(world: hd.World, route: str, case: str) -> None:
    """Writing a result changes neither x nor another result, and writing x does not change a result."""
    findings = Findings(world.comm)
    extents = extents_of(case, world.world_size)
    for dim, shape in enumerate([(sum(extents), 3), (3, sum(extents))]):
        whole = whole_of(shape, torch.int64)
        shard = part(whole, dim, extents, world.rank).clone()
        expected = shard.clone()
        for verb in ("gather", "concat", "split"):
            x = whole.clone() if verb == "split" else shard.clone()
            before = x.clone()
            results: list[Tensor] = []
            for _ in range(3):
                if verb == "split":
                    result = hd.split(x if world.rank == 0 else None, dim, 0, extents, route=route)
                else:
                    result = hd.gather(x, dim, route=route) if verb == "gather" else hd.concat(x, dim, route=route)
                results += [] if result is None else [result]
            wanted = expected if verb == "split" else whole
            if results:
                results[0].fill_(-1)
                findings.same(x, before, f"{verb}: x after writing the result")
                x.fill_(-2)
                findings.same(results[1], wanted, f"{verb}: after writing x and another result")
                findings.check((results[0] == -1).all(), f"{verb}: a result shares memory with x")
                results[1].fill_(-3)
                findings.same(results[2], wanted, f"{verb}: after writing another result")
                reach = results[2].untyped_storage().nbytes()
                findings.check(reach == results[2].nbytes, f"{verb}: the result holds {reach} bytes alive")
            else:
                findings.check(verb == "gather" and world.rank != 0, "no result")
    findings.settle()


@pytest.mark.parametrize("route", ROUTES)
def test_a_result_keeps_its_values(world: hd.World, route: str) -> None:
    """Through many later calls of every verb."""
    findings = Findings(world.comm)
    extents = extents_of("ragged", world.world_size)
    held: list[tuple[Tensor, Tensor]] = []
    for turn in range(40):
        whole = whole_of((2, sum(extents)), torch.float32, salt=turn)
        shard = part(whole, 1, extents, world.rank)
        held.append((hd.concat(shard, 1, route=route), whole))
        on_root = hd.gather(shard, 1, turn % world.world_size, route=route)
        held += [] if on_root is None else [(on_root, whole)]
        held.append((hd.split(whole if world.rank == 0 else None, 1, 0, extents, route=route), shard))
    for turn, (result, expected) in enumerate(held):
        findings.same(result, expected, f"result {turn}")
    findings.settle()


# --- groups ----------------------------------------------------------------------------------------------------------


def _run_in(world: hd.World, route: str, group: Group, rank: int, size: int) -> Battery:
    battery = Battery(world, route, group, rank)
    for turn, case in enumerate(EXTENTS):
        extents = extents_of(case, size)
        battery.run(whole_of((sum(extents), 2), torch.int32, salt=turn), 0, extents, turn % size)
        battery.run(whole_of((2, sum(extents)), torch.bfloat16, salt=turn), 1, extents, (turn + 1) % size)
    return battery


@pytest.mark.parametrize("route", ROUTES)
def test_the_ranks_of_a_communicator(world: hd.World, route: str) -> None:
    """Even and odd ranks at once, each in a communicator of their own."""
    comm = world.comm.Split(world.rank % 2, world.rank)
    _run_in(world, route, comm, comm.rank, comm.size).settle()
    comm.Free()


@pytest.mark.parametrize("route", ROUTES)
def test_the_ranks_of_a_communicator_in_reverse(world: hd.World, route: str) -> None:
    """The order of the result is that of the communicator that was passed, not that of the world."""
    comm = world.comm.Split(0, -world.rank)
    _run_in(world, route, comm, comm.rank, comm.size).settle()
    comm.Free()


@pytest.mark.parametrize("route", ROUTES)
def test_one_rank_alone(world: hd.World, route: str) -> None:
    _run_in(world, route, MPI.COMM_SELF, 0, 1).settle()


@pytest.mark.parametrize("route", ROUTES)
def test_the_first_call_of_a_group_may_leave_ranks_without_data(world: hd.World, route: str) -> None:
    """A route that sets something up when it is first used must not wait for a rank that has nothing to move."""
    findings = Findings(world.comm)
    for verb in ("gather", "concat", "split"):
        comm = world.comm.Split(0, -world.rank)
        extents = extents_of("all on one rank", comm.size)
        whole = whole_of((sum(extents), 2), torch.float32)
        shard = part(whole, 0, extents, comm.rank)
        if verb == "gather":
            result = hd.gather(shard, route=route, group=comm)
            findings.check(comm.rank > 0 or same_bits(result, whole), verb)
        elif verb == "concat":
            findings.same(hd.concat(shard, route=route, group=comm), whole, verb)
        else:
            x = whole if comm.rank == 0 else None
            findings.same(hd.split(x, counts=extents, route=route, group=comm), shard, verb)
    findings.settle()


@pytest.mark.parametrize("route", ROUTES)
def test_the_ranks_of_a_torch_group(world: hd.World, route: str) -> None:
    """The last ranks, then the first ones; every rank makes both groups, as torch demands."""
    size = world.world_size
    for ranks in (list(range(size // 2, size)), list(range(size // 2 + 1))):
        group = dist.new_group(ranks)
        battery = Battery(world, route)
        if world.rank in ranks:
            battery = _run_in(world, route, group, ranks.index(world.rank), len(ranks))
        battery.findings.check(True, "ranks outside have nothing to check")
        battery.settle()


def test_groups_of_the_whole_world(world: hd.World) -> None:
    for group in (None, MPI.COMM_WORLD, world.comm, dist.group.WORLD, world.group):
        _run_in(world, "auto", group, world.rank, world.world_size).settle()


@pytest.mark.parametrize("route", ROUTES)
def test_two_groups_in_turns(world: hd.World, route: str) -> None:
    """Overlapping groups, whose calls alternate, do not meet each other's messages."""
    findings = Findings(world.comm)
    size = world.world_size
    half = world.comm.Split(world.rank % 2, world.rank)
    backwards = world.comm.Split(0, -world.rank)
    everyone = dist.new_group(list(range(size)))
    for turn in range(10):
        for group, rank, parts in ((half, half.rank, half.size), (backwards, backwards.rank, size)):
            extents = extents_of("ragged", parts)
            whole = whole_of((sum(extents),), torch.int64, salt=turn + 100 * (group is half))
            findings.same(hd.concat(part(whole, 0, extents, rank), group=group, route=route), whole, f"turn {turn}")
        whole = whole_of((size,), torch.int64, salt=turn)
        shard = part(whole, 0, (1,) * size, world.rank)
        findings.same(hd.concat(shard, group=everyone, route=route), whole, f"turn {turn}, torch group")
    half.Free()
    backwards.Free()
    findings.settle()


@pytest.mark.parametrize("group", [5, "world", [0, 1], object()], ids=str)
def test_what_is_no_group(world: hd.World, group: Any) -> None:
    x = torch.zeros(2)
    for step in (
        lambda: hd.gather(x, group=group),
        lambda: hd.concat(x, group=group),
        lambda: hd.split(x, group=group),
    ):
        error = raises_on_all_ranks(world.comm, TypeError, step, same_text=False)
        assert_on_all_ranks(
            world.comm,
            "group must be a torch ProcessGroup, a 1-d DeviceMesh or an mpi4py" in str(error),
            error,
        )
    assert_on_all_ranks(world.comm, hd.concat(x).shape == (2 * world.world_size,), "the next call")


def test_a_rank_outside_the_group(world: hd.World) -> None:
    """COMM_NULL and torch's counterpart: told on that rank alone; the others can go on without it."""
    x = torch.zeros(2)
    inside = world.rank == 0
    comm = world.comm.Split(0 if inside else MPI.UNDEFINED)
    group = dist.new_group([0])
    findings = Findings(world.comm)
    for passed in (comm, MPI.COMM_NULL if not inside else MPI.COMM_SELF, group):
        try:
            result: object = hd.concat(x, group=passed)
        except ValueError as error:
            result = str(error)
        if inside:
            findings.same(result, x, "inside")
        else:
            findings.check(f"rank {world.rank} of the world is not in" in str(result), f"outside: {result}")
    findings.settle()


# --- at random -------------------------------------------------------------------------------------------------------


def _random_shape(draw: random.Random) -> tuple[list[int], int]:
    shape = [draw.randrange(1, 5) for _ in range(draw.randrange(1, 5))]
    return shape, draw.randrange(-len(shape), len(shape))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_at_random(world: hd.World, seed: int) -> None:
    """The same draws on every rank: verb, shape, dtype, dim, root, route, extents, strides and out."""
    draw = random.Random(seed)
    size = world.world_size
    findings = Findings(world.comm)
    for turn in range(60):
        shape, dim = _random_shape(draw)
        extents = tuple(draw.choice((0, 0, 1, 2, 3, 17, 100)) for _ in range(size))
        shape[dim] = sum(extents)
        dtype = draw.choice(list(DTYPES))
        name = draw.choice(list(strides_for(dtype)))
        verb, root, route = draw.choice(("gather", "concat", "split")), draw.randrange(size), draw.choice(ROUTES)
        whole = STRIDES[name](whole_of(tuple(shape), dtype, salt=turn))
        shard = part(whole, dim, extents, world.rank)
        wanted = shard if verb == "split" else whole
        out = draw.choice((None, "contiguous", "transposed", "stepped"))
        memory = None if out is None else STRIDES[out](whole_of(tuple(wanted.shape), dtype, salt=turn + 1))
        if verb == "split":
            x = whole if world.rank == root else None
            result = hd.split(x, dim, root, extents, out=memory, route=route)
        elif verb == "concat":
            result = hd.concat(shard, dim, out=memory, route=route)
        else:
            result = hd.gather(shard, dim, root, out=memory if world.rank == root else None, route=route)
        context = (
            f"seed {seed} turn {turn}: {verb} {dtype} {shape} dim {dim} {extents} root {root} {route} {name} {out}"
        )
        if verb == "gather" and world.rank != root:
            findings.check(result is None, context)
        else:
            findings.same(result, wanted, context)
    findings.settle()


@pytest.mark.parametrize("case", EXTENTS)
def test_by_way_of_a_file(case: str, world: hd.World) -> None:
    """Route hdf5: strided, of every dtype, along every dim, to and from every root."""
    findings = Findings(world.comm)
    extents = extents_of(case, world.world_size)
    for turn, (dtype, dim) in enumerate(itertools.product((torch.bfloat16, torch.complex128, torch.bool), (0, 1))):
        root = turn % world.world_size
        shape = (sum(extents), 3) if dim == 0 else (3, sum(extents))
        whole = whole_of(shape, dtype)
        mine = part(whole, dim, extents, world.rank)
        x = STRIDES["transposed"](mine)
        findings.same(hd.concat(x, dim, route="hdf5"), whole, f"concat {dtype} {dim}")
        got = hd.gather(x, dim, root, route="hdf5")
        findings.check((got is None) == (world.rank != root), "gather: who gets it")
        findings.check(got is None or same_bits(got, whole), f"gather {dtype} {dim}")
        sent = whole if world.rank == root else None
        findings.same(hd.split(sent, dim, root, extents, route="hdf5"), mine, f"split {dtype} {dim}")
    findings.settle()


def test_root_as_another_kind_of_integer(world: hd.World) -> None:
    findings, last = Findings(world.comm), world.world_size - 1
    x, root = torch.tensor([world.rank]), Index(last)
    whole = torch.arange(world.world_size)
    for got in (hd.gather(x, root=root), hd.gather({"x": x}, root=root)):  # type: ignore[arg-type]
        held = got["x"] if isinstance(got, dict) else got
        findings.check((held is None) == (world.rank != last), "who receives")
        if held is not None:
            findings.same(held, whole, "gathered")
    findings.same(hd.split(whole if world.rank == last else None, root=root), x, "split")  # type: ignore[arg-type]
    findings.settle()
