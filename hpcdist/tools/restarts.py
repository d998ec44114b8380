"""The command ``python -m hpcdist restarts``: start the ranks of a batch job, and start them again after a failure.

It runs on the batch host, outside of the ranks, without torch and MPI. ``python -m hpcdist jobscript --restarts 3``
writes the script that calls it. It knows what has failed from the launcher's exit status, from a test of each node, and
from the facts that failing ranks write: ``rank-N.json`` in the folder HPCDIST_FACTS, see docs/do/job-scripts.md.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpcdist.launch import launcher
from hpcdist.process.streams import printing
from hpcdist.runtime.commandline import Parser, path

SCHEDULERS = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID"}
STOPPED = 75  # the exit status of a program that stops in time, to be requeued
_ANSWER = 10.0  # seconds in which a node answers a test, and in which the step ends after a rank has failed
_LOOK = 1.0  # seconds between two looks at the facts
_ASK = 10.0  # seconds between two questions to Slurm
_LEAST = 60.0  # seconds of the job that a restart is worth


class Supervisor:
    """Starts the ranks on nodes of the job that answer; see the module.

    Args:
        args: the command line.
    """

    def __init__(self, args: Namespace) -> None:
        self._args, self._hosts = args, args.hosts.split(",")
        beside = args.checkpoint or Path("checkpoint")  # all nodes must share its folder
        self._folder = beside.absolute().parent / f"hpcdist-restarts-{args.job}"
        self._blames: Counter[str] = Counter()
        self._errors: set[str] = set()  # of the failure before
        self._told = False  # by a signal, to end
        self._child: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: object) -> None:
        self._told = True
        if self._child is not None:
            self._child.send_signal(number)

    def run(self) -> int:
        """Return the exit status of the last start."""
        args, status = self._args, 1
        self._folder.mkdir(exist_ok=True)
        for count in range(args.restarts + 1):
            answering = self._answering(self._hosts)
            silent, self._hosts = set(self._hosts) - answering, [host for host in self._hosts if host in answering]
            if silent:
                say(f"left out: {','.join(sorted(silent))}: no answer, or it does not share {self._folder.parent}")
            if count and self._is_programs(count, silent, status):
                say("the fault is in the program: the same error twice, and no checkpoint between the two")
                return status
            if len(self._hosts) < args.nodes:
                say(f"{args.nodes} nodes are needed, and {len(self._hosts)} are left: the job ends")
                return status
            best = sorted(self._hosts, key=self._blames.__getitem__)[: args.nodes]
            nodes = [host for host in self._hosts if host in best]
            if count:
                say(f"restart {count} of {args.restarts}, on {','.join(nodes)}, {self._begin()}")
            self._saved = self._newest()
            status = self._start(nodes, count)
            if status in (0, STOPPED) or self._told:
                return status
            say(f"the ranks have ended with status {status}")
            left = launcher.time_left({SCHEDULERS[args.scheduler]: args.job})
            if left is not None and left < _LEAST:
                say(f"the job ends in {left:.0f} s: no restart")
                return status
        say(f"restarted {args.restarts} times already, and not again")
        return status

    def _newest(self) -> int:
        """Return when the checkpoint was last written; 0 if it does not exist."""
        file = self._args.checkpoint
        paths = [file, *file.rglob("*")] if file is not None else []
        times = [0]
        for one in paths:
            with suppress(OSError):
                times.append(one.stat().st_mtime_ns)
        return max(times)

    def _begin(self) -> str:
        if self._args.checkpoint is None:
            return "from the program's own checkpoint, if it has saved one (--checkpoint is not given)"
        if not self._newest():
            return f"from the beginning: the program has not saved {self._args.checkpoint}"
        return f"from {self._args.checkpoint}"

    # The ranks.

    def _on(self, nodes: list[str], each: int, words: list[str]) -> list[str]:
        """Return a command line of the launcher for `each` ranks on these nodes."""
        if self._args.scheduler == "slurm":  # a step that has lost a node holds the others: --overlap
            return [words[0], "--overlap", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", *words[1:]]
        file = self._folder / f"nodes-{nodes[0]}-{len(nodes)}"
        file.write_text("".join(f"{node}\n" * each for node in nodes))
        named = [str(file) if before == "--hostfile" else word for before, word in pairwise(["", *words])]
        return ["env", f"PBS_NODEFILE={file}", *named]

    def _start(self, nodes: list[str], count: int) -> int:
        """Start the ranks, and return their exit status. They are ended where they hang after a failure."""
        self._facts = self._folder / f"run-{count}-{time.time_ns()}"
        self._facts.mkdir()
        start = self._on(nodes, self._args.per_node, self._args.command)
        variables = [f"HPCDIST_FACTS={self._facts}", f"TORCHELASTIC_RESTART_COUNT={count}"]
        self._child = child = subprocess.Popen(["env", *variables, *start])
        failed = asked = time.monotonic()
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(_LOOK)
            now = time.monotonic()
            if not any(self._facts.glob("*.json")):
                failed = now
            if now - asked > _ASK:
                asked = now
                suspects = self._suspects(nodes)
                if suspects - self._answering(suspects):
                    say(f"no answer from {','.join(sorted(suspects))}: the ranks are ended")
                    failed = -_ANSWER
            if now - failed > _ANSWER:
                self._end(child)

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        if self._args.scheduler == "slurm":
            with suppress(OSError, subprocess.SubprocessError):
                launcher.printed(["scancel", "--signal=KILL", self._args.job])  # all steps, not this one
        with suppress(subprocess.TimeoutExpired):
            child.wait(_LOOK)
        child.kill()

    # Who is to blame.

    def _suspects(self, nodes: list[str]) -> set[str]:
        """Return the nodes that Slurm takes for lost."""
        states = ""
        if self._args.scheduler == "slurm":
            with suppress(OSError, subprocess.SubprocessError):
                states = launcher.printed(["sinfo", "-hN", "-o", "%N %T", "-n", ",".join(nodes)])
        return set(re.findall(r"^(\S+) (?:down|fail|\S*\*)", states, re.MULTILINE))

    def _answering(self, nodes: Any) -> set[str]:
        """Return the nodes that run a command in time, and have the folder of facts."""
        words = self._args.command
        words = [words[0], *["--hostfile", ""] * ("--hostfile" in words), "-n", "1", "test", "-d", str(self._folder)]
        tests = {}
        for node in nodes:
            tests[node] = subprocess.Popen(self._on([node], 1, words))
        end = time.monotonic() + _ANSWER
        for test in tests.values():
            with suppress(subprocess.TimeoutExpired):
                test.wait(max(0.0, end - time.monotonic()))
            test.kill()
        return {node for node, test in tests.items() if test.wait() == 0}

    def _read(self, silent: set[str]) -> Iterator[dict[str, Any]]:
        """Yield what ranks of this job have written, but for those on silent nodes, which see the others as lost."""
        for file in self._facts.glob("*.json"):
            facts = json.loads(file.read_text())
            if facts["job"] != self._args.job:
                say(f"{file} is of job {facts['job'] or '(none)'}, and ignored")
            elif not on(silent, facts["host"]):
                yield facts

    def _is_programs(self, count: int, silent: set[str], status: int) -> bool:
        """Blame hosts for the last failure; return whether the program has failed twice alike, at the same step."""
        errors, lost = set(), set()
        for facts in self._read(silent):
            error = facts.get("error", f"exit status {facts.get('status')}")
            say(f"rank {facts['rank']} on {facts['host']}: {error}, at {facts.get('place', 'its end')}")
            for rank, host in facts.get("lost", {}).items():
                say(f"rank {rank} on {host} was dead, stopped or silent")
                lost.add(host)
                errors.add(f"lost rank {rank}")
            errors.add(re.sub(r"[\d.]+", "", error) + facts.get("place", ""))
        errors, before = errors or {f"exit status {status}"}, self._errors
        self._errors = set() if silent else errors
        for host in self._hosts:
            self._blames[host] += on(lost, host) and not silent
        return bool(not silent and errors & before) and self._saved == self._newest()


def on(hosts: set[str], host: str) -> bool:
    """Whether a host is one of them, by names with or without a domain."""
    return host.split(".")[0] in {one.split(".")[0] for one in hosts}


def say(text: str) -> None:
    """Print a line of the supervisor's."""
    print(f"hpcdist restarts: {text}", flush=True)


def main(words: list[str]) -> int:
    """Run the ranks; return the exit status."""
    p = Parser(
        prog="hpcdist restarts",
        description="Start the ranks of a batch job, and start them again on nodes that answer after a failure. "
        "The scripts of hpcdist jobscript --restarts call it.",
        prints=lambda: True,
    )
    p.add_argument("--scheduler", choices=SCHEDULERS, default="slurm", help="the job's scheduler (default slurm)")
    p.add_argument("--job", required=True, metavar="ID", help="number of the job")
    p.add_argument("--hosts", required=True, metavar="A,B,...", help="its nodes, the spare ones among them")
    p.add_argument("--nodes", type=int, required=True, metavar="N", help="number of nodes that the ranks need")
    p.add_argument("--per-node", type=int, required=True, metavar="N", help="ranks per node")
    p.add_argument("--restarts", type=int, required=True, metavar="N", help="number of restarts at most")
    p.add_argument("--checkpoint", type=lambda text: Path(path(text)), metavar="PATH", help="what the program saves")
    p.add_argument("command", nargs="+", metavar="COMMAND", help="launcher, its options and the program, after --")
    args = p.parse_args(words)
    if args.nodes < 1:
        p.error(f"--nodes {args.nodes}: expected at least 1, beside the spare nodes of the job")
    try:
        return Supervisor(args).run()
    except OSError as error:
        p.error(f"{error.filename}: {error.strerror}")


if __name__ == "__main__":
    with printing("hpcdist restarts"):
        sys.exit(main(sys.argv[1:]))
