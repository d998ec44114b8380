"""The facts that the doctor collects, from made-up files of the system; and what other programs say of the same."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from facts import mount
from launch import mpirun

from hpcdist import cgroups, host_memory
from hpcdist.comm import rendezvous
from hpcdist.control import objects
from hpcdist.doctor import cores, examine, fabric, files, filesystems, quotas, software, supervisor

pytestmark = pytest.mark.once

# The files of a process's control groups: /proc/self/cgroup, and those below /sys/fs/cgroup.
VERSION_1 = (
    "9:name=systemd:/\n4:memory:/slurm/job_7/step_0\n2:cpu,cpuacct:/slurm/job_7/step_0\n0::/\n",
    {
        "cpu/slurm/job_7/cpu.cfs_quota_us": "250000\n",
        "cpu/slurm/job_7/cpu.cfs_period_us": "100000\n",
        "cpu/slurm/job_7/step_0/cpu.cfs_quota_us": "-1\n",
        "cpu/slurm/job_7/step_0/cpu.cfs_period_us": "100000\n",
        "memory/slurm/job_7/memory.limit_in_bytes": "4294967296\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    },
    "cpu/slurm/job_7",
    "memory/slurm/job_7",
)
VERSION_2 = (
    "0::/system.slice/job_7/step_0\n",
    {
        "system.slice/job_7/cpu.max": "250000 100000\n",
        "system.slice/job_7/step_0/cpu.max": "max 100000\n",
        "system.slice/job_7/memory.max": "4294967296\n",
        "system.slice/job_7/step_0/memory.max": "max\n",
    },
    "system.slice/job_7",
    "system.slice/job_7",
)


@pytest.mark.parametrize("version", [VERSION_1, VERSION_2])
def test_limits_of_control_groups(
    version: tuple[str, dict[str, str], str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the process's own groups and of the groups above; "max" and -1 are none."""
    own, contents, of_cpu, of_memory = version
    (tmp_path / "cgroup").write_text(own)
    for name, text in contents.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "fs")
    assert cgroups.cpus() == [(tmp_path / "fs" / of_cpu, 2.5)]
    assert (tmp_path / "fs" / of_memory, 2**32) in cgroups.memory()
    host = host_memory.capacity()[1]
    assert host_memory.capacity()[0] == min(host, 2**32)
    found = cores.gather()
    assert (found["cpu_quota"], found["cpu_group"]) == (2.5, str(tmp_path / "fs" / of_cpu))
    own_group = (tmp_path / "fs" / of_cpu).stat()
    assert found["cpu_group_id"] == f"{own_group.st_dev}:{own_group.st_ino}"


MOUNTINFO = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
40 22 0:44 / /scratch rw,noatime shared:9 - lustre 10.0.0.9@o2ib:/fs rw,localflock,lazystatfs
41 22 0:45 /home /home\040dirs rw - nfs4 server:/export/home rw,vers=4.2,local_lock=none
42 22 0:46 / /sshfs rw - fuse.sshfs me@host: rw,user_id=0
43 22 0:47 / /image ro - fuse.squashfuse env.sif ro
"""


def test_mounts_as_the_kernel_lists_them() -> None:
    scratch = filesystems._parsed("40", MOUNTINFO)
    assert scratch == {
        "point": "/scratch",
        "type": "lustre",
        "source": "10.0.0.9@o2ib:/fs",
        "options": ["lazystatfs", "localflock", "noatime", "rw"],
        "network": True,
    }
    assert filesystems.local_locks(scratch) == "localflock"
    home = filesystems._parsed("41", MOUNTINFO)
    assert home is not None
    assert (home["point"], home["network"], filesystems.local_locks(home)) == ("/home dirs", True, None)
    networks = [(filesystems._parsed(number, MOUNTINFO) or {}).get("network") for number in ("22", "42", "43", "99")]
    assert networks == [False, True, False, None]


def test_mounts_as_psutil_lists_them() -> None:
    """It does not tell which mount holds a folder: it is the one with the longest name, the last of several."""
    listed = {found.mountpoint: found for found in psutil.disk_partitions(all=True)}
    for folder in ("/", "/dev/shm", "/proc", os.getcwd()):
        found = filesystems.mount_of(folder)
        assert found is not None
        point = max((point for point in listed if (folder + "/").startswith(point.rstrip("/") + "/")), key=len)
        assert (found["point"], found["type"]) == (point, listed[point].fstype), folder


def test_addresses_and_cores_as_psutil_lists_them() -> None:
    found = {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    }
    assert rendezvous.interfaces() == found
    gathered = cores.gather()
    assert gathered["cores"] == psutil.Process().cpu_affinity()
    if len(gathered["cores"]) == psutil.cpu_count():
        assert len(gathered["physical"]) == psutil.cpu_count(logical=False)
    assert sum(gathered["domains"].values()) in (0, gathered["cpus"])
    assert set(map(str, gathered["numa"])) <= gathered["domains"].keys() | {"0"}


# What the commands print; of lfs and quota the soft limit is exceeded.
LFS = "     /scratch 1048576* 524288 2097152 6d23h12m 500 0 1000 -\n"
QUOTA = """Disk quotas for user me (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/scratch 1048576*  524288 2097152 1795000000     500       0    1000       0
"""
MMLSQUOTA = """mmlsquota::HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:blockUsage:\
blockQuota:blockLimit:blockInDoubt:blockGrace:filesUsage:filesQuota:filesLimit:filesInDoubt:filesGrace:
mmlsquota::0:1:::fs1:USR:1000:me:1048576:524288:2097152:0:7 days:500:0:1000:0:none:
"""


@pytest.mark.parametrize(
    ("kind", "command", "text"), [("lustre", "lfs", LFS), ("nfs4", "quota", QUOTA), ("gpfs", "mmlsquota", MMLSQUOTA)]
)
def test_quotas(kind: str, command: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a program of that name that prints so."""
    program = tmp_path / command
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = quotas.ask("/scratch/me", mount(kind, "/scratch"))
    assert [row.pop("of") for row in found] == ["user", "group"]
    assert all(row.pop("command").startswith(command) for row in found)
    values = {"folder": "/scratch/me", "bytes": 2**30, "most_bytes": 2**31, "files": 500, "most_files": 1000}
    assert found == [values, values]


@pytest.mark.parametrize("text", ["", "lfs: quota not enabled\n", "/scratch none none\n", "/scratch 1 2\n"])
def test_quotas_that_nobody_reports(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quotas.ask("/scratch", None) == []
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    program = tmp_path / "lfs"
    program.write_text(f"#!/bin/sh\nprintf '{text}'\nexit 1\n")
    program.chmod(0o700)
    assert quotas.ask("/scratch", mount("lustre", "/scratch")) == []


def test_infiniband_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for port, state in (("1", "4: ACTIVE"), ("2", "1: DOWN")):
        folder = tmp_path / "infiniband" / "mlx5_0" / "ports" / port
        folder.mkdir(parents=True)
        for name, text in (("state", state), ("rate", "200 Gb/sec (4X HDR)"), ("link_layer", "InfiniBand")):
            (folder / name).write_text(f"{text}\n")
    (tmp_path / "net" / "eth0").mkdir(parents=True)
    (tmp_path / "net" / "eth0" / "speed").write_text("25000\n")
    (tmp_path / "net" / "veth").mkdir()
    (tmp_path / "net" / "veth" / "speed").write_text("-1\n")
    for name, folder in (("_RDMA", "infiniband"), ("_NET", "net"), ("_VERBS", "dev")):
        monkeypatch.setattr(fabric, name, tmp_path / folder)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    found = fabric.gather()
    assert [(p["device"], p["port"], p["state"], p["rate"], p["layer"]) for p in found["rdma"]["ports"]] == [
        ("mlx5_0", "1", "ACTIVE", 200.0, "InfiniBand"),
        ("mlx5_0", "2", "DOWN", 200.0, "InfiniBand"),
    ]
    assert found["speeds"] == {"eth0": 25000}
    assert found["rdma"]["problem"].startswith(f"there is no {tmp_path}/dev/uverbs*, as in a container")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "uverbs0").touch()
    assert fabric.gather()["rdma"]["problem"] is None


def test_the_network_in_ncclss_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    environ: dict[str, str] = {}
    path = fabric.log_nccl(environ, {"id": "a7"})
    assert path is not None
    assert environ["NCCL_DEBUG_FILE"] == path
    assert fabric.read_nccl_log(path) is None
    Path(path).write_text("vm:7:7 [0] NCCL INFO NET/IB : No device found.\nvm:7:7 [0] NCCL INFO Using network Socket\n")
    assert fabric.read_nccl_log(path) == "Socket"
    assert not os.path.exists(path)
    asked = {"NCCL_DEBUG": "WARN"}  # by the user, who reads it
    assert fabric.log_nccl(asked, {"id": "a7"}) is None
    assert asked == {"NCCL_DEBUG": "WARN"}


def test_the_lock_of_another_process(tmp_path: Path) -> None:
    """As flock(1) of util-linux holds it."""
    made = files.put(str(tmp_path))
    assert made is not None
    assert files.sees_lock(made) is False
    held = files.hold(made)
    assert held is not None
    assert files.sees_lock(made) is True
    os.close(held)
    command = [str(shutil.which("flock")), made[0], "sh", "-c", "echo; read -r _"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert files.sees_lock(made) is True
        assert files.hold(made) is None
    assert files.sees_lock(None) is None


class _Line(supervisor.Line):
    """Keeps the stage, and whether the ranks wait for each other in it."""

    def __init__(self) -> None:
        self.now = "", False

    def stage(self, name: str, fix: str, together: bool = False) -> None:
        self.now = name, together


@pytest.mark.parametrize("first", [True, False])
def test_no_rank_waits_for_others_in_a_stage_of_its_own(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a folder that hangs on one node makes every supervisor run out of time, and rank 0 may be blamed."""
    line, called = _Line(), []
    alone = ("try_folder", "put", "hold", "look", "sees_lock")

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            called.append(name)
            assert line.now[1] is (name not in alone), (name, line.now)
            return function(*args)

        return call

    for name in alone:
        monkeypatch.setattr(files, name, noted(name, getattr(files, name)))
    monkeypatch.setattr(objects, "all_gather_object", noted("gather", lambda comm, x: [x if first else None]))
    comm: Any = SimpleNamespace(rank=0 if first else 1, Barrier=noted("Barrier", lambda: None))
    (tmp_path / "current").mkdir()
    (tmp_path / "staging").mkdir()
    facts = {"node": comm.rank, "current": {"folder": str(tmp_path / "current")}, "mounts": {}}
    examine._try_staging(line, comm, facts, str(tmp_path / "staging"), True)
    folder = ["hold", "gather", "look", "Barrier"]
    if first:
        assert called == ["try_folder", "put", *folder, "gather", "put", *folder]
        assert facts["sees"] is facts["sees_current"] is True
    else:
        assert called == ["try_folder", "hold", "gather", "look", "sees_lock", "Barrier", "gather"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["current", "staging"]


def test_the_sources_of_hpcdist_by_their_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        shutil.copytree(Path(software.__file__).parent, tmp_path / name / "doctor")
    digests = []
    for name, change in (("a", ""), ("b", ""), ("b", "# changed\n")):
        path = tmp_path / name / "doctor" / "software.py"
        path.write_text(path.read_text() + change)
        monkeypatch.setattr(software, "__file__", str(path))
        digests.append(software._digest())
    assert digests[0] == digests[1] != digests[2]


def test_a_doctor_that_is_interrupted_prints_no_traceback() -> None:
    """Nor does the process that examines."""
    job = mpirun(0, code="""
        import os, signal, sys
        from hpcdist.doctor.supervisor import watch
        def interrupted(line):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        watch(interrupted, {"id": 0, "rank": 0, "host": "x"}, 20)
    """)  # fmt: skip
    assert (job.status, job.err) == (0, ""), job
