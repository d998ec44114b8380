"""A call that all ranks have agreed on; and how calls of other packages are planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hpcdist.layout import Box

planners: dict[Callable[..., Any], Callable[..., Plan]] = {}
"""By the verb of another package: takes all of its arguments by name, `group` included, and plans it."""

_RESULTS = {
    "new": "new memory",
    "pool": "memory from the pool",
    "shared": "memory that the ranks of this node share",
    "out": "out",
    "structure": "a structure; its large tensors in memory from the pool",
    "none": "None",
}


@dataclass(frozen=True)
class Plan:
    """A call that all ranks have agreed on, made by :func:`plan`. ``print`` it to describe it, call it to execute it.

    Attributes:
        verb: name of the verb.
        route: "mpi", "nccl", "gloo" or "hdf5"; "none" of files that the ranks read alone.
        methods: how data move, such as "MPI_Allgatherv". The same on all ranks.
        sent, received: bytes that this rank sends to and receives from other ranks, counted for every receiver.
        result: memory of this rank's result: "new", "pool", "shared", "out", "structure" (of several loaded tensors)
            or "none".
        reasons: the reasons for route and method. The same on all ranks.
        shape: of the whole tensor; in all_to_all, of this rank's result; None if there are several tensors.
        box: box of the whole tensor that this rank receives, of size 0 if it receives none; None as for `shape`.
        file_bytes: for :func:`hpcdist.staging.load`: bytes of data that this rank reads from the file. Bytes that it
            reads only to compare a checksum, or between short runs, are not counted.
        file_bytes_of_all, sent_by_all: `file_bytes` and `sent` of all ranks together. The same on all ranks.
    """

    verb: str
    route: str
    methods: tuple[str, ...]
    sent: int
    received: int
    result: str
    reasons: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    box: Box | None = None
    file_bytes: int = 0
    file_bytes_of_all: int = 0
    sent_by_all: int = 0
    _call: Callable[..., Any] = field(kw_only=True, repr=False)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Execute the plan. Collective over its group.

        Small tensors in host memory travel in the message that detects a wrong call. Larger ones follow it.

        Args:
            x: this rank's tensor, of the shape, dtype and device that the plan was made for; any strides. None where
                the plan was made with None. Of ``staging.load``, nothing.
            out, async_op: as in the planned verb.

        Returns:
            As the planned verb.

        Raises:
            RankError: on every rank, if `x` or `out` does not match the plan on any rank, or the ranks call different
                plans or operations. No data have moved, and the next call can succeed.
            HpcdistError: on this rank, if the plan's world has ended, or its group was freed.
        """
        return self._call(*args, **options)

    def __str__(self) -> str:
        file = f"  this rank reads {self.file_bytes:,} bytes from the file, all ranks {self.file_bytes_of_all:,}"
        lines = [
            f"{self.verb}: route {self.route}, {' and '.join(self.methods) or 'headers alone'}",
            f"  this rank sends {self.sent:,} bytes, receives {self.received:,} bytes; result: {_RESULTS[self.result]}",
            *([f"{file}; these send {self.sent_by_all:,} bytes"] if self.file_bytes_of_all else []),
            *(f"  because {reason}" for reason in self.reasons),
        ]
        return "\n".join(lines)
