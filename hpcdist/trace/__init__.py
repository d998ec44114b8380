"""The command ``python -m hpcdist.trace DIR``: merge the traces of a run's ranks, and report the slow ones."""
