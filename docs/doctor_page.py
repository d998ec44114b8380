"""``python docs/doctor_page.py``: fill the tables of docs/fail/doctor.md from the doctor's table of checks.

The text around them is written by hand; a comment in front of each table names its section.
"""

from __future__ import annotations

import re
from pathlib import Path

from hpcdist.tools.doctor.checks import CHECKS, STEPS

PAGE = Path(__file__).with_name("fail") / "doctor.md"
_TABLE = re.compile(r"(<!-- checks: (.+) -->\n\n)(?:\|.*\n)*")
_HEAD = "| finding | meaning if not ok | what to do |\n|---|---|---|\n"


def tables() -> dict[str, str]:
    """Return the table of each section, and that of the steps of the examination."""
    rows: dict[str, list[tuple[str, str, str]]] = {"steps": [(name, *STEPS[name]) for name in STEPS]}
    for row in CHECKS:
        meaning, fix = " ".join((row.judge.__doc__ or "").split()), "; ".join(filter(None, (row.fix, row.alike)))
        rows.setdefault(row.section, []).append((row.name, meaning, fix))
    return {
        name: _HEAD + "".join(f"| `{name}` | {meaning} | {fix} |\n" for name, meaning, fix in of_section)
        for name, of_section in rows.items()
    }


def filled(text: str) -> str:
    """Return the page with its tables."""
    of = tables()
    return _TABLE.sub(lambda found: found[1] + of[found[2]], text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
