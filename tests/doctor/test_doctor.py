"""The doctor: what it makes of facts, and that it finds what is wrong with jobs that are ill for real."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launch import Job, launcher, mpirun, python, run

from hpcdist.doctor import cores, files, gpus, launch, network, timing
from hpcdist.doctor.examine import judge
from hpcdist.doctor.findings import Facts, Finding, report, status
from hpcdist.runtime.cli import ranks_text

GIB = 2**30


def rank(number: int, *, node: int = 0, local_rank: int = 0, environ: dict[str, str] | None = None) -> Facts:
    """Made-up facts of a healthy rank: two nodes of 64 cores, a GPU for each rank, two networks."""
    host = "ab"[node > 0]
    address = f"10.0.0.{1 + (node > 0)}"
    return {
        "rank": number,
        "node": node,
        "local_rank": local_rank,
        "host": host,
        "pid": 100 + number,
        "environ": {"OMPI_COMM_WORLD_SIZE": "4", "OMP_NUM_THREADS": "8", **(environ or {})},
        "mpi": {
            "library": "Open MPI v5.0.7, package: x",
            "mpi4py": "4.1.0",
            "standard": [3, 1],
            "thread_level": "MULTIPLE",
            "size": 4,
            "alone": None,
        },
        "cores": list(range(8 * local_rank, 8 * local_rank + 8)),
        "cpus": 64,
        "threads": 8,
        "gpu": {
            "torch": "2.13.0",
            "cuda": "13.0",
            "gloo": True,
            "nccl": "2.28.9",
            "in_node": 2,
            "gpus": [{"name": "H200", "uuid": f"GPU-{host}{i}", "bytes": 2**37} for i in range(2)],
            "peers": [[True, True], [True, True]],
        },
        "interfaces": {"lo": "127.0.0.1", "eth0": address, "docker0": "172.17.0.1"},
        "links": ["lo", "eth0", "docker0"],
        "reach": {str(2 - node): {"10.0.0.1" if node else "10.0.0.2": True, "172.17.0.1": False}},
        "shm": {"bytes": 128 * GIB, "free": 127 * GIB, "writable": True},
        "hdf5": {"h5py": "3.16.0", "hdf5": "1.14.6", "parallel": True},
        "staging": {"folder": "/scratch", "bytes": 2**50, "free": 2**49, "writable": True, "locks": None},
        "sees": True,
        "cuda_aware": True,
        "file": {"seconds": 0.02, "writer": "mpio"},
        "init": {"seconds": 0.2, "device": "cuda", "backend": "cpu:mpi,cuda:nccl"},
    }


def healthy(**environ: str) -> list[Facts]:
    """Ranks 0 and 1 on node a, 2 and 3 on node b."""
    return [rank(i, node=i // 2 * 2, local_rank=i % 2, environ=environ) for i in range(4)]


def ill(findings: Sequence[Finding]) -> dict[str, str]:
    """The findings that are not ok: name -> "verdict: text"; each has a fix."""
    wrong = [finding for finding in findings if finding.verdict != "ok"]
    assert all(finding.fix for finding in wrong), wrong
    return {finding.name: f"{finding.verdict}: {finding.text}" for finding in wrong}


def test_healthy_facts_of_two_nodes_with_gpus() -> None:
    findings = judge(healthy())
    assert ill(findings) == {}
    texts = {finding.name: finding.text for finding in findings}
    assert texts["world"] == "4 ranks on 2 nodes: a (ranks 0-1), b (ranks 2-3)"
    assert texts["MPI library"] == "Open MPI v5.0.7, mpi4py 4.1.0"
    assert texts["CUDA-aware MPI"] == "tried: route mpi moves GPU memory itself"
    assert texts["cores"] == "bound to 8 each"
    assert "rank 3: H200 GPU-b1" in texts["GPUs"]
    assert texts["peer access"] == "between all 2 GPUs of a node"
    assert "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0" in texts["network"]
    assert texts["staging folder"] == "/scratch: written and read, shared by 2 nodes, 512.0 TiB free"


def change(path: str, value: Any, *where: int) -> list[Facts]:
    """Healthy facts, but for one thing on some ranks (on all if none are named)."""
    ranks = healthy()
    *inner, last = path.split(".")
    for number in where or range(4):
        place = ranks[number]
        for step in inner:
            place = place[step]
        place[last] = value
    return ranks


# A change of healthy facts: on which ranks, and what must be found: name, the finding, and what its fix holds.
MADE_UP = {
    "threads": (("mpi.thread_level", "SERIALIZED"), "MPI threads", "broken: MPI_THREAD_SERIALIZED", "THREAD_LEVEL"),
    "libraries": (
        ("mpi.library", "MPICH 5.0.2", 2, 3),
        "MPI library",
        "broken: Open MPI v5.0.7, mpi4py 4.1.0 (ranks 0-1); MPICH 5.0.2, mpi4py 4.1.0 (ranks 2-3)",
        "same installation",
    ),
    "timeout": (("environ.HPCDIST_TIMEOUT", "0"), "deadline", "broken: HPCDIST_TIMEOUT is 0", "export HPCDIST_TIMEOUT"),
    "timeouts": (("environ.HPCDIST_TIMEOUT", "9", 1), "deadline", "warning: HPCDIST_TIMEOUT is not the same", "-x"),
    "torchrun": (("environ.WORLD_SIZE", "8"), "environment", "warning: rank 0: WORLD_SIZE=8 where MPI has 4", "unset"),
    "too many threads": (
        ("threads", 64, 2, 3),
        "threads",
        "warning: 2 ranks with 64 threads each on 16 cores of b",
        "export OMP_NUM_THREADS=8",
    ),
    "old torch on a node": (("gpu.torch", "2.6.0", 3), "torch", "broken: torch 2.13.0 (ranks 0-2)", "environment"),
    "no gloo": (("gpu.gloo", False), "torch", "broken: torch 2.13.0, built without gloo", "pip install torch"),
    "no NCCL": (("gpu.nccl", None), "NCCL", "warning: torch without NCCL", "torch built for CUDA"),
    "NCCL versions": (("gpu.nccl", "2.30.7", 0), "NCCL", "broken: NCCL 2.30.7 (rank 0); NCCL 2.28.9", "same"),
    "one GPU for two": (
        ("gpu.gpus", [{"name": "H200", "uuid": "GPU-x", "bytes": 1}], 0, 1),
        "GPUs",
        "broken: ranks 0 and 1 share one GPU (UUID GPU-x)",
        "one rank a GPU",
    ),
    "a node without": (("gpu.gpus", [], 2, 3), "GPUs", "warning: none on ranks 2-3", "--gpus-per-node"),
    "driver": (("gpu.error", "driver too old", 2), "GPUs", "broken: rank 2: driver too old", "nvidia-smi"),
    "hidden": (("gpu.gpus", []), "GPUs", "warning: a has 2, but torch sees none", "CUDA_VISIBLE_DEVICES"),
    "no peer access": (
        ("gpu.peers", [[True, False], [False, True]], 2),
        "peer access",
        "warning: 2 of 2 pairs on b have none, such as GPUs 0 and 1",
        "nvidia-smi topo -m",
    ),
    "firewall": (
        ("reach", {"2": {"10.0.0.2": False, "172.17.0.1": False}}, 0),
        "network",
        "broken: a does not reach b",
        "open the nodes' ephemeral ports",
    ),
    "no such interface": (
        ("environ.GLOO_SOCKET_IFNAME", "ib0"),
        "GLOO_SOCKET_IFNAME",
        "broken: GLOO_SOCKET_IFNAME=ib0: no such interface with an address on a, which has lo, eth0, docker0",
        "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0",
    ),
    "interface of one node": (
        ("environ.NCCL_SOCKET_IFNAME", "docker0"),
        "NCCL_SOCKET_IFNAME",
        "broken: NCCL_SOCKET_IFNAME=docker0: a does not reach b through it",
        "export GLOO_SOCKET_IFNAME=eth0",
    ),
    "loopback": (
        ("environ.GLOO_SOCKET_IFNAME", "lo"),
        "GLOO_SOCKET_IFNAME",
        "broken: GLOO_SOCKET_IFNAME=lo: a does not reach b through it",
        "unset GLOO_SOCKET_IFNAME",
    ),
    "shm of docker": (
        ("shm", {"bytes": 2**26, "free": 2**26, "writable": True}, 2, 3),
        "/dev/shm",
        "warning: b: 64.0 MiB free of 64.0 MiB, for 2 ranks",
        "--shm-size=8g",
    ),
    "shm full": (
        ("shm", {"bytes": GIB, "free": 17 * 2**20, "writable": True}, 0),
        "/dev/shm",
        "broken: a: 17.0 MiB free of 1.0 GiB, for 2 ranks",
        "remove the files of ended jobs",
    ),
    "no shm": (("shm", {"error": "No such file"}, 0), "/dev/shm", "broken: a: No such file", "mount -t tmpfs"),
    "no h5py": (
        ("hdf5", {"error": "h5py cannot be imported: x"}, 3),
        "HDF5",
        "broken: h5py cannot",
        "pip install h5py",
    ),
    "two h5pys": (
        ("hdf5", {"h5py": "3.16.0", "hdf5": "2.0.0", "parallel": False}, 3),
        "HDF5",
        "broken: HDF5 1.14.6, h5py 3.16.0, parallel: writer mpio (ranks 0-2); HDF5 2.0.0",
        "same environment",
    ),
    "not shared": (
        ("sees", False, 2, 3),
        "staging folder",
        "broken: /scratch: b does not see what a writes: it is not shared by all nodes",
        "export HPCDIST_STAGING=",
    ),
    "no space": (
        ("staging.error", "No space left on device", 2),
        "staging folder",
        "broken: /scratch on b: No space left on device",
        "export HPCDIST_STAGING=",
    ),
    "little space": (("staging.free", 2**20), "staging folder", "warning: /scratch: written", "df -h"),
    "no locks": (("staging.locks", "ENOLCK: No locks"), "file locking", "warning: /scratch: ENOLCK", "=FALSE"),
    "odd locking": (
        ("environ.HDF5_USE_FILE_LOCKING", "no"),
        "file locking",
        "warning: HDF5_USE_FILE_LOCKING=no",
        "unset",
    ),
    "file": (("file", {"error": "MPI-IO failed"}), "HDF5 file", "broken: MPI-IO failed", "writer='posix'"),
    "init": (("init", {"error": "no common network"}, 1), "hpcdist.init()", "broken: rank 1: no common", "findings"),
}


@pytest.mark.parametrize("case", MADE_UP)
def test_made_up_facts_are_judged(case: str) -> None:
    """One thing is wrong, and one finding says so."""
    changed, name, text, fix = MADE_UP[case]
    findings = judge(change(*changed))
    found = ill(findings)
    assert found.get(name, "").startswith(text), found
    assert fix in next(finding.fix or "" for finding in findings if finding.name == name and finding.verdict != "ok")
    assert status(findings) == int(text.startswith("broken"))
    assert len(found) == 1, found


def test_nodes_with_unequal_numbers_of_ranks() -> None:
    found = launch.judge(change("node", 0, 2))
    assert ill(found)["world"].startswith("warning: 4 ranks on 2 nodes: a (ranks 0-2), b (rank 3)")
    assert any("--ntasks-per-node" in (finding.fix or "") for finding in found)


def test_more_ranks_than_cores_that_wait_without_yielding() -> None:
    """MPICH yields; Open MPI where it is told to, or where mpirun knows that there are too many ranks."""
    for library, environ, verdict in (
        ("Open MPI v4.1.4", {}, "warning"),
        ("Open MPI v4.1.4", {"OMPI_MCA_mpi_oversubscribe": "1"}, "ok"),
        ("Open MPI v4.1.4", {"OMPI_MCA_mpi_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "0"}, "warning"),
        ("Open MPI v4.1.4", {"OMPI_MCA_mpi_yield_when_idle": "true"}, "ok"),
        ("MPICH Version: 5.0.2", {}, "ok"),
    ):
        ranks = healthy(**environ)
        for facts in ranks:
            facts.update(cores=[0], cpus=1, threads=1)
            facts["mpi"]["library"] = library
        found = next(finding for finding in cores.judge(ranks) if finding.name == "cores")
        assert found.verdict == verdict, (library, environ)
        assert verdict == "ok" or "OMPI_MCA_mpi_yield_when_idle=1" in (found.fix or "")


def test_threads_that_nobody_has_limited() -> None:
    ranks = change("threads", 64)
    for facts in ranks:
        del facts["environ"]["OMP_NUM_THREADS"]
    text = "warning: 2 ranks with 64 threads each on 16 cores of a, because OMP_NUM_THREADS is not set"
    assert ill(cores.judge(ranks)) == {"threads": text}


def test_ranks_that_are_bound_to_one_core() -> None:
    found = cores.judge(change("cores", [5], 2, 3))
    assert ill(found)["cores"] == "warning: ranks 2-3 on b share core 5, of the 64 of this machine"
    assert "--bind-to core" in (found[0].fix or "")


def test_the_launcher_and_where_it_has_put_the_ranks() -> None:
    """Two nodes of two ranks for the launcher; containers that hide the ranks of a node from each other."""
    local = [{"OMPI_COMM_WORLD_LOCAL_RANK": str(i % 2), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"} for i in range(4)]
    ranks = [rank(i, node=i // 2, local_rank=i % 2, environ=local[i]) for i in range(4)]
    (found, *_) = launch.judge(ranks)
    assert (found.name, found.verdict, found.text) == ("launcher", "ok", "mpirun of Open MPI: OMPI_COMM_WORLD_SIZE=4")
    apart = [rank(i, node=i, local_rank=0, environ=local[i]) for i in range(4)]
    text = "rank 0 is number 0 of 2 on its node, but 0 of 1 as MPI sees it: a wrong GPU"
    assert ill(launch.judge(apart))["launcher"].endswith(text)
    ranks[3]["environ"].update(SLURM_LOCALID="0", OMPI_COMM_WORLD_LOCAL_RANK="0")
    text = "rank 3 is number 0 of 2 on its node, but 1 of 2 as MPI sees it: a wrong GPU"
    assert ill(launch.judge(ranks)) == {"launcher": f"warning: mpirun of Open MPI: OMPI_COMM_WORLD_SIZE=4; {text}"}


def test_worlds_of_one_and_locks_that_are_insisted_on() -> None:
    lonely = rank(0)
    lonely["mpi"].update(size=1, alone="this process is alone")
    assert ill(launch.judge([lonely]))["launcher"].startswith("broken: 4 worlds of one rank, instead of one of 4")
    insists = change("staging.locks", "ENOLCK: No locks available")
    insists[0]["environ"]["HDF5_USE_FILE_LOCKING"] = "TRUE"
    assert ill(files.judge(insists))["file locking"].startswith("broken")
    insists[0]["environ"]["HDF5_USE_FILE_LOCKING"] = "FALSE"
    assert ill(files.judge(insists)) == {}


def test_cuda_visible_devices_that_is_the_same_for_all_is_named() -> None:
    ranks = healthy(CUDA_VISIBLE_DEVICES="0")
    for facts in ranks:
        facts["gpu"]["gpus"] = facts["gpu"]["gpus"][:1]
    assert "CUDA_VISIBLE_DEVICES=0 on all ranks" in ill(gpus.judge(ranks))["GPUs"]


def test_names_of_interfaces_as_nccl_reads_them() -> None:
    facts = rank(0)
    for value, expected in (("eth", ["eth0"]), ("=eth", []), ("=eth0", ["eth0"]), ("^lo,docker", ["eth0"])):
        assert network._named_by("NCCL_SOCKET_IFNAME", value, facts) == expected, value
    assert network._named_by("GLOO_SOCKET_IFNAME", "eth", facts) == []


def test_nodes_whose_interfaces_have_different_names() -> None:
    ranks = healthy()
    for facts in ranks[2:]:
        facts["interfaces"] = {"lo": "127.0.0.1", "ens3": "10.0.0.2"}
    assert ill(network.judge(ranks)) == {}


def test_routes_are_judged() -> None:
    rows = [
        {"route": "nccl", "absent": "needs a GPU"},
        {"route": "gloo", "error": "connection refused"},
        {"route": "mpi", "seconds": 0.001, "bytes": 2**21, "right": True},
        {"route": "hdf5", "seconds": 0.001, "bytes": 2**21, "right": False},
    ]
    found = timing.judge(rows)
    assert [finding.verdict for finding in found] == ["ok", "broken", "ok", "broken"]
    assert "1.00 ms,   2097 MB/s" in found[2].text
    assert set(ill(found)) == {"route gloo", "route hdf5"}


def test_facts_that_are_not_there_are_not_judged() -> None:
    """A process that could not even start MPI, as the doctor's report of its end judges it."""
    assert ill(judge([launch.gather({"PMI_RANK": "3"})])) == {}


def test_the_report() -> None:
    findings = [Finding("a", "ok", "fine"), Finding("longer", "broken", "bad", "mend it")]
    assert report(findings, [], False).splitlines() == [
        "ok      a       fine",
        "broken  longer  bad",
        "          fix:  mend it",
        "1 broken, 0 warnings, 1 ok",
    ]
    assert ranks_text([3, 1, 2, 7]) == "ranks 1-3, 7"
    assert ranks_text([5]) == "rank 5"


DOCTOR = ("-m", "hpcdist.doctor")


def doctor(np: int, *args: str, env: dict[str, str] | None = None, under: Sequence[str] = ()) -> Job:
    """The doctor on `np` ranks, each started by the command `under`."""
    return run([*(launcher(np) if np else []), *under, *python(), *DOCTOR, *args], env=env)


@pytest.mark.parametrize("np", [0, 2])
def test_a_healthy_job(np: int, tmp_path: Path) -> None:
    job = mpirun(np, *DOCTOR, "--json", "--staging", str(tmp_path), quick=False)
    assert job.status == 0, job.err
    told = json.loads(job.out)  # one report, however many ranks
    verdicts = {finding["name"]: finding["verdict"] for finding in told["findings"]}
    assert "broken" not in verdicts.values(), job.out
    for name in ("world", "MPI library", "/dev/shm", "HDF5 file", "hpcdist.init()", "route mpi", "route hdf5"):
        assert verdicts[name] == "ok", job.out
    assert [facts["rank"] for facts in told["ranks"]] == list(range(max(np, 1)))
    assert told["count"]["broken"] == 0
    assert list(tmp_path.iterdir()) == []


def found(job: Job, name: str, fix: str) -> str:
    """The text of a finding that is not ok, whose fix holds `fix`."""
    lines = job.out.splitlines()
    at = next((i for i, line in enumerate(lines) if line[8:].startswith(f"{name}  ") and line[:2] != "ok"), None)
    assert at is not None, f"no finding about {name}\n{job.out}\n{job.err}"
    assert lines[at + 1].strip().startswith("fix:"), lines[at + 1]
    assert fix in lines[at + 1]
    return lines[at]


# Ill for real: ranks, environment, and the finding; those of one process where the others would be ill alike.
BROKEN: dict[str, tuple[int, dict[str, str], str, str, str]] = {
    "no MPI library": (
        0,
        {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
        "MPI library",
        "mpi4py finds no MPI library",
        "pip install mpich",
    ),
    "the start of MPI fails": (
        0,
        {"OMPI_MCA_pml": "nonsense"},
        "MPI_Init",
        "ended with status 1; what it printed may tell why",
        "srun --mpi=pmix for Open MPI",
    ),
    "MPI without threads": (
        2,
        {"MPI4PY_RC_THREAD_LEVEL": "funneled"},
        "MPI threads",
        "MPI_THREAD_FUNNELED: async_op=True, isend and irecv are refused",
        "MPI4PY_RC_THREAD_LEVEL",
    ),
    "an interface that is not there": (
        2,
        {"GLOO_SOCKET_IFNAME": "nope0"},
        "GLOO_SOCKET_IFNAME",
        "no such interface with an address on",
        "unset GLOO_SOCKET_IFNAME",
    ),
    "a deadline that is none": (
        0,
        {"HPCDIST_TIMEOUT": "soon"},
        "deadline",
        "HPCDIST_TIMEOUT is 'soon', expected seconds",
        "export HPCDIST_TIMEOUT=1800",
    ),
    "no staging folder": (
        2,
        {"HPCDIST_STAGING": "/nowhere/at/all"},
        "staging folder",
        "/nowhere/at/all",
        "export HPCDIST_STAGING=FOLDER",
    ),
    "a staging folder that is none": (
        0,
        {"HPCDIST_STAGING": "/dev/null"},
        "staging folder",
        "Not a directory",
        "export HPCDIST_STAGING=FOLDER",
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_found(case: str) -> None:
    np, env, name, text, fix = BROKEN[case]
    job = doctor(np, env=env)
    line = found(job, name, fix)
    assert line.startswith("broken  ")
    assert text in line
    assert job.status == 1, job.err
    assert "Traceback" not in job.err


@pytest.mark.once
def test_worlds_of_one_tell_once() -> None:
    """Two processes that a launcher has started of which the MPI library knows nothing."""
    one = shlex.join([*python(), *DOCTOR])
    command = f"PMI_SIZE=2 PMI_RANK=1 {one} & PMI_SIZE=2 PMI_RANK=0 {one}; first=$?; wait $!; echo $first $?"
    job = run(["sh", "-c", command])
    assert "2 worlds of one rank, instead of one of 2" in found(job, "launcher", "srun --mpi=pmix for Open MPI")
    assert job.out.count(" broken, ") == 1
    assert job.out.splitlines()[-1] == "1 0"


# In a job whose ranks have done something else before.
EXAMINE = """
import runpy, sys
sys.argv = ["doctor", *sys.argv[1:]]
runpy.run_module("hpcdist.doctor", run_name="__main__", alter_sys=True)
"""


@pytest.mark.once
def test_no_h5py(tmp_path: Path) -> None:
    (tmp_path / "h5py.py").write_text("raise ImportError('no module named h5py, as it were')")
    job = mpirun(2, *DOCTOR, cwd=tmp_path)
    assert "h5py cannot be imported: no module named h5py, as it were" in found(job, "HDF5", "pip install h5py")
    assert found(job, "route hdf5", "staging folder").startswith("broken")
    assert job.status == 1


UNLOCKED = """
import errno, fcntl
def flock(fd, how):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = flock
"""


@pytest.mark.once
def test_a_file_system_without_locks() -> None:
    job = mpirun(0, code=UNLOCKED + EXAMINE, env={"HDF5_USE_FILE_LOCKING": "TRUE"})
    assert found(job, "file locking", "export HDF5_USE_FILE_LOCKING=FALSE").startswith("broken")
    assert job.status == 1


FULL = """
import errno, os
written = os.write
def write(fd, data):
    if "hpcdist-doctor" in os.readlink(f"/proc/self/fd/{fd}"):
        raise OSError(errno.ENOSPC, "No space left on device")
    return written(fd, data)
os.write = write
"""


@pytest.mark.once
def test_a_full_staging_folder(tmp_path: Path) -> None:
    job = mpirun(2, "-c", FULL + EXAMINE, "--staging", str(tmp_path))
    assert "No space left on device" in found(job, "staging folder", "export HPCDIST_STAGING=FOLDER")
    assert job.status == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.once
def test_a_job_that_works_but_slowly() -> None:
    """Two ranks on one core; torch takes all its threads; another launcher's variables. Nothing of it is broken."""
    env = {"WORLD_SIZE": "7", "RANK": "5", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    job = doctor(2, env=env, under=["taskset", "-c", "0"])
    assert "ranks 0-1 on" in found(job, "cores", "mpirun --bind-to core")
    assert "WORLD_SIZE=7 where MPI has 2, RANK=5 where MPI has 0" in found(job, "environment", "unset RANK")
    assert job.status == 0, job.err
    job = doctor(2, under=["env", "OMP_NUM_THREADS=64"])
    assert "threads each on" in found(job, "threads", "export OMP_NUM_THREADS=")
    assert job.status == 0, job.err


@pytest.mark.once
def test_a_rank_that_never_comes() -> None:
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


@pytest.mark.once
@pytest.mark.parametrize(
    ("ill", "text"),
    [
        ("import ctypes; ctypes.PyDLL(None).sleep(50)", "has not ended in time (--limit 5)"),
        ("import signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed its process by SIGSEGV"),
    ],
)
def test_a_rank_that_hangs_or_dies_alone_is_named(ill: str, text: str, tmp_path: Path) -> None:
    limit = "5" if "limit" in text else "20"  # within which MPI must start on a busy machine
    (tmp_path / "h5py.py").write_text(HANGS.format(ill))
    job = mpirun(2, *DOCTOR, "--limit", limit, cwd=tmp_path)
    lines = [line for line in job.err.splitlines() if line.startswith("broken") and "rank 1 on" in line]
    assert len(lines) == 1, job.err
    assert text in lines[0]
    assert lines[0][8:].startswith("this rank's hardware")
    assert job.status != 0


@pytest.mark.once
def test_help_is_printed_once() -> None:
    job = doctor(2, "--help")
    assert job.status == 0
    assert job.out.count("usage: hpcdist.doctor") == 1
    assert "The exit status is 1" in " ".join(job.out.split())
