"""The ranks of a call: private communicators, the order of ranks, and groups that come and go."""

import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import part, whole_of
from collective import assert_on_all_ranks, goes_on, refused, several_ranks
from mpi4py import MPI
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hpcdist as hd
from hpcdist.routes import mpi
from hpcdist.runtime.world import context, team_of


def test_a_copy_of_a_communicator_has_a_team_of_its_own(world):
    """The team hangs on one communicator: MPI must not copy it to a duplicate that outlives it."""
    comm = world.comm.Split(0, -world.rank)
    first = team_of(comm)
    copy = comm.Dup()
    comm.Free()
    second = team_of(copy)
    alone = world.world_size == 1  # in reverse it is still the world
    assert_on_all_ranks(alone or second is not first, "one team for two communicators")
    x = torch.tensor([copy.rank])
    assert_on_all_ranks(hd.concat(x, group=copy).tolist() == list(range(copy.size)))
    copy.Free()


@pytest.fixture(params=["Dup", "new_group"])
def twins(request, world):
    """Two groups that both have all ranks of the world, in its order."""
    make = world.comm.Dup if request.param == "Dup" else dist.new_group
    groups = [make() for _ in range(2)]
    yield groups
    for group in groups:
        _end(group)


def _in_threads(step, count):
    threads = [threading.Thread(target=step, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"


def test_groups_of_the_same_ranks_are_kept_apart(world, size, findings, twins):
    """What is sent in one arrives in that one, and two threads on two groups do not get each other's data."""
    one, other = twins
    teams = {id(team_of(group)) for group in (None, one, other)}
    findings.check(len(teams) == 3, "a team for two groups")
    after, before = (world.rank + 1) % size, (world.rank - 1) % size
    handles = [hd.isend(f"in {i}", after, group=group) for i, group in enumerate((None, one, other))]
    got = [hd.recv(before, group=group) for group in (other, None, one)]
    findings.check(got == ["in 2", "in 0", "in 1"], got)
    for handle in handles:
        handle.wait(30)
    found = {0: [], 1: []}

    def work(i):
        for turn in range(20):
            found[i].append(hd.concat(torch.tensor([i, world.rank, turn]), group=twins[i]).tolist())

    _in_threads(work, 2)
    for i in range(2):
        expected = [[part for rank in range(size) for part in (i, rank, turn)] for turn in range(20)]
        findings.check(found[i] == expected, f"thread {i} got {found[i][:2]}")


@several_ranks
@pytest.mark.parametrize("kind", ["Split", "new_group"])
def test_a_group_that_not_all_its_ranks_use(findings, world, size, kind):
    """Only the two ranks that send and receive take part, and nobody in what is local: nothing of it is collective."""
    group = world.comm.Split(0, -world.rank) if kind == "Split" else dist.new_group(list(range(size)))
    of_group = (lambda rank: size - 1 - rank) if kind == "Split" else (lambda rank: rank)
    if kind == "Split":
        hd.concat([], group=group)  # send and recv need one collective of a communicator
    if world.rank == 0:
        x = torch.arange(2 * size)
        mine = slice(2 * of_group(0), 2 * of_group(0) + 2)
        findings.same(hd.split(x, root=None, group=group), x[mine], "split")
        findings.same(hd.split(x, root=None, group=group, async_op=True).wait(5), x[mine], "split, async_op")
        findings.same(hd.local(x, hd.Split(0), group=group), x[mine], "local")
        findings.check(hd.balance([1] * size, group=group) == [1] * size, "balance")
        hd.send(torch.arange(50_000), of_group(1), 3, group=group)
    if world.rank == 1:
        got, source = hd.recv(group=group, with_source=True)
        findings.same(got, torch.arange(50_000), "recv")
        findings.check(source == of_group(0), f"from {source}")
    first = hd.isend("before", of_group(1), group=group) if world.rank == 0 else None
    whole = hd.concat(torch.tensor([of_group(world.rank)]), group=group)
    findings.check(whole.tolist() == list(range(size)), f"a collective: {whole}")
    second = hd.isend("after", of_group(1), group=group) if world.rank == 0 else None
    if world.rank == 1:
        got = [hd.recv(of_group(0), group=group) for _ in range(2)]
        findings.check(got == ["before", "after"], got)
    for handle in (first, second):
        if handle is not None:
            handle.wait(30)
    _end(group)


def test_a_communicator_carries_messages_after_a_collective(findings, world, rank):
    """Before that, nothing tells it from another one of the same ranks."""
    comms = [world.comm.Split(0, -rank) for _ in range(2)]
    for comm in comms:
        for step in (lambda comm=comm: hd.isend(1, 0, group=comm), lambda comm=comm: hd.recv(group=comm)):
            with pytest.raises(hd.HpcdistError, match="call a collective on it first"):
                step()
    for comm in comms:
        hd.concat([rank], group=comm)
    handles = [hd.isend(text, comm.rank, group=comm) for comm, text in zip(comms, ("one", "other"), strict=True)]
    findings.check([hd.recv(group=comm) for comm in reversed(comms)] == ["other", "one"], "told apart")
    for handle in handles:
        handle.wait(30)
    for comm in comms:
        comm.Free()


def test_groups_end_in_any_order(world, rank):
    """On different ranks in different ones: no rank waits for another at the end of a group."""
    comms = [world.comm.Dup() for _ in range(4)]
    for comm in comms:
        hd.concat(torch.tensor([rank]), group=comm, route="gloo")
        hd.concat(torch.tensor([rank]), group=comm, async_op=True).wait(30)
    for comm in comms if rank % 2 else reversed(comms):
        comm.Free()
    assert_on_all_ranks(not [group for group in context().teams if group.freed], "a team is left")


def test_destroyed_groups_give_their_communicators_back(rank, size, findings):
    """An MPI has some thousands of them."""
    groups = []
    for turn in range(6):
        group = dist.new_group(list(range(size)))
        result = hd.concat(torch.tensor([rank]), group=group, route="gloo" if turn % 2 else "mpi")
        findings.check(result.tolist() == list(range(size)), result)
        groups.append(group)  # that it is still referred to makes no difference
        dist.destroy_process_group(group)
    kept = [group for group in context().teams if group.ended]
    findings.check(len(kept) <= 1, f"{len(kept)} teams of groups that are gone")
    with pytest.raises(ValueError, match="the group has been destroyed"):
        hd.concat(torch.tensor([rank]), group=groups[0])


def test_communicators_come_and_go(world, rank, findings):
    """MPI reuses the handle of a communicator that was freed; its team must not be taken for the new one's."""
    for turn in range(20):
        sign = -1 if turn % 2 else 1
        comm = world.comm.Split(0, sign * rank)
        result = hd.concat(torch.tensor([rank]), group=comm)
        findings.check(result.tolist() == list(range(world.world_size))[::sign], f"turn {turn}: {result}")
        comm.Free()


@pytest.mark.parametrize("order", [1, -1], ids=["the world", "in reverse"])
def test_messages_never_meet_the_users(world, findings, order, monkeypatch):
    """A receive from anyone with any tag, posted on the user's communicator before the verbs, gets the user's."""
    monkeypatch.setattr(mpi, "LIMIT", 10)  # sends and receives in pieces, which such a receive could take
    comm = world.comm if order == 1 else world.comm.Split(0, -world.rank)
    own = team_of(comm).comm
    findings.check(MPI.Comm.Compare(own, comm) == MPI.CONGRUENT, "the library talks on the user's communicator")
    size, extents = comm.size, (2,) * comm.size
    got = np.zeros(1, dtype=np.int64)
    request = comm.Irecv(got, MPI.ANY_SOURCE, MPI.ANY_TAG)
    whole = whole_of((2 * size, 3), torch.int64)
    mine = part(whole, 0, extents, comm.rank)
    for route in ("mpi", "gloo"):
        findings.same(hd.concat(mine, route=route, group=comm), whole, f"concat {route}")
        findings.same(hd.split(whole if comm.rank == 0 else None, route=route, group=comm), mine, f"split {route}")
    comm.Send(np.array([1000 + comm.rank]), (comm.rank + 1) % size, 7)
    request.Wait()
    findings.check(got[0] == 1000 + (comm.rank - 1) % size, f"received {got}")


def test_gloo_where_ranks_are_in_different_numbers_of_groups(world):
    """The name of a team's torch group must not depend on what other groups a process happens to be in."""
    for last in range(world.world_size):
        dist.new_group(list(range(last + 1)))  # rank 0 is in all of them
        comm = world.comm.Split(0, -world.rank)
        result = hd.concat(torch.tensor([comm.rank]), group=comm, route="gloo")
        assert_on_all_ranks(result.tolist() == list(range(comm.size)), result)


@several_ranks
def test_gloo_beside_groups_that_the_user_makes(world, size, findings):
    """Two threads make groups at once, and wait for other ranks while they do."""
    for turn in range(4):
        comm = world.comm.Dup()
        handle = hd.concat(torch.tensor([turn]), group=comm, route="gloo", async_op=True)
        if world.rank == 0:
            time.sleep(0.05)
        group = dist.new_group(list(range(size)))
        findings.same(handle.wait(20), torch.full((size,), turn), "concat")
        dist.destroy_process_group(group)
        comm.Free()


@several_ranks
def test_gloo_first_used_by_threads_in_different_orders(world, size, findings):
    groups = [dist.new_group(list(range(size))) for _ in range(4)]
    results = {}

    def use(number):
        time.sleep(0.05 * (number if world.rank == 0 else 3 - number))
        results[number] = hd.concat(torch.tensor([number]), group=groups[number], route="gloo")

    _in_threads(use, 4)
    for number in range(4):
        findings.same(results[number], torch.full((size,), number), "concat")


def _end(group):
    if isinstance(group, MPI.Comm):
        group.Free()
    else:
        dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=1)
def test_torch_distributed_that_has_been_ended(world, last, size, findings, monkeypatch):
    """On one rank only: routes that need it are refused on all, and the others go on."""
    with monkeypatch.context() as patch:
        if world.rank == last:
            patch.setattr(dist, "is_initialized", lambda: False)
        refused("[HD207]", hd.concat, torch.ones(1), route="gloo", ranks=[last])
        findings.check(hd.concat(torch.ones(1)).numel() == size, "route auto")
    findings.check(hd.concat(torch.ones(1), route="gloo").numel() == size, "route gloo")


@several_ranks
def test_a_device_mesh_is_a_group(world, size, findings):
    """Of one dimension; one dim of a larger mesh by its name."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("outer", "inner"))
    whole = torch.cat([torch.full((rank,), rank) for rank in range(size)])
    findings.same(hd.concat(torch.full((world.rank,), world.rank), group=mesh["inner"]), whole, "all ranks")
    findings.same(hd.concat(torch.ones(2), group=mesh["outer"]), torch.ones(2), "this rank alone")
    findings.check(hd.balance([1.0] * size, group=mesh["inner"]) == [1] * size, "balance")
    with pytest.raises(ValueError, match=r"group is a DeviceMesh of 2 dims, expected 1: pass mesh\[NAME\]"):
        hd.concat(torch.ones(2), group=mesh)


@several_ranks
def test_a_mesh_without_this_rank_or_without_a_group(rank, size):
    mesh = DeviceMesh("cpu", [size - 1])
    if rank < size - 1:
        with pytest.raises(ValueError, match=f"rank {rank} of the world is not in the mesh that it passed"):
            hd.concat(torch.ones(2), group=mesh)
    else:
        assert hd.concat(torch.ones(2), group=mesh).tolist() == [1, 1]
    goes_on()
    bare = DeviceMesh("cpu", list(range(size)), _init_backend=False)
    with pytest.raises(ValueError, match="group is a DeviceMesh without a process group"):
        hd.concat(torch.ones(2), group=bare)
