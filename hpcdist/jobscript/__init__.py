"""Write Slurm job scripts: one text for each shape of a job. Integers and strings only: no torch, no MPI, no Slurm.

The scripts in jobscripts/ are exactly what :func:`write` returns for each kind by default.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields

from hpcdist.errors import InputError
from hpcdist.jobscript import parts

__all__ = ["KINDS", "LAUNCHERS", "MPIS", "Shape", "write"]

KINDS = tuple(parts.KINDS)
LAUNCHERS = ("srun", "mpirun")
MPIS = ("auto", "pmix", "pmi2")

_MIN_WARNING = 60  # seconds: Slurm may send the signal so much earlier than requested


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a job. None leaves a value to the kind.

    Attributes:
        kind: "cpu", CPU ranks over MPI; "gpu", one GPU a rank with NCCL; "train", a training with torch's
            DistributedDataParallel; "staged", from files to one HDF5 file, nothing held in memory; "array", several
            jobs of one script; "interactive", an allocation to work in; "requeue", a job that returns to the queue
            before its time limit and continues from its staged file.
        nodes: number of nodes.
        ntasks_per_node: ranks on each node; by default 4, or one for each GPU.
        gpus_per_node: GPUs of each node, at most one a rank; by default 4 for the kind "gpu", else 0.
        cpus_per_task: cores of each rank; by default 1, or 8 with a GPU.
        time: time limit in Slurm's notation: "90" minutes, "01:30:00", "2-12:00:00".
        partition, account: names on the cluster; None for the cluster's defaults.
        name: name of the job; hpcdist-KIND if None.
        array: indices of the kind "array" in Slurm's notation: "0-3", "1,5,7", "0-99%10".
        warning: for the kind "requeue": seconds before the limit at which the job ends its step and leaves.
        launcher: "srun" or "mpirun", unless HPCDIST_LAUNCHER is set when the job is submitted.
        mpi: PMI of srun, "pmix" or "pmi2"; "auto" chooses in the job, from mpi4py's MPI library.
        modules: names for ``module load``.
        venv: folder of the virtual environment to activate, or None.
        command: program of each rank, followed by the arguments of the script.
    """

    kind: str = "cpu"
    nodes: int = 2
    ntasks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    time: str = "00:10:00"
    partition: str | None = None
    account: str | None = None
    name: str | None = None
    array: str = "0-3"
    warning: int = 120
    launcher: str = "srun"
    mpi: str = "auto"
    modules: tuple[str, ...] = ()
    venv: str | None = None
    command: tuple[str, ...] | None = None

    def gpus(self) -> int:
        """Return the GPUs of a node."""
        return (4 if self.kind == "gpu" else 0) if self.gpus_per_node is None else self.gpus_per_node

    def ranks(self) -> int:
        """Return the ranks of a node."""
        return (self.gpus() or 4) if self.ntasks_per_node is None else self.ntasks_per_node

    def cpus(self) -> int:
        """Return the cores of a rank."""
        return (8 if self.gpus() else 1) if self.cpus_per_task is None else self.cpus_per_task


def write(shape: Shape) -> str:
    """Return the job script of a shape. Nothing is read, written or started.

    Raises:
        InputError: the shape is impossible: no nodes, more GPUs than ranks, a malformed time limit, and so on.

    Example::

        >>> print(write(Shape(kind="gpu", nodes=4, gpus_per_node=8)))
        #!/bin/bash
        # One GPU a rank, NCCL: sbatch gpu.sbatch 'shards/*.npy'
        ...
    """
    _check(shape)
    kind = parts.KINDS[shape.kind]
    command = kind.command if shape.command is None else shape.command
    blocks = [
        "\n".join([parts.head(shape.kind, _asked(shape), shape.command is not None), *_directives(shape)]),
        parts.START,
        kind.before,
        _environment(shape),
        parts.PROGRAM.format(comment=kind.program, program=shlex.join(command)),
        parts.launch(shape.launcher, shape.mpi),
        kind.run.replace("@SAY@", parts.say(shape.kind, shape.gpus() > 0)),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _directives(shape: Shape) -> list[str]:
    kind = shape.kind
    options: Mapping[str, object] = {
        "job-name": shape.name or f"hpcdist-{kind}",
        "nodes": shape.nodes,
        "ntasks-per-node": shape.ranks(),  # --ntasks would let Slurm place 3 on one node and 1 on the other
        "gres": f"gpu:{shape.gpus()}" if shape.gpus() else None,
        "cpus-per-task": shape.cpus(),
        "time": shape.time,
        "partition": shape.partition,
        "account": shape.account,
        "array": shape.array if kind == "array" else None,
        "signal": f"B:USR1@{shape.warning}" if kind == "requeue" else None,
        "open-mode": "append" if kind == "requeue" else None,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    return [*lines, "#SBATCH --requeue"] if kind == "requeue" else lines


def _environment(shape: Shape) -> str:
    loaded = f"module load {shlex.join(shape.modules)}" if shape.modules else "# module load openmpi"
    active = f"source {shlex.quote(shape.venv + '/bin/activate')}" if shape.venv else "# source env/bin/activate"
    return f"{loaded}\n{active}"


def _asked(shape: Shape) -> str:
    """Return the command line that writes this script."""
    words = ["python", "-m", "hpcdist.jobscript", "--kind", shape.kind]
    for field in fields(shape):
        value = getattr(shape, field.name)
        assert field.default is not MISSING
        if field.name not in ("kind", "modules", "command") and value != field.default:
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    for module in shape.modules:
        words += ["--module", module]
    return shlex.join([*words, *(["--", *shape.command] if shape.command else [])])


def _check(shape: Shape) -> None:
    """Raise an InputError if no job can have this shape."""
    for name, known in (("kind", KINDS), ("launcher", LAUNCHERS), ("mpi", MPIS)):
        value = getattr(shape, name)
        _require(value in known, name, value, f"expected one of {', '.join(known)}")
    gpus, ranks = shape.gpus(), shape.ranks()
    for name, count, least in (
        ("nodes", shape.nodes, 1),
        ("gpus-per-node", gpus, 1 if shape.kind == "gpu" else 0),
        ("ntasks-per-node", ranks, 1),
        ("cpus-per-task", shape.cpus(), 1),
    ):
        _require(count >= least, name, count, f"expected at least {least}")
    too_many = f"more than the {ranks} ranks of a node, each of which uses one GPU"
    _require(gpus <= ranks, "gpus-per-node", gpus, too_many)
    too_few = f"more than the {gpus} GPUs of a node, and NCCL takes one rank a GPU"
    _require(shape.kind not in ("gpu", "train") or gpus in (0, ranks), "ntasks-per-node", ranks, too_few)
    limit = _seconds(shape.time)
    within = f"expected {_MIN_WARNING} seconds at least, and less than the time limit of {limit} seconds"
    _require(shape.kind != "requeue" or _MIN_WARNING <= shape.warning < limit, "warning", shape.warning, within)
    indices = re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%[1-9]\d*)?", shape.array)
    _require(bool(indices), "array", shape.array, "expected indices such as 0-3, 1,5,7 or 0-99%10")
    for name in ("partition", "account", "name"):
        text = getattr(shape, name)
        right = text is None or bool(re.fullmatch(r"[\w.,+@%-]+", text))
        _require(right, name, repr(text), "expected letters, digits and .,+@%-_")
    for text in (*shape.modules, shape.venv or "", *(shape.command or ())):
        if "\n" in text:
            raise InputError("HD801", f"{text!r}: a line break cannot be in a job script's line")


def _require(right: bool, option: str, value: object, problem: str) -> None:
    if not right:
        raise InputError("HD801", f"--{option} {value}: {problem}")


def _seconds(time: str) -> int:
    """Return the seconds of a time limit in any of Slurm's notations."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise InputError(
            "HD801", f"--time {time}: expected minutes, hours:minutes:seconds or days-hours:minutes:seconds"
        )
    days = int(match[1] or 0)
    given = [int(part) for part in match.groups()[1:] if part is not None]
    if match[1] is None and len(given) < 3:
        given.insert(0, 0)  # minutes, or minutes:seconds; otherwise hours come first
    hours, minutes, seconds = [*given, 0, 0][:3]
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise InputError("HD801", f"--time {time}: expected more than 0 seconds")
    return total
