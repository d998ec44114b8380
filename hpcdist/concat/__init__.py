"""The operation concat, and the command ``python -m hpcdist.concat``."""

from hpcdist.collectives.join import concat as concat
