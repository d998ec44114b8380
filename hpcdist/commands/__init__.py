"""The commands on files: gather, concat and split, and what they read and write."""
