"""The operations of backend "mpi", against plain computation; of tensors that share memory: see test_overlaps.py."""

from functools import partial, reduce

import pytest
import torch
import torch.distributed as dist
from cases import copy_of, same_bits, whole_of
from collective import all_gather_single, assert_on_all_ranks, reduce_scatter_single, several_ranks

import hpcdist as hd
from hpcdist.backend import collectives
from hpcdist.layout import limits

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*unbatched P2P")

EVERY_DTYPE = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
]
OPS = {
    "SUM": lambda x: x.sum(0),
    "AVG": lambda x: x.sum(0) / x.shape[0],
    "PRODUCT": lambda x: x.prod(0),
    "MIN": lambda x: x.amin(0),
    "MAX": lambda x: x.amax(0),
    **{op: partial(reduce, getattr(torch, f"bitwise_{op[1:].lower()}")) for op in ("BAND", "BOR", "BXOR")},
}


@pytest.fixture(params=["whole", "in pieces"], autouse=True)
def sizes(request, monkeypatch):
    """Everything twice: as it is, and with limits so low that small tensors go the way of large ones."""
    if request.param == "in pieces":
        monkeypatch.setattr(limits, "PIECE", 64)
        for name, limit in {"SMALL": 0, "PACKED": 0, "LEAST": 0, "SLOT": 128, "PIPELINED": 0, "SLICE": 8}.items():
            monkeypatch.setattr(collectives, name, limit)


@pytest.fixture(params=[False, True], ids=["blocking", "async"])
def run(request):
    """Makes a call, and waits for it."""
    return lambda call, *args: call(*args, async_op=True).wait() if request.param else call(*args)


def values(size, shape, dtype):
    """What each of `size` ranks has: small whole numbers, exact in every dtype, that depend on rank and place."""
    count = torch.Size(shape).numel()
    found = (torch.arange(count)[None] * 3 + torch.arange(size)[:, None] * 5) % 4 + 1
    return (found % 2 if dtype == torch.bool else found).to(dtype).view(size, *shape)


def strided(x):
    """The same values, every second element of larger memory."""
    room = torch.zeros(*x.shape, 2, dtype=x.dtype)
    room[..., 0] = x
    return room[..., 0]


@pytest.mark.parametrize("name", OPS)
def test_every_reduction_of_every_dtype(name, rank, size, findings, run):
    op, fold = getattr(dist.ReduceOp, name), OPS[name]
    for dtype in EVERY_DTYPE:
        if dtype.is_complex or dtype in (torch.float8_e4m3fn, torch.uint16, torch.bool):
            continue
        if name.startswith("B") and dtype.is_floating_point:
            with pytest.raises(ValueError, match="non-integral dtype"):
                dist.all_reduce(torch.ones(2, dtype=dtype), op)
            continue
        for shape in [(), (0,), (3,), (40, 7)]:
            every = values(size, (size, *shape), dtype)  # of each rank, a block for each rank
            wide = every if not dtype.is_floating_point else every.double()
            expected = fold(wide).to(dtype)
            for x in (every[rank].clone(), strided(every[rank])):
                run(dist.all_reduce, x, op)
                findings.same(x.clone(), expected, f"{name} {dtype} {shape}")
            for root in range(size):
                x = every[rank].clone()
                run(dist.reduce, x, root, op)
                findings.check(rank != root or same_bits(x, expected), f"reduce {name} {dtype} {shape} to {root}")
            outs = every[rank, 0].clone(), every[rank, 0].clone()
            run(dist.reduce_scatter, outs[0], [*every[rank]], op)
            run(reduce_scatter_single, outs[1], every[rank], op)
            for x in outs:
                findings.same(x, expected[rank], f"reduce_scatter {name} {dtype} {shape}")


def test_sums_of_narrow_floats_are_added_up_in_float32(world, findings):
    for dtype, most in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        x = torch.full((50,), most if world.rank == 0 else 1.0, dtype=dtype)
        dist.all_reduce(x)
        # Added one after the other in `dtype`, each 1 would be lost.
        expected = torch.full((50,), most + world.world_size - 1).to(dtype)
        findings.same(x, expected, dtype)


def test_booleans_and_premul_sum(world, size, findings):
    only = torch.tensor([world.rank == 0, True, False])
    for op, expected in (
        ("SUM", True),
        ("MAX", True),
        ("PRODUCT", size == 1),
        ("MIN", size == 1),
    ):
        x = only.clone()
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        findings.same(x, torch.tensor([expected, True, False]), op)
    x = torch.arange(5.0) + world.rank
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    findings.same(x, 0.5 * sum(torch.arange(5.0) + rank for rank in range(size)), "premul_sum")


def test_all_ranks_get_the_same_bits(world, rank, findings):
    """Of sums that depend on the order, and of what has several representations: zeros and NaN."""
    torch.manual_seed(rank)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for count in (1, 7, 1000):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
                x = torch.randn(count).to(dtype)
                x[0] = (float("nan"), 0.0, -0.0)[rank % 3]
                dist.all_reduce(x, op)
                bits = x.view(torch.uint8).numpy().tobytes()
                findings.check(len(set(world.comm.allgather(bits))) == 1, f"{op} {dtype} {count}")


def test_moves_of_every_dtype_uneven_and_strided(rank, size, findings, run):
    sizes = [3 * i % 5 for i in range(size)]
    for dtype in EVERY_DTYPE:
        wholes = [whole_of((sizes[i], 3), dtype, i) for i in range(size)]
        outs = [torch.zeros_like(whole) for whole in wholes]
        run(dist.all_gather, outs, copy_of(wholes[rank]))
        for i, out in enumerate(outs):
            findings.same(out, wholes[i], f"all_gather {dtype} from {i}")
        root = size - 1
        outs = [torch.zeros_like(whole) for whole in wholes]
        run(dist.gather, copy_of(wholes[rank]), outs if rank == root else None, root)
        for i, out in enumerate(outs if rank == root else []):
            findings.same(out, wholes[i], f"gather {dtype} from {i}")
        out = torch.zeros_like(wholes[rank])
        run(dist.scatter, out, [copy_of(whole) for whole in wholes] if rank == root else None, root)
        findings.same(out, wholes[rank], f"scatter {dtype}")
        x = whole_of((4, 3), dtype, rank).t()
        run(dist.broadcast, x, root)
        findings.same(x.contiguous(), whole_of((4, 3), dtype, root).t().contiguous(), f"broadcast {dtype}")
        x = whole_of((2, 3), dtype, rank)
        out = torch.zeros(2 * size, 3, dtype=dtype)
        run(all_gather_single, out, x)
        expected = torch.cat([whole_of((2, 3), dtype, i).view(torch.uint8) for i in range(size)])
        findings.same(out.view(torch.uint8), expected, f"all_gather_single {dtype}")


def test_all_to_all_uneven(rank, size, findings):

    def part(source, dest):
        return whole_of(((source + 2 * dest) % 3, 2), torch.float32, 10 * source + dest)

    outs = [torch.zeros_like(part(i, rank)) for i in range(size)]
    dist.all_to_all(outs, [part(rank, i) for i in range(size)])
    for i, out in enumerate(outs):
        findings.same(out, part(i, rank), f"all_to_all from {i}")
    expected = torch.cat([part(i, rank) for i in range(size)])
    out = torch.zeros_like(expected)
    splits = [len(part(i, rank)) for i in range(size)], [len(part(rank, i)) for i in range(size)]
    dist.all_to_all_single(out, torch.cat([part(rank, i) for i in range(size)]), *splits)
    findings.same(out, expected, "all_to_all_single with splits")
    x = torch.arange(2.0 * size).view(size, 2) + 100 * rank
    out = torch.zeros_like(x)
    dist.all_to_all_single(out, x)
    findings.same(out, torch.stack([torch.arange(2.0) + 2 * rank + 100 * i for i in range(size)]), "equal parts")


def test_reduce_scatter_uneven_and_coalesced(rank, size, findings):
    sizes = [1 + 2 * i % 3 for i in range(size)]
    every = [[torch.arange(float(n)) + 10 * source + dest for dest, n in enumerate(sizes)] for source in range(size)]
    expected = sum(every[source][rank] for source in range(size))
    out = torch.zeros(sizes[rank])
    dist.reduce_scatter(out, [x.clone() for x in every[rank]])
    findings.same(out, expected, "reduce_scatter")
    xs = [torch.full((n,), float(rank + n)) for n in (1, 4)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    for n, x in zip((1, 4), xs, strict=True):
        findings.same(x, torch.full((n,), float(sum(i + n for i in range(size)))), "all_reduce coalesced")


@several_ranks
def test_messages(rank, size, findings):
    after, before = (rank + 1) % size, (rank - 1) % size
    out, x = torch.zeros(40, 2).t(), whole_of((2, 40), torch.float32, rank)
    ops = [dist.P2POp(dist.irecv, out, before), dist.P2POp(dist.isend, x, after)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    findings.same(out.contiguous(), whole_of((2, 40), torch.float32, before), "batch_isend_irecv")
    works = [dist.isend(torch.full((3,), float(10 * rank + tag)), after, tag=tag) for tag in (1, 2)]
    second, first = torch.zeros(3), torch.zeros(3)
    dist.recv(second, before, tag=2)
    dist.recv(first, before, tag=1)
    for work in works:
        work.wait()
    findings.same(second, torch.full((3,), 10.0 * before + 2), "tag 2")
    findings.same(first, torch.full((3,), 10.0 * before + 1), "tag 1")
    if rank == 0:
        found = {}
        for _ in range(size - 1):
            x = torch.zeros(50)
            found[dist.recv(x)] = x
        findings.check(sorted(found) == list(range(1, size)), f"senders {sorted(found)}")
        for source, x in found.items():
            findings.same(x, torch.full((50,), float(source)), "from any rank")
    else:
        dist.send(torch.full((50,), float(rank)), 0)


@several_ranks
def test_a_message_of_another_size_is_an_error(rank):
    if rank == 1:
        dist.send(torch.ones(3), 0)
    elif rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 1 has sent 12 bytes, where the tensor has 20"):
            dist.recv(torch.zeros(5), 1)


@several_ranks
def test_a_message_that_is_too_long_is_an_error_of_its_own_receive(rank):
    if rank == 0:
        dist.send(torch.ones(5), 1)
        dist.send(torch.ones(1), 1, tag=1)
        dist.recv(torch.zeros(1), 1)
    elif rank == 1:
        work = dist.irecv(torch.zeros(3), 0)
        dist.recv(torch.zeros(1), 0, tag=1)  # the long message has arrived as well
        dist.send(torch.ones(1), 0)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"of 12 bytes.*HD301"):
                work.wait()


def test_groups(rank, size, findings):
    for ranks in ([size - 1], list(range(size))[::-1], list(range(0, size, 2))):
        group = dist.new_group(ranks)
        if rank in ranks:
            x = torch.tensor([rank + 1])
            dist.all_reduce(x, group=group)
            findings.same(x, torch.tensor([sum(i + 1 for i in ranks)]), f"group {ranks}")
            dist.broadcast(x.fill_(rank), ranks[0], group=group)
            findings.same(x, torch.tensor([ranks[0]]), f"root of group {ranks}")
            findings.check(hd.concat(torch.tensor([rank]), group=group).tolist() == sorted(ranks), "verb in that group")
            dist.destroy_process_group(group)


def test_broadcasts_that_follow_each_other(world):
    """The ranks use the same memory for each: a root that is early must not write what another rank still reads."""
    wrong = []
    for turn in range(60):
        root, numel = turn % world.world_size, turn * 7 % 50
        whole = torch.arange(numel) + 1000 * turn
        x = whole.clone() if world.rank == root else torch.zeros(numel, dtype=torch.int64)
        dist.broadcast(x, root)
        if not torch.equal(x, whole):
            wrong.append(turn)
    assert_on_all_ranks(not wrong, f"wrong in turns {wrong}")
