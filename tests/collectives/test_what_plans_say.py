"""What a plan says, against what the calls then do: spies on the operations of routes, and the results' memory."""

import pytest
import torch
from collective import assert_on_all_ranks, change_settings

import hpcdist as hd
from hpcdist.collectives.kept import BEHIND_HEADERS
from hpcdist.comm import tuning
from hpcdist.comm.node_memory import Windows
from hpcdist.routes import c10d, hdf5_files, mpi
from hpcdist.routes.select import StagedRoute
from hpcdist.runtime.world import team_of
from hpcdist.tensors import pool

SMALL, LARGE = 4, 40_000  # elements of float32: behind the headers, and above all limits but the pool's
SPIED = [  # what moves data: (class, method, what a plan calls it)
    (mpi.Mpi, "exchange", "MPI sends and receives"),
    (type(c10d.GLOO), "exchange", "sends and receives"),
    (type(hdf5_files.HDF5_ROUTE), "allgatherv_sends", "a file in the staging folder"),
    (type(hdf5_files.HDF5_ROUTE), "exchange", "a file in the staging folder"),
]


@pytest.fixture
def moves(monkeypatch):
    """The operations of routes that have been called, the innermost last."""
    found = []

    def spy(cls, name, told):
        original = getattr(cls, name)

        def spied(*args):
            found.append(told)
            return original(*args)

        monkeypatch.setattr(cls, name, spied)

    for cls, name, told in SPIED:
        spy(cls, name, told)

    for operation, names in tuning.ALGORITHMS.items():
        for algorithm, told in names.items():
            if hasattr(mpi.Mpi, name := f"{operation}_{algorithm}"):
                spy(mpi.Mpi, name, told)
    return found


def _calls(n, world):
    x = torch.arange(n * 3, dtype=torch.float32).view(n, 3) + world.rank
    last = world.world_size - 1
    yield hd.concat, (x,)
    yield hd.concat, (x.t().contiguous(), 1)
    yield hd.gather, (x, 0, last)
    yield hd.split, (x if world.rank == last else None, 0, last)
    yield hd.redistribute, (x, hd.Split(0), hd.Split(1))
    yield hd.redistribute, (x, hd.Split(0), hd.Split(0))
    yield hd.all_to_all, (x,)
    yield hd.reduce_scatter, (x, 1)
    yield hd.reduce, (x, last)
    yield hd.all_reduce, (x,)


def _done(found, verb, args, **options):
    found.clear()
    verb(*args, **options)
    return list(found)


@pytest.mark.parametrize("route", ["auto", "mpi", "gloo", "hdf5"])
@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_it_says_what_the_call_does(findings, world, moves, route, n):
    for verb, args in _calls(n, world):
        moves.clear()
        said = hd.plan(verb, *args, route=route)
        findings.check(not moves, f"{said}\n  but it called {moves}")
        done = _done(moves, verb, args, route=route)
        findings.check(said.verb == verb.__name__, said)
        findings.check(said.route == ("mpi" if route == "auto" else route), said)
        findings.check(f"route='{route}'" in said.reasons[0], said)
        method = said.methods[0]
        findings.check(len(said.methods) == 1 or verb in (hd.reduce, hd.all_reduce), said)
        inline = method == BEHIND_HEADERS.name
        findings.check(inline == (n == SMALL and route in ("auto", "mpi")), said)
        if inline or method.startswith("copies"):
            findings.check(not done, f"{said}\n  but the call did {done}")
        elif world.world_size > 1 or done:
            findings.check(set(said.methods) <= set(done), f"{said}\n  but the call did {done}")
        others = world.comm.allgather((said.route, said.methods, said.reasons))
        findings.check(len(set(others)) == 1, others)


def test_bytes_and_result(findings, rank, size, monkeypatch):
    """Of ragged shards: rank r has r + 1 rows of 12 bytes."""
    x = torch.zeros(rank + 1, 3)
    total = 12 * size * (size + 1) // 2

    def check(said, sent, received, result):
        findings.check((said.sent, said.received, said.result) == (sent, received, result), said)

    mine = 12 * (rank + 1)
    check(hd.plan(hd.concat, x), mine * (size - 1), total - mine, "new")
    check(hd.plan(hd.gather, x), mine if rank else 0, 0 if rank else total - mine, "none" if rank else "new")
    whole = torch.zeros(size, 3) if rank == 0 else None
    check(hd.plan(hd.split, whole), 0 if rank else 12 * (size - 1), 12 if rank else 0, "new")
    check(hd.plan(hd.redistribute, torch.zeros(1, size), hd.Split(0), hd.Split(1)), *[4 * (size - 1)] * 2, "new")
    check(hd.plan(hd.concat, x, out=torch.empty(total // 12, 3)), mine * (size - 1), total - mine, "out")
    counts = [dest + 1 for dest in range(size)]
    y = torch.zeros(sum(counts), 3)
    check(hd.plan(hd.all_to_all, y, counts), total - mine, mine * (size - 1), "new")
    check(hd.plan(hd.reduce_scatter, y, counts=counts), total - mine, mine * (size - 1), "new")
    check(
        hd.plan(hd.reduce, y), total if rank else 0, 0 if rank else total * (size - 1), "new" if rank == 0 else "none"
    )
    check(hd.plan(hd.all_reduce, y), *[total * (size - 1)] * 2, "new")
    block = 4 * LARGE
    blocks = torch.zeros(LARGE * size)
    own, rest = block * (size - 1), block * (size - 1) * (rank == 0)
    check(hd.plan(hd.reduce, blocks), own + block * (rank > 0), own + rest, "none" if rank else "new")
    said = hd.plan(hd.all_reduce, blocks, out=blocks)
    check(said, 2 * own, 2 * own, "out")
    findings.check(said.shape == said.box.shape == (LARGE * size,), said)
    said = hd.plan(hd.reduce_scatter, y, counts=counts)
    findings.check(said.shape == (total // 12, 3), said)
    findings.check(said.box == hd.layout.Box((sum(counts[:rank]), 0), (rank + 1, 3)), said)
    large = torch.zeros(2**18 // size + 1)
    taken = lambda: [hd.memory.memory_stats()[name] for name in ("num_allocations", "num_reuses")]  # noqa: E731
    before = taken()
    said = hd.plan(hd.concat, large)
    findings.check(taken() == before, "planning took memory")
    kept = hd.concat(large)
    findings.check(said.result == ("pool" if taken() != before else "new"), f"{said} {before} {taken()}")
    monkeypatch.setattr(pool, "current", pool.Pool(0))
    findings.check(hd.plan(hd.concat, large).result == "new", "the pool is switched off")
    del kept


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_shared_results(findings, world, n):
    """Which fall back to private memory below a size."""
    team = team_of()
    root = world.world_size - 1
    for verb, args in [
        (hd.concat, (torch.zeros(n, 3), 1)),
        (hd.split, (torch.zeros(n, 3) if world.rank == root else None, 0, root)),
    ]:
        said = hd.plan(verb, *args, shared=True)
        verb(*args, shared=True)
        shared = team.unshared is None
        findings.check(shared == (n == LARGE), team.unshared)
        findings.check(said.result == ("shared" if shared else "new"), said)
        findings.check(("memory that the ranks of a node share" in said.methods) == shared, said)
        text = "shared=True was passed" if shared else str(team.unshared)
        findings.check(any(text in reason for reason in said.reasons), f"{said}, {text}")


def test_no_windows_here(world, monkeypatch):
    monkeypatch.setattr(team_of().windows, "problem", "none today")
    x = torch.zeros(LARGE)
    said = hd.plan(hd.concat, x, shared=True)
    assert_on_all_ranks(said.result == "new" and "none today" in str(said), said)


def test_through_windows_between_nodes(world, size, monkeypatch):
    """Several nodes, and several ranks on one of them, as far as there are so many ranks."""
    taken = []
    take = Windows.take
    monkeypatch.setattr(Windows, "take", lambda self, nbytes: taken.append(nbytes) or take(self, nbytes))
    change_settings(monkeypatch, world, node_of=tuple(rank % 2 for rank in range(size)))
    comm = world.comm.Dup()
    for n in (2**10, 2**18):
        x = torch.zeros(n)
        taken.clear()
        said = hd.plan(hd.concat, x, group=comm)
        assert_on_all_ranks(not taken, taken)
        hd.concat(x, group=comm)
        assert_on_all_ranks(bool(taken) == ("memory that the ranks of a node share" in said.methods), said)
        assert_on_all_ranks(bool(taken) == (size > 2 and n > 2**10), said)
        assert_on_all_ranks(said.route == "mpi" and said.result != "shared", said)
    comm.Free()


def test_mpi_by_sends_and_receives(findings, world, monkeypatch, moves):
    monkeypatch.setattr(mpi, "LIMIT", 1000)
    for verb, args in _calls(LARGE // 8, world):
        if verb is not hd.redistribute:
            said = hd.plan(verb, *args)
            done = _done(moves, verb, args)
            findings.check(
                said.methods == ("MPI sends and receives",) and done[-1:] == list(said.methods), (said, done)
            )
            findings.check("1,000" in str(said), said)


def test_through_pinned_buffers(world, monkeypatch):
    route = StagedRoute(mpi.MPI_ROUTE)
    for operation, name in [("allgatherv", "MPI_Allgatherv"), ("alltoallv", "MPI sends and receives")]:
        method = route.method(team_of(), operation, 1000)
        assert method.name == f"pinned host buffers, {name}"
        assert "cannot access the GPU memory" in method.reason
    assert route.name == "mpi"


def test_wrong_on_this_rank_alone(world):
    x = torch.zeros(2)
    for verb in (torch.cat, "concat", []):
        with pytest.raises(TypeError, match="expected one of gather, concat, split, redistribute"):
            hd.plan(verb, x)
    with pytest.raises(TypeError, match="all_to_all of a list has no plan"):
        hd.plan(hd.all_to_all, [x] * world.world_size)
    with pytest.raises(TypeError, match="dims"):
        hd.plan(hd.concat, x, dims=0)
