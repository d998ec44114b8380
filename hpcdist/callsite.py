"""Where a program calls this library: the innermost line that is neither this library's nor torch's."""

from __future__ import annotations

import contextlib
import os
import sys
from types import CodeType, FrameType

__all__ = ["LONGEST", "outside", "place", "where"]

LONGEST = 400  # bytes of a description
_PATH = 200  # characters of a path that are shown
_TORCH = os.path.join("-packages", "torch", "")
_HOME = os.path.dirname(__file__) + os.sep

# Keyed by the ID of code objects, which are kept alive for that: hashing one takes longer than all the rest. Both are
# bounded: a program may make its code as it runs.
_MOST_PLACES = 4096
_texts: dict[tuple[str, int, int], tuple[bytes, CodeType]] = {}
_inside: dict[int, tuple[bool, CodeType]] = {}  # whether code is this library's or torch's


def where(verb: str, frames: int = 1) -> bytes:
    """Describe the call being made, with the file and line of the user's code.

    Args:
        frames: number of innermost frames that are certainly this library's; to look at a frame takes time.
    """
    frame = outside(sys._getframe(frames))
    key = (verb, id(frame.f_code), frame.f_lineno)
    known = _texts.get(key)
    if known is None:
        if len(_texts) >= _MOST_PLACES:
            _texts.clear()
        call = verb if " " in verb else f"{verb}()"
        text = f"{call} at {place(frame)}".encode(errors="backslashreplace")[:LONGEST]
        known = _texts[key] = text, frame.f_code
    return known[0]


def outside(frame: FrameType) -> FrameType:
    """Return the innermost frame of the user's code; in a command of this library, the outermost frame."""
    while (back := frame.f_back) is not None:
        code = frame.f_code
        known = _inside.get(id(code))
        if known is None:
            if len(_inside) >= _MOST_PLACES:
                _inside.clear()
            path = code.co_filename
            inside = path.startswith(_HOME) or _TORCH in path or path == contextlib.__file__
            known = _inside[id(code)] = inside, code
        if not known[0] or back.f_code.co_filename.startswith("<frozen"):  # what `python -m` runs
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
