"""Kinds of memory that a tensor, or the result of a call, can be in."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["MemoryKind"]


class MemoryKind(IntEnum):
    """The memory in which a rank has its data in a call, as a number in the header of the call.

    Attributes:
        CPU, CUDA: host memory, GPU memory.
        FOLLOWS: memory of a receiver that passes no tensor: on its GPU if the root's tensor is on one.
        FOLLOWS_CPU: the same for a receiver without a GPU: host memory, wherever the root's tensor is.
    """

    CPU = 1
    CUDA = 2
    FOLLOWS = 3
    FOLLOWS_CPU = 4
