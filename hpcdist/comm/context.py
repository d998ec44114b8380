"""The data that the teams of one job share: the groups, the team of each, and the communicators of send and recv.

Context and team are terms of UCC (https://openucx.github.io/ucc).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpcdist import activity
from hpcdist.comm.settings import Settings
from hpcdist.comm.team import Group, Team, create_group, digest, freeing, is_alive
from hpcdist.errors import HpcdistError, refusal

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdist.comm.matching import Unexpected
    from hpcdist.comm.settings import GroupLike


class Context:
    """The ranks of one job and the groups that they form, from init() to finalize(). Collective over `private`.

    Args:
        private: communicator of all ranks, which the context owns and frees.
        comm: the user's communicator of the same ranks.
        settings: settings of the job.

    Attributes:
        team, everyone: team and group of all ranks.
        teams: teams of the groups that collectives have used so far.
        header_comm, data_comm: communicators of send and recv, for headers and for data.
        unexpected: messages that arrived before their receive.
        most_tag: largest tag that this MPI allows.
        transport: thread that sends and receives messages in the background, see :mod:`hpcdist.p2p.transfers`.
    """

    def __init__(self, private: MPI.Intracomm, comm: MPI.Intracomm, settings: Settings) -> None:
        from mpi4py import MPI

        from hpcdist.comm.matching import Unexpected  # which imports MPI

        self.comm = comm
        self.settings = settings
        self.rank: int = private.rank
        self.everyone = Group(private.rank, range(private.size))
        self.team = Team(private, self.everyone, settings)
        self.teams = {self.everyone: self.team}
        self.header_comm, self.data_comm = private.Dup(), private.Dup()
        self.unexpected: Unexpected = Unexpected(self.header_comm)
        self.most_tag = int(self.data_comm.Get_attr(MPI.TAG_UB) or 32767)
        self.transport: Any = None  # before its first use
        self._torch_groups: dict[tuple[int, str], Any] = {}  # of teams that have ended; all ranks end them together

    def group_of(self, given: GroupLike | None) -> Group:
        """Return the group that the caller passed; all ranks for None. Nothing is communicated.

        Raises:
            TypeError: if `given` is not a torch group, a DeviceMesh or a communicator; on this rank alone, since there
                are no known ranks to agree with.
            ValueError: if this rank is not in it, it has been destroyed, or a mesh has more than one dimension.
            HpcdistError: if it has ranks that are not in hpcdist's world.
        """
        if given is None:
            return self.everyone
        from mpi4py import MPI

        if isinstance(given, MPI.Intracomm):
            return _of_comm(given, self)
        if isinstance(given, DeviceMesh):
            if given.ndim != 1:
                raise refusal(
                    ValueError,
                    "HD204",
                    f"group is a DeviceMesh of {given.ndim} dims, expected 1: pass mesh[NAME] for one",
                )
            if given.get_coordinate() is None:
                raise refusal(ValueError, "HD204", f"rank {self.rank} of the world is not in the mesh that it passed")
            try:
                given = given.get_group()
            except RuntimeError as error:
                raise refusal(ValueError, "HD204", f"group is a DeviceMesh without a process group: {error}") from error
        if isinstance(given, dist.ProcessGroup):
            return _of_torch(given, self)
        if given == MPI.COMM_NULL or given == dist.GroupMember.NON_GROUP_MEMBER:
            raise refusal(ValueError, "HD204", f"rank {self.rank} of the world is not in the group that it passed")
        raise refusal(
            TypeError,
            "HD204",
            f"group must be a torch ProcessGroup, a 1-d DeviceMesh or an mpi4py Intracomm, got {type(given).__name__}",
        )

    def team_of(self, given: GroupLike | None) -> Team:
        """Return the team of a torch group, a DeviceMesh or an mpi4py communicator; that of all ranks for None.

        Each communicator and each torch group has a team of its own, also where several have the same ranks.
        Collective over the group when it is first used.

        Raises:
            TypeError, ValueError, HpcdistError: as :meth:`group_of`.
        """
        if given is None:
            return self.team
        group = self.group_of(given)
        team = self.teams.get(group)
        if team is None:
            from mpi4py import MPI

            for ended in [group for group in self.teams if group.ended]:  # torch has no callback for that
                self.forget(ended)
            with activity.InCall("the first use of a group", _FirstUse(group)):
                if isinstance(given, MPI.Intracomm):
                    comm = given.Dup()
                else:
                    comm = create_group(self.team.comm, group.peers, group.key or 0)
                team = self.teams[group] = Team(comm, group, self.settings)
        return team

    def forget(self, group: Group) -> None:
        """Free the resources of a group that has ended. Nothing is communicated."""
        if group.key is not None:
            self.unexpected.drop(group.key)
        group.freed = True
        team = self.teams.pop(group, None)
        if team is not None:
            self._torch_groups.update(team.free())

    def free(self, messages: bool) -> None:
        """Free all teams, and with `messages` the communicators of send and recv. Collective over the world."""
        if messages:
            self.header_comm.Free()
            self.data_comm.Free()
        for team in self.teams.values():
            self._torch_groups.update(team.free())
        self.teams.clear()
        for _, group in sorted(self._torch_groups.items()):  # in the same order on all ranks
            group.shutdown()
        self._torch_groups.clear()


class _FirstUse:
    """The team of a group in the making, for the record of calls."""

    def __init__(self, group: Group) -> None:
        self.number, self.begun = digest("", group.peers), 0
        activity.peers[self.number] = group.peers


_torch_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Context, Group]] = weakref.WeakKeyDictionary()
_keyval: int | None = None  # of the MPI attribute that holds a communicator's context and Group


def _of_comm(comm: MPI.Intracomm, context: Context) -> Group:
    global _keyval
    from mpi4py import MPI

    if comm == MPI.COMM_NULL:
        raise refusal(
            ValueError,
            "HD204",
            f"rank {context.rank} of the world is not in the communicator that it passed (COMM_NULL), or has freed it",
        )
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval(delete_fn=_freed)
    kept = comm.Get_attr(_keyval)
    if isinstance(kept, tuple) and kept[0] is context:
        found: Group = kept[1]
        return found
    whole = context.team.comm
    if comm == context.comm and MPI.Comm.Compare(comm, whole) == MPI.CONGRUENT:  # not with torch's own order
        group = context.everyone
    else:
        with freeing(comm.Get_group()) as part, freeing(whole.Get_group()) as all_:
            peers = MPI.Group.Translate_ranks(part, None, all_)
        if MPI.UNDEFINED in peers:
            raise HpcdistError("HD204", "the communicator has ranks that are not in hpcdist's world")
        group = Group(comm.rank, peers, comm)
    comm.Set_attr(_keyval, (context, group))
    return group


def _freed(comm: MPI.Comm, keyval: int, kept: tuple[Context, Group]) -> None:
    """Called by MPI when the user frees a communicator."""
    context, group = kept
    if group is not context.everyone:
        context.forget(group)


def _of_torch(given: dist.ProcessGroup, context: Context) -> Group:
    if not is_alive(given):
        raise refusal(ValueError, "HD204", "the group has been destroyed (torch.distributed.destroy_process_group)")
    kept, group = _torch_groups.get(given, (None, context.everyone))
    if kept is not context:
        if given is dist.group.WORLD and given.size() == context.everyone.size:
            group = context.everyone
        else:
            ranks = dist.get_process_group_ranks(given)
            group = Group(ranks.index(context.rank), ranks, given)
        _torch_groups[given] = context, group
    return group
