"""The operation split, and the command ``python -m hpcdist.split``."""

from hpcdist.collectives.split import split as split
