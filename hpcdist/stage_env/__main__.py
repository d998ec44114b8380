"""The command ``python -m hpcdist.stage_env``. It imports no torch: it runs from the slow file system."""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping

from hpcdist.comm import launcher
from hpcdist.comm.job import job
from hpcdist.control import objects
from hpcdist.errors import HpcdistError, InputError, listed
from hpcdist.formats.paths import shown
from hpcdist.process import exits, streams
from hpcdist.runtime.commandline import BAD_INPUT, Parser, line, path, plural, show_bytes
from hpcdist.stage_env import copies
from hpcdist.stage_env.archive import Request
from hpcdist.stage_env.stage import Options, Staged, stage
from hpcdist.stage_env.transfer import VERB
from hpcdist.watch.deadlines import deadline

_NAME = "hpcdist.stage_env"
# Where batch systems say which job this is: a copy may serve several jobs.
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID", "OAR_JOB_ID", "JOB_ID")
_TASKS = {"LSB_JOBID": "LSB_JOBINDEX", "JOB_ID": "SGE_TASK_ID"}  # where all jobs of an array have one number


def parser() -> Parser:
    """Return the parser. It does not ask MPI for the rank: --cleanup and --help need no MPI."""
    p = Parser(
        prog=_NAME,
        description="Copy an environment, a folder or a file from a shared file system to every node's own disk: one "
        "rank reads it, once, MPI sends it, and its path there is printed.",
        epilog="example: env=$(srun --ntasks-per-node=1 python -m hpcdist.stage_env /shared/venv); "
        'srun "$env/bin/python" train.py. See docs/stage-env.md.',
        prints=lambda: launcher.number(os.environ) == 0,
    )
    p.add_argument("source", nargs="?", type=path, help="venv, conda environment, other folder, or file")
    p.add_argument("--to", type=path, default="/tmp", metavar="DIR", help="folder on each node's own disk (/tmp)")
    p.add_argument("--archive", type=path, metavar="FILE", help="where it is packed (SOURCE.stage_env.tar)")
    p.add_argument("--no-scan", action="store_true", help="take the archive as it is, without a look for changes")
    p.add_argument("--with-base", action="store_true", help="take the venv's base interpreter along")
    p.add_argument("--with", dest="also", type=path, action="append", default=[], metavar="DIR", help="take another "
                   "folder along, such as that of an editable install; may be repeated")  # fmt: skip
    p.add_argument("--readers", type=int, default=1, metavar="N", help="nodes that read the archive in turn (1)")
    p.add_argument("--verify", action="store_true", help="read the copies again, and compare them with what was sent")
    p.add_argument("--job", metavar="NAME", help="what identifies this job to others that use the copy (its number in "
                   "the batch system)")  # fmt: skip
    p.add_argument("--cleanup", type=path, metavar="PATH", help="remove the copy with this path, as it was printed, on "
                   "the nodes on which this runs")  # fmt: skip
    return p


def main(words: list[str]) -> int:
    """Stage or clean up; return the exit status."""
    p = parser()
    args = p.parse_args(words)
    if (args.source is None) == (args.cleanup is None):
        p.error("expected SOURCE, or --cleanup PATH")
    if args.readers < 1:
        p.error(f"--readers {args.readers}: expected 1 at least")
    name = re.sub(r"[^\w.-]", "_", args.job or _job(os.environ)).lstrip(".") or "none"  # it becomes a file's
    return _cleanup(args.cleanup, name) if args.source is None else _stage(args, name)


def _job(environ: Mapping[str, str]) -> str:
    """What the batch system calls this job, or this task of an array; "none" without one."""
    name = next((name for name in _JOBS if environ.get(name)), None)
    if name is None:
        return "none"
    task = environ.get(_TASKS.get(name, ""), "")
    return f"{environ[name]}_{task}" if task.strip("0").isdigit() else environ[name]  # else "0", or "undefined"


def _cleanup(path: str, job: str) -> int:
    """On this node alone, without MPI: it may come after a job that has failed."""
    try:
        users = copies.cleanup(path, job)
    except HpcdistError as error:
        print(f"{_NAME}: error: {line(error)}", file=sys.stderr, flush=True)
        return BAD_INPUT
    if users:
        text = f"{path} stays on {socket.gethostname()}: {listed(users)} may use it"
        print(f"{_NAME}: {shown(text)}", file=sys.stderr, flush=True)
    return 0


def _stage(args: argparse.Namespace, name: str) -> int:
    rank = launcher.number(os.environ)
    try:
        comm = job(None, os.environ)
        rank = comm.rank
        if comm.size > 1:
            exits.install()
        private = comm.Dup()
        limit = objects.run_on_root(private, VERB, _limit)
        request = Request(args.source, args.archive or "", args.with_base, tuple(args.also), not args.no_scan)
        options = Options(args.to, name, args.readers, args.verify, limit)
        done = stage(private, request, options, _note, lambda total: _bar(rank, total))
        private.Free()
    except HpcdistError as error:
        if rank == 0:
            print(f"{_NAME}: error: {line(error)}", file=sys.stderr, flush=True)
        exits.uninstall()  # all ranks have agreed on this status
        return BAD_INPUT
    if rank == 0:
        _report(done)
        print(done.path, flush=True)
    return 0


def _limit() -> float:
    try:
        return deadline(None, os.environ.get("HPCDIST_TIMEOUT"))
    except ValueError as error:
        raise InputError(str(error)) from error


def _note(text: str) -> None:
    print(f"{_NAME}: {shown(text)}", file=sys.stderr, flush=True)


def _bar(rank: int, total: int) -> Callable[[int], object]:
    if rank != 0 or not sys.stderr.isatty():
        return lambda _: None
    from tqdm import tqdm

    bar = tqdm(desc="stage_env", total=total, unit="B", unit_scale=True, unit_divisor=1024)
    return bar.update  # type: ignore[no-any-return]


def _report(done: Staged) -> None:
    """Print what was done, and what is still read from where it was."""
    source = done.source
    size = f"{source.files:,} files and folders, {show_bytes(source.nbytes)}"
    if source.packed is not None:
        _note(f"{source.origin}: packed into {source.path} in {source.packed:.1f} s")
    if done.sent:
        there = f"; {plural(done.nodes - done.sent, 'node')} had it" if done.sent < done.nodes else ""
        _note(f"{source.origin}: {size}: sent to {plural(done.sent, 'node')} in {done.sending:.1f} s{there}")
    else:
        _note(f"{source.origin}: {size}: {plural(done.nodes, 'node')} had it already")
    if source.outside:
        _note(f"still read from where it is: {listed(source.outside)}; --with-base, --with DIR take it along")


if __name__ == "__main__":
    streams.pass_bytes_on()
    with streams.printing(_NAME):
        sys.exit(main(sys.argv[1:]))
