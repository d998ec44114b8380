"""The memory of large results: see :mod:`hpcdist.tensors.pool`."""

from hpcdist.tensors.pool import empty_cache, memory_stats

__all__ = ["empty_cache", "memory_stats"]
