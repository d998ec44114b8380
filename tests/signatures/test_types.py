"""A type checker knows a tensor from a structure from a Handle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "program.py"
CHECKERS = {"mypy": ["mypy", "--strict"], "pyright": ["pyright", "--pythonpath", sys.executable]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", CHECKERS)
def test_the_types_of_every_verb(checker):
    module, *options = CHECKERS[checker]
    command = [sys.executable, "-m", module, *options, str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=PROGRAM.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
