"""The command ``python -m hpcdist.jobscript``: write a Slurm job script. It needs neither MPI nor Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

from hpcdist.errors import InputError, reason
from hpcdist.jobscript import KINDS, LAUNCHERS, MPIS, Shape, write
from hpcdist.process.streams import printing
from hpcdist.runtime.cli import Parser, path


def main(words: list[str]) -> None:
    """Write the script to the file that is named, or to standard output."""
    p = parser()
    given = {name: value for name, value in vars(p.parse_args(words)).items() if value is not None}
    output = given.pop("output", None)
    given.setdefault("kind", "gpu" if given.get("gpus_per_node") else "cpu")
    given["modules"] = tuple(given["modules"])
    given["command"] = tuple(given["command"]) or None
    try:
        text = write(Shape(**given))
    except InputError as error:
        p.error(str(error))
    if output is None:
        print(text, end="", flush=True)
        return
    try:
        Path(output).write_text(text)
    except OSError as error:
        p.error(f"{output}: cannot be written: {reason(error)}")


def parser() -> Parser:
    """Return the parser of python -m hpcdist.jobscript. It runs on login nodes, and does not ask MPI for the rank."""
    p = Parser(
        prog="hpcdist.jobscript",
        description="Write a Slurm job script for the shape of a job. Without options: 2 nodes with 4 CPU ranks each.",
        epilog="example: python -m hpcdist.jobscript --nodes 4 --gpus-per-node 8 -o job.sbatch -- python train.py",
        prints=lambda: True,
    )
    p.add_argument("--kind", choices=KINDS, help="kind of job (default gpu with --gpus-per-node, else cpu)")
    p.add_argument("--nodes", type=int, help="number of nodes (default 2)")
    p.add_argument("--ntasks-per-node", type=int, metavar="N", help="ranks of a node (default one for each GPU, or 4)")
    p.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of a node (default 4 for kind gpu, else none)")
    p.add_argument("--cpus-per-task", type=int, metavar="N", help="cores of a rank (default 8 with a GPU, else 1)")
    p.add_argument("--time", help="time limit: 90 minutes as 90, 01:30:00 or 0-1:30 (default 00:10:00)")
    p.add_argument("--partition", help="partition of the cluster (default the cluster's)")
    p.add_argument("--account", help="account to charge (default yours)")
    p.add_argument("--name", help="name of the job (default hpcdist-KIND)")
    p.add_argument("--array", metavar="INDICES", help="for kind array: 0-3, 1,5,7 or 0-99%%10 (default 0-3)")
    p.add_argument("--warning", type=int, metavar="SECONDS", help="for kind requeue: before the limit (default 120)")
    p.add_argument("--launcher", choices=LAUNCHERS, help="launcher unless HPCDIST_LAUNCHER is set (default srun)")
    p.add_argument("--mpi", choices=MPIS, help="PMI of srun (default auto: found in the job)")
    p.add_argument("--module", dest="modules", action="append", default=[], help="module to load; may be repeated")
    p.add_argument("--venv", metavar="DIR", help="virtual environment to activate")
    p.add_argument("-o", "--output", type=path, metavar="FILE", help="file to write (default standard output)")
    p.add_argument("command", nargs="*", metavar="COMMAND", help="program of a rank, after -- (default hpcdist.gather)")
    return p


if __name__ == "__main__":
    with printing("hpcdist.jobscript"):
        main(sys.argv[1:])
