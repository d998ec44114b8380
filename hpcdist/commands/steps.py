"""The steps that every command on files takes, and the report it prints."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from hpcdist.commands import inputs, sources
from hpcdist.commands.inputs import Inputs
from hpcdist.commands.options import Options
from hpcdist.commands.streaming import Writer
from hpcdist.commands.verify import verify_files
from hpcdist.control import objects
from hpcdist.files.regular import shown
from hpcdist.layout import Box
from hpcdist.runtime.world import World

__all__ = ["Command", "Report", "run", "shortened", "show", "speed"]

Report = dict[str, Any]

_MISMATCH = 1  # exit status if the result differs from the inputs


class Command(ABC):
    """What one command does in the steps of :func:`run`.

    Attributes:
        verdict: end of the line on --verify, with {} for "equal to" or "NOT EQUAL to".
        names: names of the output files, where there are several.
    """

    verdict: ClassVar[str]

    def __init__(self, world: World, options: Options, names: Sequence[str] = ()) -> None:
        self.world, self.options, self.names = world, options, names

    @abstractmethod
    def check(self, data: Inputs) -> None:
        """Raise, on every rank, what would keep the outputs from being written. Collective."""

    @abstractmethod
    def move(self, data: Inputs) -> Report:
        """Move the data and verify the result; return this command's entries of the report. Collective."""

    @abstractmethod
    def text(self, data: Inputs, report: Report) -> list[str]:
        """Return this command's lines of the report."""

    def check_output(self, data: Inputs, name: str, nbytes: int) -> None:
        """Raise, on this rank alone, what would keep a file of `nbytes` from being written."""
        size = 0 if self.options.resume else nbytes  # part of it may exist already
        sources.check_output(name, data.dtype, size, [source.spec for source in data.sources])

    def writer(self, data: Inputs) -> Writer:
        """Return the writer of this command's outputs."""
        source = data.fingerprint() if self.options.resume else None
        return Writer(self.world, self.options.verb, data.dtype, self.options.window, source)

    def verify(self, data: Inputs, parts: Sequence[tuple[str, Box]]) -> Report:
        """Compare files with boxes of the inputs, on the root, if --verify is given. Collective."""
        if not self.options.verify:
            return {}
        step = lambda: verify_files(data, parts, self.options.window)  # noqa: E731
        return objects.broadcast(self.world.team.comm, "verify", step, self.options.root)


def run(command: Command) -> int:
    """Find the inputs, check the outputs, move the data and print the report; return the exit status. Collective."""
    world, options = command.world, command.options
    options.check()
    data = inputs.find(world, options.input, options.dim, options.output)
    command.check(data)
    report: Report = {
        "verb": options.verb,
        "ranks": world.world_size,
        "nodes": world.nodes,
        "files": len(data.sources),
        "inputs": data.names(),
        "dim": data.dim,
        "shape": list(data.shape),
        "dtype": str(data.dtype).removeprefix("torch."),
        "bytes": data.nbytes(),
        **command.move(data),
    }
    if options.output:
        report["output"] = options.output
    show(world, report, None if options.json else lambda: _text(command, data, report))
    return _MISMATCH if report.get("verified") is False else 0


def show(world: World, report: Report, text: Callable[[], str] | None) -> None:
    """Print a report on rank 0: as the text that `text` returns, or without it as JSON."""
    if world.rank == 0:
        print(json.dumps(report) if text is None else text(), flush=True)


def _text(command: Command, data: Inputs, report: Report) -> str:
    what = "source files of Python's standard library" if data.of_stdlib else "array" + "s" * (len(data.sources) > 1)
    size = f"{report['bytes']:,} bytes of {report['dtype']}"
    lines = [f"{report['verb']}: {len(data.sources)} {what}, {size}, along dim {report['dim']}"]
    if report["inputs"]:
        lines.append(f"order: {shortened(map(shown, report['inputs']))}")
    lines += command.text(data, report)
    if "output" in report:
        lines.append(f"written: {shown(report['output'])}")
    if "verified" in report:
        found = "equal to" if report["verified"] else "NOT EQUAL to"
        lines.append(f"sha256 {report['sha256']}{command.verdict.format(found)}")
    return "\n".join(lines)


def shortened(items: Iterable[object]) -> str:
    """Return a list as text; of a long one, the first four items and the last.

    Example::

        >>> shortened(range(12))
        '0, 1, 2, 3, ..., 11'
    """
    texts = list(map(str, items))
    return ", ".join(texts if len(texts) <= 8 else [*texts[:4], "...", texts[-1]])


def speed(how: str, seconds: float, nbytes: int) -> str:
    """Return the line of a report on the time that the data took."""
    return f"{how}: {seconds * 1e3:.2f} ms, {nbytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"
