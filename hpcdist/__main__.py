"""The command ``hpcdist NAME``, which is also ``python -m hpcdist NAME``."""

from __future__ import annotations

import argparse
import runpy
import sys

from hpcdist.process.startup import __version__
from hpcdist.runtime.commandline import Parser

# Name -> what it does, the module to run, and words that come before the user's.
COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run a program that is written for torchrun", "hpcdist.run"),
    "gather": ("join arrays from files over the ranks of a job", "hpcdist.gather"),
    "concat": ("join arrays from files, with the result on every rank", "hpcdist.concat"),
    "split": ("split an array into one file per part", "hpcdist.split"),
    "convert": ("copy all tensors of a file or folder to another format", "hpcdist.commands.conversion"),
    "ls": ("list the tensors of a file or folder", "hpcdist.commands.listing", "ls"),
    "verify": ("compare a file or folder with its checksums", "hpcdist.commands.listing", "verify"),
    "doctor": ("diagnose this job, and name the fixes", "hpcdist.tools.doctor"),
    "jobscript": ("write a job script for Slurm, PBS, Flux or LSF", "hpcdist.tools.jobscript"),
    "restarts": ("start the ranks of a job script again after a failure", "hpcdist.tools.restarts"),
    "stage-env": ("copy an environment to every node's own disk, over MPI", "hpcdist.tools.stage_env"),
    "trace": ("report which rank the others waited for, from a run with HPCDIST_TRACE=DIR", "hpcdist.tools.trace"),
    "compare": ("time calls of given shapes, by hand and with hpcdist", "hpcdist.tools.compare"),
    "tune": ("measure the algorithms of calls, and write rules for HPCDIST_TUNE", "hpcdist.tools.tune"),
    "explain": ("explain the code of an error, and name the remedy", "hpcdist.errors.explain"),
}


def main() -> None:
    """Run the command that the first word of the command line names; without one, list the commands."""
    if sys.argv[1:] and sys.argv[1] in COMMANDS:
        _, module, *first = COMMANDS[sys.argv[1]]
        sys.argv[1:2] = first
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    from hpcdist.runtime import world  # imports torch, which some commands do without

    p = Parser(
        prog="hpcdist",
        description="Run a command of hpcdist.",
        formatter_class=argparse.RawTextHelpFormatter,
        prints=world.is_first,  # without MPI, which a login node may refuse to start
    )
    p.add_argument("-V", "--version", action="version", version=f"hpcdist {__version__}")
    commands = "\n".join(f"{name:10} {what}" for name, (what, *_) in COMMANDS.items())
    p.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=f"one of these; each has --help\n{commands}")
    p.parse_args(sys.argv[1:] or ["--help"])


if __name__ == "__main__":
    main()
