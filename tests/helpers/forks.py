"""Python processes that begin with torch imported: forks of a server, forkserver.py, which forked.py asks for them."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

GIVEN = "HPCDIST_TEST_FORKS"  # a folder of servers: those of one executable are used, not started again
OWNER = "HPCDIST_TEST_OWNER"  # a process with which the forks that have this in their environment end, at the latest
_HERE = Path(__file__).parent

_serving = threading.Lock()
_served: dict[tuple[str, str | None], list[str]] = {}  # by executable, and what is loaded before it


def serve(executable: str, environ: Mapping[str, str]) -> list[str]:
    """Start the servers, if there are none yet, until this process ends; returns the words before a program's
    arguments, in place of `executable`. The last of them is a folder with a command ``python`` that does the same.

    Args:
        executable: a Python.
        environ: with other values of what decides how imports go, such as PYTHONPATH, it is a true process that begins.
    """
    with _serving:
        key = (executable, environ.get("LD_PRELOAD"))
        if key not in _served:
            _served[key] = _given(executable) or _start(executable, environ)
        return _served[key]


def _given(executable: str) -> list[str] | None:
    folder = Path(os.environ.get(GIVEN) or os.devnull)
    words, command = _words(executable, folder), folder / "python"
    return words if command.is_file() and command.read_text() == _script(words) else None


def _words(executable: str, folder: Path) -> list[str]:
    return [executable, "-SE", str(_HERE / "forked.py"), str(folder)]


def _script(words: list[str]) -> str:
    return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'


def _start(executable: str, environ: Mapping[str, str]) -> list[str]:
    # A short path, which all hosts share.
    shared = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="hpcdist-fork-", dir=shared))
    for name in ("0", "1"):  # for even and odd ranks, whose hashes and addresses differ as those of true processes do
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / name))
            listener.listen(64)
            server = subprocess.Popen(
                [executable, str(_HERE / "forkserver.py"), str(listener.fileno()), str(folder)],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is for the tests, which end it
            )
        atexit.register(_end, server, folder)
    words = _words(executable, folder)
    (folder / "python").write_text(_script(words))
    (folder / "python").chmod(0o755)
    return words


def _end(server: subprocess.Popen[bytes], folder: Path) -> None:
    """It ends with its standard input, also when this process is killed, and removes the folder."""
    try:
        server.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    shutil.rmtree(folder, ignore_errors=True)
