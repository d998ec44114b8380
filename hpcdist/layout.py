"""Who holds which rows. Integers only: no torch, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["block", "chunk", "counts_of", "displs", "pieces"]


def block(extent: int, parts: int) -> list[int]:
    """Share `extent` rows evenly: the first ``extent % parts`` ranks hold one row more.

    Example::

        >>> block(10, 4)
        [3, 3, 2, 2]
    """
    quotient, rest = divmod(extent, parts)
    return [quotient + (rank < rest) for rank in range(parts)]


def chunk(extent: int, parts: int) -> list[int]:
    """Share `extent` rows by the ceiling rule of ``torch.chunk`` and DTensor: the last ranks may hold none.

    Example::

        >>> chunk(10, 4)
        [3, 3, 3, 1]
    """
    size = -(-extent // parts)
    return [max(0, min(size, extent - rank * size)) for rank in range(parts)]


RULES = {"block": block, "chunk": chunk}


def counts_of(counts: str | Sequence[int] | None, extent: int, parts: int) -> list[int]:
    """Turn a rule's name, explicit counts, or None (the block rule) into `parts` counts that add up to `extent`.

    Raises:
        ValueError: the name is unknown, or the counts are not `parts` integers >= 0 with the sum `extent`.
    """
    if counts is None or isinstance(counts, str):
        rule = RULES.get("block" if counts is None else counts)
        if rule is None:
            raise ValueError(f"counts names no rule: expected one of {sorted(RULES)}, got {counts!r}")
        return rule(extent, parts)
    values = [int(c) for c in counts]
    if len(values) != parts:
        raise ValueError(f"counts has {len(values)} entries, expected one for each of {parts} ranks")
    if min(values) < 0:
        raise ValueError(f"counts has a negative entry: {values}")
    if sum(values) != extent:
        raise ValueError(f"counts add up to {sum(values)}, expected {extent}, the extent along dim")
    return values


def displs(counts: Sequence[int]) -> list[int]:
    """Where each rank's part starts in the whole.

    Example::

        >>> displs([3, 0, 2])
        [0, 3, 3]
    """
    return list(accumulate(counts, initial=0))[:-1]


def pieces(extent: int, limit: int) -> list[tuple[int, int]]:
    """Cut `extent` into (start, length) pieces of at most `limit`; none for an extent of 0.

    Example::

        >>> pieces(5, 2)
        [(0, 2), (2, 2), (4, 1)]
    """
    return [(start, min(limit, extent - start)) for start in range(0, extent, limit)]
