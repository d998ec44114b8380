"""What an environment is, and what in it names its own path: it is corrected where the copy is made."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpcdist.errors import InputError
from hpcdist.stage_env.trees import Tree

__all__ = ["BASE", "Environment", "Relocation", "base_tree", "described", "elsewhere"]

BASE = "base"  # name of the base interpreter in the copy
_TEXT = 2**20  # bytes: larger files are no scripts
_CONFIG = "pyvenv.cfg"
_LINE = 127  # bytes of a #! line that every system takes
_PROGRAM = re.compile(rb"#![ \t]*(/[^\s]+)[ \t]*([^\r\n]*)")
_PYTHON = re.compile(rb"(python|pypy)[\d.]*t?")
_UNQUOTED = re.compile(rb"(#!/bin/sh\n'''exec' )(/[^\s\"']+)")  # as pip writes it if the path has no blanks


@dataclass(frozen=True)
class Environment:
    """An environment of Python, or another folder.

    Attributes:
        kind: "venv", "conda" or "folder".
        prefixes: the paths by which its files may name it.
        base: of a venv, the prefix of the interpreter that it was made with; else "".
        system_site: whether a venv sees the packages of that.
    """

    kind: str
    prefixes: tuple[str, ...]
    base: str = ""
    system_site: bool = False


def described(root: str) -> Environment:
    """Return what a folder is. Its real path and, in a venv, the one that it was made for count as its own."""
    prefixes = [os.path.abspath(root), os.path.realpath(root)]
    config = Path(root, _CONFIG)
    if config.is_file():
        values = dict(_pair(line) for line in config.read_text(errors="surrogateescape").splitlines())
        activate = Path(root, "bin", "activate")
        text = activate.read_text(errors="surrogateescape") if activate.is_file() else ""
        prefixes += [match[2] for match in re.finditer(r"VIRTUAL_ENV=(['\"]?)(/[^'\"\n]+)\1$", text, re.MULTILINE)]
        site = values.get("include-system-site-packages", "") == "true"
        home = values.get("home", "")
        return Environment("venv", tuple(dict.fromkeys(prefixes)), os.path.dirname(home.rstrip("/")), site)
    kind = "conda" if Path(root, "conda-meta").is_dir() else "folder"
    return Environment(kind, tuple(dict.fromkeys(prefixes)) if kind == "conda" else ())


def _pair(line: str) -> tuple[str, str]:
    key, _, value = line.partition("=")
    return key.strip().lower(), value.strip()


def base_tree(root: str, environment: Environment) -> Tree:
    """Return the base interpreter of a venv: programs, standard library and libpython.

    Without other packages, unless the venv sees them, Python's own tests, and what extensions are linked with.

    Raises:
        InputError: `root` is no venv.
    """
    if not environment.base:
        what = "a conda environment holds its interpreter" if environment.kind == "conda" else "it is no venv"
        raise InputError("HD505", f"{root}: --with-base: {what}")
    left_out = f"({'' if environment.system_site else '(site|dist)-packages|'}test|config-[^/]*)(/|$)"
    library = rf"lib(64)?/python3(\.\d+t?)?(/(?!{left_out}).*)?"
    kept = re.compile(rf"bin|lib|lib64|bin/python[^/]*|lib(64)?/libpython[^/]*|{library}", re.DOTALL)
    return Tree(environment.base, BASE, lambda name: kept.fullmatch(name) is not None)


def elsewhere(name: str, data: bytes, prefixes: Iterable[str]) -> list[str]:
    """Return the folders outside of the environment that one of its files adds to sys.path: editable installs."""
    if not (name.endswith(".pth") or re.search(r"/__editable__[^/]*_finder\.py$", name)):
        return []
    text = os.fsdecode(data)
    pattern = r"^(/[^\n]+)$" if name.endswith(".pth") else r"['\"](/[^'\"\n]+)['\"]"
    found = dict.fromkeys(path.rstrip("/ ") for path in re.findall(pattern, text, re.MULTILINE))
    return [path for path in found if os.path.isdir(path) and not any(f"{path}/".startswith(f"{p}/") for p in prefixes)]


class Relocation:
    """Corrects the files of an environment that name its old path: scripts, activate, .pth and other texts.

    Args:
        moved: old path -> new path, of all that is copied.
        base: old and new prefix of the base interpreter if it is copied, too: only pyvenv.cfg names it.
        inside: name of the environment in the copy; files elsewhere in the copy stay as they are.
    """

    def __init__(self, moved: dict[str, str], base: tuple[str, str] | None, inside: str) -> None:
        self._inside = f"{inside}/"
        self._new = {os.fsencode(old): os.fsencode(new) for old, new in moved.items()}
        longest_first = sorted(self._new, key=len, reverse=True)
        # A path that continues before or after it is another one: /env2 is not /env. But -I/env/include names it.
        either = b"|".join(map(re.escape, longest_first))
        self._pattern = (
            re.compile(rb"(?:(?<![\w.+-])|(?<=-[BFILR]))(?:" + either + rb")(?![\w.+-])") if self._new else None
        )
        self._config = f"{inside}/{_CONFIG}"
        self._base = base

    def concerns(self, name: str, size: int) -> bool:
        """Whether a file may have to be corrected."""
        return self._pattern is not None and size <= _TEXT and name.startswith(self._inside)

    def corrected(self, name: str, data: bytes) -> bytes:
        """Return the file's contents for the copy; they are the same object if nothing is to be changed."""
        if self._pattern is None or b"\0" in data:
            return data
        if name == self._config and self._base is not None:
            old, new_base = (os.fsencode(f"{prefix}/") for prefix in self._base)
            data = data.replace(old, new_base)
        first = _PROGRAM.match(data)
        if first is not None and (program := self._replaced(first[1])) != first[1]:
            return _started(program, first[2].rstrip()) + self._replaced(data[first.end() :])
        new = self._replaced(_UNQUOTED.sub(rb'\1"\2"', data))
        return data if self._replaced(data) == data else new

    def _replaced(self, data: bytes) -> bytes:
        assert self._pattern is not None
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
