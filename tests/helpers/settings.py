"""What tests ask about the run that they are in."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALL = "HPCDIST_TEST_ALL" in os.environ  # make test-all: also what takes long
