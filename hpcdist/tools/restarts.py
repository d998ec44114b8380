"""The command ``python -m hpcdist restarts``: start the ranks of a batch job, and start them again after a failure.

It runs on the batch host, outside of the ranks, without torch and MPI. ``python -m hpcdist jobscript --restarts 3``
writes the script that calls it. It learns what has failed from the launcher's exit status, from a test of each node,
and from the facts that failing ranks write to the folder HPCDIST_FACTS: see docs/do/job-scripts.md.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hpcdist.formats.paths import shown
from hpcdist.launch import launcher
from hpcdist.process.streams import printing
from hpcdist.runtime.commandline import Parser

_STOPPED = 75  # the exit status of a program that stops in time, to be requeued
_ANSWER = 10.0  # seconds in which a node answers a test
_FIRST = 60.0  # the same, before the first start
_SOON = 3.0  # the same, of a node that a rank blames, if there are enough others
_TESTS = 64  # tests of nodes at once; with more nodes, each is of several
_END = 5.0  # seconds in which the ranks end after one has written its facts
_LOOK = 0.5  # seconds between two looks at the facts
_TAIL = 1 << 20  # bytes of the ranks' output: at once, as a pipe holds, and the last ones, where a launcher tells why
_LEAST = 60.0  # seconds of the job that a restart is worth
# What launchers print of a rank that was killed. srun kills the others after one that has ended by itself, too.
_KILLED = re.compile(
    rb"srun: error: (\S+): tasks? [\d,-]+: (?:Killed|Bus error|Out Of Memory)"
    rb"|process rank \d+ with PID \d+ on node (\S+) exited on signal [79] "  # Open MPI
    rb"|(?<!\S)(\S+): shepherd died from signal 9\b"  # PALS
)


class Supervisor(Namespace):
    """The command line, and what it does: see the module."""

    job: str
    hosts: str
    nodes: int
    restarts: int
    checkpoint: Path
    command: list[str]
    folder: Path  # of the facts; all nodes share it
    told = 0  # the signal to end, if there was one
    child: subprocess.Popen[bytes] | None = None

    def pass_on(self, number: int, frame: object) -> None:
        """Pass a signal on to the ranks, and do not start them again."""
        self.told = number
        if self.child is not None:
            self.child.send_signal(number)

    def run(self) -> int:
        """Return the exit status of the last start."""
        hosts = list(dict.fromkeys(self.hosts.split(",")))
        blames: Counter[str] = Counter()
        errors: set[str] = set()
        saved, status, killed, facts = 0, 1, "", Path()
        for count in range(self.restarts + 1):
            shared = self.checkpoint.absolute().parent
            self.folder = Path(tempfile.mkdtemp(prefix=f"hpcdist-{self.job}-run-{count}-", dir=shared))
            told = self.read(facts) if count else []
            silent = self.silent(hosts, _ANSWER if count else _FIRST, lost_by(told))
            hosts = [host for host in hosts if host not in silent]
            if silent and not self.told:
                say(f"left out: {', '.join(silent)} (no answer, or {shared} is not shared)")
            why = f"{self.nodes} nodes are needed, and {len(hosts)} are left" if len(hosts) < self.nodes else ""
            if self.told:
                why = "no start after a signal"
            if count:
                before = errors
                errors, lost = self.judge(told, silent, status, killed)
                if errors & before and saved == self.saved():
                    why = "the fault is in the program: the same error twice, and nothing saved between the two"
                blames.update(lost)
            if why:
                say(why)
                shutil.rmtree(self.folder, ignore_errors=True)
                return status
            nodes = sorted(sorted(hosts, key=lambda host: blames[short(host)])[: self.nodes], key=hosts.index)
            saved, facts = self.saved(), self.folder
            if count:
                begin = (
                    self.checkpoint
                    if saved
                    else f"its beginning, unless it saves something else than {self.checkpoint}"
                )
                say(f"restart {count} of {self.restarts} on {', '.join(nodes)}, from {begin}")
            status, killed = self.start(nodes, count)
            if status in (0, _STOPPED) or self.told:
                shutil.rmtree(facts, ignore_errors=True)
                return status
            say(f"the ranks have ended with status {status}")
            left = launcher.time_left({"SLURM_JOB_ID" if self.by_srun() else "PBS_JOBID": self.job})
            if left is not None and left < _LEAST:
                say(f"the job ends in {left:.0f} s: no restart")
                return status
        return status

    def by_srun(self) -> bool:
        """Whether Slurm starts the ranks; otherwise an mpirun does, in a job of PBS."""
        return Path(self.command[0]).name == "srun"

    def saved(self) -> int:
        """Return when the checkpoint was last written; 0 if it does not exist."""
        return max(
            (one.stat().st_mtime_ns for one in (self.checkpoint, *self.checkpoint.rglob("*")) if one.exists()),
            default=0,
        )

    def on(self, nodes: list[str], words: list[str], once: bool = False) -> list[str]:
        """Return a command line of the launcher for these nodes; `once`: a file for mpirun names each once."""
        if self.by_srun():  # a step that has lost a node holds the others: --overlap
            return [words[0], "--overlap", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", *words[1:]]
        file = self.folder / f"nodes-{nodes[0]}-{once}"
        lines = nodes if once else [host for host in self.hosts.split(",") if host in nodes]
        file.write_text("".join(f"{host}\n" for host in lines))
        if "--hostfile" in words:  # the program may have such an option, too, after it
            at = words.index("--hostfile") + 1
            words = [*words[:at], str(file), *words[at + 1 :]]
        return ["env", f"PBS_NODEFILE={file}", *words]

    def start(self, nodes: list[str], count: int) -> tuple[int, str]:
        """Start the ranks. Return a shell's exit status, and the node where one was killed, if that ended the others.

        They are ended where they hang after a failure.
        """
        words = ["env", f"HPCDIST_FACTS={self.folder}", f"TORCHELASTIC_RESTART_COUNT={count}"]
        words += self.on(nodes, self.command)
        self.child = child = subprocess.Popen(words, stderr=subprocess.PIPE)
        assert child.stderr
        if self.told:  # too early for pass_on()
            child.send_signal(self.told)
        end, said = math.inf, b""
        while (code := child.poll()) is None:
            look = time.monotonic() + _LOOK
            while (left := look - time.monotonic()) > 0:
                said = (said + forward(child.stderr, left))[-_TAIL:]
            if look > end:
                self.cancel()
                child.kill()
            elif end == math.inf and any(self.folder.glob("*.json")):
                end = look + _END
        said += forward(child.stderr, 0.0)
        found = None if b": Exited with exit code" in said else _KILLED.search(said)
        killed = found[found.lastindex or 0].decode("latin-1") if found else ""
        return code if code >= 0 else 128 - code, killed

    def cancel(self) -> None:
        """Have Slurm end the ranks."""
        with suppress(OSError, subprocess.SubprocessError):
            # Of Slurm's steps, that of this script has no number.
            steps = launcher.printed(["squeue", "-hs", "-o", "%i", "-j", self.job])
            launcher.printed(["scancel", *re.findall(r"(?m)^\S+\.\d+$", steps)])

    def silent(self, nodes: list[str], seconds: float, doubted: set[str], most: int = _TESTS) -> list[str]:
        """Return the nodes that do not run a command in time, or do not have the folder of facts.

        There are at most so many tests, all at once. Each node of those that fail then has one of its own, with as much
        time again. Nodes in doubt do not have the whole time, if enough others answer.
        """
        size = -(-len(nodes) // most)
        groups = [nodes[at : at + size] for at in range(0, len(nodes), size)]
        tests = [(group, self.test(group)) for group in groups]
        begun = time.monotonic()
        while waits := [node for group, test in tests if test.poll() is None for node in group]:
            answered = sum(len(group) for group, test in tests if test.returncode == 0)
            enough = answered >= self.nodes and doubted.issuperset(map(short, waits))
            if self.told or time.monotonic() > begun + (_SOON if enough else seconds):
                break
            time.sleep(0.05)
        for _, test in tests:
            test.kill()
        failed = [node for group, test in tests if test.wait() for node in group]
        return self.silent(failed, seconds, doubted, len(failed)) if failed and size > 1 and not self.told else failed

    def test(self, nodes: list[str]) -> subprocess.Popen[bytes]:
        """Begin a test of some nodes, which ends with 0 if each of them runs a command and has the folder of facts."""
        how = ["--ntasks-per-node=1"] if self.by_srun() else ["--hostfile", ""] * ("--hostfile" in self.command)
        return subprocess.Popen(
            self.on(nodes, [self.command[0], *how, "-n", f"{len(nodes)}", "test", "-d", f"{self.folder}"], once=True)
        )

    def read(self, folder: Path) -> list[dict[str, Any]]:
        """Return the facts of this job in a folder."""
        found = []
        for file in folder.glob("*.json"):
            try:
                facts = json.loads(file.read_bytes())
                job = facts["job"]
                facts["rank"], short(facts["host"]), lost_by([facts]), facts.get("error", "") + facts.get("place", "")
            except Exception:
                say(f"{file} has no facts, and is ignored")
                continue
            if job == self.job:
                found.append(facts)
            else:
                say(f"{file} is of job {job or '(none)'}, and ignored")
        return found

    def judge(
        self, told: list[dict[str, Any]], silent: list[str], status: int, killed: str
    ) -> tuple[set[str], set[str]]:
        """Return which errors of the program there were, and which hosts are to blame: none if a node is silent."""
        believed = [facts for facts in told if short(facts["host"]) not in map(short, silent)]  # which lose the others
        errors, lost = set(), lost_by(believed)
        for facts in believed:
            error, place = facts.get("error", f"exit status {facts.get('status')}"), facts.get("place", "its end")
            say(f"rank {facts['rank']} on {facts['host']}: {error}, at {place}")
            errors.add(re.sub(r"[\d.]+", "", error) + place)
            for rank, host in facts.get("lost", {}).items():
                say(f"rank {rank} on {host} was dead, stopped, or silent")
                errors.add(rank)
        if killed and not told:
            say(f"a rank on {killed} was killed")
            lost = {short(killed)}
        return (set(), set()) if silent else (errors or {f"status {status}"}, lost)


def lost_by(told: list[dict[str, Any]]) -> set[str]:
    """Return the hosts that ranks have lost."""
    return {short(host) for facts in told for host in facts.get("lost", {}).values()}


def short(host: str) -> str:
    """Return the name of a host without its domain, and without the interface that PALS appends."""
    return re.sub(r"-hsn\d+$", "", host.partition(".")[0])


def forward(pipe: IO[bytes], seconds: float) -> bytes:
    """Print a part of what comes from a pipe, waiting at most so long for it, and return the part."""
    if not select.select([pipe], [], [], seconds)[0]:
        return b""
    text = os.read(pipe.fileno(), _TAIL)
    with suppress(OSError):  # such as a full disk
        sys.stderr.buffer.write(text)
        sys.stderr.flush()
    if not text:  # it is closed
        time.sleep(seconds)
    return text


def say(text: str) -> None:
    """Print a line of the supervisor's."""
    print(f"hpcdist restarts: {shown(text)}", flush=True)


def main(words: list[str]) -> int:
    """Run the ranks; return the exit status."""
    p = Parser(
        prog="hpcdist restarts",
        description="Start the ranks of a batch job, and start them again on nodes that answer after a failure. "
        "The scripts of hpcdist jobscript --restarts call it.",
        prints=lambda: True,
    )
    for name, kind, text in (
        ("job", str, "number of the job"),
        ("hosts", str, "names of all its nodes, A,B,...; under PBS one for each rank"),
        ("nodes", int, "number of nodes that the ranks need"),
        ("restarts", int, "number of restarts at most"),
    ):
        p.add_argument(f"--{name}", type=kind, required=True, help=text)
    p.add_argument("--checkpoint", type=Path, default="checkpoint", help="what the program saves (default checkpoint)")
    p.add_argument("command", nargs="+", help="launcher, its options and the program, after --")
    supervisor = p.parse_args(words, Supervisor())
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, supervisor.pass_on)
    try:
        return supervisor.run()
    except OSError as error:
        p.error(f"{error.filename}: {error.strerror}")


if __name__ == "__main__":
    with printing("hpcdist restarts"):
        sys.exit(main(sys.argv[1:]))
