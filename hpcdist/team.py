"""The ranks of one call: communicators of the library's own, and torch backends made when a route first needs one."""

from __future__ import annotations

import secrets
from array import array
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hpcdist.errors import RankError
from hpcdist.groups import Group, group_of
from hpcdist.settings import Settings
from hpcdist.watch import record

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdist.world import World

__all__ = ["Team", "team_of"]

_FREE, _OWN, _OTHERS = range(3)  # whose the provisional key of a communicator's ranks is


class Team:
    """Some ranks of the world, in the order of a communicator.

    All library traffic goes over communicators made here, so that it never meets the user's messages, nor those of
    another group of the same ranks. Collective over `comm`.

    Args:
        comm: a communicator of these ranks, which belongs to the library from here on.
        group: the group of the caller that the team is for.
        front: the team in whose background this one works; None for one in the foreground.

    Attributes:
        rank, size: of this process in the team, and the number of its ranks.
        peers: the world's rank of each rank of the team, which is also torch.distributed's.
        world: the world the team is a part of.
        front: the team itself; of a team that works in the background of another, that one.
        number: by which a record tells teams apart; the same on all ranks. That of a background team is one more.
        calls: the verbs begun so far, in the foreground and (True) with async_op; of a background team, those of the
            foreground before the one at hand.
        torch_groups: the team's torch backends by name, see :mod:`hpcdist.routes.c10d`.
        back_comm: the communicator of the team that works in the background of this one; None if this is one.
    """

    def __init__(self, comm: MPI.Intracomm, group: Group, front: Team | None = None) -> None:
        self.comm = comm
        self.group = group
        self.front = front or self
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.peers = group.peers
        self.world: World = group.world
        self.memo: dict[Any, Any] = {}  # what modules keep a team: header buffers, whether MPI takes GPU memory
        self.calls = {False: 0, True: 0}
        self._begun = 0
        self.torch_groups: dict[str, Any] = {}
        self.number: int = _agree_on_keys(comm, group) if front is None else front.number + 1
        self.back_comm = comm.Dup() if front is None else None
        record.peers[self.number] = self.peers
        if front is None:
            group.team = self

    @property
    def settings(self) -> Settings:
        """Those of the world."""
        return self.world.settings

    def next_call(self) -> int:
        """The number of a call that begins now, of this team's."""
        self._begun += 1
        return self._begun

    @property
    def freed(self) -> bool:
        from mpi4py import MPI

        return bool(self.comm == MPI.COMM_NULL)

    def free(self) -> None:
        """Free the communicators and the torch backends; once is enough.

        No rank waits for another one: programs end their groups in different orders on different ranks.
        """
        if self.freed:
            return
        if "background" in self.memo:
            self.memo.pop("background").stop()
        gloo = self.torch_groups.pop("gloo", None)
        if gloo is not None:
            gloo.shutdown()
        self.world.ended_groups.update({(self.number, name): group for name, group in self.torch_groups.items()})
        self.torch_groups.clear()
        for number in (self.number, self.number + 1):
            record.peers.pop(number, None)
        if self.back_comm is not None:
            self.back_comm.Free()
            self.group.team = None
        self.comm.Free()


def _agree_on_keys(comm: MPI.Intracomm, group: Group) -> int:
    """The team's number, and the group's key if it has none yet. Collective; one small Allgather.

    Where messages have gone from rank to rank already, the key they have is kept.

    Raises:
        RankError: on every rank, if on one of them that key is another communicator's.
    """
    from mpi4py import MPI

    holder = group.world.provisional.get(group.provisional_key)
    mine = array("q", [2 * secrets.randbits(60) + 2, _FREE if holder is None else _OWN if holder is group else _OTHERS])
    all_ = array("q", bytes(mine.itemsize * 2 * comm.size))
    comm.Allgather([mine, MPI.INT64_T], [all_, MPI.INT64_T])
    holders = all_[1::2]
    if _OWN in holders:
        problem = (
            "send or recv was called here with another communicator of these ranks, and on other ranks with this one"
        )
        taken = {rank: problem for rank, whose in enumerate(holders) if whose == _OTHERS}
        if taken:
            raise RankError("the first use of a group", taken)
        group.world.provisional[group.provisional_key] = group
        group.key = group.provisional_key
    elif group.key is None:
        group.key = all_[0] + 1
    return all_[0]


class _Coming:
    """A team that is being made, which is the first thing that its ranks do together."""

    def __init__(self, group: Group) -> None:
        self.number = group.provisional_key

    def next_call(self) -> int:
        return 0


def team_of(given: dist.ProcessGroup | MPI.Comm | None, world: World) -> Team:
    """The team of a torch group or an mpi4py communicator; the whole world for None.

    Each communicator and each torch group has a team of its own, also where several have the same ranks. Collective
    over the group when it is first used.

    Raises:
        TypeError, ValueError, HpcdistError: as :func:`hpcdist.groups.group_of`.
        RankError: on every rank, if messages sent before cannot be told from those of another group.
    """
    group = group_of(given, world)
    if group.team is None:
        world.dismiss_ended()
        record.peers[group.provisional_key] = group.peers
        with record.InCall("the first use of a group", _Coming(group)):
            comm = _communicator(given, group)
            try:
                world.adopt(Team(comm, group))
            except RankError:
                comm.Free()
                raise
    assert group.team is not None
    return group.team


def _communicator(given: Any, group: Group) -> MPI.Intracomm:
    """A new communicator of the ranks of a group. Collective over it."""
    from mpi4py import MPI

    if isinstance(given, MPI.Intracomm):
        return given.Dup()
    whole = group.world.team.comm
    all_ = whole.Get_group()
    part = all_.Incl(group.peers)
    # The tag keeps apart the groups that several threads make at once.
    comm = whole.Create_group(part, (group.key or 0) % 2**15)
    all_.Free()
    part.Free()
    return comm
