"""What the doctor makes of facts: they are made up, so that no hardware is needed."""

from __future__ import annotations

import json

import pytest
from facts import GIB, change, healthy, ill, mount, port, quota, rank

from hpcdist.doctor import cores, fabric, files, gpus, launch, limits, links, network, timing
from hpcdist.doctor.examine import SECTIONS, judge
from hpcdist.doctor.findings import Facts, Finding, report, status
from hpcdist.doctor.supervisor import Outcome
from hpcdist.runtime.cli import ranks_text

pytestmark = pytest.mark.once


def test_healthy_facts_of_two_nodes_with_gpus() -> None:
    findings = judge(healthy())
    assert ill(findings) == {}
    texts = {finding.name: finding.text for finding in findings}
    assert texts["world"] == "4 ranks on 2 nodes: a (ranks 0-1), b (ranks 2-3)"
    assert texts["MPI library"] == "Open MPI v5.0.7, mpi4py 4.1.0"
    assert texts["CUDA-aware MPI"] == "tried: route mpi moves GPU memory itself"
    assert texts["cores"] == "bound to 8 each"
    assert "rank 3: H200, b, GPU-b1" in texts["GPUs"]
    assert texts["peer access"] == "between all 2 GPUs of a node"
    assert "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0" in texts["network"]
    assert texts["staging folder"] == "/scratch: written and read, shared by 2 nodes, 512.0 TiB free"


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
        ("gpu.gpus", [{"name": "H200", "id": "a, UUID GPU-x", "bytes": 1}], 0, 1),
        "GPUs",
        "broken: ranks 0 and 1 share one GPU (a, UUID GPU-x)",
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
    "locking in lower case": (
        ("environ.HDF5_USE_FILE_LOCKING", "false"),
        "file locking",
        "warning: HDF5_USE_FILE_LOCKING=false: HDF5 accepts TRUE, 1, FALSE",
        "unset",
    ),
    "Python": (
        ("versions.Python", "3.12.1", 2, 3),
        "versions",
        "broken: Python 3.11.2 (ranks 0-1); Python 3.12.1",
        "one",
    ),
    "numpy": (("versions.numpy", "1.26.0", 3), "versions", "warning: numpy 2.4.6 (ranks 0-2); numpy 1.26.0", "one env"),
    "checkouts": (("sources", "0f0f0f0f", 2), "versions", "broken: hpcdist 0.1.0 of different sources", "git pull"),
    "slow start": (
        ("start", 95.0, 3),
        "start of Python",
        "warning: Python, torch and hpcdist started in 95.0 s on rank 3 on b: many small files, from the environment "
        "/sw/env (lustre at /sw)",
        "env=$(srun --ntasks-per-node=1 python -m hpcdist.stage_env /sw/env)",
    ),
    "long TMPDIR": (("temporary.folder", f"/local/{'x' * 70}"), "TMPDIR", "broken: /local/xxx", "export TMPDIR=/tmp"),
    "no TMPDIR": (
        ("temporary", {"folder": "/local/7", "error": "No such file or directory"}, 2, 3),
        "TMPDIR",
        "warning: ranks 2-3 on b: /local/7: cannot be written to: No such file or directory",
        "srun --ntasks-per-node=1 mkdir -p '/local/7'",
    ),
    "full TMPDIR": (
        ("temporary", {"folder": "/local/7", "bytes": 2**20, "error": "No space left on device"}, 1),
        "TMPDIR",
        "warning: rank 1 on a: /local/7: cannot be written to: No space left on device",
        "df -h /local/7",
    ),
    "small TMPDIR": (("temporary.free", 2**20, 3), "TMPDIR", "warning: rank 3 on b: /tmp: 1.0 MiB free", "df -h /tmp"),
    "far TMPDIR": (("temporary.mount", mount("nfs4", "/tmp"), 2), "TMPDIR", "warning: /tmp is on nfs4", "TMPDIR=/tmp"),
    "worker": (
        ("worker", {"error": "DataLoader worker (pid 7) is killed by signal: Bus error"}, 1),
        "DataLoader workers",
        "broken: forked under this MPI, rank 1: DataLoader worker",
        "multiprocessing_context='forkserver'",
    ),
    "old Linux": (
        ("kernel", "4.18.0-553.el8.x86_64"),
        "DataLoader workers",
        "warning: with InfiniBand and Linux 4.18.0",
        "export RDMAV_FORK_SAFE=1",
    ),
    "overlap": (
        ("cores", list(range(4, 12)), 1),
        "cores",
        "warning: ranks 0-1 on a are bound to other cores, but share cores 4-7",
        "--cpu-bind=cores",
    ),
    "two domains": (
        ("numa", [0, 1], 0),
        "NUMA",
        "warning: rank 0 on a has cores 0-7, in NUMA domains 0, 1",
        "--distribution=block:block",
    ),
    "CPU time": (
        ("cpu_quota", 6.0, 2, 3),
        "CPU quota",
        "warning: 2 ranks on b compute with 16 threads, where the control group None allows the time of 6 of 64 CPUs",
        "export OMP_NUM_THREADS=3",
    ),
    "little memory": (
        ("memory.available", 2**30, 2, 3),
        "memory",
        "warning: b: 1.0 GiB free of 512.0 GiB, and the control group /sys/fs/cgroup/job_7 may have 256.0 GiB, for 2",
        "srun --mem=0",
    ),
    "no memory": (("memory.available", 2**28, 2, 3), "memory", "broken: b: 256.0 MiB free", "docker run --memory"),
    "locked memory": (
        ("limits.locked", 2**16, 2, 3),
        "ulimit -l",
        "broken: ranks 2-3 may lock 64.0 KiB, where InfiniBand needs unlimited",
        "ulimit -l unlimited",
    ),
    "some locked memory": (("limits.locked", 2**30), "ulimit -l", "warning: ranks 0-3 may lock 1.0 GiB", "memlock=-1"),
    "few files": (
        ("limits.files", 200, 3),
        "ulimit -n",
        "warning: rank 3 may open 200 files; connections to 4 ranks",
        "ulimit -n $(ulimit -Hn)",
    ),
    "very few files": (("limits.files", 100, 3), "ulimit -n", "broken: rank 3 may open 100", "which is 524288 here"),
    "InfiniBand down": (
        ("rdma.ports", [port("mlx5_0", "DOWN"), port("mlx5_1", "INIT")], 2, 3),
        "InfiniBand",
        "broken: b: mlx5_0/1 DOWN (InfiniBand, 200 Gbit/s), mlx5_1/1 INIT (InfiniBand, 200 Gbit/s), where a has",
        "srun --exclude=b",
    ),
    "InfiniBand nowhere up": (
        ("rdma.ports", [port("mlx5_0", "DOWN")]),
        "InfiniBand",
        "warning: a: mlx5_0/1 DOWN (InfiniBand, 200 Gbit/s); b: mlx5_0/1 DOWN",
        "ibstat",
    ),
    "slow port": (
        ("rdma.ports", [port("mlx5_0"), port("mlx5_1", rate=25.0)], 2, 3),
        "InfiniBand",
        "warning: b: 225 Gbit/s in all, where others have 400",
        "srun --exclude=b",
    ),
    "no verbs": (
        ("rdma.problem", "libibverbs.so.1 cannot be loaded", 3),
        "InfiniBand",
        "warning: rank 3 on b: libibverbs.so.1 cannot",
        "apt-get install libibverbs1",
    ),
    "NCCL through sockets": (
        ("nccl_network", "Socket"),
        "NCCL network",
        "warning: NCCL moves data between the nodes through sockets, though mlx5_0 is active",
        "NCCL_DEBUG=INFO",
    ),
    "NCCL networks": (
        ("nccl_network", "Socket", 2, 3),
        "NCCL network",
        "broken: not the same on all ranks: IB (ranks 0-1); Socket (ranks 2-3)",
        "the same environment",
    ),
    "slow link": (
        ("pairs", [{"peer": 2, "latency": 2e-6, "rate": 1e9, "bytes": 2**22}], 0),
        "bandwidth between nodes",
        "warning: 1000 MB/s from node to node through MPI (1 pair), where InfiniBand mlx5_0 of 200 Gbit/s promises",
        "export UCX_NET_DEVICES",
    ),
    "far nodes": (
        ("pairs", [{"peer": 2, "latency": 5e-3, "rate": 20e9, "bytes": 2**22}], 0),
        "latency between nodes",
        "warning: 5000.0 us from node to node through MPI (1 pair): more ranks than cores",
        "one rank a core",
    ),
    "localflock": (
        ("staging.mount", mount("lustre", "/scratch", "localflock")),
        "file locking",
        "warning: /scratch: lustre at /scratch is mounted with localflock: locks hold on one node only",
        "mount -o remount,flock /scratch",
    ),
    "local locks": (
        ("sees_lock", False, 2),
        "file locking",
        "warning: /scratch: lustre at /scratch; b does not see a lock that a holds: locks hold on one node only",
        "one job at a time for each file",
    ),
    "NFS": (
        ("staging.mount", mount("nfs4", "/scratch", "local_lock=none")),
        "MPI-IO",
        "warning: nfs4 at /scratch: its clients write whole pages back",
        "staging.save(writer='posix')",
    ),
    "read-only": (
        ("current.writable", False, 2, 3),
        "file systems",
        "warning: the current folder /scratch/me cannot be written to on b",
        "cd $SCRATCH",
    ),
    "a current folder that does not answer": (
        ("current", {"folder": "/scratch/me"}, 2, 3),
        "file systems",
        "warning: the current folder /scratch/me cannot be written to on b",
        "cd $SCRATCH",
    ),
    "no current folder": (("current", {}, 3), "file systems", "broken: the current folder is not there on b", "cd "),
    "inodes": (("staging.inodes", 12), "inodes", "warning: /scratch on a: 12 more files; /scratch on b", "df -i"),
    "quota": (
        ("quotas", [quota(0.95)], 0),
        "quota",
        "warning: /scratch: the user has 972.8 GiB of 1.0 TiB",
        "lfs quota -q -u 1000 /scratch shows it",
    ),
    "quota of files": (
        ("quotas", [quota(files=1.01)], 0),
        "quota",
        "broken: /scratch: the user has 1010000 of 1000000 files",
        "export HPCDIST_STAGING=FOLDER",
    ),
    "route": (("routes.mpi.error", "refused"), "route mpi", "broken: refused", "look at the findings about MPI"),
    "wrong data": (("routes.mpi.right", False), "route mpi", "broken: the data received differ", "/dev/shm"),
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
    ranks = healthy()
    ranks[0]["routes"] = {
        "nccl": {"absent": "needs a GPU"},
        "gloo": {"error": "connection refused"},
        "mpi": {"seconds": 0.001, "bytes": 2**21, "right": True},
        "hdf5": {"seconds": 0.001, "bytes": 2**21, "right": False},
    }
    found = timing.judge(ranks)
    assert {finding.name: finding.verdict for finding in found} == {
        "route nccl": "ok", "route gloo": "broken", "route mpi": "ok", "route hdf5": "broken"
    }  # fmt: skip
    assert "1.00 ms,   2097 MB/s" in found[[finding.name for finding in found].index("route mpi")].text
    assert set(ill(found)) == {"route gloo", "route hdf5"}


def test_hardware_threads_of_one_core() -> None:
    ranks = healthy()
    ranks[1].update(cores=list(range(64, 72)), physical=list(range(8)))
    found = cores.judge(ranks)
    text = "warning: ranks 0-1 on a are bound to hardware threads of the same physical core, that of CPU 0"
    assert ill(found)["hardware threads"] == text
    assert any("--hint=nomultithread" in (finding.fix or "") for finding in found)
    assert ill(found)["threads"] == "warning: 2 ranks with 8 threads each on 8 cores of a (16 hardware threads)"


def test_ranks_with_both_hardware_threads_of_their_cores() -> None:
    ranks = healthy()
    for facts in ranks:
        own = facts["cores"]
        facts.update(cores=[*own, *(core + 64 for core in own)], cpus=128)
        facts["domains"] = {"0": 16, "1": 16}
    found = cores.judge(ranks)
    assert ill(found) == {}
    assert next(f.text for f in found if f.name == "hardware threads") == "2 a physical core"


def test_a_control_group_that_allows_enough() -> None:
    found = cores.judge(change("cpu_quota", 16.0))
    assert next(f.text for f in found if f.name == "CPU quota") == "the time of 16 CPUs, enough for all threads"


def test_limits_that_do_not_matter() -> None:
    """Locked memory of root, or without InfiniBand; the second port of a card, with no cable on any node."""
    ranks = change("limits", {"locked": 2**16, "locks_freely": True, "files": None, "most_files": None})
    assert ill(limits.judge(ranks)) == {}
    ranks = change("limits.locked", 2**16)
    for facts in ranks:
        facts["rdma"]["ports"] = []
    assert ill([*limits.judge(ranks), *fabric.judge(ranks)]) == {}
    assert ill(judge(change("rdma.ports", [port("mlx5_0"), port("mlx5_1", "DOWN")]))) == {}


def per_task(openable: int) -> list[Facts]:
    """Ranks that see one GPU each."""
    ranks = healthy()
    for facts in ranks:
        facts["gpu"].update(gpus=facts["gpu"]["gpus"][facts["local_rank"] :][:1], peers=[[True]], openable=openable)
    return ranks


def test_one_gpu_a_task() -> None:
    """By a control group, which keeps CUDA from passing memory on; CUDA_VISIBLE_DEVICES does not."""
    assert ill(gpus.judge(per_task(openable=2))) == {}
    found = gpus.judge(per_task(openable=1))
    text = ill(found)["GPUs of the others"]
    assert text.startswith("warning: ranks 0-1 on a may use 1 of the 2 GPUs of the node, as with --gpus-per-task")
    fix = next(finding.fix or "" for finding in found if finding.name == "GPUs of the others")
    assert fix.startswith("srun --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=none")


def test_gpus_that_are_far_from_their_ranks() -> None:
    ranks = healthy()
    for facts in ranks[2:]:
        facts["cores"] = [(core + 8) % 16 for core in facts["cores"]]
    found = gpus.judge(ranks)
    text = "ranks 2-3 run far from their GPUs: rank 2 on b has cores 8-15, and its GPU is near cores 0-7"
    assert ill(found) == {"GPU affinity": f"warning: {text}"}
    assert any("srun --cpu-bind=map_ldom:0,1," in (finding.fix or "") for finding in found)


def test_nodes_with_ipv6_alone() -> None:
    ranks = healthy()
    for facts in ranks[2:]:
        facts["interfaces"] = {"lo": "127.0.0.1", "docker0": "172.17.0.1"}
    found = network.judge(ranks)
    text = "b: 2001:db8::2 on eth0, but no address of IPv4, by which hpcdist.init() connects the nodes"
    assert ill(found) == {"IPv6": f"broken: {text}"}
    assert "ip addr add 10.0.0.N/24 dev eth0" in (next(f for f in found if f.name == "IPv6").fix or "")


def test_global_addresses_of_ipv6() -> None:
    text = (
        "20010db8000000000000000000000001 02 40 00 80     eth0\n"
        "fe800000000000000000000000000001 02 40 20 80     eth0\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    assert network._global_ipv6(text) == {"eth0": "2001:db8::1"}


def test_nccl_through_sockets_by_hand_and_on_slingshot() -> None:
    ranks = change("nccl_network", "Socket")
    for facts in ranks:
        facts["environ"]["NCCL_IB_DISABLE"] = "1"
    (found,) = [finding for finding in fabric.judge(ranks) if finding.name == "NCCL network"]
    assert found.text.endswith("through sockets, because of NCCL_IB_DISABLE=1")
    assert found.fix == "unset NCCL_IB_DISABLE"
    ranks = change("nccl_network", None)
    for facts in ranks:
        facts["rdma"]["ports"] = []
        facts["interfaces"]["hsn0"] = "10.9.0.1"
    (found,) = [finding for finding in fabric.judge(ranks) if finding.name == "NCCL network"]
    assert found.text.endswith("unless it finds the plugin for Slingshot: hsn0 is Slingshot, which needs a plugin")
    assert "NCCL_NET='AWS Libfabric'" in (found.fix or "")


def nodes(count: int, slow: str, **of_slow: float) -> list[Facts]:
    """One rank on each of the nodes a, b, c and d; the pairs that involve one of them are slow."""
    ranks = [{**rank(i, node=i), "host": "abcd"[i]} for i in range(count)]
    for facts in ranks:
        base = {"latency": 2e-6, "rate": 20e9, "bytes": 2**22}
        facts["pairs"] = [
            {"peer": peer, **base, **(of_slow if slow in (facts["host"], "abcd"[peer]) else {})}
            for peer in range(facts["rank"] + 1, count)
        ]
    return ranks


@pytest.mark.parametrize("count", [3, 4])
def test_a_node_whose_links_are_slow(count: int) -> None:
    """Also one of three nodes, where most pairs are slow."""
    found = links.judge(nodes(count, "c", rate=2e9))
    others = "; c and d 2000 MB/s" if count == 4 else ""
    text = f"a and c 2000 MB/s; b and c 2000 MB/s{others}, where 20000 MB/s is usual in this job"
    assert ill(found) == {"bandwidth between nodes": f"warning: {text}"}
    assert (found[0].fix or "").startswith("srun --exclude=c, ")
    found = links.judge(nodes(count, "a", latency=90e-6))
    assert ill(found)["latency between nodes"].startswith("warning: a and b 90 us; a and c 90 us")
    assert "where 2.0 us is usual in this job" in ill(found)["latency between nodes"]
    assert (found[1].fix or "").startswith("srun --exclude=a, ")


@pytest.mark.parametrize(("seconds", "nbytes"), [(1e-4, 2**22), (5e-4, 2**22), (0.01, 245760), (1.0, 2457)])
def test_a_slow_pair_sends_fewer_bytes(seconds: float, nbytes: int) -> None:
    """Large messages take 0.3 s a pair at most: 4 there and back at the rate of those of 64 KiB."""
    assert links.large_size(seconds) == nbytes


def test_a_current_folder_that_is_not_shared_is_no_fault() -> None:
    found = judge(change("sees_current", False, 2, 3))
    assert ill(found) == {}
    text = "/scratch/me is not shared with b, which is no fault: the staging folder is elsewhere"
    assert next(finding.text for finding in found if finding.name == "current folder") == text


def test_local_locks_that_do_not_matter() -> None:
    """On one node, and where HDF5 does not lock."""
    ranks = change("staging.mount", mount("nfs", "/scratch", "nolock"))
    assert "mounted with nolock" in ill(files.judge(ranks))["file locking"]
    for facts in ranks:
        facts["environ"]["HDF5_USE_FILE_LOCKING"] = "FALSE"
    assert "file locking" not in ill(files.judge(ranks))
    assert "file locking" not in ill(files.judge(change("staging.mount", mount("nfs", "/scratch", "nolock"))[:2]))


def test_every_finding_that_can_be_ill_has_been_so() -> None:
    """Here, or where the doctor meets it."""
    never = {"interfaces", "large counts", "CUDA-aware MPI", "current folder"}
    elsewhere = {"hardware threads", "GPUs of the others", "GPU affinity", "IPv6", "launcher", "world"}
    names = {topic.name for section in SECTIONS for topic in section.topics}
    routes = {name for name in names if name.startswith("route ")}
    assert names - routes - never - elsewhere == {case[1] for case in MADE_UP.values()} - routes


def test_facts_that_are_not_there_are_not_judged() -> None:
    """A process that could not even start MPI, as the doctor's report of its end judges it."""
    assert ill(judge([launch.gather({"PMI_RANK": "3"})])) == {}


def test_ranks_that_have_not_told_are_not_taken_for_absent() -> None:
    """Rank 0 of 8 has its own facts alone if another rank hangs or crashes before it tells its own."""
    local = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    first = rank(0, environ=local)
    first["mpi"]["size"] = 8
    for name in ("reach", "pairs", "sees_current", "init", "routes", "file", "nccl_network"):  # of later steps
        del first[name]
    found = judge([first])
    assert ill(found) == {}
    texts = {finding.name: finding.text for finding in found}
    assert texts["launcher"] == "mpirun of Open MPI: OMPI_COMM_WORLD_SIZE=8"
    assert not {"world", "IPv6", "network"} & texts.keys()


def test_a_world_of_one_whose_gpu_is_far() -> None:
    """MPI has not told its place on the node."""
    lonely = rank(0)
    lonely["mpi"].update(size=1, alone="this process is alone")
    del lonely["local_rank"]
    lonely["cores"] = [8]
    assert "rank 0 on a has core 8" in ill(gpus.judge([lonely]))["GPU affinity"]


def test_one_container_a_rank() -> None:
    """Each shows its own control group by the same path; host and pid may be the same, too."""
    ranks = healthy()
    for facts in ranks:
        facts.update(host="a", pid=1, cpu_quota=8.0, cpu_group="/sys/fs/cgroup", cpu_group_id=f"27:{facts['rank']}")
        facts["memory"].update(group="/sys/fs/cgroup", group_id=f"27:{facts['rank']}", available=int(1.5 * GIB))
    assert ill([*cores.judge(ranks), *limits.judge(ranks)]) == {}
    for facts in ranks:
        facts["cpu_group_id"] = facts["memory"]["group_id"] = "27:7"
    assert set(ill([*cores.judge(ranks), *limits.judge(ranks)])) == {"CPU quota", "memory"}
    outcome = Outcome([ranks[0]])
    outcome.take({"facts": ranks})
    assert [facts["rank"] for facts in outcome.facts] == [0, 1, 2, 3]
    assert launch.gather({})["id"] != launch.gather({})["id"]


def test_cores_that_are_shared_by_as_many() -> None:
    """Two ranks on cores 0-7 and two on 8-15; then ranks of different numbers of cores."""
    ranks = [{**rank(i, local_rank=i // 2), "threads": 4} for i in range(4)]
    assert cores._places(ranks) == "bound to 8 each, shared by 2"
    ranks = change("cores", list(range(8, 12)), 1)[:2]
    assert cores._places(ranks) == "bound to 4 or 8 each"


def test_the_report() -> None:
    """What is broken comes first, and what is ok in one line a section."""
    findings = [
        Finding("a", "ok", "fine", None, "job"),
        Finding("b", "warning", "slow", "speed it up", "cores"),
        Finding("longer", "broken", "bad", "mend it", "cores"),
        Finding("c", "ok", "fine, too", None, "job"),
    ]
    assert report(findings, [], False).splitlines() == [
        "broken  longer  bad",
        "          fix:  mend it",
        "warning b       slow",
        "          fix:  speed it up",
        "ok      job     a, c",
        "1 broken, 1 warning, 2 ok (--verbose shows what was found)",
    ]
    assert report(findings, [], False, verbose=True).splitlines()[4:] == [
        "ok      a       fine",
        "ok      c       fine, too",
        "1 broken, 1 warning, 2 ok",
    ]
    assert json.loads(report(findings, [{"rank": 0}], True))["ranks"] == [{"rank": 0}]
    assert ranks_text([3, 1, 2, 7]) == "ranks 1-3, 7"
    assert ranks_text([5]) == "rank 5"


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
