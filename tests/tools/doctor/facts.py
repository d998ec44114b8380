"""Made-up facts of a healthy job, for the doctor to judge with something changed."""

GIB = 2**30


def make(root, files):
    """Files of the system, by name below a folder; returns it."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def mount(kind, point):
    """A mount as mount_of() describes it."""
    return {"point": point, "type": kind, "network": kind in ("lustre", "nfs4", "nfs", "gpfs")}


def rank(number, *, node=0, local_rank=0, environ=None):
    """Made-up facts of a healthy rank: two nodes of 64 cores, a GPU for each rank, two networks."""
    host = "ab"[node > 0]
    address = f"10.0.0.{1 + (node > 0)}"
    leads = local_rank == 0
    staging = {"folder": "/scratch", "free": 2**49, "mount": mount("lustre", "/scratch")}
    return {
        "rank": number,
        "node": node,
        "local_rank": local_rank,
        "host": host,
        "id": f"{number:016x}",
        "environ": {"OMPI_COMM_WORLD_SIZE": "4", "OMP_NUM_THREADS": "8", **(environ or {})},
        "mpi": {
            "library": "Open MPI v5.0.7, package: x",
            "mpi4py": "4.1.0",
            "thread_level": "MULTIPLE",
            "size": 4,
            "alone": None,
        },
        "versions": {
            "Python": "3.11.2",
            "torch": "2.13.0",
            "numpy": "2.4.6",
            "NCCL": "2.28.9",
            "hpcdist": "0.1.0 of sources a1b2c3d4",
        },
        "prefix": "/sw/env",
        "start": 4.0,
        "temporary": {"folder": "/tmp", "bytes": GIB, "free": GIB, "mount": mount("xfs", "/tmp")},
        "environment": mount("lustre", "/sw"),
        "cores": list(range(8 * local_rank, 8 * local_rank + 8)),
        "cpus": 64,
        "threads": 8,
        "physical": list(range(8 * local_rank, 8 * local_rank + 8)),
        "memory": {
            "host": 512 * GIB,
            "limit": 256 * GIB,
            "group": "/sys/fs/cgroup/job_7",
            "group_id": 7,
            "available": 250 * GIB,
        },
        "limits": {"files": 1024, "most_files": 524288},
        "gpu": {
            "in_node": 2,
            "gpus": [{"name": "H200", "id": f"{host}, GPU-{host}{i}"} for i in range(2)],
        },
        "interfaces": {"lo": "127.0.0.1", "eth0": address, "docker0": "172.17.0.1"},
        "shm": {"bytes": 128 * GIB, "free": 127 * GIB},
        "hdf5": {"h5py": "3.16.0", "hdf5": "1.14.6", "parallel": True},
        "sees": True,
        "routes": {"mpi": {"seconds": 0.001}},
        **({"staging": staging} if leads else {}),
        **({"pair": {"host": "b", "rate": 20e9}} if leads and not node else {}),
        "file": {"seconds": 0.02, "writer": "mpio"},
        "init": {"seconds": 0.2, "device": "cuda"},
    }


def healthy(**environ):
    """Ranks 0 and 1 on node a, 2 and 3 on node b."""
    return [rank(i, node=i // 2 * 2, local_rank=i % 2, environ=environ) for i in range(4)]


def ill(findings):
    """The findings that are not ok: name -> "verdict: text"; each has a fix."""
    wrong = [finding for finding in findings if finding.verdict != "ok"]
    assert all(finding.fix for finding in wrong), wrong
    return {finding.name: f"{finding.verdict}: {finding.text}" for finding in wrong}


def change(path, value, *where):
    """Healthy facts, but for one thing on some ranks (on all if none are named)."""
    ranks = healthy()
    *inner, last = path.split(".")
    for facts in ranks:
        if (where and facts["rank"] not in where) or (inner and inner[0] not in facts):
            continue  # such as staging, which one rank of each node knows
        place = facts
        for step in inner:
            place = place[step]
        place[last] = value
    return ranks
