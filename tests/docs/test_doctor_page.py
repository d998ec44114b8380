"""docs/fail/doctor.md has the doctor's own table of checks: every finding, and no other."""

import ast
import re
import sys
from pathlib import Path

from hpcdist.routes import select
from hpcdist.tools.doctor import checks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fail" / "doctor.md").read_text()


def test_the_page_is_made_from_the_table():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import doctor_page
    finally:
        sys.path.pop(0)
    assert doctor_page.filled(PAGE) == PAGE, "run python docs/doctor_page.py"
    sections = list(dict.fromkeys(row.section for row in checks.CHECKS))
    assert re.findall(r"<!-- checks: (.+) -->", PAGE) == [*sections, "steps"]


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
