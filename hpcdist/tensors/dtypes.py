"""Kinds of memory in which a tensor, or the result of a call, can be."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["MemoryKind"]


class MemoryKind(IntEnum):
    """Where a rank has its data of a call, as a number that travels in the header of the call.

    Attributes:
        CPU, CUDA: host memory, and that of a GPU.
        FOLLOWS: of a receiver that brings no tensor: a GPU, if the root's tensor is on one.
        FOLLOWS_CPU: the same for a receiver without a GPU: host memory, wherever the root's tensor is.
    """

    CPU = 1
    CUDA = 2
    FOLLOWS = 3
    FOLLOWS_CPU = 4
