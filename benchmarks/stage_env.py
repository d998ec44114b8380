"""Start-up of Python from a slow shared file system, beside python -m hpcdist stage-env and a start from local disk.

python benchmarks/stage_env.py --ranks 2,8,16,32 --rounds 3 --json benchmarks/results/stage-env.json

As root, with util-linux, iproute2, sshfs and openssh-sftp-server. Two hosts of network namespaces, as of
tests/cluster/hosts.py, mount the same folder from a third one, whose server limits requests and bytes a second for both
together (file_server.py). In the folder is a venv with numpy, mpi4py and hpcdist. Each start begins with new mounts: no
client has anything in its cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests" / name) for name in ("cluster", "helpers")]

import report  # noqa: E402
from hosts import Hosts  # noqa: E402

CLIENTS, SERVER = ("node1", "node2"), "node3"
SHARED = "/tmp/shared"  # where both mount it: /tmp is each host's own
PROGRAM = ("-c", "import numpy")
PACKAGES = ("numpy", "numpy.libs", "mpi4py", "xxhash", "tqdm")
# As a good client's: what is read once is kept.
MOUNT = "ro,no_contain_symlinks,kernel_cache,dcache_timeout=60,entry_timeout=60,attr_timeout=60,negative_timeout=60"
SHARED_START, STAGING, LOCAL_START = "start from the shared folder", "stage_env", "start from the copy"
MIB = 2**20


class Cluster:
    """Two hosts with a shared folder, and the server."""

    def __init__(self, hosts: Hosts, rates: tuple[float, int]) -> None:
        self.hosts, self.rates = hosts, rates
        self.exported = hosts.folder / "exported"
        self.served = {"requests": 0, "bytes": 0}
        _environment(self.exported / "venv")

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """A context in which the clients have the folder, with nothing in their caches. Adds to `served`."""
        command = [sys.executable, HERE / "file_server.py", "--folder", self.exported]
        options = ["--requests", str(self.rates[0]), "--bandwidth", str(self.rates[1])]
        server = self.hosts.start(SERVER, [*command, *options])
        assert server.process.stdout is not None and server.process.stdout.readline() == "listening\n"
        try:
            for name in CLIENTS:
                self._do(name, "mkdir", "-p", SHARED)
                address = f"{self.hosts.address(SERVER)}:{self.exported}"
                self._do(name, "sshfs", "-o", f"directport=7000,{MOUNT}", address, SHARED)
            yield
            for name in CLIENTS:
                self._do(name, "umount", SHARED)
        finally:
            server.process.terminate()
        counts = json.loads(server.wait(20).out)
        self.served = {what: self.served[what] + counts[what] for what in counts}

    def _do(self, host: str, *command: str) -> None:
        done = self.hosts.run(host, command)
        if done.status:
            raise SystemExit(f"{' '.join(command)}: {done.err}")

    def launch(self, ranks: int, python: str, *args: str) -> tuple[float, str]:
        """Run Python on all ranks, as many on one host as on the other; return (seconds, standard output)."""
        start = time.perf_counter()
        counts = [ranks // len(CLIENTS)] * len(CLIENTS)
        job = self.hosts.start_mpirun(counts, *args, python=python, env={"PYTHONPATH": ""}).wait(300)
        seconds = time.perf_counter() - start
        if job.status:
            raise SystemExit(f"{python} {' '.join(args)}: {job.err}")
        return seconds, job.out

    def cleanup(self) -> None:
        for name in CLIENTS:
            self._do(name, "rm", "-rf", "/tmp/hpcdist-0")


def _environment(venv: Path) -> None:
    """A venv with copies of what the program and the command need of the packages here."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    there = next(venv.glob("lib/python3*/site-packages"))
    for name in PACKAGES:
        source = Path(sysconfig.get_path("purelib"), name)
        if source.exists():
            shutil.copytree(source, there / name)
    shutil.copytree(HERE.parent / "hpcdist", there / "hpcdist")
    subprocess.run([sys.executable, "-m", "compileall", "-q", there], check=True)
    for path in Path(sys.prefix, "lib").glob("lib*.so*"):  # MPI's, if it is a wheel
        shutil.copy(path, venv / "lib" / path.name, follow_symlinks=False)


def measure(cluster: Cluster, ranks: int) -> dict[str, tuple[float, int, int]]:
    """Measure one start of `ranks` ranks each way: (seconds, requests, bytes) of each step."""
    found = {}

    def step(name: str, run: Callable[[], tuple[float, str]]) -> str:
        cluster.served = {"requests": 0, "bytes": 0}
        with cluster.mounted():
            seconds, out = run()
        found[name] = seconds, cluster.served["requests"], cluster.served["bytes"]
        return out.strip()

    shared = f"{SHARED}/venv/bin/python"
    step(SHARED_START, lambda: cluster.launch(ranks, shared, *PROGRAM))
    path = step(
        STAGING,
        lambda: cluster.launch(len(CLIENTS), shared, "-m", "hpcdist", "stage-env", f"{SHARED}/venv"),
    )
    step(LOCAL_START, lambda: cluster.launch(ranks, f"{path}/bin/python", *PROGRAM))
    cluster.cleanup()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[2, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=float, default=500, help="of the file server, a second (500)")
    parser.add_argument("--bandwidth", type=int, default=100, help="of the file server, MiB a second (100)")
    parser.add_argument("--json", type=Path, help="file to which the measurements are added")
    asked = parser.parse_args()
    limits = f"{asked.requests:g} requests and {asked.bandwidth} MiB a second for all"
    record: dict[str, object] = {"limits": limits, "rounds": {}}
    if asked.json and asked.json.exists() and (before := json.loads(asked.json.read_text()))["limits"] == limits:
        record["rounds"] = {int(ranks): rounds for ranks, rounds in before["rounds"].items()}
    with Hosts(3) as hosts:
        cluster = Cluster(hosts, (asked.requests, asked.bandwidth * MIB))
        for ranks in asked.ranks:
            record["rounds"][ranks] = [measure(cluster, ranks) for _ in range(asked.rounds)]  # type: ignore[index]
            if asked.json:
                asked.json.write_text(json.dumps(record) + "\n")
    print(report.start_up(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
