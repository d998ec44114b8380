"""The fault battery: jobs with a fault drawn at random, over one host and two. ``python tests/faults.py --runs 50``

Of each run: does it end within its deadline and 10 s of the fault, with a status that is not 0, a message that names
the right rank and cause, and without a process, file or shared memory left behind? Needs root, for the hosts.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "helpers"), str(HERE / "cluster")]

from hosts import Hosts  # noqa: E402
from launch import slowness  # noqa: E402

SLOWER = slowness()  # now: what follows are seconds of a quiet machine
LIMIT = 5 * SLOWER  # the deadline of the jobs' calls
GRACE = 10 * SLOWER  # more, until which a job has to have ended
STARTS = 60  # seconds in which a job comes to its fault
CALLS = 6
PLACES = ("/tmp", "/dev/shm", "-xdev", "-mindepth", "1")  # of a host: not the checkout, should it lie in /tmp
ENDS = 3 * SLOWER  # in which the processes of a launcher that has returned end
VERBS = (
    *("concat", "gather", "split", "redistribute", "structure", "background", "ring", "save"),
    *("all_reduce", "all_to_all"),
)
ROUTES = ("mpi", "gloo", "hdf5")

# What is said of rank {rank}, process {pid}, at fault.
CAUSES = {
    "raise": r"a mistake of rank {rank}\n",
    "os_exit": r"os\._exit\(5\) at .*faulty.py:\d+ on rank {rank} \(\S+, pid {pid}\)",
    "no_finalize": r"os\._exit\(0\) at .*faulty.py:\d+ on rank {rank} \(\S+, pid {pid}\)",
    # Where no other rank of its node is left to say so in time, the launcher does.
    "kill": r"rank {rank} \(\S+, pid {pid}\) is dead|process rank {rank} with PID .* exited on signal 9"
    r"|PID {pid} RUNNING",
    # With no other rank on its node, nobody can see what it is that keeps it from answering.
    "stop": r"rank {rank} \(\S+, pid {pid}\) (is stopped|does not answer: it is stopped,)",
    "hang": r"rank {rank} \(\S+, pid {pid}\) has not reached this call: it is in Python, at .*faulty.py:\d+ in commit",
    "argument": r"was refused on all ranks\n(\[rank\d+\]: )?  rank {rank}: (?!called)"
    r"|\[rank{rank}\]: ValueError: dest is 99",
    "too_few": r"rank {rank}: called finalize\(\), or reached the end|where rank {rank} called finalize\(\), or reached"
    r"|rank {rank} \(\S+, pid {pid}\) has not reached this call: it is in (the end of its program|finalize)"
    r"|rank{rank}\]: .*HangError: (the end of its program|finalize)",
    "too_many": r"rank {rank}: called \S+\(\), where|where rank {rank} called [^f]\S+\(\)"
    r"|{rank} +\S+ +{pid} .* recv\(\) at",
}


@dataclass
class Run:
    """One job, and how it went."""

    fault: str
    verb: str
    route: str
    np: int
    hosts: int
    rank: int
    at: int
    status: int = 0
    seconds: float = 0.0  # from the fault to the end of the job
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what a launcher does that kills all before we can act
    output: str = ""


def draw(seed, runs):
    """So many runs: every fault in its turn, all else at random."""
    chance = random.Random(seed)
    faults = list(CAUSES)
    found = []
    for i in range(runs):
        np = chance.choice((2, 4))
        place = {"verb": chance.choice(VERBS), "route": chance.choice(ROUTES), "hosts": chance.choice((1, 2))}
        found.append(
            Run(faults[i % len(faults)], np=np, rank=chance.randrange(np), at=chance.randrange(CALLS), **place)
        )
    return found


def execute(run, hosts):
    """Run a job on two hosts that nothing else uses; what is wrong with its end is in `problems`."""
    folder = hosts.folder / f"job-{time.monotonic_ns()}"
    folder.mkdir()
    said = folder.with_suffix(".said")
    what = {**asdict(run), "calls": CALLS, "folder": str(folder), "said": str(said)}
    ranks = [run.np] if run.hosts == 1 else [run.np // 2, run.np // 2]
    job = hosts.start_mpirun(ranks, HERE / "faulty.py", json.dumps(what), env={"HPCDIST_TIMEOUT": f"{LIMIT:g}"})
    try:
        done = job.wait(STARTS + LIMIT + GRACE)
        run.status, run.output = done.status, done.out + done.err
    except AssertionError as late:
        run.problems.append("hangs")
        run.output = str(late)
    end = time.time()
    if not said.exists():
        run.problems.append("did not come to its fault")
        list(left_behind(hosts, [], folder))  # the next job finds nothing of it
        return run
    fault = json.loads(said.read_text())
    run.seconds = end - fault["time"]
    if run.seconds > LIMIT + GRACE:
        run.problems.append("ends late")
    if run.status == 0:
        run.problems.append("status 0")
    if "WRONG DATA" in run.output:
        run.problems.append("wrong data")
    if not re.search(CAUSES[run.fault].format(rank=run.rank, pid=fault["pid"]), run.output):
        # The launchers of MPICH and Intel MPI end all ranks 2 ms after one was killed, and may name another process.
        launchers = run.fault == "kill" and re.search(r"EXIT STRING: Killed|KILLED BY SIGNAL: 9", run.output)
        (run.notes if launchers else run.problems).append("rank or cause not named")
    soon = end + ENDS
    while (pids := job.pids()) and time.time() < soon:
        time.sleep(0.1)
    for what in left_behind(hosts, pids, folder):
        launchers = "hydra_hwloc_xmlfile" in what or (run.fault in ("kill", "stop") and "mpich_shm" in what)
        (run.notes if launchers else run.problems).append(f"left behind: {what}")
    return run


def left_behind(hosts, pids, folder):
    """What a job has left: processes, files, shared memory. The part of a save that was killed may stay: the next save
    takes it over."""
    for _ in pids:
        yield "a process"
    for path in folder.iterdir():
        if path.name != "saved.h5" and not (path.name.startswith(".saved.h5.") and path.suffix == ".part"):
            yield f"a file {path.name}"
    for name in hosts.names:
        found = hosts.run(name, ["find", *PLACES, "-not", "-type", "d"])
        for path in found.out.splitlines():
            yield f"{path} on {name}"
        hosts.run(name, ["find", *PLACES, "-delete"])


def battery(runs, workers):
    """Execute the runs, so many at a time, each with two hosts of its own."""
    free = SimpleQueue()

    def one(run):
        hosts = free.get()
        try:
            return execute(run, hosts)
        finally:
            free.put(hosts)

    every = [Hosts(2) for _ in range(workers)]
    try:
        for hosts in every:
            free.put(hosts)
        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(one, runs)
    finally:
        for hosts in every:
            hosts.close()


def summary(runs):
    """A line for each fault: runs, those without a problem, and the seconds from the fault to the end of the job."""
    lines = ["| fault | runs | as they should be | seconds to the end: median, longest |", "|---|---|---|---|"]
    for fault in CAUSES:
        of = [run for run in runs if run.fault == fault]
        if of:
            times = sorted(run.seconds for run in of)
            good = sum(not run.problems and "rank or cause not named" not in run.notes for run in of)
            lines.append(f"| {fault} | {len(of)} | {good} | {times[len(times) // 2]:.1f}, {times[-1]:.1f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description="Jobs with faults drawn at random, and how they end.")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=3, help="jobs at a time")
    parser.add_argument("--json", type=Path, help="write the runs there")
    args = parser.parse_args()
    done = []
    for run in battery(draw(args.seed, args.runs), args.workers):
        done.append(run)
        place = f"np {run.np} on {run.hosts}, rank {run.rank}, call {run.at}"
        print(f"{len(done):4} {run.fault:12} {run.verb:12} {run.route:5} {place:32} {run.seconds:5.1f} s", end=" ")
        print("; ".join(run.problems) or "ok", flush=True)
    print(summary(done))
    kinds = (re.sub(r"(_\w+)?( on \w+)|-\w+\.h5", "", what) for run in done for what in run.problems + run.notes)
    for problem, count in Counter(kinds).items():
        print(f"{count} x {problem}")
    if args.json:
        args.json.write_text(json.dumps([asdict(run) for run in done], indent=1))
    return any(run.problems for run in done)


if __name__ == "__main__":
    sys.exit(main())
