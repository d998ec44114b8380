"""The verb split, and with ``python -m hpcdist.split`` the command."""

from hpcdist.collectives.split import split

__all__ = ["split"]
