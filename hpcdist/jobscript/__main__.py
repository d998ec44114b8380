"""The command ``python -m hpcdist.jobscript``: write a job script. It needs neither MPI nor a scheduler."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

from hpcdist.errors import InputError, reason
from hpcdist.jobscript import (
    BINDINGS,
    KINDS,
    LAUNCHERS,
    OTHER_PMIS,
    PMI_OF_IMAGES,
    PMIS,
    SCHEDULERS,
    Shape,
    option,
    write,
)  # fmt: skip
from hpcdist.process.streams import pass_bytes_on, printing
from hpcdist.runtime.commandline import Parser, path

_SECONDS = 20.0
_VENDOR = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"


def main(words: list[str]) -> None:
    """Write the script to the file that is named, or to standard output."""
    p = parser()
    given = vars(p.parse_args(words))
    script = given.pop("script", None)
    given.setdefault("kind", "gpu" if given.get("gpus_per_node") else "cpu")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    given["command"] = given.get("command") or None
    shape = Shape(**given)
    if shape.plain and (shape.scheduler, shape.mpi) == ("slurm", "auto"):
        shape = replace(shape, mpi=pmi(shape))
    try:
        text = write(shape)
    except InputError as error:
        p.error(str(error))
    if script is None:
        print(text, end="", flush=True)
        return
    try:
        Path(script).write_bytes(os.fsencode(text))
    except OSError as error:
        p.error(f"{script}: cannot be written: {reason(error)}")


def pmi(shape: Shape) -> str:
    """Return the PMI of srun that the MPI library of the ranks understands; "default", the cluster's, if that is not
    known: mpi4py or srun is not here, or the library is in an Apptainer image."""
    if shape.pyxis:
        return PMI_OF_IMAGES
    if shape.apptainer:
        return "default"
    library = _printed([sys.executable, "-c", _VENDOR]).strip()
    listed = re.findall(r"\w+", _printed(["srun", "--mpi=list"]))
    return next((one for one in PMIS.get(library, OTHER_PMIS) if library and one in listed), "default")


def _printed(command: list[str]) -> str:
    """Return the output of a command; nothing if it fails or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


# What --help says of each option: of each field of Shape.
_HELP = {
    "kind": "kind of job (default gpu with --gpus-per-node, else cpu)",
    "scheduler": "scheduler of the cluster (default slurm)",
    "plain": "minimal; everything is decided when it is written",
    "nodes": "number of nodes (default 2)",
    "ntasks_per_node": "ranks per node (default one per GPU, or 4)",
    "gpus_per_node": "GPUs per node, for Slurm also their type (default 4 for kind gpu, else none)",
    "cpus_per_task": "cores per rank (default 8 with a GPU, else 1)",
    "mem": "memory per node, such as 64G (default the cluster's; not with Flux, jsrun)",
    "time": "time limit: 90 minutes as 90, 01:30:00 or 0-1:30 (default 00:10:00)",
    "partition": "partition or queue of the cluster (default the cluster's)",
    "account": "account, project or bank to charge (default yours)",
    "qos": "quality of service (Slurm)",
    "constraint": "required features of the nodes, in the scheduler's words",
    "exclusive": "do not share the nodes with other jobs",
    "output": "file for the job's output, with the scheduler's patterns",
    "name": "name of the job (default hpcdist-KIND)",
    "array": "for kind array: 0-3, 1,5,7 or 0-99%%10 (default 0-3; LSF 1-4)",
    "warning": "for kind requeue: seconds before the limit (default 120)",
    "launcher": "launcher of the ranks (default the scheduler's first)",
    "mpi": "PMI of srun: pmix, pmi2, ..., or default for the cluster's (default auto)",
    "bind": "bind each rank to the cores beside its GPU, to its own cores, or not (default gpu with a GPU per rank)",
    "modules": "module to load; may be repeated",
    "venv": "virtual environment to activate",
    "conda": "conda environment to activate, by name or folder",
    "stage_env": "first copy the environment to every node's own disk",
    "apptainer": "Apptainer or Singularity image in which the ranks run",
    "pyxis": "image in which the ranks run, for Slurm with Pyxis",
    "mounts": "folder to mount in the container, in addition to the current one; may be repeated",
    "directives": "any other option of the scheduler, such as mail-type=END; may be repeated",
}
_CHOICES = {"kind": KINDS, "scheduler": SCHEDULERS, "launcher": LAUNCHERS, "bind": BINDINGS}
_METAVARS = {"gpus_per_node": "[TYPE:]N", "mounts": "DIR[:INSIDE]", "directives": "KEY[=VALUE]", "venv": "DIR"}
_ALSO = {"partition": "--queue", "directives": "--sbatch"}  # other names of options


def parser() -> Parser:
    """Return the parser of python -m hpcdist.jobscript. It runs on login nodes, and does not ask MPI for the rank."""
    p = Parser(
        prog="hpcdist jobscript",
        description="Write a job script. Without options it is for Slurm, and 2 nodes with 4 CPU ranks each.",
        epilog="example: python -m hpcdist.jobscript --nodes 4 --gpus-per-node 8 -o job.sbatch -- python train.py",
        argument_default=argparse.SUPPRESS,
        prints=lambda: True,
    )
    for field in fields(Shape):
        if (text := _HELP.get(field.name)) is None:
            continue
        names = (option(field), *filter(None, [_ALSO.get(field.name)]))
        if field.default is False:
            p.add_argument(*names, action="store_true", help=text)
            continue
        number, several = "int" in str(field.type), field.default == ()
        p.add_argument(
            *names, dest=field.name, help=text, type=int if number else str, choices=_CHOICES.get(field.name),
            action="append" if several else "store", metavar=_METAVARS.get(field.name, "N" if number else None),
        )  # fmt: skip
    p.add_argument("-o", "--script", type=path, metavar="FILE", help="file to write (default standard output)")
    p.add_argument("command", nargs="*", metavar="COMMAND", help="each rank's program, after -- (default the kind's)")
    return p


if __name__ == "__main__":
    pass_bytes_on()
    with printing("hpcdist jobscript"):
        main(sys.argv[1:])
