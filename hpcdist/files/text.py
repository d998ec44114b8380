"""A small text file that replaces another one as a whole."""

from __future__ import annotations

from pathlib import Path

from hpcdist.errors import FileError, reason
from hpcdist.files.commit import Commit

__all__ = ["write_text"]


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, which appears under its name when it is complete.

    Raises:
        FileError: it cannot be written; what was there before stays.

    Example::

        >>> write_text("index.json", "{}\\n")
    """
    commit = Commit(path)
    try:
        commit.part.write_text(text)
        commit.finish()
    except OSError as error:
        raise FileError("HD410", f"{path}: cannot be written: {reason(error)}") from error
    finally:
        commit.discard()  # does nothing after finish()
