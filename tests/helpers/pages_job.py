"""``pages_job.py FOLDER``: run what FOLDER/task.json lists, one after the other, in one job: see pages.py."""

from __future__ import annotations

import json
import linecache
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from mpi4py import MPI

import hpcdist as hd

FIRST = MPI.COMM_WORLD.rank == 0


def main(folder: Path) -> None:
    results: list[tuple[int, str, str]] = []
    space: dict[str, Any] = {}
    for i, run in enumerate(json.loads((folder / "task.json").read_text())):
        os.chdir(folder / run["page"])
        out, err = folder / f"{i}.out", folder / f"{i}.err"
        if run["fresh"] or not run["code"]:
            hd.finalize()  # the namespace before it has had its own world
        if run["fresh"]:
            space = {"torch": torch, "hd": hd, "staging": hd.staging, "rank": MPI.COMM_WORLD.rank}
            space["size"] = MPI.COMM_WORLD.size
        status = redirected(run, space, out, err)
        worst = max(MPI.COMM_WORLD.allgather(status))
        if FIRST:
            results.append((worst, out.read_text(errors="replace"), err.read_text(errors="replace")))
            out.unlink()
            err.unlink()
            (folder / "result.json").write_text(json.dumps(results))
        MPI.COMM_WORLD.Barrier()


def redirected(run: dict[str, Any], space: dict[str, Any], *paths: Path) -> int:
    """Run one with files for its standard streams; returns its status."""
    before = [os.dup(fd) for fd in (1, 2)]
    for fd, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), fd)
    MPI.COMM_WORLD.Barrier()
    try:
        return snippet(run, space) if run["code"] else program(run["words"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, old in zip((1, 2), before, strict=True):
            os.dup2(old, fd)
            os.close(old)


def snippet(run: dict[str, Any], space: dict[str, Any]) -> int:
    """Run code of a page, in the world of its namespace; an error ends the job, as it would end the reader's."""
    name = f"docs/{run['page']}"
    linecache.cache[name] = len(run["code"]), None, run["code"].splitlines(keepends=True), name
    hd.init(device="cpu")
    try:
        exec(compile(run["code"], name, "exec"), space)
    except Exception:
        end()
    return 0


def end() -> NoReturn:
    """Print the error at hand, and end the job."""
    traceback.print_exc()
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)
    raise AssertionError


def program(words: list[str]) -> int:
    """Run a program or a module as Python does."""
    module = words[0] == "-m"
    sys.argv = words[1:] if module else words
    path, modules, environ = list(sys.path), set(sys.modules), dict(os.environ)
    sys.path.insert(0, os.getcwd())
    try:
        if module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        hd.finalize()  # as at the end of a process
        if dist.is_initialized():
            dist.destroy_process_group()
    except SystemExit as left:
        return int(left.code or 0)
    except Exception:
        end()
    finally:
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environ)
        for name in (
            sys.modules.keys() - modules
        ):  # other programs of the page, by whose names another page may have others
            if (
                getattr(sys.modules[name], "__file__", None)
                and Path(str(sys.modules[name].__file__)).parent == Path.cwd()
            ):
                del sys.modules[name]
    return 0


main(Path(sys.argv[1]))
