"""The doctor on several hosts: which reaches which, a folder that is not shared, memory and disks that are too small.

python -m pytest -m cluster tests/cluster/test_doctor_hosts.py     # as root; under the MPI of that Python
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hosts import Hosts
from launch import Job, python
from slurm import Slurm

pytestmark = pytest.mark.cluster


def finding(job: Job, name: str) -> tuple[str, str, str]:
    """(verdict, text, fix) of one finding of ``--json``."""
    assert job.out.startswith("{") and job.out.endswith("}\n"), job.out + job.err
    told = json.loads(job.out)
    found = next((f for f in told["findings"] if f["name"] == name), None)
    assert found is not None, job.out
    return found["verdict"], found["text"], found["fix"]


def doctor(hosts: Hosts, ranks: list[int], *args: str, cwd: Path | None = None, **env: str) -> Job:
    return hosts.mpirun(ranks, "-m", "hpcdist.doctor", "--json", *args, cwd=cwd, env=env)


def test_hosts_that_reach_each_other_by_one_of_four_interfaces(hosts: Hosts) -> None:
    """One of them slowly; and they share a folder."""
    slow = "tc qdisc add dev eth0 root tbf rate 200mbit burst 128kb latency 20ms"
    assert hosts.run("node3", slow.split()).status == 0
    job = doctor(hosts, [1, 1, 1], cwd=Path("/tmp"), HPCDIST_STAGING=str(hosts.folder))
    assert job.status == 0, job.out + job.err
    verdict, text, _ = finding(job, "network")
    assert verdict == "ok"
    assert "all 6 pairs" in text
    assert "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0" in text
    ranks = json.loads(job.out)["ranks"]
    assert [facts["host"] for facts in ranks] == hosts.names
    reached = {"172.17.0.1": False, "192.168.99.2": False, "10.77.0.2": True}
    got = ranks[0]["reach"]["1"]
    assert {address: got[address] for address in reached} == reached
    assert finding(job, "staging folder")[1].startswith(f"{hosts.folder}: written and read, shared by 3 nodes")
    assert [facts["sees"] for facts in ranks] == [True, True, True]
    verdict, text, fix = finding(job, "bandwidth between nodes")
    assert verdict == "warning"
    assert "node1 and node3" in text and "node2 and node3" in text and "node1 and node2" not in text
    assert fix.startswith("srun --exclude=node3, ")
    assert [row["peer"] for row in ranks[0]["pairs"]] == [1, 2]


def test_an_interface_that_leads_nowhere_and_a_folder_that_is_not_shared(hosts: Hosts) -> None:
    """The speed of the interface is known in a container that has its own /sys."""
    for name in hosts.names[:2]:
        assert hosts.run(name, ["mount", "-t", "sysfs", "sysfs", "/sys"]).status == 0
    hosts.rate("200mbit")
    job = doctor(hosts, [1, 1], "--staging", "/tmp", "--limit", "4", GLOO_SOCKET_IFNAME="ib0")
    verdict, text, fix = finding(job, "GLOO_SOCKET_IFNAME")
    assert (verdict, text) == ("broken", "GLOO_SOCKET_IFNAME=ib0: node1 does not reach node2 through it")
    assert fix.startswith("unset GLOO_SOCKET_IFNAME")
    verdict, text, fix = finding(job, "staging folder")
    assert (verdict, text) == (
        "broken",
        "/tmp: rank 1 on node2 does not see what node1 writes: it is not shared by all nodes",
    )
    assert "export HPCDIST_STAGING=FOLDER" in fix
    verdict, text, fix = finding(job, "bandwidth between nodes")
    assert verdict == "warning"
    assert text.endswith("MB/s from node to node through MPI (1 pair), where eth0 of 10 Gbit/s promises 1250")
    assert "export UCX_NET_DEVICES" in fix
    assert job.status != 0


def test_shared_memory_and_a_disk_that_are_too_small(hosts: Hosts) -> None:
    small = hosts.folder / "small"
    small.mkdir()
    for command in (
        ["mount", "-o", "remount,size=20m", "/dev/shm"],
        ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(small)],
    ):
        assert hosts.run("node1", command).status == 0
    job = doctor(hosts, [2], "--staging", str(small))
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
    runpy.run_module("hpcdist.doctor", run_name="__main__", alter_sys=True)
"""


def test_one_report_of_an_mpi_that_does_not_start(hosts: Hosts) -> None:
    """The other host says in one finding what rank 0 cannot know."""
    job = hosts.mpirun([1, 1], code=FEW)
    assert (job.out + job.err).count(" broken, ") <= 1, job
    (other,) = [line for line in job.err.splitlines() if line.startswith("broken")] or [""]
    assert "may open 24 files" in job.out, job
    assert not other or (other[8:].count("rank 1 on node2") and "may open 24 files" in other), job  # Open MPI starts
    assert "must belong together" not in job.out + job.err
    assert job.status != 0


def test_a_full_folder_for_temporary_files(hosts: Hosts) -> None:
    full = hosts.folder / "full"
    full.mkdir()
    assert hosts.run("node1", ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(full)]).status == 0
    job = doctor(hosts, [1], "--limit", "20", TMPDIR=str(full))
    verdict, text, fix = finding(job, "TMPDIR")
    assert verdict != "ok"
    assert text == f"{full}: No space left on device"
    assert fix.startswith(f"ls -ld {full}; df -h {full}")


# The doctor; the ports that are given out from the test of the network on are those that a firewall does not let pass.
BEHIND_A_FIREWALL = """
    import runpy, sys
    from pathlib import Path
    from hpcdist.doctor import examine
    reach = examine.reach
    def narrowed(leaders, facts):
        leaders.alltoall([0] * leaders.size)  # MPI has its own connections already
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("20000 20199")
        return reach(leaders, facts)
    examine.reach = narrowed
    sys.argv = ["doctor", "--json", "--limit", "10"]
    runpy.run_module("hpcdist.doctor", run_name="__main__", alter_sys=True)
"""


def test_a_host_behind_a_firewall(hosts: Hosts) -> None:
    rule = "ip rule add ipproto tcp dport 20000-20199 unreachable"
    assert hosts.run("node2", rule.split()).status == 0
    job = hosts.mpirun([1, 1], code=BEHIND_A_FIREWALL)
    verdict, text, fix = finding(job, "network")
    assert verdict == "broken"
    assert "node2 does not reach node1" in text
    assert "net.ipv4.ip_local_port_range" in fix
    verdict, text, _ = finding(job, "hpcdist.init()")
    assert verdict == "broken"
    assert "no address of rank 0's host is reached by all 2 ranks" in text
    assert job.status != 0


def test_the_wrong_mpi_of_srun(slurm: Slurm) -> None:
    from mpi4py import MPI

    wrong = "pmix" if "MPICH" in MPI.Get_library_version() else "pmi2"
    command = ["srun", "-N2", "-n2", f"--mpi={wrong}", *python(), "-m", "hpcdist.doctor", "--json"]
    job = slurm.run(command, cwd=slurm.folder, env=slurm.mpi_environment())
    verdict, text, fix = finding(job, "MPI_Init")
    assert verdict == "broken"
    assert "rank 0 on node1: ended with status" in text
    assert "srun --mpi=pmix for Open MPI, srun --mpi=pmi2 for MPICH" in fix
    assert finding(job, "launcher")[1] == "srun: SLURM_STEP_NUM_TASKS=2"
    assert job.status == 1
