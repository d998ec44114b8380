"""Deadlines, and the ranks that are missing. Each rank records its calls; others read them when one waits too long."""
