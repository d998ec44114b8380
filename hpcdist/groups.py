"""A torch group or an MPI communicator as a rank of it knows it by itself: its ranks, and no message."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpcdist.errors import HpcdistError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdist.team import Team
    from hpcdist.world import World

__all__ = ["WORLD", "Group", "forget", "group_of", "is_alive"]

WORLD = 0  # the key of the group of all ranks


class Group:
    """What the caller passed as ``group=``, as this rank knows it; nothing here communicates.

    Args:
        world: the world the group is a part of.
        rank: of this process in the group.
        peers: the world's rank of each rank of the group.
        handle: the communicator or torch group itself; None for the whole world.

    Attributes:
        team: what the ranks of the group have made together, in the first collective call; None before.
        key: what messages between two ranks of the group are known by, the same on all of them; None where it is not
            yet fixed.
    """

    def __init__(
        self, world: World, rank: int, peers: Sequence[int], handle: MPI.Intracomm | dist.ProcessGroup | None = None
    ) -> None:
        self.world = world
        self.rank = rank
        self.size = len(peers)
        self.peers = list(peers)
        self.team: Team | None = None
        self.key: int | None = WORLD if handle is None else None
        self.freed = False
        self._torch: weakref.ref[dist.ProcessGroup] | None = None
        if isinstance(handle, dist.ProcessGroup):
            self._torch = weakref.ref(handle)
            self.key = _digest(distributed_c10d._world.pg_names[handle], self.peers)

    @property
    def ended(self) -> bool:
        """Whether the communicator has been freed, or the torch group destroyed."""
        return self.freed or (self._torch is not None and not is_alive(self._torch()))

    @property
    def provisional_key(self) -> int:
        """What stands for the key of a communicator until its ranks have agreed on one."""
        return _digest("", self.peers)

    def message_key(self) -> int:
        """The key for a message to or from another rank of the group.

        A communicator has no name that all its ranks know without a message. Until a collective call has given it a
        key, it is known by its ranks; of several communicators of the same ranks, one only.

        Raises:
            HpcdistError: on this rank, for a second communicator of the same ranks that no collective call has used.
        """
        if self.key is None:
            if self.world.provisional.setdefault(self.provisional_key, self) is not self:
                raise HpcdistError(
                    "two communicators of the same ranks are used for send and recv, and nothing tells them apart yet: "
                    "call a collective on each of them first, on all its ranks, such as hpcdist.concat([], group=comm)"
                )
            self.key = self.provisional_key
        return self.key

    def release(self) -> None:
        """The communicator is being freed: its ranks may have another one."""
        self.freed = True
        if self.key is not None:
            self.world.engine.unexpected.drop(self.key)
        if self.world.provisional.get(self.provisional_key) is self:
            del self.world.provisional[self.provisional_key]


def _digest(name: str, peers: Sequence[int]) -> int:
    """A positive number of 63 bits that is not WORLD."""
    text = repr((name, list(peers))).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1 or 1


def is_alive(group: dist.ProcessGroup | None) -> bool:
    """Whether a torch group has not been destroyed."""
    return group is not None and group in distributed_c10d._world.pg_map


_torch_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = weakref.WeakKeyDictionary()
_keyval: int | None = None  # the MPI attribute under which a communicator keeps its Group


def group_of(given: dist.ProcessGroup | MPI.Comm | None, world: World) -> Group:
    """The group that the caller means; all ranks for None. Nothing is communicated.

    Raises:
        TypeError: `given` is neither a torch group nor a communicator; on this rank alone, since nothing tells which
            ranks to agree with.
        ValueError: this rank is not in it, or it has been destroyed.
        HpcdistError: it has ranks that are not in hpcdist's world.
    """
    if given is None:
        return world.everyone
    from mpi4py import MPI

    if isinstance(given, MPI.Intracomm):
        return _of_comm(given, world)
    if isinstance(given, dist.ProcessGroup):
        return _of_torch(given, world)
    if given == MPI.COMM_NULL or given == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {world.rank} of the world is not in the group that it passed")
    raise TypeError(f"group must be a torch ProcessGroup or an mpi4py Intracomm, got {type(given).__name__}")


def _of_comm(comm: MPI.Intracomm, world: World) -> Group:
    global _keyval
    from mpi4py import MPI

    if comm == MPI.COMM_NULL:
        raise ValueError(f"rank {world.rank} of the world is not in the communicator that it passed (COMM_NULL)")
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval(delete_fn=_freed)
    group = comm.Get_attr(_keyval)
    if not isinstance(group, Group) or group.world is not world:
        whole = world.team.comm
        if comm == world.comm and MPI.Comm.Compare(comm, whole) == MPI.CONGRUENT:  # torch may have another order
            group = world.everyone
        else:
            part, all_ = comm.Get_group(), whole.Get_group()
            peers = MPI.Group.Translate_ranks(part, None, all_)
            part.Free()
            all_.Free()
            if MPI.UNDEFINED in peers:
                raise HpcdistError("the communicator has ranks that are not in hpcdist's world")
            group = Group(world, comm.rank, peers, comm)
        comm.Set_attr(_keyval, group)
    return group


def _freed(comm: MPI.Comm, keyval: int, group: Group) -> None:
    """MPI calls it when the user frees a communicator."""
    if group is not group.world.everyone:
        forget(group)


def forget(group: Group) -> None:
    """Release what belongs to a group that has ended. Nothing is communicated."""
    group.release()
    if group.team is not None:
        group.world.dismiss(group.team)


def _of_torch(given: dist.ProcessGroup, world: World) -> Group:
    if not is_alive(given):
        raise ValueError("the group has been destroyed (torch.distributed.destroy_process_group)")
    group = _torch_groups.get(given)
    if group is None or group.world is not world:
        if given is world.group:
            group = world.everyone
        else:
            ranks = dist.get_process_group_ranks(given)
            group = Group(world, ranks.index(world.rank), ranks, given)
        _torch_groups[given] = group
    return group
