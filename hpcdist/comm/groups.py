"""A torch group or an MPI communicator as a rank of it knows it by itself: its ranks, and no message."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpcdist.errors import HpcdistError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["WORLD", "Group", "freeing", "is_alive"]

WORLD = 0  # the key of the group of all ranks


class _Owned(Protocol):
    def Free(self) -> None: ...  # noqa: N802


T = TypeVar("T", bound=_Owned)


class Group:
    """What the caller passed as ``group=``, as this rank knows it; nothing here communicates.

    Args:
        rank: of this process in the group.
        peers: the world's rank of each rank of the group.
        provisional: who has the key that communicators of the same ranks share at first; one dict for a whole job.
        handle: the communicator or torch group itself; None for the whole world.

    Attributes:
        key: what messages between two ranks of the group are known by, the same on all of them; None where it is not
            yet fixed.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[int],
        provisional: dict[int, Group],
        handle: MPI.Intracomm | dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = rank
        self.size = len(peers)
        self.peers = list(peers)
        self.provisional = provisional
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
            if self.provisional.setdefault(self.provisional_key, self) is not self:
                raise HpcdistError(
                    "two communicators of the same ranks are used for send and recv, and nothing tells them apart yet: "
                    "call a collective on each of them first, on all its ranks, such as hpcdist.concat([], group=comm)"
                )
            self.key = self.provisional_key
        return self.key

    def release(self) -> None:
        """Give up the provisional key: the ranks of a communicator that is freed may have another one."""
        self.freed = True
        if self.provisional.get(self.provisional_key) is self:
            del self.provisional[self.provisional_key]


def _digest(name: str, peers: Sequence[int]) -> int:
    """A positive number of 63 bits that is not WORLD."""
    text = repr((name, list(peers))).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1 or 1


@contextmanager
def freeing(owned: T) -> Iterator[T]:
    """A context that frees an MPI object at its end."""
    try:
        yield owned
    finally:
        owned.Free()


def is_alive(group: dist.ProcessGroup | None) -> bool:
    """Whether a torch group has not been destroyed."""
    return group is not None and group in distributed_c10d._world.pg_map
