"""The page on environment variables has every variable that the package reads, and no other of its own."""

import re
from pathlib import Path

from hpcdist.launch import launcher, torchrun

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "variables.md").read_text()
SHOWN = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", PAGE))


def test_the_page_has_the_package_s_own_variables():
    """Those in its code and its templates of job scripts."""
    files = [path for path in (ROOT / "hpcdist").rglob("*") if path.suffix in (".py", ".j2")]
    read = {name for path in files for name in re.findall(r"\bHPCDIST_[A-Z_]+", path.read_text())}
    assert {name for name in SHOWN if name.startswith("HPCDIST_")} == read


def test_the_page_has_the_variables_of_launchers_and_schedulers():
    assert {*launcher.VARIABLES, *launcher._SCHEDULERS} <= SHOWN


def test_the_page_has_the_variables_that_init_and_run_set():
    """By the names in the code that sets them."""
    text = Path(torchrun.__file__).read_text()
    names = set(re.findall(r'"((?:[A-Z]+_)*(?:RANK|SIZE|NAME|ADDR|PORT|THREADS|ID|COUNT|RESTARTS))"', text))
    assert {"RANK", "MASTER_PORT", "OMP_NUM_THREADS"} <= names <= SHOWN
