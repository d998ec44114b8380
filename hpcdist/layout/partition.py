"""Partition an extent among ranks: counts and displacements, in rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from hpcdist.errors import refusal

__all__ = ["PARTITIONS", "balance", "block", "block_range", "block_ranges", "chunk", "counts_of", "displs", "pieces"]


def block(extent: int, parts: int) -> list[int]:
    """Partition `extent` rows evenly: the first ``extent % parts`` ranks hold one extra row.

    Example::

        >>> block(10, 4)
        [3, 3, 2, 2]
    """
    quotient, rest = divmod(extent, parts)
    return [quotient + (rank < rest) for rank in range(parts)]


def chunk(extent: int, parts: int) -> list[int]:
    """Partition `extent` rows by the ceiling rule of ``torch.chunk`` and DTensor: the last ranks may hold none.

    Example::

        >>> chunk(10, 4)
        [3, 3, 3, 1]
    """
    size = -(-extent // parts)
    return [max(0, min(size, extent - rank * size)) for rank in range(parts)]


def balance(weights: Sequence[float], parts: int) -> list[int]:
    """Partition rows of unequal weight into consecutive parts of similar weight; return their counts, in order.

    Each cut is at the row start nearest to the ideal cut, off by at most half the largest weight. Therefore no part
    weighs more than the ideal part plus the largest weight, or than the heaviest part of the best partition plus the
    largest weight.

    Args:
        weights: the weight of each row, a number >= 0, such as the length of a sequence.
        parts: the number of ranks.

    Raises:
        ValueError: if a weight is negative or not a number, or `parts` is not positive.

    Example::

        >>> balance([8, 1, 1, 1, 1, 4], 2)
        [1, 5]
    """
    # NumPy integers would overflow.
    weights = [weight.item() if hasattr(weight, "item") else weight for weight in weights]
    if parts < 1:
        raise refusal(ValueError, "HD213", f"parts is {parts}, expected at least 1")
    if not all(0 <= weight < float("inf") for weight in weights):
        raise refusal(ValueError, "HD213", "weights must be numbers >= 0")
    starts = list(accumulate(weights, initial=0))  # the start of each row, and the end of the last
    total, cuts = starts[-1], [0]
    if total == 0:
        return block(len(weights), parts)
    for part in range(1, parts):
        # Scaled by `parts`, to compare integers exactly.
        at = bisect_left(starts, part * total, key=lambda start: start * parts)
        if at > 0 and part * total - starts[at - 1] * parts < starts[at] * parts - part * total:
            at -= 1
        cuts.append(at)
    return [end - start for start, end in pairwise([*cuts, len(weights)])]


PARTITIONS = {"block": block, "chunk": chunk}


def counts_of(counts: str | Sequence[int] | None, extent: int, parts: int) -> list[int]:
    """Turn a rule's name, explicit counts, or None (the block rule) into `parts` counts that add up to `extent`.

    Raises:
        ValueError: if the name is unknown, or the counts are not `parts` integers >= 0 that add up to `extent`.
    """
    if counts is None or isinstance(counts, str):
        rule = PARTITIONS.get("block" if counts is None else counts)
        if rule is None:
            raise refusal(
                ValueError, "HD213", f"counts is not a known rule: expected one of {sorted(PARTITIONS)}, got {counts!r}"
            )
        return rule(extent, parts)
    values = [int(c) for c in counts]
    if len(values) != parts:
        raise refusal(ValueError, "HD213", f"counts has {len(values)} entries, expected one for each of {parts} ranks")
    if min(values) < 0:
        raise refusal(ValueError, "HD213", f"counts has a negative entry: {values}")
    if sum(values) != extent:
        raise refusal(ValueError, "HD213", f"counts add up to {sum(values)}, expected {extent}, the extent along dim")
    return values


def displs(counts: Sequence[int]) -> list[int]:
    """Return the start of each rank's part in the whole.

    Example::

        >>> displs([3, 0, 2])
        [0, 3, 3]
    """
    return list(accumulate(counts, initial=0))[:-1]


def pieces(extent: int, limit: int) -> list[tuple[int, int]]:
    """Cut `extent` into (start, length) pieces of at most `limit`; an extent of 0 has no pieces.

    Example::

        >>> pieces(5, 2)
        [(0, 2), (2, 2), (4, 1)]
    """
    return [(start, min(limit, extent - start)) for start in range(0, extent, limit)]


def block_range(extent: int, parts: int, rank: int) -> range:
    """Return the range of a rank in `extent` items that `parts` ranks share by the block rule.

    Example::

        >>> block_range(5, 3, 1)
        range(2, 4)
    """
    return range(*block_ranges(extent, parts, parts)[rank])


def block_ranges(extent: int, parts: int, owners: int) -> list[tuple[int, int]]:
    """Partition `extent` items by the block rule among `owners` of `parts` ranks, evenly spread: (start, end) per rank.

    Example::

        >>> block_ranges(10, 4, 2)       # ranks 0 and 2
        [(0, 5), (5, 5), (5, 10), (10, 10)]
    """
    chosen = {i * parts // owners for i in range(owners)}
    counts = iter(block(extent, owners))
    ends = list(accumulate((next(counts) if rank in chosen else 0 for rank in range(parts)), initial=0))
    return list(pairwise(ends))
