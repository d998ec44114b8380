"""Which launcher started this process, from the variables that mpirun, srun and torchrun set. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["alone", "claims", "has_rank", "number", "without_launcher"]

# The variables in which launchers put the number of processes and the number of each, the nearest launcher first.
_TORCHRUN = ("WORLD_SIZE", "RANK", "torchrun (or another one of torch's kind: accelerate, deepspeed, Ray)")
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun of Open MPI"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "mpirun of MVAPICH2"),
    ("MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_RANK", "mpirun of MVAPICH"),
    ("PMI_SIZE", "PMI_RANK", "mpirun of MPICH (or srun --mpi=pmi2)"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "jsrun"),
    ("PALS_LOCAL_SIZE", "PALS_RANKID", "mpiexec of PALS, on this node,"),
    ("HOROVOD_SIZE", "HOROVOD_RANK", "horovodrun"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "flux run"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun"),
    ("SLURM_NTASKS", "SLURM_PROCID", "Slurm"),
    _TORCHRUN,  # or variables that a script has derived from those above
)
_ELASTIC = "TORCHELASTIC_RUN_ID"  # set by torchrun itself, which a launcher of those above may have started
_WITHOUT_MPI = ("WORLD_SIZE", "HOROVOD_SIZE")
# Of MPI's own launchers: where one of these is 1, one process was meant, whatever a batch system has set.
_DIRECT = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE", "PMI_SIZE")

# Variables of launchers, which would make a child process join the job.
_LEFT = (
    *("OMPI_COMM_", "OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_pmix", "PMI_", "PMI2_", "PMIX_", "PRTE_"),
    *("SLURM_", "HYDI_", "HYDRA_", "MPIEXEC_", "MPI_LOCAL", "MV2_COMM_", "MVP_COMM_", "HOROVOD_", "JSM_", "PALS_"),
    *("FLUX_", "TORCHELASTIC_"),
)
# The user's settings of Open MPI 5's launcher and PMIx, which a child's own mpirun needs as well.
_USERS = ("PRTE_MCA_", "PRTE_ALLOW_", "PMIX_MCA_")
_LEFT_BY_TORCH = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else None


def claims(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the numbers of processes that launchers have started, the nearest launcher first.

    WORLD_SIZE counts beside RANK and LOCAL_RANK: alone it may be something else, such as a number of pods.

    Example::

        >>> claims({"SLURM_NTASKS": "8", "PMI_SIZE": "4", "HOME": "/root"})
        {'PMI_SIZE': 4, 'SLURM_NTASKS': 8}
    """
    found = {size: _number(environ, size) for size, _, _ in _nearest_first(environ)}
    if any(_number(environ, name) is None for name in ("RANK", "LOCAL_RANK")):
        found["WORLD_SIZE"] = None
    return {name: count for name, count in found.items() if count is not None}


def number(environ: Mapping[str, str]) -> int:
    """Return the number that the launcher has given this process; 0 without a launcher."""
    given = (_number(environ, rank) for _, rank, _ in (*_nearest_first(environ), ("", "PMIX_RANK", "prterun")))
    return next((rank for rank in given if rank is not None), 0)


def _nearest_first(environ: Mapping[str, str]) -> tuple[tuple[str, str, str], ...]:
    return (_TORCHRUN, *_LAUNCHERS) if _ELASTIC in environ else _LAUNCHERS


def has_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher of MPI's has a rank for this process."""
    return any(_number(environ, rank) is not None for size, rank, _ in _LAUNCHERS if size not in _WITHOUT_MPI)


def alone(environ: Mapping[str, str], size: int, library: str) -> str | None:
    """Find N worlds of one: a launcher that started N processes, and an MPI `library` whose world has `size`, one.

    Returns:
        What is wrong and what to do, or None.
    """
    found = claims(environ)
    if size > 1 or (_ELASTIC not in environ and any(found.get(name) == 1 for name in _DIRECT)):
        return None
    name, claim = next(iter(found.items()), ("PMIX_RANK", _number(environ, "PMIX_RANK") or 0))
    if claim <= (name != "PMIX_RANK"):
        return None
    how = next((how for known, _, how in _LAUNCHERS if known == name), "prterun")
    head = f"this process is alone in its MPI world, but {name}={claim}: {how} started "
    head += f"{claim} processes" if name != "PMIX_RANK" else "others, too"
    if name in _WITHOUT_MPI:
        return (
            f"{head}, and MPI knows nothing of them. hpcdist's ranks are MPI's: start the "
            f"program with mpirun -n {claim} python ..., or with srun, in its place. For one process on purpose: "
            f"hpcdist.init(MPI.COMM_SELF). If {name} is left from another launch: unset {name}."
        )
    return (
        f"{head}, and the MPI library that mpi4py uses does not know of them. The library is {library}. "
        "Use the launcher that belongs to it: the mpirun of the same installation "
        "(for the PyPI wheels, the one in the environment's bin folder), or under Slurm srun --mpi=pmix for "
        "Open MPI and srun --mpi=pmi2 for MPICH. For one process on purpose inside an allocation: srun -n 1, or "
        "hpcdist.init(MPI.COMM_SELF)."
    )


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child process that runs MPI on its own, outside the job.

    Example::

        >>> without_launcher({"PMIX_RANK": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"})
        {'PRTE_MCA_rmaps_default_mapping_policy': ':oversubscribe'}
    """
    return {name: value for name, value in environ.items() if name.startswith(_USERS) or not _left(name)}


def _left(name: str) -> bool:
    return name.startswith(_LEFT) or name in _LEFT_BY_TORCH
