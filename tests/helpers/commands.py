"""``commands.py FOLDER``: run what FOLDER/task.json lists, one after the other, in one job: see launch.together().

A step has "words", which are Python's arguments after variables (``NAME=VALUE``, where {rank} is the rank), or "code",
which goes on in one namespace, or in a new one if it is "fresh". It runs in the folder "cwd".
"""

import json
import linecache
import os
import re
import runpy
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI

import hpcdist as hd

COMM = MPI.COMM_WORLD


def main(folder):
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # PYTHONUNBUFFERED makes two writes of a line
    results = []
    space = {}
    for i, step in enumerate(json.loads((folder / "task.json").read_text())):
        os.chdir(step["cwd"])
        out, err = folder / f"{i}.out", folder / f"{i}.err"
        if step["fresh"] or not step["code"]:
            hd.finalize()  # the namespace before it has had its own world
        if step["fresh"]:
            space = {"torch": torch, "hd": hd, "staging": hd.staging, "rank": COMM.rank, "size": COMM.size}
        status = max(COMM.allgather(redirected(step, space, out, err)))
        if COMM.rank == 0:
            results.append((status, out.read_text(errors="replace"), err.read_text(errors="replace")))
            out.unlink()
            err.unlink()
            (folder / "result.json").write_text(json.dumps(results))
        COMM.Barrier()


def redirected(step, space, *paths):
    """Run one with files for its standard streams; returns its status."""
    before = [os.dup(fd) for fd in (1, 2)]
    for fd, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), fd)
    COMM.Barrier()
    try:
        return snippet(step, space) if step["code"] else program(step["words"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, old in zip((1, 2), before, strict=True):
            os.dup2(old, fd)
            os.close(old)


def snippet(step, space):
    """Run code of a page, in the world of its namespace; an error ends the job, as it would end the reader's."""
    name = f"docs/{step['page']}"
    linecache.cache[name] = len(step["code"]), None, step["code"].splitlines(keepends=True), name
    hd.init(device="cpu")
    try:
        exec(compile(step["code"], name, "exec"), space)
    except Exception:
        end()
    return 0


def end():
    """Print the error at hand, and end the job."""
    traceback.print_exc()
    sys.stderr.flush()
    COMM.Abort(1)
    raise AssertionError


def program(words):
    """Run a program, a module or code as Python does."""
    path, modules, environ, status = list(sys.path), set(sys.modules), dict(os.environ), 0
    words = [os.fsdecode(word.encode(errors="surrogateescape")) for word in words]  # as this locale has them
    while found := re.match(r"([A-Z_0-9]+)=(.*)", words[0]):
        os.environ[found[1]] = found[2].format(rank=COMM.rank)
        del words[0]
    kind, *rest = words
    sys.argv = rest if kind == "-m" else [kind, *rest[1:]] if kind == "-c" else words
    sys.path.insert(0, os.getcwd())
    try:
        if kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(kind, run_name="__main__")
        hd.finalize()  # as at the end of a process
        if dist.is_initialized():
            dist.destroy_process_group()
    except SystemExit as left:
        status = int(left.code or 0)
    except Exception:
        end()
    finally:
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environ)
        for name in sys.modules.keys() - modules:  # by whose names another page may have other programs
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == Path.cwd():
                del sys.modules[name]
    return status


main(Path(sys.argv[1]))
