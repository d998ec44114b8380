"""The doctor on several hosts: which reaches which, a folder that is not shared, memory and disks that are too small.

python -m pytest -m cluster tests/cluster/test_doctor_hosts.py     # as root; under the MPI of that Python
"""

import json
from pathlib import Path

import pytest
from launch import python

pytestmark = pytest.mark.cluster


def finding(job, name):
    """(verdict, text, fix) of one finding of ``--json``."""
    assert job.out.startswith("{") and job.out.endswith("}\n"), job.out + job.err
    told = json.loads(job.out)
    found = next((f for f in told["findings"] if f["name"] == name), None)
    assert found is not None, job.out
    return found["verdict"], found["text"], found["fix"]


def doctor(hosts, ranks, *args, cwd=None, **env):
    return hosts.mpirun(ranks, "-m", "hpcdist", "doctor", "--json", *args, cwd=cwd, env=env)


def test_hosts_that_reach_each_other_by_one_of_four_interfaces(hosts):
    """And they share a folder."""
    job = doctor(hosts, [1, 1, 1], cwd=Path("/tmp"), HPCDIST_STAGING=str(hosts.folder))
    assert job.status == 0, job.out + job.err
    assert finding(job, "hpcdist.init()")[0] == "ok"
    ranks = json.loads(job.out)["ranks"]
    assert [facts["host"] for facts in ranks] == hosts.names
    assert finding(job, "staging folder")[1].startswith(f"{hosts.folder}: written and read, shared by 3 nodes")
    assert [facts["sees"] for facts in ranks] == [True, True, True]
    verdict, text, _ = finding(job, "bandwidth between nodes")
    assert verdict == "ok"
    assert text.endswith("MB/s to node2 through MPI (rank 0 on node1)")


def test_an_interface_that_is_not_there_and_a_folder_that_is_not_shared(hosts):
    job = doctor(hosts, [1, 1], "--limit", "4", GLOO_SOCKET_IFNAME="ib7", HPCDIST_STAGING="/tmp")
    verdict, text, fix = finding(job, "GLOO_SOCKET_IFNAME")
    assert verdict == "broken"
    assert text.startswith("GLOO_SOCKET_IFNAME=ib7: node1 has no such interface with an address, only ")
    assert fix.startswith("unset GLOO_SOCKET_IFNAME")
    verdict, text, fix = finding(job, "staging folder")
    assert (verdict, text) == (
        "broken",
        "/tmp: rank 1 on node2 does not see files of node1: the folder is not shared by all nodes",
    )
    assert "export HPCDIST_STAGING=FOLDER" in fix
    assert job.status != 0


def test_shared_memory_and_a_disk_that_are_too_small(hosts):
    small = hosts.folder / "small"
    small.mkdir()
    for command in (
        ["mount", "-o", "remount,size=20m", "/dev/shm"],
        ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(small)],
    ):
        assert hosts.run("node1", command).status == 0
    job = doctor(hosts, [2], HPCDIST_STAGING=str(small))
    verdict, text, fix = finding(job, "/dev/shm")
    assert verdict == "broken"
    assert "free of 20.0 MiB, for 2 ranks" in text
    assert "--shm-size=8g" in fix
    verdict, text, fix = finding(job, "staging folder")
    assert (verdict, text) == ("broken", f"{small}: No space left on device (rank 0 on node1)")
    assert job.status == 1


# The doctor, on ranks that may open so few files that MPICH does not start.
FEW = """
    import resource, runpy, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
    sys.argv = ["doctor", "--limit", "20"]
    runpy.run_module("hpcdist.tools.doctor", run_name="__main__", alter_sys=True)
"""


def test_one_report_of_an_mpi_that_does_not_start(hosts):
    """The other host says in one finding what rank 0 cannot know."""
    job = hosts.mpirun([1, 1], code=FEW)
    assert (job.out + job.err).count(" broken, ") <= 1, job
    (other,) = [line for line in job.err.splitlines() if line.startswith("broken")] or [""]
    assert "may open 24 files" in job.out, job
    assert not other or (other[8:].count("rank 1 on node2") and "may open 24 files" in other), job  # Open MPI starts
    assert "must belong together" not in job.out + job.err
    assert job.status != 0


def test_a_full_folder_for_temporary_files(hosts):
    full = hosts.folder / "full"
    full.mkdir()
    assert hosts.run("node1", ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(full)]).status == 0
    job = doctor(hosts, [1], "--limit", "20", TMPDIR=str(full))
    verdict, text, fix = finding(job, "TMPDIR")
    assert verdict != "ok"
    assert text == f"{full}: No space left on device"
    assert fix.startswith("ls -ld $TMPDIR; df -h $TMPDIR")


def test_the_wrong_mpi_of_srun(slurm):
    from mpi4py import MPI

    wrong = "pmix" if "MPICH" in MPI.Get_library_version() else "pmi2"
    command = ["srun", "-N2", "-n2", f"--mpi={wrong}", *python(), "-m", "hpcdist", "doctor", "--json"]
    job = slurm.run(command, cwd=slurm.folder, env=slurm.mpi_environment())
    verdict, text, fix = finding(job, "MPI_Init")
    assert verdict == "broken"
    assert "rank 0 on node1: ended with status" in text
    assert "srun --mpi=pmix for Open MPI, srun --mpi=pmi2 for MPICH" in fix
    assert finding(job, "launcher")[1] == "srun: SLURM_STEP_NUM_TASKS=2"
    assert job.status == 1
