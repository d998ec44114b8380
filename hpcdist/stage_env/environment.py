"""What an environment is, and what in it names its own path: this is corrected where the copy is made."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hpcdist.errors import InputError

__all__ = ["BASE", "Environment", "Relocation", "added_paths", "base_tree", "describe"]

BASE = "with-base"  # name of the base interpreter in the copy
_TEXT = 2**20  # bytes: larger files are no scripts
_CONFIG = "pyvenv.cfg"
_LINE = 127  # bytes of a #! line that every system takes
_PROGRAM = re.compile(rb"#![ \t]*(/[^\s]+)[ \t]*([^\r\n]*)")
_PYTHON = re.compile(rb"(python|pypy)[\d.]*t?")
_UNQUOTED = re.compile(rb"(#!/bin/sh\n'''exec' )(/[^\s\"']+)")  # as pip writes it if the path has no blanks


class Environment(NamedTuple):
    """The paths by which the files of an environment may name it, none of another folder; of a venv, the prefix of the
    interpreter that it was made with, and whether it sees the packages of that."""

    prefixes: tuple[str, ...] = ()
    base: str = ""
    system_site: bool = False


def describe(root: str) -> Environment:
    """Return what a folder is. Its real path and, in a venv, the one that it was made for count as its own."""
    prefixes = [os.path.abspath(root), os.path.realpath(root)]
    config = Path(root, _CONFIG)
    if not config.is_file():
        return Environment(tuple(dict.fromkeys(prefixes)) if Path(root, "conda-meta").is_dir() else ())
    pairs = [line.partition("=") for line in config.read_text(errors="surrogateescape").splitlines()]
    values = {key.strip().lower(): value.strip() for key, _, value in pairs}
    activate = Path(root, "bin", "activate")
    text = activate.read_text(errors="surrogateescape") if activate.is_file() else ""
    prefixes += [match[2] for match in re.finditer(r"VIRTUAL_ENV=(['\"]?)(/[^'\"\n]+)\1$", text, re.MULTILINE)]
    base = os.path.dirname(values.get("home", "").rstrip("/"))
    return Environment(tuple(dict.fromkeys(prefixes)), base, values.get("include-system-site-packages") == "true")


def base_tree(root: str, environment: Environment) -> tuple[str, Callable[[str], object]]:
    """Return the prefix of the interpreter that a venv was made with, and what is copied of it, by relative names.

    Programs, standard library and libpython; without other packages, unless the venv sees them, Python's own tests, and
    what extensions are linked with.

    Raises:
        InputError: `root` is no venv.
    """
    if not environment.base:
        raise InputError("HD505", f"{root}: --with-base: it is no venv")
    left_out = f"({'' if environment.system_site else '(site|dist)-packages|'}test|config-[^/]*)(/|$)"
    library = rf"lib(64)?/python3(\.\d+t?)?(/(?!{left_out}).*)?"
    kept = re.compile(rf"bin|lib|lib64|bin/python[^/]*|lib(64)?/libpython[^/]*|{library}", re.DOTALL)
    return environment.base, kept.fullmatch


def added_paths(path: str) -> list[str]:
    """Return the folders that a file of an environment adds to sys.path: those of editable installs."""
    if not re.search(r"\.pth$|/__editable__[^/]*_finder\.py$", path):
        return []
    text = Path(path).read_text(errors="surrogateescape")
    found = re.findall(r"^(/[^\n]+)$" if path.endswith(".pth") else r"['\"](/[^'\"\n]+)['\"]", text, re.MULTILINE)
    return [folder for folder in (name.rstrip("/ ") for name in found) if os.path.isdir(folder)]


class Relocation:
    """Corrects the files of an environment that name its old path: scripts, activate, .pth and other texts.

    Args:
        moved: old path -> new path, of all that is copied. The base interpreter's, whose new name is BASE, is corrected
            in pyvenv.cfg alone: it may be /usr.
        inside: name of the environment in the copy; files elsewhere in the copy stay as they are.
    """

    def __init__(self, moved: dict[str, str], inside: str) -> None:
        self._inside = f"{inside}/"
        new = {os.fsencode(old): os.fsencode(new) for old, new in moved.items()}
        self._base = {old: at for old, at in new.items() if at.endswith(b"/" + BASE.encode())}
        self._new = {old: at for old, at in new.items() if old not in self._base}
        either = b"|".join(map(re.escape, sorted(self._new, key=len, reverse=True)))
        # A path that continues before or after it is another one: /env2 is not /env. But -I/env/include names it.
        self._pattern = re.compile(rb"(?:(?<![\w.+-])|(?<=-[BFILR]))(?:" + either + rb")(?![\w.+-])")

    def concerns(self, name: str, size: int) -> bool:
        """Whether a file may have to be corrected."""
        return bool(self._new) and size <= _TEXT and name.startswith(self._inside)

    def corrected(self, name: str, data: bytes) -> bytes:
        """Return the file's contents for the copy; they are the same object if nothing is to be changed."""
        if b"\0" in data:
            return data
        if name == f"{self._inside}{_CONFIG}":
            for old, at in self._base.items():
                data = data.replace(old + b"/", at + b"/")
        first = _PROGRAM.match(data)
        if first is not None and (program := self._replaced(first[1])) != first[1]:
            return _started(program, first[2].rstrip()) + self._replaced(data[first.end() :])
        new = self._replaced(_UNQUOTED.sub(rb'\1"\2"', data))
        return data if self._replaced(data) == data else new

    def _replaced(self, data: bytes) -> bytes:
        return self._pattern.sub(lambda match: self._new[match[0]], data)


def _started(program: bytes, argument: bytes) -> bytes:
    """Return the #! line for a program, without its end.

    Where the system takes no such line, as it is long or the path has a blank: of Python, the lines that pip writes, in
    which both sh and Python find what they need; of another program, the one that PATH names, as conda does.
    """
    line = b"#!" + b" ".join(filter(None, (program, argument)))
    if len(line) < _LINE and not re.search(rb"\s", program):
        return line
    name = program.rpartition(b"/")[2]
    if _PYTHON.fullmatch(name):
        words = b" ".join(filter(None, (b'"' + program + b'"', argument, b'"$0" "$@"')))
        return b"#!/bin/sh\n'''exec' " + words + b"\n' '''"
    return b" ".join(filter(None, (b"#!/usr/bin/env", b"-S" if argument else b"", name, argument)))
