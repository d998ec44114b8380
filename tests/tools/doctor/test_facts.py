"""The facts that the doctor collects, from made-up files of the system; and what other programs say of the same."""

from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from facts import make
from launch import mpirun

import hpcdist
from hpcdist.control import objects
from hpcdist.process import machine
from hpcdist.tensors import accelerator
from hpcdist.tools.doctor import examine
from hpcdist.tools.doctor.__main__ import parser

# The files of a process's control groups: /proc/self/cgroup, and those below /sys/fs/cgroup; and where the limit is.
VERSION_1 = (
    "9:name=systemd:/\n4:memory:/slurm/job_7/step_0\n2:cpu,cpuacct:/slurm/job_7/step_0\n0::/\n",
    {
        "memory/slurm/job_7/memory.limit_in_bytes": "4294967296\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    },
    "memory/slurm/job_7",
)
VERSION_2 = (
    "0::/system.slice/job_7/step_0\n",
    {
        "system.slice/job_7/memory.max": "4294967296\n",
        "system.slice/job_7/step_0/memory.max": "max\n",
    },
    "system.slice/job_7",
)


@pytest.mark.parametrize(("own", "contents", "limited"), [VERSION_1, VERSION_2])
def test_limits_of_control_groups(own, contents, limited, tmp_path, monkeypatch):
    """Those of the process's own groups and of the groups above; "max" is none."""
    make(tmp_path, {"cgroup": own} | {f"fs/{name}": text for name, text in contents.items()})
    monkeypatch.setattr(machine, "OWN", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "ROOT", tmp_path / "fs")
    folder = tmp_path / "fs" / limited
    assert (folder, 2**32) in machine.groups()
    least, host = machine.capacity()
    assert least == min(host, 2**32)
    memory = examine.before_mpi(str(tmp_path))["memory"]
    assert (memory["group"], memory["limit"], memory["group_id"]) == (str(folder), 2**32, folder.stat().st_ino)


Mount = namedtuple("Mount", "device mountpoint fstype opts")
MOUNTS = [
    Mount("/dev/sda1", "/", "ext4", "rw,relatime"),
    Mount("tmpfs", "/scratch", "tmpfs", "rw"),
    Mount("10.0.0.9@o2ib:/fs", "/scratch", "lustre", "rw,localflock"),
    Mount("me@host:", "/sshfs", "fuse.sshfs", "rw"),
    Mount("env.sif", "/image", "fuse.squashfuse", "ro"),
]


def test_the_mount_of_a_folder(monkeypatch):
    """That with the longest name, and the last of several in one place."""
    monkeypatch.setattr(psutil, "disk_partitions", lambda all=False: MOUNTS if all else MOUNTS[:1])
    assert examine.mount_of("/scratch/me") == {"point": "/scratch", "type": "lustre", "network": True}
    networks = [(examine.mount_of(folder) or {})["network"] for folder in ("/scratchy", "/sshfs/a", "/image/b")]
    assert networks == [False, True, False]


def test_gpus_as_torch_describes_them(tmp_path, monkeypatch):
    """Each by host, PCI address and UUID, of three on the node."""
    make(tmp_path, dict.fromkeys(("nvidia0", "nvidia1", "nvidia2", "nvidiactl"), ""))
    monkeypatch.setattr(examine, "DEV", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = [
        SimpleNamespace(name="GPU", total_memory=1, uuid="0000", pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)
        for bus in (1, 2)
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
    monkeypatch.setattr(accelerator.socket, "gethostname", lambda: "a")
    gpu = examine.gpus()["gpu"]
    assert [found["id"] for found in gpu["gpus"]] == [f"a, PCI 0000:0{i}:00, UUID 0000" for i in (1, 2)]
    assert gpu["in_node"] == 3


@pytest.mark.parametrize("first", [True, False])
def test_no_rank_waits_for_others_in_a_step_of_its_own(first, tmp_path, monkeypatch):
    """Else a folder that hangs on one node makes every supervisor run out of time, and rank 0 may be blamed."""
    limits, called = 0, set()

    def note(place, name, limit, function):
        def call(*args):
            called.add(name)
            assert limits == limit, name
            return function(*args)

        monkeypatch.setattr(place, name, call)

    for name in ("try_folder", "made", "sees"):
        note(examine, name, examine.ALONE, getattr(examine, name))
    told = str(tmp_path / "of rank 0"), b"data"  # by rank 0
    note(objects, "all_gather_object", examine.TOGETHER, lambda comm, x: [x if first else told])
    comm = SimpleNamespace(rank=0 if first else 1)
    found = {"rank": comm.rank, "node": comm.rank}
    for _, limits in examine.try_staging(comm, found, str(tmp_path)):  # noqa: B007
        pass
    assert (found["staging"]["folder"], found["sees"]) == (str(tmp_path), first)
    assert called == {"try_folder", "made", "sees", "all_gather_object"}
    assert list(tmp_path.iterdir()) == []


def test_the_sources_of_hpcdist_by_their_contents(tmp_path):
    digests = []
    for name, change in (("a", ""), ("b", ""), ("c", "# changed\n")):
        (tmp_path / name / "doctor").mkdir(parents=True)
        (tmp_path / name / "doctor" / "x.py").write_text(f"x = 1\n{change}")
        digests.append(examine.digest_of(tmp_path / name))
    assert digests[0] == digests[1] != digests[2]
    assert examine.software()["versions"]["hpcdist"].endswith(f" {examine.digest_of(Path(hpcdist.__file__).parent)}")


def test_a_doctor_that_is_interrupted_prints_no_traceback():
    """Nor does the process that examines."""
    job = mpirun(0, code="""
        import os, signal, sys
        from hpcdist.tools.doctor.__main__ import watch
        def interrupted(ranks):
            yield "a step", 1
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        watch(interrupted, {"id": 0, "rank": 0, "host": "x"}, 20)
    """)  # fmt: skip
    assert (job.status, job.err) == (0, ""), job


def test_a_limit_that_is_none(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["--limit", "nan"])
    assert "--limit: expected seconds, more than 0, got 'nan'" in capsys.readouterr().err
