"""The command ``python -m hpcdist.tune``: measure the algorithms of calls, and write rules for HPCDIST_TUNE."""
