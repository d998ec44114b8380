"""What the doctor makes of facts: they are made up, so that no hardware is needed."""

import json

import pytest
from facts import GIB, change, healthy, ill, mount, rank

from hpcdist.runtime.cli import ranks_text
from hpcdist.tools.doctor.__main__ import report
from hpcdist.tools.doctor.checks import CHECKS, Finding, judge
from hpcdist.tools.doctor.examine import launch


def text_of(findings, name):
    return next(finding.text for finding in findings if finding.name == name)


def expect(ranks, name="", text="", fix="", *others):
    """This finding is ill, and is fixed so; beside the `others`, which follow from it, nothing is. Without a name,
    nothing is ill."""
    findings = judge(ranks)
    found = ill(findings)
    assert {*found} == {*filter(None, (name, *others))}, found
    assert found.get(name, "").startswith(text), found
    assert all(fix in finding.fix for finding in findings if finding.fix and finding.name == name)
    return findings


def all_with(facts, **changes):
    return [{**one, **changes} for one in facts]


def test_healthy_facts_of_two_nodes_with_gpus():
    findings = judge(healthy())
    assert ill(findings) == {}
    texts = {finding.name: finding.text for finding in findings}
    assert texts["world"] == "4 ranks on 2 nodes: ranks 0-1 on a; ranks 2-3 on b"
    assert texts["MPI library"] == "Open MPI v5.0.7, mpi4py 4.1.0"
    assert texts["cores"] == "bound to 8 each"
    assert "rank 3: H200, b, GPU-b1" in texts["GPUs"]
    assert (
        texts["staging folder"] == "/scratch: written and read, shared by 2 nodes, 512.0 TiB free (lustre at /scratch)"
    )


# A change of healthy facts: on which ranks, and what must be found: name, the finding, and what its fix holds.
MADE_UP = {
    "threads": (("mpi.thread_level", "SERIALIZED"), "MPI threads", "broken: MPI_THREAD_SERIALIZED", "THREAD_LEVEL"),
    "libraries": (
        ("mpi.library", "MPICH 5.0.2", 2, 3),
        "MPI library",
        "broken: Open MPI v5.0.7, mpi4py 4.1.0 (ranks 0-1 on a); MPICH 5.0.2, mpi4py 4.1.0 (ranks 2-3 on b)",
        "same installation",
    ),
    "too many threads": (
        ("threads", 64, 2, 3),
        "threads",
        "warning: 2 ranks with 64 threads each on 16 cores of b",
        "export OMP_NUM_THREADS=8",
    ),
    "no NCCL": (("versions.NCCL", None), "GPUs", "warning: torch without NCCL", "torch built for CUDA"),
    "one GPU for two": (
        ("gpu.gpus", [{"name": "H200", "id": "a, PCI 0000:01:00, UUID GPU-x", "bytes": 1}], 0, 1),
        "GPUs",
        "broken: ranks 0 and 1 share one GPU (a, PCI 0000:01:00, UUID GPU-x)",
        "one rank per GPU",
    ),
    "a node without": (("gpu.gpus", [], 2, 3), "GPUs", "warning: none on ranks 2-3 on b", "--gpus-per-node"),
    "driver": (("gpu.error", "driver too old", 2), "GPUs", "broken: driver too old (rank 2 on b)", "nvidia-smi"),
    "hidden": (("gpu.gpus", []), "GPUs", "warning: a has 2, but torch 2.13.0 sees none", "CUDA_VISIBLE_DEVICES"),
    "no such interface": (
        ("environ.GLOO_SOCKET_IFNAME", "ib0", 0, 1),
        "GLOO_SOCKET_IFNAME",
        "broken: GLOO_SOCKET_IFNAME=ib0: a has no such interface with an address, only lo, eth0, docker0 (ranks",
        "unset GLOO_SOCKET_IFNAME",
    ),
    "shm of docker": (
        ("shm", {"bytes": 2**26, "free": 2**26}, 2, 3),
        "/dev/shm",
        "warning: 64.0 MiB free of 64.0 MiB, for 2 ranks: little for a DataLoader with workers (ranks 2-3 on b)",
        "--shm-size=8g",
    ),
    "shm full": (
        ("shm", {"bytes": GIB, "free": 17 * 2**20}, 0),
        "/dev/shm",
        "broken: 17.0 MiB free of 1.0 GiB, for 2 ranks: MPI's messages within a node may not fit (ranks 0-1 on a)",
        "remove the files of ended jobs",
    ),
    "no shm": (
        ("shm", {"error": "No such file"}, 0),
        "/dev/shm",
        "broken: No such file (rank 0 on a)",
        "mount -o remount",
    ),
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
        "broken: /scratch: rank 2 on b does not see files of a: the folder is not shared by all nodes",
        "export HPCDIST_STAGING=",
    ),
    "no space": (
        ("staging.error", "/scratch: No space left on device", 2),
        "staging folder",
        "broken: /scratch: No space left on device (rank 2 on b)",
        "export HPCDIST_STAGING=",
    ),
    "little space": (("staging.free", 2**20), "staging folder", "warning: /scratch: written", "HPCDIST_STAGING"),
    "Python": (
        ("versions.Python", "3.12.1", 2, 3),
        "versions",
        "broken: Python 3.11.2, torch 2.13.0, numpy 2.4.6, NCCL 2.28.9, hpcdist 0.1.0 of sources a1b2c3d4",
        "one environment for all nodes",
    ),
    "slow start": (
        ("start", 95.0, 3),
        "start of Python",
        "warning: Python, torch and hpcdist started in 95.0 s on rank 3 on b: many small files, from the environment "
        "/sw/env (lustre at /sw)",
        "env=$(srun -n $SLURM_NNODES --ntasks-per-node=1 python -m hpcdist stage-env ENVIRONMENT)",
    ),
    "long TMPDIR": (("temporary.folder", f"/local/{'x' * 70}"), "TMPDIR", "broken: /local/xxx", "export TMPDIR=/tmp"),
    "no TMPDIR": (
        ("temporary", {"folder": "/local/7", "error": "/local/7: No such file or directory"}, 2, 3),
        "TMPDIR",
        "warning: /local/7: No such file or directory (ranks 2-3 on b)",
        "ls -ld $TMPDIR",
    ),
    "full TMPDIR": (
        ("temporary", {"folder": "/local/7", "bytes": 2**20, "error": "/local/7: No space left on device"}, 1),
        "TMPDIR",
        "warning: /local/7: No space left on device (rank 1 on a)",
        "df -h $TMPDIR",
    ),
    "small TMPDIR": (
        ("temporary.free", 2**20, 3),
        "TMPDIR",
        "warning: /tmp: 1.0 MiB free (rank 3 on b)",
        "df -h $TMPDIR",
    ),
    "far TMPDIR": (("temporary.mount", mount("nfs4", "/tmp"), 2), "TMPDIR", "warning: /tmp is on nfs4", "TMPDIR=/tmp"),
    "little memory": (
        ("memory.available", 2**30, 2, 3),
        "memory",
        "warning: 1.0 GiB free of 512.0 GiB, and the cgroup /sys/fs/cgroup/job_7 may have 256.0 GiB, for 2 "
        "ranks: little for torch and its data (ranks 2-3 on b)",
        "srun --mem=0",
    ),
    "no memory": (("memory.available", 2**28, 2, 3), "memory", "broken: 256.0 MiB free", "docker run --memory"),
    "few files": (
        ("limits.files", 200, 3),
        "ulimit -n",
        "warning: may open 200 files; connections to 4 ranks and the workers of a DataLoader need about 272 "
        "(ulimit -Hn: 524288) (rank 3 on b)",
        "ulimit -n $(ulimit -Hn)",
    ),
    "very few files": (
        ("limits.files", 100, 3),
        "ulimit -n",
        "broken: may open 100 files; ",
        "ulimit -n $(ulimit -Hn)",
    ),
    "route": (("routes.mpi.error", "refused"), "route mpi", "broken: refused", "look at the findings about MPI"),
    "file": (("file", {"error": "MPI-IO failed"}), "HDF5 file", "broken: MPI-IO failed", "writer='posix'"),
    "init": (
        ("init", {"error": "no common network"}, 1),
        "hpcdist.init()",
        "broken: no common network (rank 1 on a)",
        "findings",
    ),
}


@pytest.mark.parametrize("case", MADE_UP)
def test_made_up_facts_are_judged(case):
    """One thing is wrong, and one finding says so."""
    changed, *expected = MADE_UP[case]
    expect(change(*changed), *expected)


def test_ranks_and_cores():
    """Two ranks on a core that is bound; hardware threads of one core; ranks of a node that are not bound, or all of
    whose cores' threads are theirs."""
    text = "warning: 4 ranks on 2 nodes: ranks 0-2; rank 3 on b; not the same number on each node"
    expect(change("node", 0, 2), "world", text, "--ntasks-per-node", "threads")
    text = "warning: ranks 2-3 on b share core 5, of the 64 of this machine (ranks 2-3 on b)"
    expect(change("cores", [5], 2, 3), "cores", text, "--bind-to core")
    unbound = all_with(change("cores", [], 0), cores=[*range(64)], domains=2)
    text = "warning: 64 for 2 ranks, which are not bound, in 2 NUMA domains"
    expect(unbound, "cores", text, "bind='numa'")
    ranks = healthy()
    ranks[1].update(cores=[*range(64, 72)], physical=[*range(8)])
    text = "warning: ranks 0-1 on a are bound to other CPUs, but share physical cores 0-7 (ranks 0-1 on a)"
    found = expect(ranks, "cores", text, "--hint=nomultithread", "threads")
    assert text_of(found, "threads").startswith("2 ranks with 8 threads each on 8 cores of a")
    expect([{**one, "cores": [*one["cores"], *(core + 64 for core in one["cores"])], "cpus": 128} for one in healthy()])


def test_mpich_5_under_srun_may_hang_at_its_start():
    ranks = healthy()
    for facts in ranks:
        facts["mpi"]["library"] = "MPICH Version: 5.0.2"
        facts["environ"] = {"SLURM_STEP_NUM_TASKS": "4", "PMI_RANK": "0"}
    expect(ranks, "PMI", "warning: MPICH 5 under srun", "MPIR_CVAR_CH4_NETMOD=ofi")
    for facts in ranks:
        facts["environ"]["UCX_TLS"] = "tcp"
    expect(ranks)


def test_worlds_of_one():
    lonely = rank(0)
    lonely["mpi"].update(size=1, alone="this process is alone")
    expect([lonely], "launcher", "broken: 4 worlds of one rank, instead of one of 4")


def test_gpus_that_are_shared_or_only_seem_so():
    """One GPU is shared if host, PCI address and UUID are the same: drivers leave UUIDs blank, and MIG cuts one GPU."""
    ranks = healthy()
    for names in (("PCI 1, UUID 0", "PCI 2, UUID 0"), ("PCI 1, UUID 3", "PCI 1, UUID 4")):
        for facts in ranks:
            facts["gpu"]["gpus"] = [{"name": "GPU", "id": f"{facts['host']}, {names[facts['local_rank']]}"}]
        expect(ranks)


def test_routes_are_judged():
    routes = {
        "nccl": {"absent": "needs a GPU"},
        "gloo": {"error": "connection refused"},
        "mpi": {"seconds": 0.002},
        "hdf5": {"error": "the data received differ from those sent"},
    }
    found = expect(all_with(healthy(), routes=routes), "route gloo", "broken", "", "route hdf5")
    assert {"route nccl", "route mpi"} <= {finding.name for finding in found}
    assert "2.00 ms,   2097 MB/s" in text_of(found, "route mpi")


def test_limits_that_do_not_matter():
    expect(change("limits", {"files": None, "most_files": None}))
    expect([launch({"PMI_RANK": "3"})])  # a process that could not even start MPI


def test_every_finding_that_can_be_ill_has_been_so():
    """Here, or where the doctor meets it."""
    elsewhere = {"PMI", "bandwidth between nodes", "cores", "launcher", "world"}
    names = {row.name for row in CHECKS if not row.name.startswith("route ")}
    ill_here = {case[1] for case in MADE_UP.values() if not case[1].startswith("route ")}
    assert names - elsewhere == ill_here


def test_ranks_that_have_not_told_are_not_taken_for_absent():
    """Rank 0 of 8 has its own facts alone if another rank hangs or crashes before it tells its own."""
    local = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    first = rank(0, environ=local)
    first["mpi"]["size"] = 8
    for name in ("pair", "init", "routes", "file"):  # of later steps
        del first[name]
    found = expect([first])
    assert text_of(found, "launcher") == "mpirun of Open MPI: OMPI_COMM_WORLD_SIZE=8"
    assert "world" not in {finding.name for finding in found}


def test_one_container_a_rank():
    """Each shows its own control group by the same path; host and pid may be the same, too."""
    ranks = all_with(healthy(), host="a", pid=1)
    for facts in ranks:
        facts["memory"].update(group="/cgroup", group_id=facts["rank"], available=int(1.5 * GIB))
    expect(ranks)
    for facts in ranks:
        facts["memory"]["group_id"] = 7
    expect(ranks, "memory")
    assert launch({})["id"] != launch({})["id"]


def test_cores_that_are_shared_by_as_many():
    """Two ranks on cores 0-7 and two on 8-15; then ranks of different numbers of cores."""
    ranks = [{**rank(i, local_rank=i // 2), "threads": 4} for i in range(4)]
    assert text_of(judge(ranks), "cores") == "bound to 8 each"
    text = "bound to 4 or 8 each (ranks 0-1 on a); bound to 8 each (ranks 2-3 on b)"
    assert text_of(judge(change("cores", list(range(8, 12)), 1)), "cores") == text


def test_the_report():
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
        "1 broken, 1 warning, 2 ok (--verbose shows details)",
    ]
    assert report(findings, [], False, verbose=True).splitlines()[4:] == [
        "ok      a       fine",
        "ok      c       fine, too",
        "1 broken, 1 warning, 2 ok",
    ]
    assert json.loads(report(findings, [{"rank": 0}], True))["ranks"] == [{"rank": 0}]
    assert ranks_text([3, 1, 2, 7]) == "ranks 1-3, 7"
    assert ranks_text([5]) == "rank 5"


def test_the_launcher_and_where_it_has_put_the_ranks():
    """Two nodes of two ranks for the launcher; containers that hide the ranks of a node from each other."""
    local = [{"OMPI_COMM_WORLD_LOCAL_RANK": str(i % 2), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"} for i in range(4)]
    ranks = [rank(i, node=i // 2, local_rank=i % 2, environ=local[i]) for i in range(4)]
    said = "mpirun of Open MPI: OMPI_COMM_WORLD_SIZE=4"
    assert text_of(expect(ranks), "launcher") == said
    apart = [rank(i, node=i, local_rank=0, environ=local[i]) for i in range(4)]
    text = "rank 1 has local rank 1 for the launcher, but 0 for MPI: a wrong GPU"
    assert ill(judge(apart))["launcher"].endswith(text)
    ranks[3]["environ"].update(SLURM_LOCALID="0", OMPI_COMM_WORLD_LOCAL_RANK="0")
    expect(ranks, "launcher", f"warning: {said}; rank 3 has local rank 0 for the launcher, but 1 for MPI: a wrong GPU")
