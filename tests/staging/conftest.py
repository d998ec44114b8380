"""The writers that can be used here."""

from __future__ import annotations

from hpcdist.staging import writers

WRITERS = [name for name in ("mpio", "posix") if writers.missing(name) is None]
