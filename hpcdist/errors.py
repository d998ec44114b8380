"""Every exception the package raises on purpose."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

__all__ = ["FileError", "HangError", "HpcdistError", "InputError", "LaunchError", "RankError", "listed", "reason"]

_RANKS_SHOWN = 8  # a thousand ranks with the same mistake need not print a thousand lines
_NAMES_SHOWN = 6
# The system's error in a message of HDF5, between names, times and addresses.
_HDF5 = re.compile(r"\(([^(:,]+)[^(]*errno = \d+, error message = '([^']*)'")
_LONGEST = 300  # characters of a library's message, which may repeat a whole header


def reason(error: BaseException) -> str:
    """Describe an error of the system or of a library in one line.

    Example::

        >>> reason(FileNotFoundError(2, "No such file or directory", "x.h5"))
        'No such file or directory'
    """
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    found = _HDF5.search(text)
    lines = [f"{found[1]}: {found[2]}"] if found else text.strip().splitlines() or [""]
    return (lines[0] if len(lines[0]) <= _LONGEST else f"{lines[0][:_LONGEST]}...") or type(error).__name__


def listed(names: Iterable[object]) -> str:
    """List the first of some names for a message; "nothing" if there are none.

    Example::

        >>> listed("abcdefgh")
        'a, b, c, d, e, f, ...'
    """
    shown = [str(name) for name, _ in zip(names, range(_NAMES_SHOWN + 1), strict=False)]
    return ", ".join([*shown[:_NAMES_SHOWN], *["..."] * (len(shown) > _NAMES_SHOWN)]) or "nothing"


class HpcdistError(RuntimeError):
    """The base of every error raised by hpcdist itself."""


class LaunchError(HpcdistError):
    """The job was not started in a way that can work; the message holds the fix.

    Raised by :func:`hpcdist.init`, on every rank that can detect it.
    """


class InputError(HpcdistError):
    """A command was given an unusable argument or file: one line with the reason; the exit status is 2."""


class FileError(HpcdistError):
    """A file cannot be read or written: it is missing, damaged, incomplete, or lacks what was asked for.

    Raised on this rank by operations of one process; a collective makes a RankError of it.
    """


class HangError(HpcdistError):
    """A call was not answered within the deadline, or another rank's process is gone; the job ends with it.

    The message has a table of the calls of all ranks, and names those that are missing. A thread that waits inside MPI
    cannot be made to raise: the error goes to ``sys.excepthook``, with the traceback of the call that waits.
    """


class RankError(HpcdistError):
    """One or more ranks called a collective wrongly; the same error is raised on every rank.

    No data has moved and the communicator still works: the next call can succeed.

    Attributes:
        verb: name of the collective that was refused, as rank 0 called it.
        problems: what was wrong on each rank at fault.

    Example::

        >>> raise RankError("gather", {1: "dtype is torch.float64, where rank 0 has torch.float32"})
        RankError: gather() was refused on all ranks
          rank 1: dtype is torch.float64, where rank 0 has torch.float32
    """

    def __init__(self, verb: str, problems: Mapping[int, str]) -> None:
        self.verb = verb
        self.problems = dict(sorted(problems.items()))
        lines = [f"{verb}() was refused on all ranks"]
        lines += [f"  rank {r}: {what}" for r, what in list(self.problems.items())[:_RANKS_SHOWN]]
        if len(self.problems) > _RANKS_SHOWN:
            lines.append(f"  and {len(self.problems) - _RANKS_SHOWN} more ranks")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[RankError], tuple[str, dict[int, str]]]:
        return type(self), (self.verb, self.problems)
