"""Tensors as memory: where they are, their dtypes and their bytes."""
