"""The commands on files: gather, concat, split, convert, ls and verify."""
