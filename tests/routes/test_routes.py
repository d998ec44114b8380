"""Each route's five operations on messages of bytes, as large as they come and cut into small pieces."""

import errno
import itertools
import os
from pathlib import Path

import pytest
import torch
from cases import EXTENTS, extents_of, starts, whole_of
from collective import assert_on_all_ranks, change_settings, refused, several_ranks
from nccl_rules import STAND_IN

import hpcdist as hd
from hpcdist.comm import team as teams
from hpcdist.comm.tuning import ALGORITHMS, Rule
from hpcdist.formats import paths, plain
from hpcdist.layout import limits as sizes
from hpcdist.routes import c10d, hdf5_files, mpi, select
from hpcdist.routes.route import Alltoall, Vector
from hpcdist.runtime.world import context, team_of
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.validation import collective

PIECE = 7  # bytes: divides no message of the tests evenly


def by(algorithm, route=mpi.Mpi):
    """A route by one algorithm, or by sends and receives in operations that do not have it."""

    class By(route):
        def rule(self, team, operation, total, largest):
            known = algorithm in ALGORITHMS[self.table + operation]
            return Rule(0, 0, algorithm if known else "sends", PIECE)

    return By()


ROUTES = {
    "mpi": mpi.MPI_ROUTE,
    "mpi by ring": by("ring"),
    "mpi by sends": by("sends"),
    "gloo": c10d.GLOO,
    "staged mpi": select.StagedRoute(mpi.MPI_ROUTE),
    "staged gloo": select.StagedRoute(c10d.GLOO),
    "hdf5": hdf5_files.HDF5_ROUTE,
    "the rules of nccl": STAND_IN,
    "nccl padded": by("padded", type(STAND_IN)),
    "nccl by broadcasts": by("broadcasts", type(STAND_IN)),
    "nccl by sends": by("sends", type(STAND_IN)),
}


@pytest.fixture(autouse=True)
def rules():
    """The stand-in for NCCL asserts its rules; its groups are made anew for each test, to see their first use."""
    yield
    for team in context().teams.values():
        STAND_IN.forget(team)


@pytest.fixture(params=[False, True], ids=["whole", "in pieces"])
def limits(request, monkeypatch):
    """The limits that real messages seldom reach, as they are, or lowered below those of the tests."""
    if request.param:
        monkeypatch.setattr(mpi, "LIMIT", 100)
        monkeypatch.setattr(sizes, "PIECE", PIECE)
        monkeypatch.setattr(sizes, "WINDOW", 33)


def _team(world, order):
    """All ranks, in the order of the world or in reverse."""
    return team_of() if order > 0 else team_of(_reversed(world))


_reverse = []


def _reversed(world):
    if not _reverse:
        _reverse.append(world.comm.Split(0, -world.rank))
    return _reverse[0]


def _messages(size):
    """Bytes by rank, and all messages one after the other: below and beyond every lowered limit."""
    for turn, case in enumerate(EXTENTS):
        for row in (1, 5, 40):
            counts = tuple(extent * row for extent in extents_of(case, size))
            yield counts, whole_of((sum(counts),), torch.uint8, salt=turn)


def _part(messages, counts, rank):
    start = starts(counts)[rank]
    return messages[start : start + counts[rank]].clone()


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("order", [1, -1], ids=["in order", "in reverse"])
@pytest.mark.parametrize("name", ROUTES)
class TestRoute:
    """One battery for every route, and for a team whose ranks are not torch's."""

    def test_gatherv_scatterv_and_allgatherv(self, findings, world, name, order):
        team, route = _team(world, order), ROUTES[name]
        for turn, (counts, messages) in enumerate(_messages(team.size)):
            root, at, mine = turn % team.size, starts(counts), _part(messages, counts, team.rank)
            on_root = lambda x: x if team.rank == root else None  # noqa: E731, B023
            send, recv, room = mine.clone(), torch.zeros_like(messages), torch.zeros_like(mine)
            what = Vector(counts, at, root)
            route.prepare(team, "gatherv", what)(send, on_root(recv))
            findings.check(team.rank != root or torch.equal(recv, messages), f"{counts} to {root}")
            route.prepare(team, "scatterv", what)(on_root(recv), room)
            findings.same(room, mine, f"{counts} from {root}")
            recv.zero_()
            route.prepare(team, "allgatherv", what)(send, recv)
            findings.same(recv, messages, f"{counts}")
            findings.same(send, mine, f"send of {counts} to {root}")

    def test_alltoallv(self, findings, world, name, order):
        """Rank i sends rank j table[i][j] bytes; with gaps between the messages, which stay as they were."""
        team = _team(world, order)
        ranks = range(team.size)
        for row, gap in itertools.product((0, 1, 5, 40), (0, 3)):
            table = [[row * ((i * 3 + j * 5) % 4) for j in ranks] for i in ranks]
            sendcounts, recvcounts = table[team.rank], [table[i][team.rank] for i in ranks]
            sdispls = [start + gap * j for j, start in enumerate(starts(tuple(sendcounts)))]
            rdispls = [start + gap * i for i, start in enumerate(starts(tuple(recvcounts)))]
            send = torch.full((sum(sendcounts) + gap * team.size,), 255, dtype=torch.uint8)
            expected = torch.full((sum(recvcounts) + gap * team.size,), 254, dtype=torch.uint8)
            for peer in ranks:
                send[sdispls[peer] :][: sendcounts[peer]] = _letter(team.rank, peer, sendcounts[peer])
                expected[rdispls[peer] :][: recvcounts[peer]] = _letter(peer, team.rank, recvcounts[peer])
            before, recv = send.clone(), torch.full_like(expected, 254)
            longest, total = max(map(max, table)), gap * team.size + row * 3 * team.size
            what = Alltoall(sendcounts, sdispls, recvcounts, rdispls, longest, total)
            ROUTES[name].prepare(team, "alltoallv", what)(send, recv)
            findings.same(recv, expected, f"rows of {row}, gaps of {gap}")
            findings.same(send, before, "send")

    def test_exchange(self, findings, world, name, order):
        """Messages that each have memory of their own; some ranks have none to send, or to receive."""
        team = _team(world, order)
        ranks = range(team.size)
        for row in (0, 1, 5, 40):
            table = [[row * ((i + 2 * j) % 3) if i != j else 0 for j in ranks] for i in ranks]
            sends = [(j, _letter(team.rank, j, n)) for j, n in enumerate(table[team.rank]) if n]
            recvs = [(i, torch.zeros(table[i][team.rank], dtype=torch.uint8)) for i in ranks if table[i][team.rank]]
            ROUTES[name].exchange(team, sends, recvs, max(map(max, table)))
            for source, got in recvs:
                findings.same(got, _letter(source, team.rank, got.numel()), f"rows of {row} from {source}")
            findings.check(all(torch.equal(x, _letter(team.rank, j, x.numel())) for j, x in sends), "send")


def _letter(source, dest, length):
    """The message of `length` bytes from `source` to `dest`."""
    return whole_of((length,), torch.uint8, salt=10 * source + dest)


@pytest.mark.parametrize("most", [64, 0])
def test_staged_stays_within_its_window(findings, world, size, most, monkeypatch):
    """What the inner route is given is never longer than the window, and every round is packed; a byte of each rank
    always fits."""
    monkeypatch.setattr(sizes, "WINDOW", most)
    seen = []

    class Spy:
        name = "spy"

        def prepare(self, team, operation, what):
            def transfer(send, recv):
                seen.append((send.numel(), recv.numel()))
                assert what.displs == starts(tuple(what.counts))
                assert recv.numel() == what.total
                mpi.MPI_ROUTE.prepare(team, operation, what)(send, recv)

            return transfer

    counts = tuple(100 * (rank + 1) for rank in range(size))
    messages = whole_of((sum(counts),), torch.uint8)
    recv, mine, step = torch.zeros_like(messages), _part(messages, counts, world.rank), max(1, most // size)
    what = Vector(counts, starts(counts))
    select.StagedRoute(Spy()).prepare(team_of(), "allgatherv", what)(mine, recv)
    findings.same(recv, messages, "allgatherv")
    findings.check(len(seen) == -(-max(counts) // step), f"{len(seen)} rounds")
    within = all(send <= step and recv <= step * size for send, recv in seen)
    findings.check(within, f"windows exceeded: {seen}")


def test_which_route_is_taken(size):
    """mpi for host memory; gloo is staged on all ranks alike where one has GPU memory."""
    team = team_of()
    host, one_gpu = (MemoryKind.CPU,) * size, (MemoryKind.GPU, *(MemoryKind.CPU,) * (size - 1))
    taken = [select.agreed("gather", name, team, host) for name in ("auto", "gloo")]
    assert_on_all_ranks(taken == [mpi.MPI_ROUTE, c10d.GLOO], taken)
    way = select.agreed("gather", "gloo", team, one_gpu)
    assert_on_all_ranks(isinstance(way, select.StagedRoute) and way.route is c10d.GLOO, way)
    assert ("auto", *select.ROUTES) == teams.ROUTES


def test_nccl_without_a_gpu_for_each_rank(world):
    """Refused everywhere, with what to do instead."""
    if world.settings.own_gpus:
        assert c10d.NCCL.missing(team_of()) is None
        return
    text = "route nccl needs a GPU of its own for each rank and a torch with NCCL; use route mpi or auto"
    refused(text, hd.concat, torch.zeros(2), route="nccl", ranks=range(world.world_size))


def test_repeated_calls_on_the_library_of_gpus(findings, rank, size, monkeypatch):
    """They are kept as those by MPI: one exchange of headers, and one operation, on the caller's stream."""
    monkeypatch.setitem(select.ROUTES, "nccl", (STAND_IN.__module__, "STAND_IN"))
    select.load.cache_clear()
    team, exchanges = team_of(), []
    team.routes.clear(), team.repeats.clear()
    exchange = collective.exchange
    monkeypatch.setattr(collective, "exchange", lambda *args: (exchanges.append(args), exchange(*args))[1])
    x, counts = torch.arange(2 + rank) + 10 * rank, [2 + r for r in range(size)]
    whole = torch.cat([torch.arange(2 + r) + 10 * r for r in range(size)])
    out, square = torch.empty_like(whole), whole_of((size, size), torch.int64)
    rows, row = (hd.Split(0), hd.Split(1)), square[rank : rank + 1]
    plan = hd.plan(hd.concat, x, route="nccl")
    calls = {
        "concat": (lambda: hd.concat(x, route="nccl"), whole),
        "concat, out": (lambda: hd.concat(x, route="nccl", out=out), whole),
        "plan": (lambda: plan(x), whole),
        "plan, out": (lambda: plan(x, out), whole),
        "gather": (lambda: hd.gather(x, route="nccl"), whole if rank == 0 else None),
        "split": (lambda: hd.split(whole if rank == 0 else None, counts=counts, route="nccl"), x),
        "redistribute": (lambda: hd.redistribute(row, *rows, route="nccl"), square[:, rank : rank + 1]),
    }
    for name, (call, expected) in calls.items():
        for turn in range(4):
            if turn == 2:  # the first one is planned, and the second one kept if the first took another way
                group = team.torch_groups.get(STAND_IN.name)
                exchanges.clear()
                before = len(group.calls) if group else 0
            got = call()
            findings.check((got is None) == (expected is None) and (got is None or torch.equal(got, expected)), name)
        findings.check(not exchanges, f"{name}: {len(exchanges)} exchanges")
        if "concat" in name or "plan" in name:
            findings.check(group.calls[before:] == [False, False], f"{name}: {group.calls[before:]}")
    STAND_IN.forget(team)
    team.routes.clear(), team.repeats.clear(), select.load.cache_clear()


def test_the_staging_folder(findings, world, rank, tmp_path, monkeypatch):
    """The files are in it while a call runs, readable by their user alone, and gone afterwards; leftovers are swept."""
    folder = Path(world.comm.bcast(str(tmp_path)))
    change_settings(monkeypatch, world, staging=str(folder))
    if rank == 0:
        (folder / "hpcdist-stage-old.h5").touch()
        os.utime(folder / "hpcdist-stage-old.h5", (0, 0))
    seen = []
    check = hdf5_files.check_visible
    monkeypatch.setattr(
        hdf5_files,
        "check_visible",
        lambda p: (seen.append((os.path.realpath(p.path), os.stat(p.path).st_mode & 0o777)), check(p)),
    )
    whole = hd.concat(torch.full((2,), rank), route="hdf5")
    findings.same(whole, torch.arange(world.world_size).repeat_interleave(2), "concat")
    findings.check(len(seen) == 1 and Path(seen[0][0]).parent == folder and seen[0][1] == 0o600, seen)
    world.comm.Barrier()
    findings.check(os.listdir(folder) == [], os.listdir(folder))


@several_ranks
def test_a_staging_folder_that_cannot_be_used(world, rank, size, tmp_path, monkeypatch):
    """Missing, not shared, full: the same error everywhere, nothing left, and the next call succeeds."""
    folder, x = Path(world.comm.bcast(str(tmp_path))), torch.ones(3)

    def fails(text):
        refused(text, hd.concat, x, route="hdf5")
        assert_on_all_ranks(os.listdir(folder) == [], os.listdir(folder))

    change_settings(monkeypatch, world, staging=str(folder / "none"))
    fails("the staging folder: no such folder")
    change_settings(monkeypatch, world, staging=str(folder))
    if rank == size - 1:
        monkeypatch.setattr(paths, "PATIENCE", 0)
        other = lambda: "another file by that name on this rank"  # noqa: E731
        monkeypatch.setattr(hdf5_files, "check_shared", lambda path, look: paths.check_shared(path, other))
    fails("the folder is not shared by all nodes")
    monkeypatch.undo()
    change_settings(monkeypatch, world, staging=str(folder))
    write = plain.write_at

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(plain, "write_at", full if rank == size - 1 else write)
    fails("No space left on device")
    monkeypatch.setattr(plain, "write_at", write)
    assert_on_all_ranks(len(hd.concat(x, route="hdf5")) == 3 * size)
