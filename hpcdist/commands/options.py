"""The command lines of gather, concat and split: the arguments they share, and the options made from them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from hpcdist.comm.settings import ROUTES
from hpcdist.errors import InputError
from hpcdist.runtime.cli import Parser, nbytes, path
from hpcdist.staging.target import WINDOW

__all__ = ["Options", "add_common", "join_parser"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one command, made once from its command line.

    Attributes:
        verb: name of the operation in reports and errors: "gather", "concat" or "split".
        input: files and patterns; empty for the source files of Python's standard library.
        dim: dimension to join or split along; negative counts from the last.
        window: host memory in bytes that a rank may use for data while it streams.
        output: file to write, or a pattern with ``{rank}``; None keeps the result in memory.
        resume, verify, json, compare: flags of the command line.
        route: name of the route, or "auto".
        everywhere: whether every rank receives the result, in memory; otherwise `root` does.
        counts: name of the partition that split uses.
    """

    verb: str
    input: Sequence[str]
    dim: int
    window: int
    output: str | None = None
    resume: bool = False
    verify: bool = False
    json: bool = False
    route: str = "auto"
    compare: bool = False
    everywhere: bool = False
    root: int = 0
    counts: str = "block"

    @classmethod
    def of(cls, verb: str, args: argparse.Namespace, **others: Any) -> Options:
        """Return the options of a parsed command line; `others` take precedence."""
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in vars(args).items() if name in known}
        return cls(verb=verb, **(given | others))

    @property
    def in_memory(self) -> bool:
        """Whether the result is gathered in memory, even if it is written to a file afterwards."""
        return self.output is None or self.everywhere or self.compare

    @property
    def all_write(self) -> bool:
        """Whether every rank writes its share of the output, so that no rank sends data."""
        return not self.in_memory and self.route in ("auto", "hdf5")

    def check(self) -> None:
        """Raise an InputError if --resume is given where no file can be resumed."""
        if self.resume and not (self.output or "").endswith(".h5"):
            raise InputError("HD505", "--resume: needs -o with an .h5 file, which keeps a checksum of each piece")
        if self.resume and not self.all_write:
            raise InputError("HD505", "--resume: only where every rank writes: without --all, --compare and --route")


def join_parser(prog: str, description: str, epilog: str) -> Parser:
    """Return a parser with the arguments of the commands that join arrays."""
    p = Parser(prog=prog, description=description, epilog=epilog)
    p.add_argument(
        "input", nargs="*", metavar="INPUT",
        help="a file or a quoted pattern: .npy, .npz, .pt, .safetensors, .h5; "
        "FILE:NAME for one array of a file that holds several",
    )  # fmt: skip
    p.add_argument("--dim", type=int, default=0, help="dimension to join along (default 0)")
    p.add_argument("-o", "--output", type=path, metavar="OUT", help="write the result: .npy, .pt, .safetensors or .h5")
    p.add_argument(
        "--route", choices=ROUTES, default="auto",
        help="how the data travel (default auto; with -o, directly from file to file)",
    )  # fmt: skip
    p.add_argument("--compare", action="store_true", help="time every route that can run here, in one table")
    add_common(p)
    return p


def add_common(p: Parser) -> None:
    """Add the options that gather, concat and split share."""
    p.add_argument(
        "--window", type=nbytes, default=WINDOW, metavar="BYTES",
        help="with -o: host memory that a rank may use for data, such as 64M (default 256M)",
    )  # fmt: skip
    p.add_argument("--resume", action="store_true", help="continue a job with --resume that was killed; .h5 only")
    p.add_argument("--staging", type=path, metavar="DIR", help="staging folder of route hdf5, shared by all nodes")
    p.add_argument(
        "--verify", action="store_true",
        help="compare the result with the inputs, both read again on one process by the libraries of their formats",
    )  # fmt: skip
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")
