"""What two layouts have in common: who sends which box to whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpcdist.layout.box import Box

__all__ = ["Overlaps", "overlaps"]


class Overlaps(NamedTuple):
    """What one rank does in a transfer; what it has already is among both, with itself.

    Attributes:
        sends: (rank, box of the whole tensor) for what it sends; to each rank in the order in which that receives.
        recvs: (rank, box) for what it receives: together its box, each element once.
        missing: how many elements of its box no rank holds.
    """

    sends: list[tuple[int, Box]]
    recvs: list[tuple[int, Box]]
    missing: int


def overlaps(source: Sequence[Box], dest: Sequence[Box], rank: int) -> Overlaps:
    """What `rank` sends and receives so that a tensor of which the ranks hold the boxes `source` comes to `dest`.

    No element travels twice to a rank, and none that it holds itself; of the ranks that hold copies of a box, each
    serves some of the others.

    Example, on rank 0 of 2, from rows to columns of a 4 x 4 tensor::

        >>> rows, columns = [Box((0, 0), (2, 4)), Box((2, 0), (2, 4))], [Box((0, 0), (4, 2)), Box((0, 2), (4, 2))]
        >>> sends, recvs, _ = overlaps(rows, columns, 0)
        >>> sends[1], recvs[1]
        ((1, Box(offset=(0, 2), shape=(2, 2))), (1, Box(offset=(2, 0), shape=(2, 2))))
    """
    sharing = _Sharing(source)
    recvs = list(sharing.parts(dest[rank], rank))
    sends = []
    for taker, wanted in enumerate(dest):
        given = sharing.only(wanted, taker, rank) if sharing.apart else sharing.parts(wanted, taker)
        sends += [(taker, box) for giver, box in given if giver == rank]
    return Overlaps(sends, recvs, dest[rank].size() - sum(box.size() for _, box in recvs))


class _Sharing:
    """The boxes that ranks hold, each with its holders.

    Attributes:
        apart: different boxes do not overlap, so that nothing has to be taken out of what is still wanted.
    """

    def __init__(self, source: Sequence[Box]) -> None:
        self.source = source
        self.holders: dict[Box, list[int]] = {}
        for rank, box in enumerate(source):
            if box.size():
                self.holders.setdefault(box, []).append(rank)
        self.apart = _apart(list(self.holders))

    def parts(self, wanted: Box, taker: int) -> Iterator[tuple[int, Box]]:
        """(a rank, what `taker` gets of it), for all that it wants: of itself first."""
        own = self.source[taker]
        rest = [wanted] if wanted.size() else []
        for box in sorted(self.holders, key=lambda box: box != own):
            common = [part for part in (left.intersect(box) for left in rest) if part.size()]
            if common:
                giver = self._giver(box, taker)
                yield from ((giver, part) for part in common)
                if not self.apart:
                    rest = [part for left in rest for part in left.without(box)]

    def only(self, wanted: Box, taker: int, giver: int) -> Iterator[tuple[int, Box]]:
        """What `taker` gets of one rank: a short way to it if the boxes are apart."""
        common = wanted.intersect(self.source[giver])
        if common.size() and self._giver(self.source[giver], taker) == giver:
            yield giver, common

    def _giver(self, box: Box, taker: int) -> int:
        if self.source[taker] == box:
            return taker
        holders = self.holders[box]
        return holders[taker % len(holders)]


def _apart(boxes: list[Box]) -> bool:
    """Whether no two boxes overlap: each is compared with those that begin before it ends, along the dim in which most
    begin at places of their own."""
    if len(boxes) < 2:
        return True
    begins = [len({box.offset[dim] for box in boxes}) for dim in range(len(boxes[0].shape))]
    dim = begins.index(max(begins))
    ordered = sorted(boxes, key=lambda box: box.offset[dim])
    for i, box in enumerate(ordered):
        end = box.offset[dim] + box.shape[dim]
        for other in ordered[i + 1 :]:
            if other.offset[dim] >= end:
                break
            if box.intersect(other).size():
                return False
    return True
