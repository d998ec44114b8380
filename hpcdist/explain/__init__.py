"""The pages that explain the errors: one Markdown file a code, in ``hpcdist/explain/pages``.

It needs neither torch nor MPI: ``python -m hpcdist.explain`` works where these are missing, or too old.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["FOLDER", "GROUPS", "page", "titles"]

FOLDER = Path(__file__).parent / "pages"

GROUPS = {
    "HD1": "launch and init",
    "HD2": "arguments of a call",
    "HD3": "disagreement between the ranks",
    "HD4": "files and staging",
    "HD5": "inputs and options of the commands",
    "HD6": "hangs and deaths",
    "HD7": "the backend of torch.distributed",
    "HD8": "job scripts",
    "HD9": "errors of hpcdist itself",
}
"""What the codes that begin so are about."""


@cache
def titles() -> dict[str, str]:
    """Return the title of each code's page, in the order of the codes."""
    return {path.stem: _title(path.stem, path.read_text()) for path in sorted(FOLDER.glob("HD*.md"))}


def page(code: str) -> str:
    """Return the page of a code, as Markdown.

    Raises:
        KeyError: if there is no such code.
    """
    if code not in titles():
        raise KeyError(code)
    return (FOLDER / f"{code}.md").read_text()


def _title(code: str, text: str) -> str:
    return text.partition("\n")[0].removeprefix(f"# {code}: ")
