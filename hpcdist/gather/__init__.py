"""The operation gather, and the command ``python -m hpcdist.gather``."""

from hpcdist.collectives.join import gather as gather
