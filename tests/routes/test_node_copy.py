"""Results that the ranks of a node share, and messages through windows, on one node and on pretended ones."""

import copy
import io

import pytest
import torch
from cases import DTYPES, EXTENTS, STRIDES, copy_of, extents_of, part, same_bits, strides_for, whole_of
from collective import assert_on_all_ranks, change_settings, refused, windows_of

import hpcdist as hd
from hpcdist.comm import messages, node_memory, tuning
from hpcdist.layout import limits
from hpcdist.routes import node_copy
from hpcdist.runtime.world import team_of

# The extent along dim is put in.
SHAPES = [((1,), 0), ((0, 1), 1), ((1, 3), 0), ((2, 1, 3), 1), ((5, 1), 1), ((2, 3, 1, 2), 2)]
PLACES = {  # the node of each rank
    "one node": lambda size: (0,) * size,
    "round robin": lambda size: tuple(rank % 2 for rank in range(size)),
    "one rank apart": lambda size: tuple(int(rank > 0) for rank in range(size)),
    "the last first": lambda size: tuple(3 if rank < size // 2 else 1 for rank in range(size)),
    "a node a rank": lambda size: tuple(range(size)),
}
LARGE = 40_000  # elements a rank, of float32: above the limits
BY_WINDOW = {"allgatherv": "window"}


@pytest.fixture(params=["large pieces", "small pieces"])
def small(request, monkeypatch):
    """Small messages take the way of large ones; and are cut, where the limits are lowered, too."""
    monkeypatch.setattr(node_copy, "SHARED_LEAST", 0)
    monkeypatch.setattr(tuning, "default", lambda _, __, name: [tuning.Rule(0, 0, BY_WINDOW.get(name, "mpi"))])
    monkeypatch.setattr(node_copy, "MESSAGE", 16)
    if request.param == "small pieces":
        monkeypatch.setattr(limits, "PIECE", 40)
        monkeypatch.setattr(limits, "WINDOW", 128)


@pytest.fixture(params=PLACES)
def comm(request, world, monkeypatch):
    """All ranks, in reverse order, on pretended nodes: each of them has windows of its own."""
    with pytest.MonkeyPatch.context() as patch:
        change_settings(patch, world, node_of=PLACES[request.param](world.world_size))
        found = world.comm.Split(0, -world.rank)
        team_of(found)
        yield found
        found.Free()


def _team(world, group=None):
    return team_of(group)


@pytest.mark.usefixtures("small")
def test_every_result_is_that_of_plain_indexing(findings, world, comm):
    rank, size = comm.rank, comm.size
    turn = 0
    for case in EXTENTS:
        for shape, dim in SHAPES:
            extents = extents_of(case, size)
            turn += 1
            dtype = list(DTYPES)[turn % len(DTYPES)]
            whole = whole_of((*shape[:dim], sum(extents), *shape[dim + 1 :]), dtype, salt=turn)
            strides = list(strides_for(dtype))
            whole = STRIDES[strides[turn % len(strides)]](whole)
            expected, root = copy_of(whole), turn % size
            shard = part(whole, dim, extents, rank)
            what = f"{dtype} {tuple(whole.shape)} dim {dim} {case}"
            for shared in (True, False):
                options = {"group": comm, "shared": shared}
                findings.same(hd.concat(shard, dim, **options), expected, f"concat {shared} {what}")
                mine = hd.split(whole if rank == root else None, dim, root, extents, **options)
                findings.same(mine, part(expected, dim, extents, rank), f"split {shared} {what}")
                findings.check(not shared or _team(world, comm).unshared is None, _team(world, comm).unshared)
            findings.same(whole, expected, f"input changed: {what}")


@pytest.mark.usefixtures("small")
def test_structures_come_through_the_windows(world, comm):
    shards = whole_of((comm.size, 5000), torch.float64)
    got = hd.concat({"x": shards[comm.rank], "list": [shards[comm.rank]] * (comm.rank % 2)}, group=comm)
    good = same_bits(got["x"], shards.view(-1)) and all(map(same_bits, got["list"], shards[1::2]))
    assert_on_all_ranks(good and len(got["list"]) == comm.size // 2)


def test_each_byte_crosses_a_wire_once(world, comm, monkeypatch):
    """Where ranks share what comes over a wire. Counted where the messages are handed to MPI; shared and private
    results, and all local ranks take part."""
    received, real, team = [], messages.start, _team(world, comm)
    helps, nodes = node_copy.helps(team), team.topology.nodes
    assert_on_all_ranks(helps == (1 < len(nodes) < comm.size), nodes)
    if not helps:
        return

    def spy(comm, sends, recvs):
        received.append(sum(view.nbytes for _, view in recvs))
        return real(comm, sends, recvs)

    monkeypatch.setattr(messages, "start", spy)
    shard = torch.full((4 * LARGE,), float(comm.rank))
    others = (comm.size - len(team.topology.local_ranks)) * shard.nbytes
    for shared in (True, False):
        received.clear()
        hd.concat(shard, group=comm, shared=shared)
        parts = team.topology.comm.allgather(sum(received))
        assert_on_all_ranks(sum(parts) == others and max(parts) <= 1.1 * min(parts), parts)


def _shared(world, value, group=None):
    whole = hd.concat(torch.full((LARGE,), float(world.rank + value)), shared=True, group=group)
    assert _team(world, group).unshared is None, _team(world, group).unshared
    return whole


def _good(world, whole, value):
    expected = torch.arange(value, value + world.world_size, dtype=torch.float32).repeat_interleave(LARGE)
    return torch.equal(whole, expected)


def test_results_are_held_freed_and_their_memory_used_again(findings, world):
    windows = _team(world).windows
    held = [_shared(world, 10 * i) for i in range(4)]
    views = [whole[1:] for whole in held]
    for i, whole in enumerate(held):
        findings.check(_good(world, whole, 10 * i), f"result {i} changed")
    kept, held[:] = held[0], []
    if world.rank == 0:
        del views[:]
    for i in range(6):  # the other ranks still hold what rank 0 does not
        again = _shared(world, 100 + i)
        findings.check(_good(world, again, 100 + i), f"again {i}")
    findings.check(_good(world, kept, 0), "the one that was kept changed")
    views.clear()
    del again, kept
    before = windows.nbytes()
    for i in range(10):
        _shared(world, i)
    findings.check(windows.nbytes() == before, (windows.nbytes(), before))


def test_memory_of_a_node_is_that_of_one_result(world):
    group = world.comm.Dup()
    whole = hd.concat(torch.ones(1_000_003), shared=True, group=group)
    taken = sum(windows_of(group))
    assert_on_all_ranks(whole.nbytes <= taken <= 1.05 * whole.nbytes, (taken, whole.nbytes))
    group.Free()
    assert_on_all_ranks(whole.sum() == 1_000_003 * world.world_size, "held beyond its group")


@pytest.mark.parametrize("kernel", ["open", "closed"])
def test_what_a_rank_writes_in_place_no_other_rank_sees(findings, world, rank, size, kernel, monkeypatch):
    """Nor does it see that itself in a later result; whatever the kernel tells of a process's own pages."""
    if kernel == "closed":
        monkeypatch.setattr(node_memory, "PAGEMAP", "/nowhere")
    for turn in range(3):
        whole = _shared(world, turn)
        address = whole.data_ptr()
        if rank == turn % size:
            whole[7 :: LARGE // 3] = -1
        world.comm.Barrier()
        if rank != turn % size:
            findings.check(_good(world, whole, turn), f"turn {turn}")
        world.comm.Barrier()
        del whole
        world.comm.Barrier()
        whole = _shared(world, 50)
        findings.check(whole.data_ptr() == address, "another window was used")
        findings.check(_good(world, whole, 50), f"turn {turn}: what was written in place came again")
        del whole


def test_the_storage_of_a_result_is_its_own_part(world):
    """torch.save and copy.deepcopy take the whole storage: not the parts of other ranks, nor what was there before."""
    whole = torch.arange(float(world.world_size * LARGE)) if world.rank == 0 else None
    for got in (hd.split(whole, shared=True), hd.concat(torch.ones(LARGE + 12345), shared=True)):
        file = io.BytesIO()
        torch.save(got, file)
        sizes = got.untyped_storage().nbytes(), copy.deepcopy(got).untyped_storage().nbytes()
        good = sizes == (got.nbytes, got.nbytes) and len(file.getbuffer()) < got.nbytes + 4096
        file.seek(0)
        unshared = team_of().unshared
        assert_on_all_ranks(unshared is None and good, (sizes, unshared))
        assert_on_all_ranks(torch.equal(torch.load(file), got))


def test_gradients_and_the_background(world, rank):
    x = torch.full((LARGE,), float(rank), requires_grad=True)
    whole = hd.concat(x, shared=True)
    (whole * 2).sum().backward()
    later = [hd.concat(x.detach() + i, shared=True, async_op=True) for i in range(3)]
    good = [x.grad.eq(2.0 * world.world_size).all(), _good(world, whole.detach(), 0)]
    good += [_good(world, handle.wait(), i) for i, handle in enumerate(later)]
    parts = hd.split(whole.detach() if rank == 0 else None, shared=True, async_op=True).wait()
    good.append(parts.eq(rank).all())
    team = team_of().background
    assert_on_all_ranks(all(good) and team.unshared is None, (good, team.unshared))


def test_wrong_calls_are_refused_on_all_ranks(world, rank, size):
    x = torch.ones(LARGE)
    cases = [
        (lambda: hd.concat(x, shared=True, out=torch.empty(LARGE * size)), "out is given, but shared=True"),
        (lambda: hd.concat(x, shared=True, route="gloo"), "route is 'gloo', but shared=True"),
        (lambda: hd.concat([x], shared=True), "shared=True takes a tensor"),
        (lambda: hd.split({"x": x} if rank == 0 else None, shared=True), "shared=True takes a tensor"),
    ]
    if size > 1:
        cases.append((lambda: hd.concat(x, shared=rank == 0), "shared is "))
    for call, text in cases:
        refused(text, call)
    assert_on_all_ranks(_good(world, _shared(world, 3), 3))
