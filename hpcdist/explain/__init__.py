"""The command ``python -m hpcdist.explain``: what an error code means, and what to do."""
