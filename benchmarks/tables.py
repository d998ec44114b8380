"""Format tables: markdown with aligned columns, and figures of three digits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a markdown table; all columns but the first are aligned right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def show(line: Sequence[str]) -> str:
        cells = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths))]  # noqa: B905
        return "| " + " | ".join(cells) + " |"

    rule = "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)) + "|"
    return "\n".join([show(lines[0]), rule, *map(show, lines[1:])])


def figure(value: float) -> str:
    """Format a number with three significant digits, and with two decimals near 1, for ratios.

    Example::

        >>> figure(1.0234), figure(0.00123), figure(123.4)
        ('1.02', '0.00123', '123')
    """
    size = abs(value)
    if size >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 or size == 0 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format a time with its unit.

    Example::

        >>> duration(0.00012), duration(0.0345)
        ('120 us', '34.5 ms')
    """
    return f"{figure(seconds * 1e6)} us" if seconds < 1e-3 else f"{figure(seconds * 1e3)} ms"
