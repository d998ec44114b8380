"""Deadlines, and the ranks that are missing: each rank records its calls, which others read when one waits too long."""
