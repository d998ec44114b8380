"""README: its programs run and print what it says, its files, pictures and commands exist, and it is one page."""

from __future__ import annotations

import re
from pathlib import Path

from pages import execute, parse

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_its_examples_run(tmp_path: Path) -> None:
    assert execute([parse("README", README)], tmp_path) == {"README": []}


def test_it_is_one_page() -> None:
    """Without the lines that a reader does not see."""
    seen = re.sub(r"<!--.*?-->\n", "", README, flags=re.DOTALL)
    assert len(seen.splitlines()) <= 130
    for command in ("make demo", "make test"):
        assert command in README


def test_what_it_names_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []
    modules = {found.replace(".", "/") for found in re.findall(r"python -m (hpcdist[.\w]*)", README)}
    assert modules
    for module in modules:
        assert (ROOT / f"{module}.py").exists() or (ROOT / module / "__main__.py").exists(), module
