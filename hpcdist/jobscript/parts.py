"""The texts of the job scripts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "PROGRAM", "START", "Kind", "head", "launch", "say"]

_GATHER = ("python", "-m", "hpcdist.gather")


@dataclass(frozen=True)
class Kind:
    """The texts of a kind of job.

    Attributes:
        title: one-line description.
        usage: command that starts the job.
        notes: lines for its user.
        command: default program of each rank.
        program: comment on the program.
        before: lines before the environment is loaded.
        run: last lines, which start the ranks; @SAY@ stands for the lines that print what was chosen.
    """

    title: str
    usage: str
    notes: tuple[str, ...] = ()
    command: tuple[str, ...] = _GATHER
    program: str = "What follows the script's name is added to it."
    before: str = ""
    run: str = '@SAY@\n"${launch[@]}" "${program[@]}" "$@"'


def head(kind: str, asked: str, own: bool) -> str:
    """Return the lines above the options: what the script is, what to edit, how to launch it differently."""
    of = KINDS[kind]
    lines = [
        f"{of.title}:",
        f"    sbatch {kind}.sbatch ARGUMENTS" if own and "sbatch " in of.usage else f"    {of.usage}",
        "",
        "Edit: the #SBATCH lines (options given to sbatch, such as --nodes=8, win over them), how your environment is",
        "loaded, and the program.",
        *of.notes,
        "HPCDIST_LAUNCHER=srun or mpirun says what starts the ranks, and HPCDIST_SRUN_MPI=pmix or pmi2 how srun talks",
        "to them, should the choice below be wrong (srun --mpi=list shows what there is).",
        "Written by:",
        f"    {asked}",
    ]
    return "\n".join(["#!/bin/bash", *(f"# {line}".rstrip() for line in lines)])


START = "set -eo pipefail # not -u: the scripts of modules and of conda use variables that are not set"

PROGRAM = "# The program of each rank. {comment}\nprogram=({program})"

_LAUNCH = """\
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export SLURM_EXPORT_ENV=ALL # what is set here is for the ranks too, even after sbatch --export=NONE
launcher=${HPCDIST_LAUNCHER:-@LAUNCHER@}
mpi=$(python -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])')
@PMI@
ranks=$((SLURM_JOB_NUM_NODES * ${SLURM_NTASKS_PER_NODE:?expected the option --ntasks-per-node}))
case $launcher in
    srun) # from Slurm 22.05 on, srun does not know --cpus-per-task of the job; one rank that fails ends all
        launch=(srun --mpi="$pmi" --ntasks="$ranks" --cpus-per-task="$OMP_NUM_THREADS" --kill-on-bad-exit=1) ;;
    mpirun) # of the MPI library that mpi4py uses; unbound, or two ranks of several threads would get one core each
        launch=(mpirun -n "$ranks" --bind-to none) ;;
    *)
        echo "HPCDIST_LAUNCHER=$launcher: expected srun or mpirun" >&2
        exit 2 ;;
esac"""

_FIND_PMI = """\
case $mpi in
    "Open MPI") pmi=${HPCDIST_SRUN_MPI:-pmix} ;;
    *) pmi=${HPCDIST_SRUN_MPI:-pmi2} ;; # MPICH, and what is made of it
esac"""


def launch(launcher: str, mpi: str) -> str:
    """Return the lines that set the array `launch`, which starts the ranks."""
    pmi = _FIND_PMI if mpi == "auto" else f"pmi=${{HPCDIST_SRUN_MPI:-{mpi}}}"
    return _LAUNCH.replace("@LAUNCHER@", launcher).replace("@PMI@", pmi)


def say(kind: str, gpus: bool) -> str:
    """Return the lines that print what was chosen."""
    job = "job $SLURM_ARRAY_JOB_ID, index $SLURM_ARRAY_TASK_ID" if kind == "array" else "job $SLURM_JOB_ID"
    lines = [
        f'echo "{kind}: {job} on $SLURM_JOB_NUM_NODES nodes: $SLURM_JOB_NODELIST"',
        'echo "ranks: $ranks, $SLURM_NTASKS_PER_NODE on each node, $OMP_NUM_THREADS CPUs each"',
        'echo "MPI: $mpi; launched by: ${launch[*]}"',
    ]
    return "\n".join(lines + ['echo "GPUs of a node: ${SLURM_GPUS_ON_NODE:-none}"'] * gpus)


_INTERACTIVE_RUN = """\
@SAY@
ranks() { "${launch[@]}" "$@"; }
if [ $# -gt 0 ]; then
    ranks "$@"
elif [ -t 0 ]; then
    echo "ranks COMMAND runs a command on every rank; exit gives the nodes back"
    # .bashrc may set PATH anew: what was loaded here comes after it.
    exec bash --rcfile <(echo '[ ! -f ~/.bashrc ] || . ~/.bashrc'; export -p; declare -p launch; declare -f ranks)
else
    ranks "${program[@]}"
fi"""

_INTERACTIVE_BEFORE = """\
if [ -z "${SLURM_JOB_ID:-}" ]; then # no allocation yet: get one of the shape above, and go on in it
    mapfile -t options < <(sed -n 's/^#SBATCH //p' "$0")
    exec salloc "${options[@]}" bash "$0" "$@"
fi"""

_REQUEUE_BEFORE = """\
most=${HPCDIST_RESTARTS:-100}
step=
go_on_later() { # Slurm sends USR1 to this shell alone, some time before the limit
    trap '' USR1
    echo "job $SLURM_JOB_ID: the time is nearly up; the ranks are ended"
    if [ -n "$step" ]; then
        case $launcher in # srun would take TERM for KILL
            srun) scancel --signal=TERM "$SLURM_JOB_ID" ;;
            *) kill -TERM "$step" ;;
        esac
        if wait "$step"; then exit 0; fi # they were just done
    fi
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "$most" ]; then
        echo "job $SLURM_JOB_ID: restarted $most times already, and not again" >&2
        exit 1
    fi
    echo "job $SLURM_JOB_ID: back to the queue, to go on from the file"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # until Slurm ends this run
    exit 1
}
trap go_on_later USR1"""

_REQUEUE_RUN = """\
@SAY@
echo "run $((${SLURM_RESTART_COUNT:-0} + 1)) of this job"
"${launch[@]}" "${program[@]}" "$@" & # bash hears a signal only while it waits
step=$!
status=0
wait "$step" || status=$?
exit "$status\""""

_STAGED_RUN = """\
writer=$(python -c 'import mpi4py; mpi4py.rc.initialize = False
from hpcdist import staging; print(*staging.writer(), sep=": ")')
@SAY@
echo "writer: $writer"
"${launch[@]}" "${program[@]}" "$@\""""

KINDS = {
    "cpu": Kind("CPU ranks over MPI", "sbatch cpu.sbatch 'shards/*.npy'"),
    "gpu": Kind(
        "One GPU a rank, NCCL",
        "sbatch gpu.sbatch 'shards/*.npy'",
        (
            "--ntasks-per-node and --gres say the same number. All GPUs of a node stay visible to its ranks, and each",
            "rank takes that of its local rank: no --gpus-per-task, no --gpu-bind, no CUDA_VISIBLE_DEVICES.",
        ),
        (*_GATHER, "--route", "nccl"),
    ),
    "train": Kind(
        "A training with DistributedDataParallel: CPU ranks over MPI, or one GPU a rank with --gpus-per-node",
        "sbatch train.sbatch --epochs 10",
        ("The program is torch's own, but for one line, hpcdist.init(): see docs/torch-backend.md.",),
        ("python", "-m", "hpcdist.examples.train_ddp"),
    ),
    "staged": Kind(
        "From files to one HDF5 file that all ranks write at once; no rank holds more than a window of it",
        "sbatch staged.sbatch 'shards/*.npy' -o whole.h5 --window 512M",
        (
            "The file belongs into a folder of the parallel file system; on Lustre: lfs setstripe -c -1 FOLDER before.",
            "A rank needs about 0.5 GiB and twice --window (256M) of memory.",
        ),
        (*_GATHER, "-o", "whole.h5"),
        run=_STAGED_RUN,
    ),
    "array": Kind(
        "A job array: the same for several sets of files, each a job of its own",
        "sbatch array.sbatch 'shards/%a/*.npy' -o 'whole-%a.h5'",
        ("%a in the program and in what follows the script's name is the index of the job, one of --array.",),
        (*_GATHER, "-o", "whole-%a.h5"),
        run='@SAY@\nprogram=("${program[@]}" "$@")\n"${launch[@]}" "${program[@]//%a/$SLURM_ARRAY_TASK_ID}"',
    ),
    "interactive": Kind(
        "An allocation to work in: a shell in which `ranks COMMAND` runs a command on every rank",
        "bash interactive.sbatch        or one command: bash interactive.sbatch python train.py",
        ("It works with sbatch, too, and in an allocation of yours: salloc --nodes=2 --ntasks-per-node=4.",),
        ("python", "-m", "hpcdist"),
        "It runs where there is neither a command nor a terminal.",
        _INTERACTIVE_BEFORE,
        _INTERACTIVE_RUN,
    ),
    "requeue": Kind(
        "A job longer than its time limit: before the limit it goes back to the queue, and goes on from its file",
        "sbatch requeue.sbatch 'shards/*.npy' -o whole.h5",
        (
            "Slurm sends the signal of --signal so many seconds before the limit, or up to 60 earlier. The ranks then",
            "get SIGTERM. A program of your own goes on from what it finds, as --resume does here.",
            "HPCDIST_RESTARTS (100): the job is restarted so many times at most.",
        ),
        (*_GATHER, "-o", "whole.h5", "--resume"),
        before=_REQUEUE_BEFORE,
        run=_REQUEUE_RUN,
    ),
}
