"""The command ``python -m hpcdist stage-env``. It imports no torch: it runs from the slow file system."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping

from hpcdist.control import objects
from hpcdist.errors import HpcdistError, InputError
from hpcdist.launch import launcher
from hpcdist.process import abort, streams
from hpcdist.runtime.commandline import BAD_INPUT, Parser, line, path, plural, show_bytes
from hpcdist.tools.stage_env.stage import VERB, Request, Staged, cleanup, stage
from hpcdist.watch.deadlines import deadline, starting_mpi

_NAME = "hpcdist stage-env"
# Where batch systems say which job this is, and which task of an array whose jobs have one number.
_JOBS = (
    "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "LSB_JOBINDEX", "FLUX_JOB_ID", "COBALT_JOBID", "OAR_JOB_ID", "JOB_ID",
    "SGE_TASK_ID",
)  # fmt: skip


def parser() -> Parser:
    """Return the parser. It does not ask MPI for the rank: --cleanup and --help need no MPI."""
    p = Parser(
        prog=_NAME,
        description="Copy an environment, a folder or a file from a shared file system to every node's own disk. One "
        "rank reads it, and MPI sends it. Print the path of the copies.",
        epilog="example: env=$(srun -n $SLURM_NNODES --ntasks-per-node=1 python -m hpcdist stage-env /shared/venv) && "
        'srun "$env/bin/python" train.py. See docs/do/stage-env.md.',
        prints=lambda: launcher.number(os.environ) == 0,
    )
    p.add_argument("source", nargs="?", type=path, help="venv, conda environment, other folder, or file")
    p.add_argument(
        "--to", type=path, default="/tmp", metavar="DIR", help="folder on each node's own disk (default /tmp)"
    )
    p.add_argument("--with", dest="also", type=path, action="append", default=[], metavar="DIR", help="also copy "
                   "another folder, such as that of an editable install; may be repeated")  # fmt: skip
    p.add_argument("--job", metavar="NAME", help="name of this job; jobs with the same name share a copy (default "
                   "its number in the batch system)")  # fmt: skip
    p.add_argument("--cleanup", type=path, metavar="PATH", help="remove the copy with this printed path, on this "
                   "job's nodes")  # fmt: skip
    return p


def main(words: list[str]) -> int:
    """Stage or clean up; return the exit status."""
    p = parser()
    args = p.parse_args(words)
    if (args.source is None) == (args.cleanup is None):
        p.error("expected SOURCE, or --cleanup PATH")
    prints = True  # --cleanup is each node's own; it needs no MPI, which may have failed
    try:
        if args.cleanup is not None:
            cleanup(args.cleanup)
        else:
            prints = launcher.number(os.environ) == 0
            with starting_mpi(None, os.environ.get("HPCDIST_TIMEOUT"), launcher.described(os.environ)):
                comm = launcher.job(None, os.environ).Dup()
            prints = comm.rank == 0
            if comm.size > 1:
                abort.install()
            request = objects.run_on_root(comm, VERB, lambda: request_of(args, os.environ))
            done = stage(comm, request)
            comm.Free()
            if prints:
                _report(done)
                print(done.path, flush=True)
    except HpcdistError as error:
        if prints:
            print(f"{_NAME}: error: {line(error)}", file=sys.stderr, flush=True)
        abort.uninstall()  # all ranks have agreed on this status
        return BAD_INPUT
    return 0


def request_of(args: argparse.Namespace, environ: Mapping[str, str]) -> Request:
    name = args.job or "_".join(filter(None, map(environ.get, _JOBS)))
    try:
        timeout = deadline(None, environ.get("HPCDIST_TIMEOUT"))
    except ValueError as error:
        raise InputError(str(error)) from error
    # The name of the job becomes part of a folder's.
    return Request(args.source, args.to, re.sub(r"[^\w.-]", "_", name), tuple(args.also), timeout)


def _report(done: Staged) -> None:
    source, there = done.source, plural(done.nodes - done.sent, "node")
    size = f"{source.files:,} files and folders, {show_bytes(source.nbytes)}"
    text = f"{size}: copied to {plural(done.sent, 'node')} in {done.seconds:.1f} s, {there} had it already"
    print(f"{_NAME}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    streams.pass_bytes_on()
    with streams.printing(_NAME):
        sys.exit(main(sys.argv[1:]))
