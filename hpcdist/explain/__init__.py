"""The function explain, of a call, and the command ``python -m hpcdist.explain``, of errors."""

from hpcdist.collectives.explain import Explanation, explain

__all__ = ["Explanation", "explain"]
