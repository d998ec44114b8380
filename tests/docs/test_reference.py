"""docs/reference has what the package says of itself: docstrings, commands, error codes, and the doctor's checks."""

import ast
import re
import sys
from pathlib import Path

import pytest

from hpcdist.__main__ import COMMANDS
from hpcdist.routes import select
from hpcdist.tools.doctor import checks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import reference

    return reference


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs" / "reference").glob("*.md")))
def test_the_pages_are_made_from_the_package(reference, page):
    text = (ROOT / "docs" / "reference" / page).read_text()
    if page == "commands.md" and sys.version_info >= (3, 13):  # where argparse lays out a help in another way
        commands = re.findall(r"^## (hpcdist.*)$", reference.filled(text), re.MULTILINE)
        assert commands == re.findall(r"^## (hpcdist.*)$", text, re.MULTILINE)
    else:
        assert reference.filled(text) == text, "run python docs/reference.py"


def test_a_changed_docstring_changes_the_page(reference, monkeypatch):
    """So the comparison above can fail."""
    text = (ROOT / "docs" / "reference" / "verbs.md").read_text()
    monkeypatch.setattr(reference.found("hpcdist.collectives.join.gather"), "__doc__", "Something else.")
    changed = reference.filled(text)
    assert changed != text and "## hd.gather\n" in changed and "\nSomething else.\n" in changed


def test_the_page_of_the_doctor_has_all_sections_and_that_of_commands_all_commands():
    page = (ROOT / "docs" / "reference" / "doctor.md").read_text()
    sections = list(dict.fromkeys(row.section for row in checks.CHECKS))
    assert re.findall(r"<!-- checks: (.+) -->", page) == [*sections, "steps"]
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert re.findall(r"<!-- help: (.+) -->", page) == ["hpcdist", *(f"hpcdist {name}" for name in COMMANDS)]


def test_every_check_says_what_it_means_and_what_to_do():
    names = [row.name for row in checks.CHECKS]
    assert len(names) == len(set(names))
    assert all(row.judge.__doc__ for row in checks.CHECKS)
    assert all(row.fix or row.alike for row in checks.CHECKS)


def test_every_step_of_the_examination_has_a_fix():
    """A step that hangs or kills its process is a finding of its name."""
    steps = set()
    for path in (ROOT / "hpcdist" / "tools" / "doctor").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
                name = node.value.elts[0]
                steps |= {name.value} if isinstance(name, ast.Constant) else set()
    steps |= {f"route {name}" for name in select.ROUTES} | {"the start"}  # before the first
    assert all(checks.fix_of(step) for step in steps)
    assert checks.STEPS.keys() == steps - {row.name for row in checks.CHECKS}
