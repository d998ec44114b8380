"""The command ``python -m hpcdist jobscript``: write a job script for Slurm, PBS, Flux or LSF.

It needs neither MPI nor a scheduler. The texts are the templates in templates/. The scripts in jobscripts/ are exactly
what :func:`write` returns. Here are the shape of a job, which shapes no job can have, and what differs between the
schedulers beside their templates.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jinja2

from hpcdist.errors import InputError, reason
from hpcdist.launch.launcher import clock
from hpcdist.process.streams import pass_bytes_on, printing
from hpcdist.runtime.commandline import Parser, path

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("hpcdist.tools"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,
    comment_start_string="<#",  # {# begins a length in bash
    comment_end_string="#>",
)


@dataclass(frozen=True)
class Scheduler:
    """A scheduler.

    Attributes:
        suffix: suffix of the scripts' names.
        submit: command that submits a script, before its name.
        prefix: the beginning of the lines with its options.
        launchers: the launchers of ranks, the default first.
        kinds: kinds of job, beside those that every scheduler has.
        passes_arguments: whether words after the script's name are its arguments.
        refuses: options of a shape that it does not have.
        index: variable of the index in a job array.
        local_rank: variable in which its own launcher puts the local rank.
    """

    suffix: str
    submit: str
    prefix: str
    launchers: tuple[str, ...]
    local_rank: str
    kinds: tuple[str, ...] = ()
    passes_arguments: bool = True
    refuses: tuple[str, ...] = ()
    index: str = ""


SCHEDULERS = {
    "slurm": Scheduler(
        *("sbatch", "sbatch", "#SBATCH", ("srun", "mpirun"), "SLURM_LOCALID", ("array", "interactive", "requeue")),
        index="$SLURM_ARRAY_TASK_ID",
    ),
    "pbs": Scheduler(
        *("pbs", "qsub", "#PBS", ("mpirun", "pals"), "PALS_LOCAL_RANKID", ("array",), False, ("qos", "pyxis")),
        index="$PBS_ARRAY_INDEX",
    ),
    "flux": Scheduler(
        *("flux", "flux batch", "#flux:", ("flux",), "FLUX_TASK_LOCAL_ID"), refuses=("mem", "qos", "pyxis", "restarts")
    ),
    "lsf": Scheduler(
        *("lsf", "bsub <", "#BSUB", ("jsrun", "mpirun"), "JSM_NAMESPACE_LOCAL_RANK", ("array",), False),
        refuses=("qos", "pyxis", "restarts"),
        index="$LSB_JOBINDEX",
    ),
}

# What srun can offer (srun --mpi=list) and an MPI library, by mpi4py's name for it, understands; the better first.
PMIS = {"Open MPI": ("pmix",), "Intel MPI": ("pmi2", "pmix"), "Cray MPICH": ("cray_shasta", "pmi2")}
OTHER_PMIS = ("pmi2",)  # MPICH, and what is made of it
PMI_OF_IMAGES = "pmix"  # of Pyxis: NVIDIA's have Open MPI

LAUNCHERS = tuple(dict.fromkeys(name for one in SCHEDULERS.values() for name in one.launchers))
BINDINGS = ("none", "cores", "gpu")

_PLAIN = ("cpu", "gpu", "train")
_EVERYWHERE = (*_PLAIN, "staged")  # kinds that every scheduler has
KINDS = (*_EVERYWHERE, "array", "interactive", "requeue")
_SECONDS = 20.0  # for a command
_VENDOR = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
_MIN_WARNING = 60  # seconds: Slurm may send the signal so much earlier than requested


def _option(default: Any, text: str, *also: str, **more: Any) -> Any:
    """Return a field that is an option of the command: its default, help, other names, and what argparse takes."""
    return field(default=default, metadata={"help": text, "also": also, **more})


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a job: the options of the command. None leaves a value to the kind, or to the cluster.

    `command` is the program of each rank, followed by the arguments of the script.
    """

    kind: str = _option("cpu", "kind of job (default gpu with --gpus-per-node, else cpu)", choices=KINDS)
    scheduler: str = _option("slurm", "scheduler of the cluster (default slurm)", choices=SCHEDULERS)
    plain: bool = _option(False, "minimal; everything is decided when it is written")
    nodes: int = _option(2, "number of nodes (default 2)")
    ntasks_per_node: int | None = _option(None, "ranks per node (default one per GPU, or 4)")
    gpus_per_node: str | None = _option(
        None, "GPUs per node, for Slurm also their type (default 4 for kind gpu, else none)", metavar="[TYPE:]N"
    )
    cpus_per_task: int | None = _option(None, "cores per rank (default 8 with a GPU, else 1)")
    mem: str | None = _option(None, "memory per node, such as 64G (default the cluster's; not with Flux, jsrun)")
    time: str = _option("00:10:00", "time limit: 90 minutes as 90, 01:30:00 or 0-1:30 (default 00:10:00)")
    partition: str | None = _option(None, "partition or queue of the cluster (default the cluster's)", "--queue")
    account: str | None = _option(None, "account, project or bank to charge (default yours)")
    qos: str | None = _option(None, "quality of service (Slurm)")
    constraint: str | None = _option(None, "required features of the nodes, in the scheduler's words")
    exclusive: bool = _option(False, "do not share the nodes with other jobs")
    output: str | None = _option(None, "file for the job's output, with the scheduler's patterns")
    name: str | None = _option(None, "name of the job (default hpcdist-KIND)")
    array: str | None = _option(None, "for kind array: 0-3, 1,5,7 or 0-99%%10 (default 0-3; LSF 1-4)")
    restarts: int = _option(0, "start the ranks again after a failure, so often (Slurm, PBS; default 0)")
    spare_nodes: int = _option(0, "more nodes, which take the places of those that fail (default 0)")
    checkpoint: str | None = _option(None, "with --restarts: file or folder that the program saves", metavar="PATH")
    warning: int | None = _option(None, "for kind requeue: seconds before the limit (default 120)")
    launcher: str | None = _option(
        None,
        "launcher of the ranks (default the scheduler's first; under Slurm HPCDIST_LAUNCHER overrides it)",
        choices=LAUNCHERS,
    )
    mpi: str = _option("auto", "PMI of srun: pmix, pmi2, ..., or default for the cluster's (default auto)")
    bind: str | None = _option(
        None,
        "bind each rank to the cores beside its GPU, to its own cores, or not (default gpu with a GPU per rank)",
        choices=BINDINGS,
    )
    modules: tuple[str, ...] = _option((), "module to load; may be repeated")
    venv: str | None = _option(None, "virtual environment to activate", metavar="DIR")
    conda: str | None = _option(None, "conda environment to activate, by name or folder")
    stage_env: bool = _option(False, "first copy the environment to every node's own disk")
    apptainer: str | None = _option(None, "Apptainer or Singularity image in which the ranks run")
    pyxis: str | None = _option(None, "image in which the ranks run, for Slurm with Pyxis")
    mounts: tuple[str, ...] = _option(
        (), "folder to mount in the container, in addition to the current one; may be repeated", metavar="DIR[:INSIDE]"
    )
    directives: tuple[str, ...] = _option(
        (), "any other option of the scheduler, such as mail-type=END; may be repeated",
        "--sbatch", metavar="KEY[=VALUE]",
    )  # fmt: skip
    command: tuple[str, ...] | None = None


def gpus(shape: Shape) -> int:
    """Return the number of GPUs of a node."""
    if shape.gpus_per_node is None:
        return 4 if shape.kind == "gpu" else 0
    typed = r"(\w[\w.-]*:)?" if shape.scheduler == "slurm" else ""
    if not re.fullmatch(typed + "[0-9]{1,6}", shape.gpus_per_node):
        raise _refusal("gpus-per-node", shape.gpus_per_node, "expected a number, or under Slurm TYPE:NUMBER")
    return int(shape.gpus_per_node.rpartition(":")[2])


def completed(shape: Shape) -> Shape:
    """Return the shape with the kind's and the scheduler's defaults in the place of None."""
    count = gpus(shape)
    ranks = count or 4 if shape.ntasks_per_node is None else shape.ntasks_per_node
    defaults: dict[str, Any] = {
        "ntasks_per_node": ranks,
        "gpus_per_node": str(count),
        "cpus_per_task": 8 if count else 1,
        "name": f"hpcdist-{shape.kind}",
        "array": "1-4" if shape.scheduler == "lsf" else "0-3",
        "warning": 120,
        "launcher": SCHEDULERS[shape.scheduler].launchers[0],
        "bind": "gpu" if count == ranks and not shape.plain else "none",
    }
    return replace(shape, **{name: value for name, value in defaults.items() if getattr(shape, name) is None})


def check(given: Shape, full: Shape) -> None:
    """Raise an InputError if no job can have this shape, as it was given and with its defaults."""
    for rules in (_launch(given, full), _numbers(full), _texts(full), _options(given, full), _times(full)):
        for right, option, value, problem in rules:
            if not right:
                raise _refusal(option, value, problem)


def _refusal(option: str, value: object, problem: str) -> InputError:
    return InputError("HD801", f"--{option} {value}".rstrip() + f": {problem}")


Rules = Iterator[tuple[object, str, object, str]]  # whether it holds; option, its value, and the problem if it does not


def _launch(given: Shape, full: Shape) -> Rules:
    scheduler = SCHEDULERS[full.scheduler]
    kinds = _PLAIN if full.plain else (*_EVERYWHERE, *scheduler.kinds)
    only = "with --plain" if full.plain else f"for --scheduler {full.scheduler}"
    yield full.kind in kinds, "kind", full.kind, f"expected one of {', '.join(kinds)} {only}"
    launchers = f"expected one of {', '.join(scheduler.launchers)}"
    yield full.launcher in scheduler.launchers, "launcher", full.launcher, launchers
    yield not full.pyxis or full.launcher == "srun", "launcher", full.launcher, "--pyxis is an option of srun"
    by_srun = full.scheduler != "slurm" or full.launcher == "srun"
    yield by_srun or not full.plain, "launcher", full.launcher, "with --plain srun starts the ranks"
    yield not full.plain or given.bind is None, "bind", full.bind, "--plain leaves it to the cluster"


def _numbers(full: Shape) -> Rules:
    count, ranks = gpus(full), full.ntasks_per_node or 0
    for name, number, least in (
        ("nodes", full.nodes, 1),
        ("restarts", full.restarts, 0),
        ("spare-nodes", full.spare_nodes, 0),
        ("gpus-per-node", count, int(full.kind == "gpu")),
        ("ntasks-per-node", ranks, 1),
        ("cpus-per-task", full.cpus_per_task or 0, 1),
    ):
        yield number >= least, name, number, f"expected at least {least}"
    too_many = f"more than the {ranks} ranks of a node, each of which uses one GPU"
    yield count <= ranks, "gpus-per-node", count, too_many
    one_each = full.kind in ("gpu", "train") or full.scheduler == "flux" or full.bind == "gpu"
    too_few = f"more than the {count} GPUs of a node, and NCCL takes one rank per GPU"
    yield not one_each or count in (0, ranks), "ntasks-per-node", ranks, too_few
    yield full.bind != "gpu" or count, "bind", "gpu", "expected --gpus-per-node, too"
    by_gres = _by_gres(full)
    yield not count or by_gres in (None, count), "gpus-per-node", count, f"the directive gres asks for {by_gres}"


def _texts(full: Shape) -> Rules:
    blank, no_spaces = (r"\n", "") if full.scheduler == "lsf" else (r"\s", " and spaces: a&b")  # LSF's line has quotes
    names = "letters, digits and .,+@%-_"
    for option, values, pattern, expected in (
        *((name, [getattr(full, name)], r"[\w.,+@%-]+", names) for name in ("partition", "account", "qos", "name")),
        ("mpi", [full.mpi], r"\w+", "auto, default, or a name that srun --mpi=list shows"),
        (
            "mem",
            [full.mem],
            r"[1-9][0-9]*[KMGT]" + ("?|0" if full.scheduler == "slurm" else ""),
            "a number with K, M, G or T",
        ),
        (
            "constraint",
            [full.constraint],
            rf"""[^{blank}"'\\$`#]+""",
            f"the scheduler's words, without quotes{no_spaces}",
        ),
        ("output", [full.output], r"""[^\s"'\\#]+""", "a path without spaces, quotes and #"),
        ("directive", full.directives, r"[A-Za-z][\w-]*(=.+)?", "KEY=VALUE or KEY, KEY without dashes before it"),
        ("mount", full.mounts, r"""[^\s"'\\$`,]+""", "FOLDER or FOLDER:INSIDE, without spaces, quotes and commas"),
    ):
        for text in values:
            yield text is None or re.fullmatch(pattern, text), option, repr(text), f"expected {expected}"


def _options(given: Shape, full: Shape) -> Rules:
    """The options that this scheduler, launcher or kind does not have."""
    for name in SCHEDULERS[full.scheduler].refuses:
        value = getattr(full, name)
        yield not value, name, value, f"--scheduler {full.scheduler} has no such option"
    needless = f"--scheduler {full.scheduler} has no such option: it is one of srun"
    yield full.mpi == "auto" or full.scheduler == "slurm", "mpi", full.mpi, needless
    for name in ("mem", "constraint") if full.launcher == "jsrun" else ():
        value = getattr(full, name)
        yield not value, name, value, "jsrun's nodes are whole; it is for --launcher mpirun"
    pythons = [name for name in ("venv", "conda", "apptainer", "pyxis") if getattr(full, name)]
    yield len(pythons) < 2, " --".join(pythons), "", "expected one of them: each brings the Python of the ranks"
    container = full.apptainer or full.pyxis
    yield container or not full.mounts, "mount", " ".join(full.mounts), "expected --apptainer or --pyxis, too"
    batch = full.kind != "interactive"
    at_hand = batch and not container and not full.plain
    yield at_hand or not full.stage_env, "stage-env", "", "not for containers, --plain and kind interactive"
    by_srun = full.scheduler != "slurm" or full.launcher == "srun"
    again = at_hand and by_srun and not full.stage_env
    lacks = "not for containers, --plain, --stage-env, kind interactive, Slurm's --launcher mpirun"
    yield again or not full.restarts, "restarts", full.restarts, lacks
    needless = "expected at least 1, with --spare-nodes or --checkpoint"
    yield full.restarts or not (full.spare_nodes or full.checkpoint), "restarts", full.restarts, needless
    yield batch or not full.output, "output", full.output, "salloc, of kind interactive, has no such option"
    yield given.array is None or full.kind == "array", "array", full.array, "it is an option of --kind array"
    requeued = full.kind == "requeue"
    yield given.warning is None or requeued, "warning", full.warning, "it is an option of --kind requeue"


def _times(full: Shape) -> Rules:
    """The indices of an array, and the seconds of a limit."""
    numbers, indices = r"\d+(-\d+(:\d+)?)?", full.array or ""
    pattern, example = rf"{numbers}(,{numbers})*(%[1-9]\d*)?", "0-3, 1,5,7 or 0-99%10"
    if full.scheduler == "pbs":
        pattern, example = r"\d+-\d+(:\d+)?(%[1-9]\d*)?", "0-3 or 0-99%10"
    yield re.fullmatch(pattern, indices, re.ASCII), "array", indices, f"expected indices such as {example}"
    zero = full.scheduler == "lsf" and re.search(r"(^|,)0+(-|,|%|$)", indices)
    yield not zero, "array", indices, "LSF counts from 1: 1-4"
    limit, warning = seconds(full.time), full.warning or 0
    within = f"expected {_MIN_WARNING} seconds at least, and less than the time limit of {limit} seconds"
    yield full.kind != "requeue" or _MIN_WARNING <= warning < limit, "warning", warning, within


def seconds(time: str) -> int:
    """Return the seconds of a time limit in any of Slurm's notations, and raise an InputError for any other text."""
    known = re.fullmatch(r"([0-9]{1,9}-)?[0-9]{1,9}(:[0-9]{1,9}){0,2}", time)
    least = 2 if "-" in time else 1  # colons: hours follow the days; a number alone is minutes
    total = clock(time + ":0" * (least - time.count(":"))) if known else 0
    if not total:
        raise _refusal("time", time, "expected minutes, hours:minutes:seconds or days-hours:minutes:seconds, above 0")
    return total


def write(shape: Shape, words: Sequence[str] = ()) -> str:
    """Return the job script of a shape. Nothing is read but the templates; nothing is written or started.

    Args:
        words: of the command line that writes it, which the script shows.

    Raises:
        InputError: the shape is impossible: no nodes, more GPUs than ranks, a malformed time limit, an option that the
            scheduler does not have, and so on.

    Example::

        >>> print(write(Shape(kind="gpu", nodes=4, gpus_per_node="8")))
        #!/bin/bash
        # One GPU per rank, NCCL:
        #     sbatch gpu.sbatch 'shards/*.npy'
        ...
    """
    full, scheduler = completed(shape), SCHEDULERS[shape.scheduler]
    check(shape, full)
    if broken := [word for word in words if "\n" in word]:
        raise InputError("HD801", f"{broken[0]!r}: a line break cannot be in a job script's line")
    values = vars(scheduler) | vars(full)
    for name in ("venv", "conda", "apptainer", "pyxis"):
        values[name] = values[name] and shlex.quote(values[name] + ("/bin/activate" if name == "venv" else ""))
    values |= {
        "gpus": gpus(full),
        "seconds": seconds(full.time),
        "modules": shlex.join(full.modules),
        "quoted_mounts": [shlex.quote(mount) for mount in full.mounts],  # Pyxis takes all in one word with quotes
        "directives": [(key, _word(value)) for key, _, value in (text.partition("=") for text in full.directives)],
        "by_gres": _by_gres(full),
        "command": full.command and shlex.join(full.command),
        "checkpoint": full.checkpoint and shlex.quote(full.checkpoint),
        "written_by": shlex.join(["python", "-m", "hpcdist", "jobscript", *words]),
        "pmis": PMIS,
        "other_pmis": OTHER_PMIS,
        "pmi_of_images": PMI_OF_IMAGES,
    }
    return _TEMPLATES.get_template("plain.j2" if shape.plain else f"kinds/{shape.kind}.j2").render(values)


def _word(value: str) -> str:
    """Return a value as one word of a scheduler's line. Quotes that are right already stay as they are."""
    with suppress(ValueError):
        if len(words := shlex.split(value)) < 2 and words == shlex.split(value, comments=True):
            return value
    return shlex.quote(value)


def _by_gres(shape: Shape) -> int | None:
    """Return the number of GPUs of a node that the directive gres of Slurm asks for; None if there is none."""
    pattern = r"gres=(?:.*,)?(?:gres/)?gpu(?::[^:,\d][^:,]*)?(?::(\d+))?"
    found = [match for text in shape.directives if (match := re.match(pattern, text))]
    return int(found[-1][1] or 1) if found and shape.scheduler == "slurm" else None


def option(of: Field[Any]) -> str:
    """Return the option for a field of a shape. That of several values is in the singular, and may be repeated."""
    name = of.name.removesuffix("s") if of.default == () else of.name
    return f"--{name.replace('_', '-')}"


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
        text = write(shape, words)
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
    library = printed([sys.executable, "-c", _VENDOR]).strip()
    listed = re.findall(r"\w+", printed(["srun", "--mpi=list"]))
    return next((one for one in PMIS.get(library, OTHER_PMIS) if library and one in listed), "default")


def printed(command: list[str]) -> str:
    """Return the output of a command; nothing if it fails or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


def parser() -> Parser:
    """Return the parser of hpcdist jobscript. It runs on login nodes, and does not ask MPI for the rank."""
    p = Parser(
        prog="hpcdist jobscript",
        description="Write a job script. Without options it is for Slurm, and 2 nodes with 4 CPU ranks each.",
        epilog="example: python -m hpcdist jobscript --nodes 4 --gpus-per-node 8 -o job.sbatch -- python train.py",
        argument_default=argparse.SUPPRESS,
        prints=lambda: True,
    )
    for one in fields(Shape):
        more = dict(one.metadata)
        if one.default is False:
            more["action"] = "store_true"
        elif one.default == ():
            more["action"] = "append"
        elif "int" in str(one.type):
            more |= {"type": int, "metavar": "N"}
        if more:  # all but the command
            p.add_argument(option(one), *more.pop("also"), dest=one.name, **more)
    p.add_argument("-o", "--script", type=path, metavar="FILE", help="file to write (default standard output)")
    p.add_argument("command", nargs="*", metavar="COMMAND", help="each rank's program, after -- (default the kind's)")
    return p


if __name__ == "__main__":
    pass_bytes_on()
    with printing("hpcdist jobscript"):
        main(sys.argv[1:])
