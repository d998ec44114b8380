"""gather, concat and split on every route against plain indexing of one whole tensor; test_property.py draws more."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import DTYPES, EXTENTS, STRIDES, Index, copy_of, extents_of, part, same_bits, strides_for, whole_of
from collective import Battery, assert_on_all_ranks, goes_on, raises_on_all_ranks
from mpi4py import MPI

import hpcdist as hd

ROUTES = ("mpi", "gloo")
SHAPES = [(1,), (1, 3), (2, 1, 3), (2, 3, 1, 2)]  # the extent along dim is put in


def _shapes(extent):
    """The shape of a whole tensor of 1 to 4 dims, and each dim; in turns counted from the front and from the back."""
    turns = 0
    for shape in SHAPES:
        for dim in range(len(shape)):
            turns += 1
            yield (*shape[:dim], extent, *shape[dim + 1 :]), dim if turns % 2 else dim - len(shape)


@pytest.mark.parametrize("case", EXTENTS)
@pytest.mark.parametrize("route", [*ROUTES, "hdf5"])
def test_every_shape_dim_and_root(world, size, route, case):
    """1-d to 4-d, each dim from the front and the back, each root; the dtypes and their strides take turns."""
    extents = extents_of(case, size)
    battery, dtypes = Battery(world, route=route), itertools.cycle(DTYPES)
    for _ in range(3 * list(EXTENTS).index(case)):
        next(dtypes)
    for turn, (shape, dim) in enumerate(list(_shapes(sum(extents)))[:: 3 if route == "hdf5" else 1]):
        for root in range(size):
            dtype = next(dtypes)
            ways = list(strides_for(dtype))
            whole = STRIDES[ways[(turn * size + root) % len(ways)]](whole_of(shape, dtype, salt=turn))
            battery.run(whole, dim, extents, root)
    battery.findings.settle()


def test_integers_of_other_libraries(findings, rank, size, last):
    """dim, root and counts; of tensors and structures."""
    extents = extents_of("ragged", size)
    whole = whole_of((2, sum(extents)), torch.int32)
    x = part(whole, 1, extents, rank)
    for dim, root in ((np.int32(1), np.int64(last)), (Index(-1), Index(last))):
        for got in (hd.gather(x, dim, root), (hd.gather({"x": x}, dim, root) or {"x": None})["x"]):
            findings.check(got is None if rank != last else same_bits(got, whole), got)
        mine = hd.split(whole if rank == last else None, dim, root, np.array(extents))
        findings.same(mine, x, "split")


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
def test_split_where_every_rank_has_the_whole(world, x, options, told):
    """Nothing is communicated, neither by a call that only rank 0 makes, nor by one that is wrong."""
    if world.rank == 0:
        assert hd.split(torch.arange(world.world_size), root=None).tolist() == [0]
        with pytest.raises(ValueError, match=told):
            hd.split(x, root=None, **options)


# --- x and out that overlap ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", ["ragged", "all on one rank"])
def test_x_is_the_part_of_out_where_it_belongs(findings, rank, size, route, case):
    """In place, as MPI_IN_PLACE would do it; whatever the order of out's strides."""
    extents = extents_of(case, size)
    for (shape, dim), name in zip(_shapes(sum(extents)), itertools.cycle(("contiguous", "transposed", "stepped"))):
        whole = whole_of(shape, torch.float32)
        mine = part(whole, dim, extents, rank)
        for root in range(size):
            for verb in ("concat", "gather"):
                out = STRIDES[name](whole_of(shape, torch.float32, salt=5))
                x = part(out, dim, extents, rank)
                x.copy_(mine)
                if verb == "concat":
                    findings.same(hd.concat(x, dim, out=out, route=route), whole, f"concat {shape} dim {dim}")
                else:
                    got = hd.gather(x, dim, root, out=out if rank == root else None, route=route)
                    findings.check(rank != root or same_bits(got, whole), f"gather {shape} dim {dim}")
            held = STRIDES[name](copy_of(whole)) if rank == root else None
            into = None if held is None else part(held, dim, extents, rank)
            findings.same(hd.split(held, dim, root, extents, out=into, route=route), mine, f"split {shape} dim {dim}")
            findings.check(held is None or same_bits(held, whole), "x changed, though out lies where the part is")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("view", [lambda x: x, lambda x: torch.from_numpy(x.numpy())], ids=["torch", "numpy"])
def test_x_is_another_part_of_out(findings, rank, size, route, view):
    """It is overwritten while the result arrives, but what arrives are its old values. Numpy's view of a tensor becomes
    a storage of its own over the same memory."""
    rows = 5000
    whole, extents = whole_of((size * rows,), torch.float32), (rows,) * size
    mine = part(whole, 0, extents, rank)
    for turn in range(size):
        elsewhere = (rank + turn) % size
        out = torch.from_numpy(np.zeros(size * rows, dtype=np.float32))
        x = view(part(out, 0, extents, elsewhere))
        x.copy_(mine)
        findings.same(hd.concat(x, out=out, route=route), whole, f"concat, shard at {elsewhere}")
        x.copy_(mine)
        result = hd.gather(x, root=turn, out=out if rank == turn else None, route=route)
        findings.check(rank != turn or same_bits(result, whole), f"gather, shard at {elsewhere}")
        held = copy_of(whole) if rank == turn else None
        into = None if held is None else view(part(held, 0, extents, (turn + 1) % size))
        findings.same(hd.split(held, root=turn, out=into, route=route), mine, "split into another part of x")


# --- groups ----------------------------------------------------------------------------------------------------------


def _run_in(world, route, group, rank, size):
    """What each rank of a group must get; a rank outside, which has rank -1, only hears the verdict."""
    battery = Battery(world, rank, route=route, group=group)
    for turn, case in enumerate(EXTENTS if rank >= 0 else ()):
        # The first call leaves ranks without data: what is set up when it is first used must not wait for them.
        extents = extents_of(case if turn else "all on one rank", size)
        battery.run(whole_of((sum(extents), 2), torch.int32, salt=turn), 0, extents, turn % size)
        battery.run(whole_of((2, sum(extents)), torch.bfloat16, salt=turn), 1, extents, (turn + 1) % size)
    battery.findings.check(True, "ranks outside have nothing to check")
    battery.findings.settle()


@pytest.mark.parametrize("route", ROUTES)
def test_the_ranks_of_a_communicator(world, rank, route):
    """Even and odd ranks at once; all in reverse, in the order of which the results are; one rank alone."""
    comms = [world.comm.Split(rank % 2, rank), world.comm.Split(0, -rank)]
    for comm in (*comms, MPI.COMM_SELF):
        _run_in(world, route, comm, comm.rank, comm.size)
    for comm in comms:
        comm.Free()


@pytest.mark.parametrize("route", ROUTES)
def test_the_ranks_of_a_torch_group(world, rank, size, route):
    """The last ranks, then the first ones; every rank makes both groups, as torch demands."""
    for ranks in (list(range(size // 2, size)), list(range(size // 2 + 1))):
        group = dist.new_group(ranks)
        _run_in(world, route, group, ranks.index(rank) if rank in ranks else -1, len(ranks))


def test_groups_of_the_whole_world(world):
    for group in (None, MPI.COMM_WORLD, world.comm, dist.group.WORLD, world.group):
        _run_in(world, "auto", group, world.rank, world.world_size)


@pytest.mark.parametrize("group", [5, "world", [0, 1], object()], ids=str)
def test_what_is_no_group(world, group):
    x = torch.zeros(2)
    for verb in (hd.gather, hd.concat, hd.split):
        error = raises_on_all_ranks(TypeError, lambda verb=verb: verb(x, group=group), same_text=False)
        told = "group must be a torch ProcessGroup, a 1-d DeviceMesh or an mpi4py"
        assert_on_all_ranks(told in str(error), error)
    goes_on()


def test_a_rank_outside_the_group(findings, world, rank):
    """COMM_NULL and torch's counterpart: told on that rank alone; the others can go on without it."""
    x, inside = torch.zeros(2), rank == 0
    comm, group = world.comm.Split(0 if inside else MPI.UNDEFINED), dist.new_group([0])
    for passed in (comm, MPI.COMM_SELF if inside else MPI.COMM_NULL, group):
        try:
            result = hd.concat(x, group=passed)
        except ValueError as error:
            result = str(error)
        right = torch.equal(result, x) if inside else f"rank {rank} of the world is not in" in str(result)
        findings.check(right, result)
