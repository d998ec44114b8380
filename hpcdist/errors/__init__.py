"""Every exception the package raises on purpose, and the codes that stand at the end of their messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

E = TypeVar("E", bound=BaseException)

_RANKS_SHOWN = 8  # a thousand ranks with the same mistake need not print a thousand lines
SHOWN = 6  # names that are listed at most
# The system's error in a message of HDF5, between names, times and addresses.
_HDF5 = re.compile(r"\(([^(:,]+)[^(]*errno = \d+, error message = '([^']*)'")
_CODE = re.compile(r"(?<!\S)\[(HD[1-9][0-9]{2})\](?![\w.])")  # a word of its own, and no part of a file's name
_LONGEST = 300  # characters of a library's message, which may repeat a whole header


def reason(error: BaseException) -> str:
    """Describe an error of the system or of a library in one line.

    Example::

        >>> reason(FileNotFoundError(2, "No such file or directory", "x.h5"))
        'No such file or directory'
    """
    if isinstance(error, HpcdistError):
        return str(error).splitlines()[0]
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    match = _HDF5.search(text)
    lines = [f"{match[1]}: {match[2]}"] if match else text.strip().splitlines() or [""]
    return (lines[0] if len(lines[0]) <= _LONGEST else f"{lines[0][:_LONGEST]}...") or type(error).__name__


def listed(names: Iterable[object]) -> str:
    """List the first of some names for a message; "nothing" if there are none.

    Example::

        >>> listed("abcdefgh")
        'a, b, c, d, e, f, ...'
    """
    shown = [str(name) for name, _ in zip(names, range(SHOWN + 1), strict=False)]
    return ", ".join([*shown[:SHOWN], *["..."] * (len(shown) > SHOWN)]) or "nothing"


def coded(code: str, text: str) -> str:
    """Return a message with its code, of which :mod:`hpcdist.errors.explain` has a page.

    A message that has a code already, that of its cause, keeps it: what to do depends on the cause.

    Example::

        >>> coded("HD401", "x.h5: no such file")
        'x.h5: no such file [HD401]'
    """
    return text if _CODE.search(text) else f"{text} [{code}]"


def labelled(args: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments of an exception that is made of a code and a message: the message with its code."""
    return (coded(*args),) if len(args) == 2 else args


def codes(text: str) -> list[str]:
    """Return the codes in a message, or in the output of a program, in order and each one once.

    Example::

        >>> codes("rank 0: no such file [HD401]; rank 1: dim is 5 [HD204]; rank 2: no such file [HD401]")
        ['HD401', 'HD204']
    """
    return list(dict.fromkeys(_CODE.findall(text)))


def hint(text: str) -> str | None:
    """Return how to read more about the codes in a message; None if it has none.

    Example::

        >>> hint("x.h5: no such file [HD401]")
        'python -m hpcdist explain HD401'
    """
    numbers = codes(text)
    return f"python -m hpcdist explain {' '.join(numbers)}" if numbers else None


def with_hint(text: str) -> str:
    """Return a message that is printed, and after it, in a line of its own, how to read more about its codes."""
    return "\n".join([text, *filter(None, [hint(text)])])


def refusal(kind: Callable[[str], E], code: str, text: str) -> E:
    """Return an exception of Python's own, such as a ValueError, with a code in its message and the hint after it."""
    return hinted(kind(coded(code, text)))


def described(error: BaseException, code: str) -> str:
    """Describe an error to other ranks, by its message, or by kind and message if it is not one of hpcdist's; with
    `code` if it has none."""
    own = isinstance(error, HpcdistError) or codes(str(error))
    return coded(code, str(error) if own else f"{type(error).__name__}: {error}")


def hinted(error: E) -> E:
    """Add the hint as a note: tracebacks show it after the message, of which it is no part."""
    text = hint(str(error))
    if text is not None:
        error.add_note(text)
    return error


def without_hint(error: E) -> E:
    """Remove the hint from an error that becomes the cause of another one, at the end of whose message it stands."""
    notes, text = getattr(error, "__notes__", []), hint(str(error))
    if text in notes:
        notes.remove(text)
    return error


class HpcdistError(RuntimeError):
    """The base of every error raised by hpcdist itself. Its message has a code in brackets, such as [HD112]:
    ``python -m hpcdist explain HD112`` prints its meaning and the remedy."""

    def __init__(self, *args: str) -> None:
        """Take a code and a message, or a message that has its code already."""
        super().__init__(*labelled(args))
        hinted(self)

    @property
    def codes(self) -> list[str]:
        """The codes in the message, each once."""
        return codes(str(self))


class LaunchError(HpcdistError):
    """The job was not started in a way that can work; the message holds the fix.

    Raised by :func:`hpcdist.init`, on every rank that can detect it.
    """


class InputError(HpcdistError):
    """A command was given an unusable argument or file: one line with the reason; the exit status is 2."""


class FileError(HpcdistError):
    """A file cannot be read or written: it is missing, damaged, incomplete, or lacks a requested tensor.

    Raised on this rank by operations of one process; a collective makes a RankError of it.
    """


class HangError(HpcdistError):
    """A call was not answered before the timeout, or another rank's process is gone; the job ends with it.

    The message has a table of the calls of all ranks, and names those that are missing. A thread that waits inside MPI
    cannot be made to raise: the error goes to ``sys.excepthook``, with the traceback of the call that waits.
    """


class RankError(HpcdistError):
    """One or more ranks called a collective wrongly; the same error is raised on every rank.

    No data have moved, and the communicator still works: the next call can succeed.

    Attributes:
        verb: name of the collective that was refused, as rank 0 called it.
        problems: the problem of each rank at fault.

    Example::

        >>> raise RankError("gather", {1: "dtype is torch.float64, where rank 0 has torch.float32 [HD303]"})
        RankError: gather() was refused on all ranks
          rank 1: dtype is torch.float64, where rank 0 has torch.float32 [HD303]
        python -m hpcdist explain HD303
    """

    def __init__(self, verb: str, problems: Mapping[int, str]) -> None:
        self.verb = verb
        self.problems = dict(sorted(problems.items()))
        lines = [f"{verb}() was refused on all ranks"]
        lines += [f"  rank {r}: {what}" for r, what in list(self.problems.items())[:_RANKS_SHOWN]]
        if len(self.problems) > _RANKS_SHOWN:
            lines.append(f"  and {len(self.problems) - _RANKS_SHOWN} more ranks")
        super().__init__("\n".join(lines))

    @property
    def codes(self) -> list[str]:
        """The codes of all problems, also of the ranks that the message does not show."""
        return codes("\n".join(self.problems.values()))

    def __reduce__(self) -> tuple[type[RankError], tuple[str, dict[int, str]]]:
        return type(self), (self.verb, self.problems)
