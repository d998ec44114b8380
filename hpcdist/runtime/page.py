"""A report as one page in HTML that needs no other file: sentences, a picture, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from hpcdist.formats.paths import write_text
from hpcdist.runtime.cli import table

_ROWS = 16  # of a table


class Table:
    """The rows of `columns` with the largest `bars`, or in their own order; the page draws the bars."""

    def __init__(self, title: str, bars: Any, columns: Mapping[str, Iterable[Any]], largest: bool = True) -> None:
        order = np.argsort(-bars if largest else 0 * bars, kind="stable")[:_ROWS]
        rows = [*zip(*columns.values(), strict=True)]
        self.title = f"{title} (the first {_ROWS} of {len(rows)})" if len(rows) > _ROWS else title
        self.head = [*columns]
        self.rows = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in rows[i]] for i in order]
        self.bars = bars[order] / (bars.max(initial=0) or 1)

    def __str__(self) -> str:
        return f"{self.title}\n{table(self.head, self.rows)}"


def render(template: Path, **values: Any) -> str:
    """Return a template of jinja2, filled in."""
    return str(jinja2.Template(template.read_text(), autoescape=True, trim_blocks=True).render(values))


def write(path: str | Path, lines: Sequence[str], picture: str, tables: Sequence[Table]) -> None:
    """Write a page: sentences, then `picture`, which is HTML, then tables.

    Raises:
        FileError: it cannot be written.
    """
    template = Path(__file__).with_name("page.html.j2")
    write_text(path, render(template, lines=lines, picture=picture, tables=tables))
