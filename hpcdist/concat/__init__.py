"""The operation concat, and the command ``python -m hpcdist.concat``."""

from hpcdist.collectives.join import concat

__all__ = ["concat"]
