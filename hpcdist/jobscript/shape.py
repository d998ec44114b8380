"""The shape of a job, and which shapes no job can have."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpcdist.errors import InputError
from hpcdist.jobscript.schedulers import SCHEDULERS, Scheduler

__all__ = ["BINDINGS", "KINDS", "LAUNCHERS", "Shape", "check", "seconds"]

KINDS = ("cpu", "gpu", "train", "staged", "array", "interactive", "requeue")
LAUNCHERS = tuple(dict.fromkeys(name for one in SCHEDULERS.values() for name in one.launchers))
BINDINGS = ("none", "cores", "gpu")

_EVERYWHERE = ("cpu", "gpu", "train", "staged")  # kinds that every scheduler has
_PLAIN = ("cpu", "gpu", "train")
_MIN_WARNING = 60  # seconds: Slurm may send the signal so much earlier than requested


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a job. None leaves a value to the kind, or to the cluster.

    Attributes:
        kind: "cpu", CPU ranks over MPI; "gpu", one GPU a rank with NCCL; "train", a training with torch's
            DistributedDataParallel; "staged", from files to one HDF5 file, nothing held in memory; "array", several
            jobs of one script (not Flux); "interactive", an allocation to work in (Slurm); "requeue", a job that
            returns to the queue before its time limit and continues from its staged file (Slurm).
        scheduler: "slurm", "pbs", "flux" or "lsf".
        plain: whether the script is a dozen lines that end in ``srun python train.py``, with nothing left to decide
            in the job; kinds "cpu", "gpu" and "train".
        nodes: number of nodes.
        ntasks_per_node: ranks on each node; by default 4, or one for each GPU.
        gpus_per_node: GPUs of each node, at most one a rank: "4", or under Slurm with their type, "a100:4"; by default
            4 for the kind "gpu", else none.
        cpus_per_task: cores of each rank; by default 1, or 8 with a GPU.
        mem: memory of each node: "64G".
        time: time limit in Slurm's notation: "90" minutes, "01:30:00", "2-12:00:00".
        partition, account, qos, constraint: names on the cluster: a queue; a project or bank; Slurm's alone; what
            nodes must have, in the words of the scheduler.
        exclusive: whether the nodes are for this job alone.
        output: file for what the job prints, with the scheduler's own patterns.
        name: name of the job; hpcdist-KIND if None.
        array: for the kind "array": indices in Slurm's notation: "1,5,7", "0-99%10"; by default 0-3, or 1-4 for LSF.
        warning: for the kind "requeue": seconds before the limit at which the job ends its step and leaves; by default
            120.
        launcher: what starts the ranks, one of the scheduler's; its first if None. Under Slurm HPCDIST_LAUNCHER
            overrides it when the job is submitted.
        mpi: PMI of srun: "pmix", "pmi2", ...; "default", that of the cluster; "auto" chooses in the job, from mpi4py's
            MPI library and ``srun --mpi=list``.
        bind: "gpu", each rank to the cores beside its GPU; "cores", to cores of its own; "none", as the scheduler does
            by itself. By default "gpu" with a GPU for each rank, else "none".
        modules: names for ``module load``.
        venv, conda: folder of the virtual environment, or name or folder of the conda environment, to activate.
        stage_env: whether the active virtual or conda environment is first copied to every node's own disk, for the
            ranks to use.
        apptainer, pyxis: image of the container that the ranks run in.
        mounts: for a container: folders to mount beside the current one, "FOLDER" or "FOLDER:INSIDE".
        directives: further options of the scheduler: "KEY=VALUE" or "KEY".
        command: program of each rank, followed by the arguments of the script.
    """

    kind: str = "cpu"
    scheduler: str = "slurm"
    plain: bool = False
    nodes: int = 2
    ntasks_per_node: int | None = None
    gpus_per_node: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    time: str = "00:10:00"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclusive: bool = False
    output: str | None = None
    name: str | None = None
    array: str | None = None
    warning: int | None = None
    launcher: str | None = None
    mpi: str = "auto"
    bind: str | None = None
    modules: tuple[str, ...] = ()
    venv: str | None = None
    conda: str | None = None
    stage_env: bool = False
    apptainer: str | None = None
    pyxis: str | None = None
    mounts: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    command: tuple[str, ...] | None = None

    def gpus(self) -> int:
        """Return the number of GPUs of a node."""
        if self.gpus_per_node is None:
            return 4 if self.kind == "gpu" else 0
        return int(self.gpus_per_node.rpartition(":")[2])

    def ranks(self) -> int:
        """Return the ranks of a node."""
        return (self.gpus() or 4) if self.ntasks_per_node is None else self.ntasks_per_node

    def cpus(self) -> int:
        """Return the cores of a rank."""
        return (8 if self.gpus() else 1) if self.cpus_per_task is None else self.cpus_per_task

    def indices(self) -> str:
        """Return the indices of an array."""
        return ("1-4" if self.scheduler == "lsf" else "0-3") if self.array is None else self.array

    def notice(self) -> int:
        """Return how many seconds before the limit a job of the kind "requeue" leaves."""
        return 120 if self.warning is None else self.warning

    def start(self) -> str:
        """Return what starts the ranks."""
        return self.launcher or SCHEDULERS[self.scheduler].launchers[0]

    def binding(self) -> str:
        """Return what the ranks are bound to."""
        own_gpu = self.gpus() == self.ranks() and not self.plain
        return ("gpu" if own_gpu else "none") if self.bind is None else self.bind


def check(shape: Shape) -> None:
    """Raise an InputError if no job can have this shape."""
    _one_of("scheduler", shape.scheduler, tuple(SCHEDULERS))
    scheduler = SCHEDULERS[shape.scheduler]
    _one_of("kind", shape.kind, KINDS)
    kinds = _PLAIN if shape.plain else (*_EVERYWHERE, *scheduler.kinds)
    only = "with --plain" if shape.plain else f"for --scheduler {shape.scheduler}"
    _require(shape.kind in kinds, "kind", shape.kind, f"expected one of {', '.join(kinds)} {only}")
    given = shape.gpus_per_node
    typed = r"(\w[\w.-]*:)?[0-9]{1,6}" if shape.scheduler == "slurm" else r"[0-9]{1,6}"
    right = given is None or bool(re.fullmatch(typed, given))
    _require(right, "gpus-per-node", given, "expected a number, or under Slurm TYPE:NUMBER")
    _one_of("launcher", shape.start(), scheduler.launchers)
    _one_of("bind", shape.binding(), BINDINGS)
    _check_numbers(shape)
    _check_names(shape)
    _check_options(shape, scheduler)
    _check_array(shape)
    _check_warning(shape)


def _check_numbers(shape: Shape) -> None:
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
    one_each = shape.kind in ("gpu", "train") or shape.scheduler == "flux" or shape.binding() == "gpu"
    _require(not one_each or gpus in (0, ranks), "ntasks-per-node", ranks, too_few)
    _require(shape.binding() != "gpu" or gpus > 0, "bind", "gpu", "expected --gpus-per-node, too")


def _check_names(shape: Shape) -> None:
    blank, no_spaces = (r"\n", "") if shape.scheduler == "lsf" else (r"\s", " and spaces: a&b")  # LSF's line has quotes
    for name, pattern, expected in (
        *((name, r"[\w.,+@%-]+", "letters, digits and .,+@%-_") for name in ("partition", "account", "qos", "name")),
        ("mpi", r"\w+", "auto, default, or a name that srun --mpi=list shows"),
        ("mem", r"[1-9][0-9]*[KMGT]" + ("?|0" if shape.scheduler == "slurm" else ""), "a number with K, M, G or T"),
        ("constraint", rf"""[^{blank}"'\\$`#]+""", f"the scheduler's words, without quotes{no_spaces}"),
        ("output", r"""[^\s"'\\#]+""", "a path without spaces, quotes and #"),
    ):
        value = getattr(shape, name)
        _require(value is None or bool(re.fullmatch(pattern, value)), name, repr(value), f"expected {expected}")
    for text in shape.directives:
        right = re.fullmatch(r"[A-Za-z][\w-]*(=.+)?", text)
        _require(bool(right), "directive", repr(text), "expected KEY=VALUE or KEY, KEY without dashes before it")
    for text in (*shape.modules, *(shape.command or ()), *_environments(shape).values()):
        if "\n" in text:
            raise InputError("HD801", f"{text!r}: a line break cannot be in a job script's line")


def _environments(shape: Shape) -> dict[str, str]:
    given = {name: getattr(shape, name) for name in ("venv", "conda", "apptainer", "pyxis")}
    return {name: value for name, value in given.items() if value}


def _check_options(shape: Shape, scheduler: Scheduler) -> None:
    for name in scheduler.refuses:
        value = getattr(shape, name)
        _require(not value, name, value, f"--scheduler {shape.scheduler} has no such option")
    needless = f"--scheduler {shape.scheduler} has no such option: it is one of srun"
    _require(shape.mpi == "auto" or shape.scheduler == "slurm", "mpi", shape.mpi, needless)
    for name in ("mem", "constraint") if shape.start() == "jsrun" else ():
        value = getattr(shape, name)
        _require(not value, name, value, "jsrun's nodes are whole; it is for --launcher mpirun")
    given = _environments(shape)
    _require(len(given) < 2, " --".join(given), "", "expected one of them: each brings the Python of the ranks")
    container = bool(shape.apptainer or shape.pyxis)
    _require(container or not shape.mounts, "mount", " ".join(shape.mounts), "expected --apptainer or --pyxis, too")
    _require(not shape.pyxis or shape.start() == "srun", "launcher", shape.launcher, "--pyxis is an option of srun")
    for mount in shape.mounts:
        right = bool(re.fullmatch(r"""[^\s"'\\$`,]+""", mount))
        _require(right, "mount", repr(mount), "expected FOLDER or FOLDER:INSIDE, without spaces, quotes and commas")
    at_hand = not (container or shape.plain or shape.kind == "interactive")
    problem = "not for containers, --plain and kind interactive"
    _require(at_hand or not shape.stage_env, "stage-env", "", problem)
    _require(not shape.plain or shape.bind is None, "bind", shape.bind, "--plain leaves it to the cluster")
    by_srun = not shape.plain or shape.scheduler != "slurm" or shape.start() == "srun"
    _require(by_srun, "launcher", shape.launcher, "with --plain srun starts the ranks")
    batch = shape.kind != "interactive"
    _require(batch or not shape.output, "output", shape.output, "salloc, of kind interactive, has no such option")


def _check_array(shape: Shape) -> None:
    numbers = r"\d+(-\d+(:\d+)?)?"
    pattern, example = rf"{numbers}(,{numbers})*(%[1-9]\d*)?", "0-3, 1,5,7 or 0-99%10"
    if shape.scheduler == "pbs":
        pattern, example = r"\d+-\d+(:\d+)?(%[1-9]\d*)?", "0-3 or 0-99%10"
    given = shape.indices()
    _require(shape.array is None or shape.kind == "array", "array", given, "it is an option of --kind array")
    _require(bool(re.fullmatch(pattern, given, re.ASCII)), "array", given, f"expected indices such as {example}")
    zero = shape.scheduler == "lsf" and re.search(r"(^|,)0+(-|,|%|$)", given)
    _require(not zero, "array", given, "LSF counts from 1: 1-4")


def _check_warning(shape: Shape) -> None:
    limit, given = seconds(shape.time), shape.notice()
    _require(shape.warning is None or shape.kind == "requeue", "warning", given, "it is an option of --kind requeue")
    within = f"expected {_MIN_WARNING} seconds at least, and less than the time limit of {limit} seconds"
    _require(shape.kind != "requeue" or _MIN_WARNING <= given < limit, "warning", given, within)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    _require(value in known, name, value, f"expected one of {', '.join(known)}")


def _require(right: bool, option: str, value: object, problem: str) -> None:
    if not right:
        raise InputError("HD801", f"--{option} {value}".rstrip() + f": {problem}")


def seconds(time: str) -> int:
    """Return the seconds of a time limit in any of Slurm's notations."""
    match = re.fullmatch(r"(?:(N)-)?(N)(?::(N))?(?::(N))?".replace("N", "[0-9]{1,9}"), time)
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
