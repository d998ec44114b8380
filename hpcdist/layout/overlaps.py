"""Plan a transfer between two layouts: which rank sends which box to which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpcdist.layout.box import Box

__all__ = ["Overlaps", "disjoint", "overlaps"]


class Overlaps(NamedTuple):
    """The part of one rank in a transfer. Both lists include what it already has, as a message to itself.

    Attributes:
        sends: (dest, box of the whole tensor) pairs; for each dest in the order in which it receives them.
        recvs: (source, box) pairs; together they cover its box, each element once.
        missing: number of elements of its box that no rank holds.
    """

    sends: list[tuple[int, Box]]
    recvs: list[tuple[int, Box]]
    missing: int


def overlaps(source: Sequence[Box], dest: Sequence[Box], rank: int) -> Overlaps:
    """Find what `rank` sends and receives when a tensor moves from the boxes `source` to the boxes `dest`.

    No rank receives an element twice, or one that it holds itself. Ranks that hold copies of a box share the sends.

    Example, on rank 0 of 2, from rows to columns of a 4 x 4 tensor::

        >>> rows, columns = [Box((0, 0), (2, 4)), Box((2, 0), (2, 4))], [Box((0, 0), (4, 2)), Box((0, 2), (4, 2))]
        >>> sends, recvs, _ = overlaps(rows, columns, 0)
        >>> sends[1], recvs[1]
        ((1, Box(offset=(0, 2), shape=(2, 2))), (1, Box(offset=(2, 0), shape=(2, 2))))
    """
    owners = _Owners(source)
    recvs = list(owners.parts(dest[rank], rank))
    sends = []
    for peer, wanted in enumerate(dest):
        found = owners.parts_of(rank, wanted, peer) if owners.disjoint else owners.parts(wanted, peer)
        sends += [(peer, box) for owner, box in found if owner == rank]
    return Overlaps(sends, recvs, dest[rank].size() - sum(box.size() for _, box in recvs))


class _Owners:
    """The boxes that the ranks hold.

    Attributes:
        ranks: the owners of each box.
        disjoint: whether different boxes never overlap, so that nothing must be subtracted from what is still missing.
    """

    def __init__(self, source: Sequence[Box]) -> None:
        self.source = source
        self.ranks: dict[Box, list[int]] = {}
        for rank, box in enumerate(source):
            if box.size():
                self.ranks.setdefault(box, []).append(rank)
        self.disjoint = disjoint(list(self.ranks))

    def parts(self, wanted: Box, dest: int) -> Iterator[tuple[int, Box]]:
        """Iterate over (owner, the part of `wanted` that it sends to `dest`), the part of `dest` itself first."""
        own = self.source[dest]
        rest = [wanted] if wanted.size() else []
        for box in sorted(self.ranks, key=lambda box: box != own):
            common = [part for part in (left.intersect(box) for left in rest) if part.size()]
            if common:
                owner = self._owner(box, dest)
                yield from ((owner, part) for part in common)
                if not self.disjoint:
                    rest = [part for left in rest for part in left.without(box)]

    def parts_of(self, owner: int, wanted: Box, dest: int) -> Iterator[tuple[int, Box]]:
        """Iterate over the parts that `owner` sends: the fast case of :meth:`parts` for disjoint boxes."""
        common = wanted.intersect(self.source[owner])
        if common.size() and self._owner(self.source[owner], dest) == owner:
            yield owner, common

    def _owner(self, box: Box, dest: int) -> int:
        """Return the owner that sends from a box to `dest`."""
        if self.source[dest] == box:
            return dest
        owners = self.ranks[box]
        return owners[dest % len(owners)]


def disjoint(boxes: list[Box]) -> bool:
    """Return whether no two boxes overlap.

    Each box is compared with those that start before it ends, along the dim with the most distinct starts.
    """
    if len(boxes) < 2:
        return True
    distinct = [len({box.offset[dim] for box in boxes}) for dim in range(len(boxes[0].shape))]
    dim = distinct.index(max(distinct))
    ordered = sorted(boxes, key=lambda box: box.offset[dim])
    for i, box in enumerate(ordered):
        end = box.offset[dim] + box.shape[dim]
        for other in ordered[i + 1 :]:
            if other.offset[dim] >= end:
                break
            if box.intersect(other).size():
                return False
    return True
