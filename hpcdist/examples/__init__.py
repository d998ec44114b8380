"""Worked examples, each a program."""
