"""Start-up of Python from a slow shared file system, beside python -m hpcdist.stage_env and a start from local disk.

python benchmarks/stage_env.py --ranks 2,8,16,32 --rounds 3 --json benchmarks/results/stage-env.json
python benchmarks/stage_env.py --draw benchmarks/results/stage-env.json      # the picture; needs matplotlib

As root, with util-linux, iproute2, sshfs and openssh-sftp-server. Two hosts of network namespaces, as of
tests/cluster/hosts.py, mount the same folder from a third one, whose server limits requests and bytes a second for both
together (file_server.py). In the folder is a venv with numpy, mpi4py and hpcdist. Each start begins with new mounts: no
client has anything in its cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests" / name) for name in ("cluster", "helpers")]

from hosts import Hosts  # noqa: E402
from tables import figure, table  # noqa: E402

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
        lambda: cluster.launch(len(CLIENTS), shared, "-m", "hpcdist.stage_env", f"{SHARED}/venv"),
    )
    step(LOCAL_START, lambda: cluster.launch(ranks, f"{path}/bin/python", *PROGRAM))
    cluster.cleanup()
    return found


def show(record: dict[str, object]) -> str:
    """Format the table."""
    rows = []
    for ranks, rounds in record["rounds"].items():  # type: ignore[attr-defined]
        for name in (SHARED_START, STAGING, LOCAL_START):
            times, requests, sizes = zip(*(found[name] for found in rounds), strict=True)
            spread = f"{figure(min(times))} to {figure(max(times))}"
            mib = figure(statistics.median(sizes) / MIB)
            rows.append([f"{ranks} ranks: {name}", figure(statistics.median(times)), spread,
                         f"{statistics.median(requests):,.0f}", mib])  # fmt: skip
    return table(["", "s", "range", "requests", "MiB read"], rows)


def draw(record: dict[str, object], path: Path) -> None:
    """Plot seconds against ranks: the start from the shared folder; staging and then starting; starting alone."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"], mpl.rcParams["svg.fonttype"] = "hpcdist", "none"
    from matplotlib import pyplot as plt

    rounds = record["rounds"]
    ranks = [int(count) for count in rounds]  # type: ignore[attr-defined]
    lines = {
        "from the shared folder": ((SHARED_START,), "#b0b0b0"),
        "stage_env, then from the copy": ((STAGING, LOCAL_START), "#1f5fa8"),
        "from the copy, in the same job again": ((LOCAL_START,), "#7fb2e5"),
    }
    figure_, panel = plt.subplots(figsize=(6, 3.6))
    for label, (steps, colour) in lines.items():
        times = [[sum(one[step][0] for step in steps) for one in found] for found in rounds.values()]  # type: ignore[attr-defined]
        panel.plot(ranks, [statistics.median(each) for each in times], "o-", color=colour, label=label)
        panel.fill_between(ranks, [min(each) for each in times], [max(each) for each in times], color=colour, alpha=0.2)
    panel.set_xticks(ranks)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("ranks on 2 hosts")
    panel.set_ylabel("seconds")
    panel.set_title(f"python -c 'import numpy'; {record['limits']}", fontsize=10)
    panel.legend(frameon=False)
    figure_.tight_layout()
    figure_.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[2, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=float, default=500, help="of the file server, a second (500)")
    parser.add_argument("--bandwidth", type=int, default=100, help="of the file server, MiB a second (100)")
    parser.add_argument("--json", type=Path, help="file to which the measurements are added")
    parser.add_argument("--draw", type=Path, help="file with measurements: draw them beside it, and measure nothing")
    asked = parser.parse_args()
    if asked.draw:
        draw(json.loads(asked.draw.read_text()), asked.draw.with_suffix(".svg"))
        return 0
    limits = f"{asked.requests:g} requests and {asked.bandwidth} MiB a second for all"
    record: dict[str, object] = {"limits": limits, "rounds": {}}
    if asked.json and asked.json.exists() and (before := json.loads(asked.json.read_text()))["limits"] == limits:
        record["rounds"] = {int(ranks): rounds for ranks, rounds in before["rounds"].items()}
    with Hosts(3) as hosts:
        cluster = Cluster(hosts, (asked.requests, asked.bandwidth * MIB))
        for ranks in asked.ranks:
            record["rounds"][ranks] = [measure(cluster, ranks) for _ in range(asked.rounds)]  # type: ignore[index]
            print(show({**record, "rounds": {ranks: record["rounds"][ranks]}}), flush=True)  # type: ignore[index]
            if asked.json:
                asked.json.write_text(json.dumps(record) + "\n")
    print(show(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
