"""Validate calls: the arguments on each rank, and their agreement on all ranks."""
