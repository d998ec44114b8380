"""Quotas, which no call of the system reports on every file system: asked of the command that belongs to each."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from contextlib import suppress
from typing import Any

__all__ = ["ask"]

_SECONDS = 3  # for each command


def ask(folder: str, mount: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the quotas of this process's user and group at a folder.

    Args:
        mount: the folder's, see :func:`hpcdist.doctor.filesystems.mount_of`.

    Returns:
        For each quota "folder", "of" ("user" or "group"), the "command", and what is used and allowed: "bytes",
        "most_bytes", "files", "most_files", 0 if there is no limit. None if the system lacks the command or it fails.
    """
    found = []
    for of, flag, number in (("user", "-u", os.getuid()), ("group", "-g", os.getgid())):
        command = _command(flag, number, mount) if mount else None
        if command is not None and shutil.which(command[0]):
            with suppress(OSError, subprocess.TimeoutExpired, ValueError, LookupError):
                done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
                row = parse(command[0], done.stdout, mount or {})
                if row is not None:
                    found.append({"folder": folder, "of": of, "command": shlex.join(command), **row})
    return found


def _command(flag: str, number: int, mount: dict[str, Any]) -> list[str]:
    if mount["type"] == "lustre":
        return ["lfs", "quota", "-q", flag, str(number), mount["point"]]
    if mount["type"] == "gpfs":
        return ["mmlsquota", "-Y", flag, str(number), mount["source"].removeprefix("/dev/")]
    return ["quota", "-w", "-p", "-v", flag, f"--filesystem={mount['point']}"]


def parse(command: str, text: str, mount: dict[str, Any]) -> dict[str, int] | None:
    """Read what a command has printed; None if there is no quota.

    Raises:
        ValueError, LookupError: if it is something else.
    """
    if command == "mmlsquota":  # a line of names, and one of values
        rows = [line.split(":") for line in text.splitlines() if line.startswith("mmlsquota:")]
        if len(rows) < 2:
            return None
        row = dict(zip(rows[0], rows[1], strict=False))
        columns = [row[f"{what}{kind}"] for what in ("block", "files") for kind in ("Usage", "Quota", "Limit")]
    else:  # the file system, and KiB, quota, limit, grace, files, quota, limit, grace
        words = text.split()
        name = next((name for name in (mount["point"], mount["source"]) if name in words), None)
        if name is None:
            return None
        columns = words[words.index(name) + 1 :][:7]
        del columns[3]
    used, soft, hard, files, few, many = (int(column.strip("*[]").replace("-", "0")) for column in columns)
    return {"bytes": used * 1024, "most_bytes": (hard or soft) * 1024, "files": files, "most_files": many or few}
