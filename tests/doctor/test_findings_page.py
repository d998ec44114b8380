"""docs/doctor.md explains every finding of the doctor, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from hpcdist.doctor.examine import SECTIONS
from hpcdist.routes import select

DOCTOR = Path(select.__file__).parent.parent / "doctor"
PAGE = (DOCTOR.parent.parent / "docs" / "doctor.md").read_text()


def _rows() -> dict[str, list[tuple[str, str, str]]]:
    """Section -> its rows: the finding's name, what it means, what to do."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        rows = re.findall(r"^\| `([^`]+)` \| (.+?) \|(.*)\|$", text, re.MULTILINE)
        if rows:
            found[title.strip()] = rows
    return found


def test_every_topic_is_on_the_page_in_its_section() -> None:
    topics: dict[str, list[str]] = {}
    for section in SECTIONS:
        topics.setdefault(section.name, []).extend(topic.name for topic in section.topics)
    page = {title: [name for name, _, _ in rows] for title, rows in _rows().items()}
    routes = {f"route {name}" for name in select.ROUTES}
    for title, names in topics.items():
        assert sorted(page.get(title, [])) == sorted({"route ..." if name in routes else name for name in names}), title
    assert set(page) - set(topics) == {"An examination that does not end"}


def test_every_stage_of_the_examination_is_on_the_page() -> None:
    """A step that hangs or kills its process is a finding of its name."""
    stages = set()
    for path in DOCTOR.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "stage":
                name = node.args[0]
                stages.add(name.value if isinstance(name, ast.Constant) else "route ...")
    stages.add("the start")  # before the first
    on_page = {name for rows in _rows().values() for name, _, _ in rows}
    assert stages <= on_page
    topics = {topic.name for section in SECTIONS for topic in section.topics}
    alone = {name for name, _, _ in _rows()["An examination that does not end"]}
    assert alone == stages - topics - {"route ..."}
