"""The verb concat, and with ``python -m hpcdist.concat`` the command."""

from hpcdist.collectives.concat import concat

__all__ = ["concat"]
