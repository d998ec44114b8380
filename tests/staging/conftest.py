"""The writers that can be used here."""

from __future__ import annotations

from hpcdist.staging import drivers

WRITERS = [name for name in ("mpio", "posix") if drivers.missing(name) is None]
