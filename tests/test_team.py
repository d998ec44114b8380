"""The ranks of a call: private communicators, the order of ranks, and groups that come and go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import part, whole_of
from collective import Findings, assert_on_all_ranks
from mpi4py import MPI

import hpcdist as hd
from hpcdist.routes import mpi
from hpcdist.team import team_of

pytestmark = pytest.mark.mpi


def test_the_world_is_one_team(world: hd.World) -> None:
    """Whatever it is called: no second communicator is made for it."""
    findings = Findings(world.comm)
    for group in (None, world.comm, MPI.COMM_WORLD, world.comm.Dup(), world.group, dist.group.WORLD):
        findings.check(team_of(group, world) is world.team, f"{group!r}")
    findings.settle()


def test_a_group_keeps_its_team(world: hd.World) -> None:
    comm, group = world.comm.Split(0, -world.rank), dist.new_group([0])
    findings = Findings(world.comm)
    findings.check(team_of(comm, world) is team_of(comm, world), "communicator")
    if world.rank == 0:
        findings.check(team_of(group, world) is team_of(group, world), "torch group")
    findings.settle()


def test_ranks_in_the_order_of_the_communicator(world: hd.World) -> None:
    size = world.world_size
    team = team_of(world.comm.Split(0, -world.rank), world)
    findings = Findings(world.comm)
    findings.check(team.rank == size - 1 - world.rank, f"rank {team.rank}")
    findings.check(team.size == size, f"size {team.size}")
    findings.check(team.peers == list(reversed(range(size))), f"peers {team.peers}")
    findings.check(world.team.peers == list(range(size)), f"peers of the world {world.team.peers}")
    findings.settle()


def test_a_copy_of_a_communicator_has_a_team_of_its_own(world: hd.World) -> None:
    """The team hangs on one communicator: MPI must not copy it to a duplicate that outlives it."""
    comm = world.comm.Split(0, -world.rank)
    first = team_of(comm, world)
    copy = comm.Dup()
    comm.Free()
    second = team_of(copy, world)
    alone = world.world_size == 1  # in reverse it is still the world
    assert_on_all_ranks(world.comm, alone or second is not first, "one team for two communicators")
    x = torch.tensor([copy.rank])
    assert_on_all_ranks(world.comm, hd.concat(x, group=copy).tolist() == list(range(copy.size)))
    copy.Free()


def test_communicators_come_and_go(world: hd.World) -> None:
    """MPI reuses the handle of a communicator that was freed; its team must not be taken for the new one's."""
    findings = Findings(world.comm)
    for turn in range(20):
        sign = -1 if turn % 2 else 1
        comm = world.comm.Split(0, sign * world.rank)
        result = hd.concat(torch.tensor([world.rank]), group=comm)
        findings.check(result.tolist() == list(range(world.world_size))[::sign], f"turn {turn}: {result}")
        comm.Free()
    findings.settle()


@pytest.mark.parametrize("order", [1, -1], ids=["the world", "in reverse"])
def test_messages_never_meet_the_users(world: hd.World, order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive from anyone with any tag, posted on the user's communicator before the verbs, gets the user's."""
    monkeypatch.setattr(mpi, "LIMIT", 10)  # sends and receives in pieces, which such a receive could take
    findings = Findings(world.comm)
    comm = world.comm if order == 1 else world.comm.Split(0, -world.rank)
    own = team_of(comm, world).comm
    findings.check(MPI.Comm.Compare(own, comm) == MPI.CONGRUENT, "the library talks on the user's communicator")
    findings.settle()
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
    findings.settle()


def test_gloo_where_ranks_are_in_different_numbers_of_groups(world: hd.World) -> None:
    """The name of a team's torch group must not depend on what other groups a process happens to be in."""
    for last in range(world.world_size):
        dist.new_group(list(range(last + 1)))  # rank 0 is in all of them
        comm = world.comm.Split(0, -world.rank)
        result = hd.concat(torch.tensor([comm.rank]), group=comm, route="gloo")
        assert_on_all_ranks(world.comm, result.tolist() == list(range(comm.size)), result)


def test_the_users_groups_go_on(world: hd.World) -> None:
    """torch.distributed's own collectives, on its default group and on new ones, among the verbs."""
    findings = Findings(world.comm)
    size = world.world_size
    for turn in range(3):
        team_comm = world.comm.Split(world.rank % 2, world.rank)
        findings.check(hd.concat(torch.zeros(1), group=team_comm, route="gloo").numel() == team_comm.size, "verb")
        total = torch.tensor([world.rank + turn])
        dist.all_reduce(total)
        findings.check(total.item() == sum(range(size)) + size * turn, f"all_reduce gave {total}")
        mine = dist.new_group(list(range(size)))
        everyone = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(everyone, torch.tensor([world.rank]), group=mine)
        findings.check([int(x) for x in everyone] == list(range(size)), f"all_gather gave {everyone}")
    findings.settle()
