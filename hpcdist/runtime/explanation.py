"""What a call would do, as the function explain() reports it; and how calls of other packages are explained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Explanation", "explained"]

explained: dict[Callable[..., Any], Callable[..., Explanation]] = {}
"""By the call: takes all of its arguments by name, `group` included, and explains it."""

_RESULTS = {
    "new": "new memory",
    "pool": "memory from the pool",
    "shared": "memory that the ranks of this node share",
    "out": "out",
    "view": "a view of x",
    "structure": "a structure; its large tensors in memory from the pool",
    "none": "None",
}


@dataclass(frozen=True)
class Explanation:
    """What a call would do; ``print`` it.

    Attributes:
        verb: name of the verb.
        route: "mpi", "nccl", "gloo" or "hdf5"; "none" if the verb does not communicate. For structures, the routes of
            large tensors in host memory and on GPUs.
        methods: how data move, such as "MPI_Allgatherv"; for structures, one for the small tensors and one for the
            large ones in each kind of memory. The same on all ranks.
        sent, received: bytes of this rank's data that other ranks get, and of theirs that it gets, each counted for
            every receiver, however they move; None if it learns that only in the call.
        result: memory of this rank's result: "new", "pool", "shared", "out", "view", "structure" or "none".
        reasons: why so. The same on all ranks.
        read: of ``staging.load``, bytes of data that this rank reads from the file; of compressed data, as it is in
            memory.
        read_by_all, sent_by_all: the same of all ranks together. The same on all ranks.
    """

    verb: str
    route: str
    methods: tuple[str, ...]
    sent: int
    received: int | None
    result: str
    reasons: tuple[str, ...]
    read: int = 0
    read_by_all: int = 0
    sent_by_all: int = 0

    def __str__(self) -> str:
        received = "not known yet" if self.received is None else f"{self.received:,} bytes"
        file = f"  this rank reads {self.read:,} bytes from the file, all ranks {self.read_by_all:,}; these send "
        lines = [
            f"{self.verb}: route {self.route}, {' and '.join(self.methods) or 'headers alone'}",
            f"  this rank sends {self.sent:,} bytes, receives {received}; result: {_RESULTS[self.result]}",
            *([f"{file}{self.sent_by_all:,} bytes"] if self.read_by_all else []),
            *(f"  because {reason}" for reason in self.reasons),
        ]
        return "\n".join(lines)
