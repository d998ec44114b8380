"""The command ``python -m hpcdist.jobscript``: write a job script. It needs neither MPI nor a scheduler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from hpcdist.errors import InputError, reason
from hpcdist.jobscript import write
from hpcdist.jobscript.shape import BINDINGS, KINDS, LAUNCHERS, OTHER_PMIS, PMI_OF_IMAGES, PMIS, SCHEDULERS, Shape
from hpcdist.process.streams import pass_bytes_on, printing
from hpcdist.runtime.cli import Parser, path

_SECONDS = 20.0
_VENDOR = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"


def main(words: list[str]) -> None:
    """Write the script to the file that is named, or to standard output."""
    p = parser()
    given = {name: value for name, value in vars(p.parse_args(words)).items() if value is not None}
    script = given.pop("script", None)
    given.setdefault("kind", "gpu" if given.get("gpus_per_node") else "cpu")
    for several in ("modules", "mounts", "directives"):
        given[several] = tuple(given[several])
    given["command"] = tuple(given["command"]) or None
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
    """Return what a command prints; nothing if it fails or is not here."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


def parser() -> Parser:
    """Return the parser of python -m hpcdist.jobscript. It runs on login nodes, and does not ask MPI for the rank."""
    p = Parser(
        prog="hpcdist jobscript",
        description="Write a job script. Without options it is for Slurm, and 2 nodes with 4 CPU ranks each.",
        epilog="example: python -m hpcdist.jobscript --nodes 4 --gpus-per-node 8 -o job.sbatch -- python train.py",
        prints=lambda: True,
    )
    _shape(p)
    _requests(p)
    _launch(p)
    p.add_argument("-o", "--script", type=path, metavar="FILE", help="file to write (default standard output)")
    p.add_argument("command", nargs="*", metavar="COMMAND", help="each rank's program, after -- (default the kind's)")
    return p


def _shape(p: Parser) -> None:
    p.add_argument("--kind", choices=KINDS, help="kind of job (default gpu with --gpus-per-node, else cpu)")
    p.add_argument("--scheduler", choices=SCHEDULERS, help="scheduler of the cluster (default slurm)")
    p.add_argument("--plain", action="store_true", help="minimal; everything is decided when it is written")
    p.add_argument("--nodes", type=int, help="number of nodes (default 2)")
    p.add_argument("--ntasks-per-node", type=int, metavar="N", help="ranks per node (default one per GPU, or 4)")
    p.add_argument(
        *("--gpus-per-node", "--gpus"),
        metavar="[TYPE:]N",
        help="GPUs per node, for Slurm also their type (default 4 for kind gpu, else none)",
    )
    p.add_argument("--cpus-per-task", type=int, metavar="N", help="cores per rank (default 8 with a GPU, else 1)")
    p.add_argument("--array", metavar="INDICES", help="for kind array: 0-3, 1,5,7 or 0-99%%10 (default 0-3; LSF 1-4)")
    p.add_argument("--warning", type=int, metavar="SECONDS", help="for kind requeue: before the limit (default 120)")


def _requests(p: Parser) -> None:
    p.add_argument("--mem", help="memory per node, such as 64G (default the cluster's; not with Flux, jsrun)")
    p.add_argument("--time", help="time limit: 90 minutes as 90, 01:30:00 or 0-1:30 (default 00:10:00)")
    p.add_argument("--partition", "--queue", help="partition or queue of the cluster (default the cluster's)")
    p.add_argument("--account", help="account, project or bank to charge (default yours)")
    p.add_argument("--qos", help="quality of service (Slurm)")
    p.add_argument("--constraint", help="required features of the nodes, in the scheduler's words")
    p.add_argument("--exclusive", action="store_true", help="do not share the nodes with other jobs")
    p.add_argument("--output", metavar="FILE", help="file for the job's output, with the scheduler's patterns")
    p.add_argument("--name", help="name of the job (default hpcdist-KIND)")
    p.add_argument(
        *("--directive", "--sbatch"),
        dest="directives",
        action="append",
        default=[],
        metavar="KEY[=VALUE]",
        help="any other option of the scheduler, such as mail-type=END; may be repeated",
    )


def _launch(p: Parser) -> None:
    p.add_argument("--launcher", choices=LAUNCHERS, help="launcher of the ranks (default the scheduler's first)")
    p.add_argument("--mpi", help="PMI of srun: pmix, pmi2, ..., or default for the cluster's (default auto)")
    p.add_argument(
        *("--bind",),
        choices=BINDINGS,
        help="bind each rank to the cores beside its GPU, to its own cores, or not (default gpu with a GPU per rank)",
    )
    p.add_argument("--module", dest="modules", action="append", default=[], help="module to load; may be repeated")
    p.add_argument("--venv", metavar="DIR", help="virtual environment to activate")
    p.add_argument("--conda", metavar="ENV", help="conda environment to activate, by name or folder")
    p.add_argument("--stage-env", action="store_true", help="first copy the environment to every node's own disk")
    p.add_argument("--apptainer", metavar="IMAGE", help="Apptainer or Singularity image in which the ranks run")
    p.add_argument("--pyxis", metavar="IMAGE", help="image in which the ranks run, for Slurm with Pyxis")
    p.add_argument(
        *("--mount",),
        dest="mounts",
        action="append",
        default=[],
        metavar="DIR[:INSIDE]",
        help="folder to mount in the container, beside the current one; may be repeated",
    )


if __name__ == "__main__":
    pass_bytes_on()
    with printing("hpcdist jobscript"):
        main(sys.argv[1:])
