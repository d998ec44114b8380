"""What differs between the schedulers, beside their templates."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OTHER_PMIS", "PMIS", "PMI_OF_IMAGES", "SCHEDULERS", "Scheduler"]


@dataclass(frozen=True)
class Scheduler:
    """A scheduler.

    Attributes:
        suffix: suffix of the scripts' names.
        submit: command that submits a script, before its name.
        prefix: what the lines with its options begin with.
        launchers: what can start the ranks, the default first.
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
        *("flux", "flux batch", "#flux:", ("flux",), "FLUX_TASK_LOCAL_ID"), refuses=("mem", "qos", "pyxis")
    ),
    "lsf": Scheduler(
        *("lsf", "bsub <", "#BSUB", ("jsrun", "mpirun"), "JSM_NAMESPACE_LOCAL_RANK", ("array",), False),
        refuses=("qos", "pyxis"),
        index="$LSB_JOBINDEX",
    ),
}

# What srun can offer (srun --mpi=list) and an MPI library, by mpi4py's name for it, understands; the better first.
PMIS = {"Open MPI": ("pmix",), "Intel MPI": ("pmi2", "pmix"), "Cray MPICH": ("cray_shasta", "pmi2")}
OTHER_PMIS = ("pmi2",)  # MPICH, and what is made of it
PMI_OF_IMAGES = "pmix"  # of Pyxis: NVIDIA's have Open MPI
