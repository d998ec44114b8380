"""Tensors as memory: kinds of memory, dtypes, bytes, messages, and structures of tensors."""
