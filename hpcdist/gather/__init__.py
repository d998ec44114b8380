"""The verb gather, and with ``python -m hpcdist.gather`` the command."""

from hpcdist.collectives.gather import gather

__all__ = ["gather"]
