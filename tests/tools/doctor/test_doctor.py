"""The doctor finds what is wrong with jobs that are ill for real."""

import json
import shlex

import pytest
from launch import finished, launcher, mpirun, python, run, slowness

DOCTOR = ("-m", "hpcdist", "doctor")


def doctor(np, *args, env=None, under=()):
    """The doctor on `np` ranks, each started by the command `under`."""
    return run([*(launcher(np) if np else []), *under, *python(), *DOCTOR, *args], env=env)


# 3: MPICH's mpirun must see all of them end well
@pytest.mark.parametrize("np", [0, pytest.param(3, marks=pytest.mark.both)])
def test_a_healthy_job(np, tmp_path):
    job = finished(np, *DOCTOR, "--json", env={"HPCDIST_STAGING": str(tmp_path)}, quick=np > 0)
    told = json.loads(job.out)  # one report, however many ranks
    verdicts = {finding["name"]: finding["verdict"] for finding in told["findings"]}
    for name in ("world", "MPI library", "/dev/shm", "HDF5 file", "hpcdist.init()", "route mpi", "route hdf5"):
        assert verdicts[name] == "ok", job.out
    assert [facts["rank"] for facts in told["ranks"]] == list(range(max(np, 1)))
    assert told["count"]["broken"] == list(verdicts.values()).count("broken") == 0, job.out
    assert list(tmp_path.iterdir()) == []


def found(job, name, fix):
    """The text of a finding that is not ok, whose fix holds `fix`."""
    lines = job.out.splitlines()
    at = next((i for i, line in enumerate(lines) if line[8:].startswith(f"{name}  ") and line[:2] != "ok"), None)
    assert at is not None, f"no finding about {name}\n{job.out}\n{job.err}"
    assert lines[at + 1].strip().startswith("fix:"), lines[at + 1]
    assert fix in lines[at + 1]
    return lines[at]


# Ill for real: ranks and environment; and the name of each finding, its text and its fix. Those that do not depend on
# each other share a job.
BROKEN = {
    "no MPI library": (
        0,
        {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
        [("MPI library", "mpi4py finds no MPI library", "pip install mpich")],
    ),
    "the start of MPI fails": (
        0,
        {"OMPI_MCA_pml": "nonsense"},
        [("MPI_Init", "ended with status 1; see its output", "srun --mpi=pmix for Open MPI")],
    ),
    "MPI without threads, an interface that is not there and a staging folder that is none": (
        2,
        {
            "MPI4PY_RC_THREAD_LEVEL": "funneled",
            "GLOO_SOCKET_IFNAME": "nope0",
            "HPCDIST_STAGING": "/dev/null/\udcff",  # not text
            "PYTHONIOENCODING": "utf-8:strict",
        },
        [
            ("MPI threads", "MPI_THREAD_FUNNELED: async_op=True, isend and irecv are refused", "THREAD_LEVEL"),
            ("GLOO_SOCKET_IFNAME", "no such interface with an address", "unset GLOO_SOCKET_IFNAME"),
            ("staging folder", "/dev/null/\\udcff: Not a directory", "export HPCDIST_STAGING=FOLDER"),
        ],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_found(case):
    np, env, expected = BROKEN[case]
    job = doctor(np, env=env)
    for name, text, fix in expected:
        line = found(job, name, fix)
        assert line.startswith("broken  ")
        assert text in line
    assert job.status == 1, job.err
    assert "Traceback" not in job.err


def test_worlds_of_one_tell_once():
    """Two processes that a launcher has started of which the MPI library knows nothing."""
    one = shlex.join([*python(), *DOCTOR])
    command = f"PMI_SIZE=2 PMI_RANK=1 {one} & PMI_SIZE=2 PMI_RANK=0 {one}; first=$?; wait $!; echo $first $?"
    job = run(["sh", "-c", command])
    assert "2 worlds of one rank, instead of one of 2" in found(job, "launcher", "srun --mpi=pmix for Open MPI")
    assert job.out.count(" broken, ") == 1
    assert job.out.splitlines()[-1] == "1 0"


FEW = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))
"""


def test_too_few_files_for_mpi():
    """The limit is known before MPI starts, which may fail; init() is refused."""
    for ranks, files in ((0, 20), (2, 24)):
        job = mpirun(ranks, "-c", FEW.format(files) + EXAMINE, "--limit", "20")
        text = job.out + job.err  # of a rank that MPI lets print
        assert f" may open {files} files; " in text, job
        assert "ulimit -n $(ulimit -Hn)" in text, job
        assert "fix:  the launcher and mpi4py's MPI library must belong together" not in text, job
        assert text.count(" broken, ") <= 1, job
        assert job.status != 0


# In a job whose ranks have done something else before.
EXAMINE = """
import runpy, sys
sys.argv = ["doctor", *sys.argv[1:]]
runpy.run_module("hpcdist.tools.doctor", run_name="__main__", alter_sys=True)
"""


FULL = """
import errno, os
synced = os.fsync
def fsync(fd):
    if "hpcdist-doctor" in os.readlink(f"/proc/self/fd/{fd}"):
        raise OSError(errno.ENOSPC, "No space left on device")
    return synced(fd)
os.fsync = fsync
"""


def test_no_h5py_and_a_full_staging_folder(tmp_path):
    (tmp_path / "h5py.py").write_text("raise ImportError('no module named h5py, as it were')")
    (tmp_path / "full").mkdir()
    job = mpirun(2, "-c", FULL + EXAMINE, cwd=tmp_path, env={"HPCDIST_STAGING": "full"})
    assert "h5py cannot be imported: no module named h5py, as it were" in found(job, "HDF5", "pip install h5py")
    assert "No space left on device" in found(job, "staging folder", "export HPCDIST_STAGING=FOLDER")
    assert job.status == 1
    assert list((tmp_path / "full").iterdir()) == []


def test_a_job_that_works_but_slowly():
    """Two ranks on one core; torch takes all its threads. Nothing of it is broken."""
    job = doctor(2, under=["taskset", "-c", "0", "env", "OMP_NUM_THREADS=64"])
    assert "ranks 0-1 on" in found(job, "cores", "mpirun --bind-to core")
    assert "threads each on" in found(job, "threads", "export OMP_NUM_THREADS=")
    assert job.status == 0, job.err


def test_a_rank_that_never_comes():
    """MPI_Init waits for it without end, with Python's lock in its hand."""
    job = run([*launcher(1), *python(), *DOCTOR, "--limit", "1", ":", "-n", "1", "sleep", "50"])
    assert "rank 0 on" in found(job, "MPI_Init", "mpirun of the same installation")
    assert "has not ended in time (--limit 1)" in job.out
    assert job.status != 0


HANGS = """
import os, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    {}
raise ImportError("h5py is not for this test")
"""


@pytest.mark.parametrize(
    ("ill", "text"),
    [
        ("import ctypes; ctypes.PyDLL(None).sleep(1000)", "has not ended in time (--limit {})"),
        ("import signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed its process by SIGSEGV"),
    ],
)
def test_a_rank_that_hangs_or_dies_alone_is_named(ill, text, tmp_path):
    limit = f"{min(20, 5 * slowness()):g}" if "limit" in text else "20"  # within which MPI must start on a busy machine
    (tmp_path / "h5py.py").write_text(HANGS.format(ill))
    job = mpirun(2, *DOCTOR, "--limit", limit, cwd=tmp_path)
    lines = [line for line in job.err.splitlines() if line.startswith("broken") and "rank 1 on" in line]
    assert len(lines) == 1, job.err
    assert text.format(limit) in lines[0]
    assert lines[0][8:].startswith("this rank's software")
    assert job.status != 0
