"""Where a program calls this library: the innermost line that is not this library's, torch's, or a wrapper's."""

from __future__ import annotations

import contextlib
import os
import sys
from types import CodeType, FrameType

LONGEST = 400  # bytes of a description
_PATH = 200  # characters of a path that are shown
# Packages whose code is not the user's, by the name of their modules: torch may be installed anywhere, and loads what
# it compiles from files in /tmp. Behind torch, those of Python in which its decorators are (@deprecated, for example).
_INSIDE = {
    *(__name__.partition(".")[0], "torch", "contextlib", "functools", "importlib", "typing_extensions", "warnings"),
    "_py_warnings",
}

# Keyed by the ID of code objects, which are kept alive for that: hashing one takes longer than all the rest. Both are
# bounded: a program may make its code as it runs.
MOST_PLACES = 4096
texts: dict[tuple[str, int, int], tuple[bytes, CodeType]] = {}
insides: dict[int, tuple[bool, CodeType]] = {}  # whether code is in one of the packages above


def where(verb: str, frames: int = 1) -> bytes:
    """Describe the call being made, with the file and line of the user's code.

    Args:
        frames: number of innermost frames that are certainly this library's; to look at a frame takes time.
    """
    frame = sys._getframe(frames)
    known = texts.get((verb, id(frame.f_code), frame.f_lasti))
    if known is None:
        frame = outside(frame)
        key = verb, id(frame.f_code), frame.f_lasti
        known = texts.get(key)
    if known is None:
        if len(texts) >= MOST_PLACES:
            texts.clear()
        call = verb if " " in verb else f"{verb}()"
        text = f"{call} at {place(frame)}".encode(errors="backslashreplace")[:LONGEST]
        known = texts[key] = text, frame.f_code
    return known[0]


def parts(text: str) -> tuple[str, str]:
    """Split a text of :func:`where` into the call, such as "concat()", and its place, such as "train.py:57"."""
    call, _, site = text.partition(" at ")
    return call, site


def outside(frame: FrameType) -> FrameType:
    """Return the innermost frame of the user's code, or of a command; the outermost one of a thread without either."""
    while (back := frame.f_back) is not None:
        code = frame.f_code
        known = insides.get(id(code))
        if known is None:
            if len(insides) >= MOST_PLACES:
                insides.clear()
            inside = str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE
            known = insides[id(code)] = inside, code
        if not known[0]:
            break
        frame = back
    return frame


def place(frame: FrameType) -> str:
    """Return the file and line of a frame; the file relative to the current folder, a long one cut at its start."""
    path = frame.f_code.co_filename
    with contextlib.suppress(OSError):  # the current folder was removed
        path = path.removeprefix(os.getcwd() + os.sep)
    if len(path) > _PATH:
        path = "..." + path[-_PATH:]
    return f"{path}:{frame.f_lineno}"
