"""The operation concat, and the command ``python -m hpcdist.concat``."""

from hpcdist.collectives.concat import concat

__all__ = ["concat"]
