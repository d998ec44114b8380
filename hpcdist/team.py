"""The ranks of one call: communicators of the library's own, and torch groups made when a route first needs one."""

from __future__ import annotations

import secrets
import threading
from array import array
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpcdist import agree
from hpcdist.errors import RankError
from hpcdist.groups import Group, group_of, is_alive
from hpcdist.watch import record

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdist.world import World

__all__ = ["Team", "team_of"]


_LATER = timedelta(minutes=1)  # after our own deadline, which can say more, comes torch's
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
        self._groups: dict[str, dist.ProcessGroup] = {}
        self.number: int = _agree_on_keys(comm, group) if front is None else front.number + 1
        self.back_comm = comm.Dup() if front is None else None
        record.peers[self.number] = self.peers
        if front is None:
            group.team = self

    def next_call(self) -> int:
        """The number of a call that begins now, of this team's."""
        self._begun += 1
        return self._begun

    def torch_group(self, backend: str, join: Callable[[dist.ProcessGroup], object] | None = None) -> dist.ProcessGroup:
        """The team's own torch group with one backend, "gloo" or "nccl". Collective over the team when first used.

        Args:
            join: the first operation of the group, where that must be one of all its ranks.
        """
        group = self._groups.get(backend)
        if group is None or not is_alive(group):  # the user may have ended torch.distributed, and started it again
            group = self._groups[backend] = self._make_torch_group(backend)
            if join is not None:
                join(group)
        return group

    def _make_torch_group(self, backend: str) -> dist.ProcessGroup:
        _choose_names()
        # One rank chooses the name, see there.
        _chosen.name = agree.from_root(self.comm, f"hpcdist-{uuid4().hex}".encode(), 0).decode()
        limit = self.world.timeout + _LATER
        try:
            group = dist.new_group(sorted(self.peers), backend=backend, timeout=limit, use_local_synchronization=True)
        finally:
            _chosen.name = None
        assert isinstance(group, dist.ProcessGroup)
        return group

    @property
    def freed(self) -> bool:
        from mpi4py import MPI

        return bool(self.comm == MPI.COMM_NULL)

    def free(self) -> None:
        """Free the communicators and the torch groups; once is enough.

        No rank waits for another one: programs end their groups in different orders on different ranks.
        """
        if self.freed:
            return
        if "background" in self.memo:
            self.memo.pop("background").stop()
        gloo = self._groups.pop("gloo", None)
        if gloo is not None and is_alive(gloo):
            dist.destroy_process_group(gloo)
        self._groups.clear()  # those of NCCL, whose end may be collective, end with torch.distributed
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


_chosen = threading.local()  # the name of the group that this thread is making


def _choose_names() -> None:
    """Have torch take our names for our groups: from now on, and for groups that are not ours it chooses its own.

    torch names a group by how many groups this process has made, which differs from rank to rank, and ranks that do
    not find each other's name hang. (The background makes groups too, so that this cannot be put on and off.)
    """
    its_own = distributed_c10d._process_group_name
    if getattr(its_own, "hpcdist", False):
        return

    def name(*args: Any, **kwargs: Any) -> str:
        return getattr(_chosen, "name", None) or its_own(*args, **kwargs)

    name.hpcdist = True  # type: ignore[attr-defined]
    distributed_c10d._process_group_name = name  # type: ignore[assignment]


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
