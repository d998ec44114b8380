"""Who started this process: what launchers set, worlds of one rank that were meant as one world, and children."""

import json
import sys

import pytest
from launch import launcher, run

from hpcdist.launch.launcher import VARIABLES, alone, described, nearest, number, on_node, without_launcher

TORCH = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}
ELASTIC = {**TORCH, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "some"}
IN_SLURM = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}  # as a job script has them
STEP = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


def of(words, more=None):
    return {**dict(word.split("=") for word in words.split()), **(more or {})}


# The variables of the last rank of 4 on 2 nodes: as printed by the launcher where docs/do/launchers.md says that it was
# run; else as documented. With it: its name, its words for one process, and those for its own mismatch.
PLACES = {
    "Open MPI": (
        of(
            "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_RANK=1 "
            "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=3",
            IN_SLURM,
        ),
        *("mpirun of Open MPI", 2, "mpirun -n 1", "the mpirun of the same installation"),
    ),
    "MPICH or Intel MPI": (
        {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", **IN_SLURM},
        *("mpirun of MPICH or Intel MPI", 2, "mpirun -n 1", "the mpirun of the same installation"),
    ),
    "MVAPICH": (
        {f"MVP_COMM_WORLD_{name}": n for name, n in (("SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "1"))},
        *("mpirun of MVAPICH", None, "mpirun -n 1", "the mpirun of the same installation"),
    ),
    "srun --mpi=pmix": ({**STEP, "PMIX_RANK": "3"}, "srun", None, "srun -n 1", "srun --mpi=pmix for Open MPI"),
    "srun --mpi=pmi2": ({**STEP, "PMI_SIZE": "4", "PMI_RANK": "3"}, "srun", None, "srun -n 1", "--mpi=pmi2 for MPICH"),
    "srun --mpi=cray_shasta": (
        {**STEP, "PALS_RANKID": "3", "PALS_NODEID": "1"},
        *("srun", None, "srun -n 1", "srun --mpi=cray_shasta for Cray MPICH"),
    ),
    "PALS": (
        of("PMI_SIZE=4 PMI_RANK=3 PMI_LOCAL_RANK=1 PALS_RANKID=3 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2"),
        *("mpiexec of PALS", 2, "mpiexec -n 1", "load the module cray-mpich-abi"),
    ),
    "flux run": (
        of("FLUX_JOB_SIZE=4 FLUX_JOB_NNODES=2 FLUX_TASK_RANK=3 FLUX_TASK_LOCAL_ID=1 PMI_SIZE=4 PMI_RANK=3"),
        *("flux run", None, "flux run -n 1", "flux run -o pmi=pmix"),
    ),
    "jsrun": (
        of(
            "JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2 "
            "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3 PMIX_RANK=3"
        ),
        *("jsrun", 2, "jsrun -n 1", "jsrun starts Spectrum MPI"),
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_launcher_is_recognised(place):
    environ, name, local_size, one, fix = PLACES[place]
    found = nearest(environ)
    assert found[0].name == name
    assert (found[2], number(environ), on_node(environ)) == (4, 3, (1, local_size))
    assert described(environ)
    problem = alone(environ, 1, "the library in use") or ""
    assert problem.startswith(f"this process is alone in its MPI world, but {found[1]}=4: {name} started 4 processes")
    for part in ("The library is the library in use.", fix, f"{one}, or hpcdist.init(MPI.COMM_SELF)"):
        assert part in problem
    assert alone(environ, 4, "some MPI") is None
    assert without_launcher({**environ, "HOME": "/home/me"}) == {"HOME": "/home/me"}
    alone_on_purpose = {key: "1" if value == "4" else "0" for key, value in environ.items() if key not in IN_SLURM}
    assert alone(alone_on_purpose, 1, "some MPI") is None


RANK_ONLY = {
    "prterun started others, too": {"PMIX_RANK": "1"},
    "aprun started others, too": {"ALPS_APP_PE": "1"},
    "mpiexec of PALS started others, too": {"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "1"},
    "PALS_LOCAL_SIZE=2: mpiexec of PALS started others": {"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "2"},
}


@pytest.mark.parametrize("told", RANK_ONLY)
def test_a_launcher_that_tells_no_size(told):
    assert told in alone(RANK_ONLY[told], 1, "some MPI")
    assert alone(dict.fromkeys(RANK_ONLY[told], "0"), 1, "some MPI") is None


@pytest.mark.parametrize("environ", [TORCH, ELASTIC, {**ELASTIC, "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1"}])
def test_worlds_of_one_under_torchrun_are_explained(environ):
    problem = alone(environ, 1, "some MPI") or ""
    for part in ("WORLD_SIZE=4: torchrun", "mpirun -n 4 python", "hpcdist.init(MPI.COMM_SELF)"):
        assert part in problem
    assert number(environ) == 1


def test_what_was_exported_for_torch_is_not_taken_for_the_launcher():
    """RANK=$SLURM_PROCID and the like, as many job scripts have it."""
    assert "SLURM_NTASKS=4: Slurm" in alone({**TORCH, "SLURM_NTASKS": "4"}, 1, "some MPI")


def test_a_batch_script_without_srun_is_told_so():
    problem = alone(IN_SLURM, 1, "some MPI") or ""
    assert "SLURM_NTASKS=8: Slurm allocated 8 tasks" in problem
    assert "started without srun" in problem
    assert "Write srun before python" in problem
    assert "without srun" not in alone(STEP, 1, "some MPI")
    assert "without srun" in alone({**IN_SLURM, "SLURM_STEP_NUM_TASKS": "1"}, 1, "some MPI")  # submitted by a step


SLURM_2 = {"SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}  # salloc -N2
UNUSED = {
    "Slurm allocated 2 tasks": SLURM_2,
    "Slurm allocated 8 tasks": {**SLURM_2, "SLURM_NTASKS_PER_NODE": "4", "SLURM_PROCID": "0"},
    "Slurm allocated 4 tasks": {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "4"},
    "PBS allocated 2 nodes": {"PBS_NODEFILE": "n1 n1 n2"},
    "LSF allocated 2 nodes": {"LSB_MCPU_HOSTS": "n1 4 n2 4"},
    "LSF allocated 3 nodes": {"LSB_MCPU_HOSTS": "batch 1 n1 42 n2 42 n3 42"},
    "Flux allocated 2 nodes": {"FLUX_URI": "local:///tmp/flux/local-0"},
}
ON_PURPOSE = ({"OMPI_COMM_WORLD_SIZE": "1"}, {"PMI_SIZE": "1"}, {"PMIX_RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1"})


@pytest.fixture
def flux(tmp_path, monkeypatch):
    """A stand-in, and the file of PBS."""
    (tmp_path / "flux").write_text('#!/bin/sh\n[ "$*" = "getattr size" ] && echo 2\n')
    (tmp_path / "flux").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def filled(environ):
        if "PBS_NODEFILE" in environ:
            (tmp_path / "nodes").write_text(environ["PBS_NODEFILE"].replace(" ", "\n") + "\n")
            return {"PBS_NODEFILE": str(tmp_path / "nodes")}
        return environ

    return filled


@pytest.mark.parametrize("allocated", UNUSED)
def test_an_allocation_of_several_nodes_is_not_used_by_one_process(allocated, flux):
    environ = flux(UNUSED[allocated])
    problem = alone(environ, 1, "some MPI") or ""
    assert f"{allocated}, and this process was started without " in problem
    assert alone(environ, 2, "some MPI") is None
    for launched in ON_PURPOSE:
        assert alone({**environ, **launched}, 1, "some MPI") is None


@pytest.mark.parametrize(
    "environ", [{"LSB_MCPU_HOSTS": "n1 8"}, {"LSB_MCPU_HOSTS": "batch 1 n1 42"}, {"PBS_NODEFILE": "/no/such/file"}]
)
def test_one_node_is_used_by_one_process(environ):
    assert alone(environ, 1, "some MPI") is None


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, 1),
        ({"SLURM_JOB_NUM_NODES": "1"}, 1),
        (TORCH, 4),
        (ELASTIC, 4),
        ({**ELASTIC, "WORLD_SIZE": "1"}, 1),
        ({**TORCH, "PMI_SIZE": "1"}, 1),
        ({**TORCH, "SLURM_STEP_NUM_TASKS": "1"}, 1),
        ({"WORLD_SIZE": "4", "RANK": "0"}, 1),
        ({"WORLD_SIZE": "many", "RANK": "0", "LOCAL_RANK": "0"}, 1),
        ({"PMIX_RANK": "0"}, 1),
        ({"SLURM_NTASKS": "4"}, 4),
        ({"SLURM_NTASKS": "4", "OMPI_COMM_WORLD_SIZE": "1"}, 1),
        ({"SLURM_NTASKS": "4", "PMI_SIZE": "1"}, 1),
        ({"SLURM_NTASKS": "1"}, 1),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_TASKS_PER_NODE": "4"}, 1),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "4"}, 1),  # left from the step that has submitted this job
        ({"SLURM_NTASKS": "4(x2)"}, 1),
    ],
)
def test_a_launcher_that_fits_is_left_alone(environ, size):
    assert alone(environ, size, "some MPI") is None
    assert without_launcher({**environ, "HOME": "/home/me"}) == {"HOME": "/home/me"}


def test_what_the_user_has_told_a_launcher_stays_for_children():
    users = {
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PMIX_MCA_gds": "hash",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "I_MPI_FABRICS": "shm",
    }
    launchers = {"PRTE_LAUNCHED": "1", "PRTE_SHARED_FS": "FALSE", "PMIX_RANK": "0", "PMI_FD": "9", "OMPI_MCA_pmix": "x"}
    launchers["OMPI_UNIVERSE_SIZE"] = "2"  # with it, mpirun "does not support recursive calls"
    assert without_launcher({**launchers, **users}) == users


def test_the_mpirun_of_this_environment_is_recognised():
    """MPICH's or Open MPI's; with make test-versions Intel MPI's and Open MPI 5's, too."""
    found = f"{{n: v for n, v in os.environ.items() if n in {VARIABLES!r}}}"
    code = f"import json, os; os.write(1, json.dumps({found}).encode() + b'\\n')"  # at once: the ranks' lines may mix
    job = run([*launcher(2), sys.executable, "-S", "-c", code])
    assert job.status == 0, job.err
    seen = []
    for environ in map(json.loads, job.out.splitlines()):
        found = nearest(environ)
        assert found[0].name in ("mpirun of Open MPI", "mpirun of MPICH or Intel MPI")
        seen.append((found[2], number(environ), on_node(environ)))
    assert sorted(seen) == [(2, 0, (0, 2)), (2, 1, (1, 2))]
