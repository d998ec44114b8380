"""Torch groups and MPI communicators as a rank sees them without communication."""

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
    """What the caller passed as ``group=``, as this rank sees it; nothing here communicates.

    Args:
        rank: rank of this process in the group.
        peers: the world's rank of each rank of the group.
        provisional: owner of each provisional key; one dict for a whole job.
        handle: communicator or torch group; None for the whole world.

    Attributes:
        key: key of messages between two ranks of the group, the same on all of them; None before it is fixed.
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
        """The key of a communicator's messages until its ranks have agreed on one; it depends on the ranks alone."""
        return _digest("", self.peers)

    def message_key(self) -> int:
        """Return the key for a message to or from another rank of the group.

        A communicator has no name that is the same on all its ranks. Until a collective call has given it a key, it
        uses the provisional one, which only one of several communicators of the same ranks can.

        Raises:
            HpcdistError: on this rank, for a second communicator of the same ranks that no collective call has used.
        """
        if self.key is None:
            if self.provisional.setdefault(self.provisional_key, self) is not self:
                raise HpcdistError(
                    "HD204",
                    "two communicators of the same ranks are used for send and recv, and nothing tells them apart yet: "
                    "call a collective on each of them first, on all its ranks, such as hpcdist.concat([], group=comm)",
                )
            self.key = self.provisional_key
        return self.key

    def release(self) -> None:
        """Release the provisional key, for other communicators of the same ranks."""
        self.freed = True
        if self.provisional.get(self.provisional_key) is self:
            del self.provisional[self.provisional_key]


def _digest(name: str, peers: Sequence[int]) -> int:
    """Return a positive number of 63 bits that is not WORLD."""
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
