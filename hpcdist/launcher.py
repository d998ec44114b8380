"""Who started this process: what mpirun and srun leave in its environment. Pure functions of an environment."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["alone", "claims", "without_launcher"]

# What the launchers call the number of processes they started, the nearest launcher first.
_SIZES = {
    "OMPI_COMM_WORLD_SIZE": "mpirun of Open MPI",
    "PMI_SIZE": "mpirun of MPICH (or srun --mpi=pmi2)",
    "SLURM_STEP_NUM_TASKS": "srun",
    "SLURM_NTASKS": "Slurm",
}

# What a launcher leaves in the environment of its processes, and what makes a child of theirs join their job.
_LAUNCHER = (
    *("OMPI_COMM_", "OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_pmix", "PMI_", "PMI2_", "PMIX_", "PRTE_"),
    *("SLURM_", "HYDI_", "HYDRA_", "MPIEXEC_", "MPI_LOCAL"),
)


def claims(environ: Mapping[str, str]) -> dict[str, int]:
    """The numbers of processes that launchers say they started, the nearest launcher first.

    Example::

        >>> claims({"SLURM_NTASKS": "8", "PMI_SIZE": "4", "HOME": "/root"})
        {'PMI_SIZE': 4, 'SLURM_NTASKS': 8}
    """
    return {name: int(environ[name]) for name in _SIZES if environ.get(name, "").isdigit()}


def alone(environ: Mapping[str, str], size: int, library: str) -> str | None:
    """Find N worlds of one: a launcher that started N processes, and an MPI `library` whose world has `size`, one.

    Returns:
        What is wrong and what to do, or None.
    """
    found = claims(environ)
    direct = [found[name] for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if name in found]
    if size > 1 or 1 in direct or not found:
        return None
    name, claim = next(iter(found.items()))
    if claim <= 1:
        return None
    return (
        f"this process is alone in its MPI world, but {name}={claim}: {_SIZES[name]} started {claim} processes, "
        f"and the MPI library that mpi4py uses does not know of them. The library is {library}. "
        "Use the launcher that belongs to it: the mpirun of the same installation "
        "(for the PyPI wheels, the one in the environment's bin folder), or under Slurm srun --mpi=pmix for "
        "Open MPI and srun --mpi=pmi2 for MPICH. For one process on purpose inside an allocation: srun -n 1, or "
        "hpcdist.init(MPI.COMM_SELF)."
    )


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child process that is to run MPI on its own, outside the job."""
    return {name: value for name, value in environ.items() if not name.startswith(_LAUNCHER)}
