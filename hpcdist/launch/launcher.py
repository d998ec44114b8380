"""Start MPI, identify the launcher of this process by the variables that mpirun, srun and others set, and ask the
scheduler how much time is left of the batch job.

Needs no torch.

docs/do/launchers.md says how each launcher was tested; docs/reference/variables.md has the variables. Their sources:

- Open MPI: mpirun(1), "Environment Variables"; MVAPICH: its user guide, "MPIRUN_RSH environment variables".
- Hydra (MPICH and Intel MPI): what ``mpiexec -n 2 env`` of mpich 5.0.2 and of impi-rt 2021.18 shows.
- PALS: mpiexec(1) of cray-pals; it sets no size of the job but through Cray PMI (PMI_SIZE). Slurm's plugin
  mpi/cray_shasta sets PALS_RANKID, too, and neither size (src/plugins/mpi/cray_shasta/mpi_cray_shasta.c).
- aprun (ALPS): aprun(1); the rank alone.
- Flux: flux-environment(7), and ``flux run env`` of flux-core 0.88.
- jsrun: what IBM's smpi tests read (JSM_NAMESPACE_*). It sets the variables of Open MPI, of which Spectrum MPI is made.
- Slurm: srun(1), "OUTPUT ENVIRONMENT VARIABLES"; with --mpi=pmi2 PMI_SIZE and PMI_RANK, too.
- torchrun: torch.distributed.run, "Environment Variables".
- Time left: sbatch(1) and squeue(1) of Slurm; qstat(1B) of OpenPBS and of Torque; bjobs(1) of LSF, options -o and -WL
  ("hours:minutes status"); flux-job(1), "TIMELEFT".
"""

from __future__ import annotations

import atexit
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpcdist.errors import LaunchError, coded, reason, refusal, with_hint
from hpcdist.process import abort

if TYPE_CHECKING:
    from mpi4py import MPI

_OWN_MPIRUN = (
    "Use the launcher that belongs to it: the mpirun of the same installation (for the PyPI wheels, the one in the "
    "environment's bin folder)"
)


@dataclass(frozen=True)
class Launcher:
    """A launcher, and the variables that it sets in each process; "" if it sets none.

    Attributes:
        name: what starts the processes.
        size, rank: number of processes, and number of this one.
        local_rank, local_size: number of this process among those of its node, and how many these are.
        sign: variable without which the others belong to another launcher; "" for none.
        fix: remedy if the MPI library does not know of this launcher.
        single: command that starts one process on purpose.
        mpi: whether it starts ranks of MPI.
    """

    name: str
    size: str
    rank: str
    local_rank: str = ""
    local_size: str = ""
    sign: str = ""
    fix: str = _OWN_MPIRUN
    single: str = "mpirun -n 1"
    mpi: bool = True


def _prefixed(name: str, prefix: str) -> Launcher:
    return Launcher(name, f"{prefix}_SIZE", f"{prefix}_RANK", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE")


_SLURM = (
    "Under Slurm: srun --mpi=pmix for Open MPI, srun --mpi=pmi2 for MPICH and Intel MPI, srun --mpi=cray_shasta for "
    "Cray MPICH (srun --mpi=list shows the choices); or the mpirun of the same installation, in the allocation"
)
NETMOD = "`export MPIR_CVAR_CH4_NETMOD=ofi`"
_FLUX = (
    "Under Flux: flux run without options for MPICH, Intel MPI and Open MPI 4, flux run -o pmi=pmix (of flux-pmix) for "
    "Open MPI 5; or the mpirun of the same installation, in the allocation"
)
_JSRUN = (
    "jsrun starts Spectrum MPI: load its module, and build mpi4py with it (MPICC=mpicc pip install --no-binary=mpi4py "
    "mpi4py); any other MPI has its own mpirun, for use in the job in place of jsrun"
)
_PALS = Launcher(
    *("mpiexec of PALS", "PMI_SIZE", "PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_RANKID"),
    single="mpiexec -n 1",
    fix="PALS starts Cray MPICH: load the module cray-mpich-abi, and name its library in MPI4PY_LIBMPI; libraries with "
    "PMIx, such as Open MPI, are started by mpiexec --pmi=pmix",
)
_NOT_MPI = "start the program with mpirun -n N python ..., or with srun, in its place"
_TORCHRUN = Launcher(
    *("torchrun (or another one of torch's kind: accelerate, deepspeed, Ray)", "WORLD_SIZE", "RANK"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    fix=_NOT_MPI,
    mpi=False,
)
_STEP = "SLURM_STEP_NUM_TASKS"
# The shell of a batch job or of salloc: no launcher has started ranks.
_BATCH = Launcher("Slurm", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", fix=_SLURM, single="srun -n 1")

# The nearest to a process first: mpirun may run in a task of srun, and both have set their variables.
_LAUNCHERS = (
    replace(_prefixed("jsrun", "JSM_NAMESPACE"), fix=_JSRUN, single="jsrun -n 1"),
    _prefixed("mpirun of Open MPI", "OMPI_COMM_WORLD"),
    _prefixed("mpirun of MVAPICH2", "MV2_COMM_WORLD"),
    _prefixed("mpirun of MVAPICH", "MVP_COMM_WORLD"),
    Launcher(
        *("mpirun of MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        sign="MPI_LOCALRANKID",
    ),
    replace(_prefixed("horovodrun", "HOROVOD"), fix=_NOT_MPI, mpi=False),
    Launcher("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", fix=_FLUX, single="flux run -n 1"),
    Launcher("srun", _STEP, "SLURM_PROCID", "SLURM_LOCALID", fix=_SLURM, single="srun -n 1"),
    _PALS,  # after Flux and Slurm, which set its variables for Cray MPICH, too
    Launcher("an mpirun with PMI (or srun --mpi=pmi2)", "PMI_SIZE", "PMI_RANK", fix=f"{_OWN_MPIRUN}. {_SLURM}"),
    Launcher("aprun", "", "ALPS_APP_PE", single="aprun -n 1"),
    _BATCH,
    _TORCHRUN,  # the variables may also be derived from those above, by a script
    Launcher("prterun", "", "PMIX_RANK"),
)
_ELASTIC = "TORCHELASTIC_RUN_ID"  # set by torchrun itself, which a launcher of those above may have started
GIVEN = {"ROLE_NAME": "hpcdist"}
"""The value that marks torchrun's variables as set by hpcdist, here or in a parent process."""

# Of MPI's own launchers: where one of these is 1, one process was meant, whatever a batch system has set.
_DIRECT = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE", "PMI_SIZE")

# Free descriptors that MPI and init() need, 25, and init() alone, 11, on two ranks as on four (MPICH and Open MPI), and
# eleven more: those of a group of gloo, and of connections to other hosts.
_FILES, _FILES_AFTER_MPI = 36, 22

VARIABLES = (
    _ELASTIC,
    *sorted({name for of in _LAUNCHERS for name in (of.size, of.rank, of.local_rank, of.local_size) if name}),
    *("SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE", "PBS_NODEFILE", "LSB_MCPU_HOSTS", "FLUX_URI"),
)
"""The variables that tell of launchers and of what schedulers have allocated. None is secret."""

# Variables of launchers, which would make a child process join the job.
_LEFT = (
    *("OMPI_COMM_", "OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_pmix", "OMPI_UNIVERSE_SIZE"),
    *("PMI_", "PMI2_", "PMIX_", "PRTE_"),
    *("SLURM_", "HYDI_", "HYDRA_", "MPIEXEC_", "MPI_LOCAL", "MV2_COMM_", "MVP_COMM_", "HOROVOD_", "JSM_", "PALS_"),
    *("ALPS_APP_", "FLUX_", "TORCHELASTIC_"),
)
# The user's settings of Open MPI 5's launcher and PMIx, which a child's own mpirun needs as well.
_USERS = ("PRTE_MCA_", "PRTE_ALLOW_", "PMIX_MCA_")
_LEFT_BY_TORCH = (
    *(_TORCHRUN.size, _TORCHRUN.rank, _TORCHRUN.local_rank, _TORCHRUN.local_size),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else None


def is_given(environ: Mapping[str, str]) -> bool:
    """Whether torchrun's variables are those that hpcdist has set."""
    return environ.items() >= GIVEN.items()


def _by_torchrun(environ: Mapping[str, str]) -> bool:
    return _ELASTIC in environ and not is_given(environ)


def _present(environ: Mapping[str, str]) -> list[Launcher]:
    """Return the launchers whose variables may be here, the nearest first."""
    order = (_TORCHRUN, *_LAUNCHERS) if _by_torchrun(environ) else _LAUNCHERS
    launchers = [launcher for launcher in order if not launcher.sign or _number(environ, launcher.sign) is not None]
    # srun sets SLURM_NTASKS to the same number. A job that a step has submitted inherits the step's other variables.
    left = environ.get("SLURM_NTASKS", environ.get(_STEP)) != environ.get(_STEP)
    return [launcher for launcher in launchers if launcher.size != _STEP or not left]


def nearest(environ: Mapping[str, str]) -> tuple[Launcher, str, int] | None:
    """Return the nearest launcher, its variable with the number of processes, and that number.

    Where a launcher tells no number of processes, the variable is one that tells that there are others: its rank that
    is not 0, or the number of several on this node. WORLD_SIZE counts beside LOCAL_RANK: alone it may be something
    else, such as a number of pods.

    Example::

        >>> launcher, variable, count = nearest({"SLURM_NTASKS": "8", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"})
        >>> launcher.name, variable, count
        ('mpirun of MPICH or Intel MPI', 'PMI_SIZE', 4)
    """
    for launcher in _present(environ):
        for variable, least in ((launcher.size, 0), (launcher.rank, 1), (launcher.local_size, 2)):
            value = _number(environ, variable)
            if value is not None and value >= least and (launcher.mpi or variable == launcher.size):
                return launcher, variable, value
    return None


def number(environ: Mapping[str, str]) -> int:
    """Return the number that the launcher has given this process; 0 without a launcher."""
    ranks = (_number(environ, launcher.rank) for launcher in _present(environ))
    return next((rank for rank in ranks if rank is not None), 0)


def on_node(environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return the number of this process on its node, and of all there, as the nearest launcher counts them."""
    launched = nearest(environ)
    if launched is None:
        return None, None
    return _number(environ, launched[0].local_rank), _number(environ, launched[0].local_size)


def _forgotten(head: str, allocated: str, launcher: Launcher, library: str) -> str:
    start = launcher.single.removesuffix(" -n 1")
    return (
        f"{head}: {allocated}, and this process was started without {start}, so there is "
        f"only one. Write {start} before python in the job script. The library is {library}. "
        f"{launcher.fix}. For one process on purpose: {launcher.single}, or hpcdist.init(MPI.COMM_SELF)."
    )


def _unused(environ: Mapping[str, str], library: str) -> str | None:
    """Find a process without a launcher in an allocation of several nodes, whose number of ranks is not known."""
    ranks = {launcher.rank for launcher in _present(environ) if launcher.mpi} - {_BATCH.rank}
    if any(_number(environ, rank) is not None for rank in ranks):
        return None
    for variable, launcher, count in _ALLOCATIONS:
        nodes = count(environ) if environ.get(variable) else 1
        if nodes > 1:
            head = f"this process is alone in its MPI world, but {variable}={environ[variable]}"
            return _forgotten(head, f"{launcher.name} allocated {nodes} {launcher.size}", launcher, library)
    return None


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    nodes, each = (_number(environ, name) for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE"))
    return (nodes or 1) * (each or 1)


def _pbs_nodes(environ: Mapping[str, str]) -> int:
    try:
        with open(environ["PBS_NODEFILE"]) as file:
            return len({*file})
    except OSError:
        return 1


def _lsf_nodes(environ: Mapping[str, str]) -> int:
    """Count the hosts, but for the one that only runs the script of a job with jsrun, in one slot."""
    slots = [int(slots) for slots in environ["LSB_MCPU_HOSTS"].split()[1::2] if slots.isdigit()]
    return len(slots) - (slots[:1] == [1] < [max(slots, default=0)])


def _flux_nodes(_: Mapping[str, str]) -> int:
    try:
        return int(printed(["flux", "getattr", "size"]))
    except (OSError, subprocess.SubprocessError, ValueError):
        return 1


# A variable of a scheduler's job; what it has allocated, and how to use that; the number of them.
_ALLOCATIONS: tuple[tuple[str, Launcher, Callable[[Mapping[str, str]], int]], ...] = (
    ("SLURM_JOB_NUM_NODES", replace(_BATCH, size="tasks"), _slurm_tasks),
    ("PBS_NODEFILE", Launcher("PBS", "nodes", ""), _pbs_nodes),
    ("LSB_MCPU_HOSTS", Launcher("LSF", "nodes", ""), _lsf_nodes),
    ("FLUX_URI", Launcher("Flux", "nodes", "", fix=_FLUX, single="flux run -n 1"), _flux_nodes),
)


def described(environ: Mapping[str, str]) -> str:
    """Describe the launcher of this process, by its variables; "" if no launcher of MPI's has a rank for it.

    Example::

        >>> described({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"})
        'srun started 4 processes (SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=0)'
    """
    for launcher in _present(environ):
        names = dict.fromkeys((launcher.size, launcher.rank, launcher.local_rank, launcher.local_size))
        shown = ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))
        if launcher.mpi and _number(environ, launcher.rank) is not None:
            count = _number(environ, launcher.size)
            return f"{launcher.name} started {'several' if count is None else count} processes ({shown})"
    return ""


def may_hang(environ: Mapping[str, str], library: str) -> bool:
    """Whether the start of this MPI `library` may hang if there are several nodes.

    MPICH 5 with UCX puts addresses on PMI that may be longer than the 1,024 bytes of a line of Slurm's.
    """
    srun = "SLURM_STEP_NUM_TASKS" in environ and "PMI_RANK" in environ and "MPI_LOCALRANKID" not in environ
    set_ = {"MPIR_CVAR_CH4_NETMOD", "UCX_TLS"} & environ.keys()
    return srun and library.startswith("MPICH Version: 5") and not set_


def alone(environ: Mapping[str, str], size: int, library: str) -> str | None:
    """Find N worlds of one: a launcher that started N processes, and an MPI `library` whose world has `size`, one.

    Returns:
        The problem and its fix, or None.
    """
    if size > 1 or (not _by_torchrun(environ) and any(_number(environ, name) == 1 for name in _DIRECT)):
        return None
    launched = nearest(environ)
    if launched is None or (launched[1] == launched[0].size and launched[2] <= 1):
        return None if launched else _unused(environ, library)
    launcher, variable, value = launched
    many = f"{value} processes" if variable == launcher.size else "others, too"
    alone_but = f"this process is alone in its MPI world, but {variable}={value}"
    head = f"{alone_but}: {launcher.name} started {many}"
    if launcher is _BATCH:
        return _forgotten(alone_but, f"Slurm allocated {value} tasks", _BATCH, library)
    if not launcher.mpi:
        return (
            f"{head}, without MPI. hpcdist needs the ranks of an MPI job: start the "
            f"program with mpirun -n {value} python ..., or with srun, in its place. For one process on purpose: "
            f"hpcdist.init(MPI.COMM_SELF). If {variable} is left from another launch: unset {variable}."
        )
    return (
        f"{head}, but the MPI library of mpi4py does not recognise them. The library is {library}. "
        f"{launcher.fix}. For one process on purpose: {launcher.single}, or hpcdist.init(MPI.COMM_SELF)."
    )


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child process that runs MPI on its own, outside the job.

    Example::

        >>> without_launcher({"PMIX_RANK": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"})
        {'PRTE_MCA_rmaps_default_mapping_policy': ':oversubscribe'}
    """
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_USERS) or not (name.startswith(_LEFT) or name in _LEFT_BY_TORCH)
    }


def job(comm: MPI.Intracomm | None, environ: Mapping[str, str]) -> MPI.Intracomm:
    """Return the communicator of the job: COMM_WORLD if `comm` is None. Starts MPI, unless it runs.

    Raises:
        LaunchError: if there is no MPI, it has ended, the launcher is that of another MPI, or this process may open too
            few files.
        TypeError: if `comm` is not a communicator, or does not hold this rank.
    """
    _check_files()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            "HD101", f"mpi4py finds no MPI library ({error}); pip install mpich, or load your MPI"
        ) from error
    if MPI.Is_finalized():
        raise LaunchError("HD112", "MPI has ended in this process (MPI.Finalize), and cannot be started again")
    if not MPI.Is_initialized():  # mpi4py.rc.initialize is false
        MPI.Init_thread(MPI.THREAD_MULTIPLE)  # mpi4py does so at its import
        atexit.register(_end)
    if comm is not None and (not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL):
        raise refusal(TypeError, "HD114", f"comm must be an mpi4py Intracomm that holds this rank, got {comm!r}")
    if comm is None:
        comm = MPI.COMM_WORLD
        misfit = alone(environ, comm.size, library())
        if misfit is not None:
            raise LaunchError("HD106", misfit)
    return comm


def _check_files() -> None:
    """Raise a LaunchError if MPI and init() would fail, or hang, because of too few descriptors."""
    needed = _FILES_AFTER_MPI if "mpi4py.MPI" in sys.modules else _FILES
    held: list[int] = []
    try:
        held.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(needed))
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        may = f"this process may open {soft} files, but needs {needed} more than it has open ({reason(error)})"
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        fix = f"ulimit -n $(ulimit -Hn) in the job script, which is {most} here"
        if soft == hard:
            fix = "call init() before files are opened, or ask your centre to raise the hard limit, which is as low"
        fix += "; docker run --ulimit nofile=65536"
        raise LaunchError("HD116", f"{may}: {fix}") from None
    finally:
        for fd in held:
            os.close(fd)


def _end() -> None:
    """End the MPI that job() has started, after the other exit handlers, as mpi4py does."""
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()


os.register_at_fork(after_in_child=lambda: atexit.unregister(_end))  # MPI is the parent's


def library() -> str:
    """Return the name and version of the MPI library."""
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().split("\n")[0].strip("\0 ").split())


_PATIENCE = 10.0  # seconds for a command of a scheduler, which may retry for minutes
_NO_LIMIT = 2**32 - 1  # Flux prints it for no limit


def clock(text: str) -> int:
    """Convert [[days-]hours:][minutes:]seconds."""
    days, _, clock = text.rpartition("-")
    total = 0
    for part in clock.split(":"):
        total = 60 * total + int(part)
    return total + 86400 * int(days or 0)


def _after_start(text: str) -> float:
    values = dict(re.findall(r"^\s*([\w.]+) = (.*\S)", text, re.MULTILINE))
    start = values.get("stime") or values.get("start_time", "")  # OpenPBS has the former, Torque the latter
    return clock(values.get("Resource_List.walltime", "")) + time.mktime(time.strptime(start)) - time.time()


# Variable with the ID of a job: command that prints the time of the job whose ID follows, and how to read seconds left.
_SCHEDULERS: dict[str, tuple[str, Callable[[str], float]]] = {
    "SLURM_JOB_ID": ("squeue --noheader --format=%L --jobs", clock),
    "PBS_JOBID": ("qstat -f", _after_start),
    "LSB_BATCH_JID": ("bjobs -noheader -o time_left", lambda text: 60 * clock(text.partition(" ")[0])),
    "FLUX_JOB_ID": ("flux job timeleft", clock),
}


def time_left(environ: Mapping[str, str]) -> float | None:
    """Return the seconds left of this batch job; of a job within a job, the smaller number.

    None without a job or a limit. If a scheduler cannot tell, the reason is printed.
    """
    times = [_of_job(job, environ) for job in _SCHEDULERS if environ.get(job)]
    return min((left for left in times if left is not None and left < _NO_LIMIT), default=None)


def batch_job(environ: Mapping[str, str]) -> str:
    """Return the ID of this batch job; "" outside of one."""
    return next((environ[name] for name in _SCHEDULERS if environ.get(name)), "")


def printed(words: list[str]) -> str:
    """Return the output of a command of a scheduler."""
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=_PATIENCE).stdout.strip()


def _of_job(job: str, environ: Mapping[str, str]) -> float | None:
    if job == "SLURM_JOB_ID" and (end := environ.get("SLURM_JOB_END_TIME")):  # seconds of the epoch; not in Slurm 22.05
        return int(end) - time.time()
    command, seconds = _SCHEDULERS[job]
    words, text = [*command.split(), environ[job]], ""
    try:
        text = printed(words)
        return seconds(text)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        why = f"the time left of this job is not known ({' '.join(words)}: {text or reason(error)})"
        abort.print_error(with_hint(coded("HD114", f"hpcdist: {why}, and stop_before has no effect")))
        return None
