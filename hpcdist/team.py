"""The ranks of one call: a private communicator for them, and torch groups made when a route first needs one."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpcdist import agree
from hpcdist.errors import HpcdistError
from hpcdist.watch import record

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdist.world import World

__all__ = ["Team", "team_of"]


_LATER = timedelta(minutes=1)  # after our own deadline, which can say more, comes torch's


class Team:
    """Some ranks of the world, in the order of a communicator.

    All library traffic goes over duplicates made here, so that it never meets the user's messages. What may be
    expensive is made when first needed: all ranks of the team come to that point in the same call.

    Attributes:
        comm: a communicator of these ranks that belongs to the library.
        rank, size: of this process in the team, and the number of its ranks.
        world: the world the team is a part of.
        front: the team itself; of a team that works in the background of another, that one.
        mail, parcels: further communicators, for what two ranks send each other; not in the background.
    """

    def __init__(self, comm: MPI.Intracomm, world: World, front: Team | None = None) -> None:
        self.comm = comm
        self.front = front or self
        self.mail, self.parcels = (comm.Dup(), comm.Dup()) if front is None else (comm, comm)
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.world = world
        self.memo: dict[Any, Any] = {}  # what modules keep a team: header buffers, whether MPI takes GPU memory
        self._peers: list[int] | None = None
        self._number: int | None = None
        self._calls = 0
        self._groups: dict[str, dist.ProcessGroup] = {}

    @property
    def peers(self) -> list[int]:
        """The world's rank of each rank of the team, which is also torch.distributed's."""
        if self._peers is None:
            from mpi4py import MPI

            whole = self.world.team.comm.Get_group()
            part = self.comm.Get_group()
            self._peers = list(MPI.Group.Translate_ranks(part, None, whole))
            if MPI.UNDEFINED in self._peers:
                raise HpcdistError("the communicator has ranks that are not in hpcdist's world")
        return self._peers

    @property
    def number(self) -> int:
        """By which a record tells teams apart; the same on all its ranks, and for teams of the same ranks alike."""
        if self._number is None:
            self._number = _number(self.peers, self.front is self)
        return self._number

    def next_call(self) -> int:
        """The number of a call that begins now, of this team's."""
        self._calls += 1
        return self._calls

    def torch_group(self, backend: str) -> dist.ProcessGroup:
        """The team's own torch group with one backend, "gloo" or "nccl". Collective over the team when first used."""
        if backend not in self._groups:
            _choose_names()
            # One rank chooses the name, see there.
            _chosen.name = agree.from_root(self.comm, f"hpcdist-{uuid4().hex}".encode(), 0).decode()
            limit = self.world.timeout + _LATER
            try:
                group = dist.new_group(
                    sorted(self.peers), backend=backend, timeout=limit, use_local_synchronization=True
                )
            finally:
                _chosen.name = None
            assert isinstance(group, dist.ProcessGroup)
            self._groups[backend] = group
        return self._groups[backend]

    @property
    def freed(self) -> bool:
        from mpi4py import MPI

        return bool(self.comm == MPI.COMM_NULL)

    def free(self) -> None:
        """Free the communicator; the torch groups end with torch.distributed. Collective; once is enough."""
        if not self.freed:
            # One that was never used has no number, and at the end of the world none can be worked out any more.
            with record.InCall("the end of a group", None if self._number is None else self):
                self._free()

    def _free(self) -> None:
        if "background" in self.memo:
            self.memo.pop("background").stop()
        self._groups.clear()
        if self.front is self:
            under_way = self.memo.pop("post").stop() if "post" in self.memo else False
            if not any(agree.allgather(self.comm, under_way)):  # else a new communicator could meet what still comes
                self.mail.Free()
                self.parcels.Free()
        self.comm.Free()


def _number(peers: list[int], front: bool) -> int:
    key = repr((peers, front)).encode()
    number = int.from_bytes(blake2b(key, digest_size=7).digest(), "little") + 1
    record.peers[number] = peers
    return number


class _Coming:
    """A team that is being made, which is the first thing that its ranks do together."""

    def __init__(self, group: MPI.Group, world: World) -> None:
        from mpi4py import MPI

        peers = MPI.Group.Translate_ranks(group, None, world.team.comm.Get_group())
        self.number = _number(list(peers), True)

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


_torch_teams: weakref.WeakKeyDictionary[dist.ProcessGroup, Team] = weakref.WeakKeyDictionary()
_keyval: int | None = None  # the MPI attribute under which a communicator keeps its team


def team_of(group: dist.ProcessGroup | MPI.Comm | None, world: World) -> Team:
    """The team of a torch group or an mpi4py communicator; the whole world for None.

    Collective over `group` when it is first used.

    Raises:
        TypeError: `group` is neither; on this rank alone, since nothing tells which ranks to agree with.
        ValueError: this rank is not in `group`.
    """
    if group is None:
        return world.team
    from mpi4py import MPI

    if isinstance(group, MPI.Intracomm):
        return _of_comm(group, world)
    if isinstance(group, dist.ProcessGroup):
        return _of_torch(group, world)
    if group == MPI.COMM_NULL or group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {world.rank} of the world is not in the group that it passed")
    raise TypeError(f"group must be a torch ProcessGroup or an mpi4py Intracomm, got {type(group).__name__}")


def _of_comm(comm: MPI.Intracomm, world: World) -> Team:
    global _keyval
    from mpi4py import MPI

    if comm == MPI.COMM_NULL:
        raise ValueError(f"rank {world.rank} of the world is not in the communicator that it passed (COMM_NULL)")
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval(delete_fn=_forget)
    team = comm.Get_attr(_keyval)
    if not isinstance(team, Team) or team.world is not world:
        same = MPI.Comm.Compare(comm, world.team.comm) in (MPI.IDENT, MPI.CONGRUENT)
        with record.InCall("the first use of a group", _Coming(comm.Get_group(), world)):
            team = world.team if same else world.adopt(Team(comm.Dup(), world))
        comm.Set_attr(_keyval, team)
    return team


def _forget(comm: MPI.Comm, keyval: int, team: Team) -> None:
    """The user frees a communicator, which is collective: its team goes with it."""
    if team is not team.world.team:
        team.world.dismiss(team)


def _of_torch(group: dist.ProcessGroup, world: World) -> Team:
    team = _torch_teams.get(group)
    if team is None or team.world is not world:
        ranks = dist.get_process_group_ranks(group)
        if ranks == list(range(world.world_size)):
            team = world.team
        else:
            whole = world.team.comm
            part = whole.Get_group().Incl(ranks)
            with record.InCall("the first use of a group", _Coming(part, world)):
                team = world.adopt(Team(whole.Create_group(part), world))
        _torch_teams[group] = team
    return team
