"""The ranks of a team by node, and a communicator of those on this node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Topology", "by_node"]


def by_node(node_of: Sequence[int]) -> list[list[int]]:
    """Return the ranks on each node, the nodes in the order of their lowest rank.

    Args:
        node_of: for each rank, the number of its node.

    Example::

        >>> by_node([3, 1, 3])
        [[0, 2], [1]]
    """
    found: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of):
        found.setdefault(node, []).append(rank)
    return list(found.values())


class Topology:
    """Which ranks of a communicator share a node. Collective over `comm`.

    Args:
        comm: the ranks.
        node_of: for each rank, the number of its node.

    Attributes:
        nodes: ranks of `comm` on each node, in the order of their lowest rank.
        node: index of this rank's node in `nodes`.
        local_rank: position of this rank in ``nodes[node]``.
        comm: communicator of the ranks of this node, in that order; that of all ranks if there is one node alone.
    """

    def __init__(self, comm: MPI.Intracomm, node_of: Sequence[int]) -> None:
        self.nodes = by_node(node_of)
        self.node = next(index for index, ranks in enumerate(self.nodes) if comm.rank in ranks)
        self.local_rank = self.nodes[self.node].index(comm.rank)
        self.comm = comm if len(self.nodes) == 1 else comm.Split(self.node, comm.rank)
        self._owned = len(self.nodes) > 1

    @property
    def local_ranks(self) -> list[int]:
        """The ranks of this node."""
        return self.nodes[self.node]

    def free(self) -> None:
        if self._owned:
            self.comm.Free()
