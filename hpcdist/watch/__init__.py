"""Deadlines, and who is missing: each rank keeps a record of its calls, read only when somebody waits too long."""
