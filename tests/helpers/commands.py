"""``commands.py FOLDER LINES``: run one command after the other in one job, as often as one import of torch is enough.

What the ranks print, and the status with which each would end, are in files of FOLDER: see launch.commands().
"""

from __future__ import annotations

import json
import os
import runpy
import sys

from mpi4py import MPI


def run(line: list[str], out: str, err: str) -> int:
    """A command as ``python -m`` runs it, with files for its standard streams; returns its status."""
    before = [os.dup(fd) for fd in (1, 2)]
    for fd, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), fd)
    sys.argv = line
    try:
        runpy.run_module(line[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, old in zip((1, 2), before, strict=True):
            os.dup2(old, fd)
    return 0


def main(folder: str, lines: str) -> None:
    statuses = []
    for i, words in enumerate(json.loads(lines)):
        line = [os.fsdecode(word.encode(errors="surrogateescape")) for word in words]  # as this locale has them
        status = run(line, f"{folder}/{i}.out", f"{folder}/{i}.err")
        statuses.append(MPI.COMM_WORLD.allgather(status))
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(statuses))


if __name__ == "__main__":
    main(*sys.argv[1:])
