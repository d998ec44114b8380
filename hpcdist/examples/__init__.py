"""Worked examples, each of them a program."""
