"""The operation gather, and the command ``python -m hpcdist.gather``."""

from hpcdist.collectives.gather import gather

__all__ = ["gather"]
