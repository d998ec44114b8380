"""Slurm over the hosts of one machine: munge, a controller on node1, and a node daemon on each.

Needs root, and the packages slurm-wlm and munge::

    with Hosts(2) as hosts, Slurm(hosts) as slurm:
        job = slurm.submit("job.sbatch", "--verify", options=["--ntasks-per-node=2"], cwd=hosts.folder)
        ended = slurm.wait(job)                 # until it is over, or an AssertionError at the deadline
        assert ended.state == "COMPLETED", ended.out
        slurm.run(["sinfo"])                    # a command on node1, which is the login node too

Everything it has is in a folder of the hosts' own: no file of a Slurm that the machine may have is read or written.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from launch import DEADLINE, slowness

CPUS = 8  # of each host, as Slurm is told: more than the machine may have
GPUS = 2  # of each host, as Slurm is told: any device will do for Slurm, which only counts them

_POLL = 0.2  # seconds; `sbatch --wait` polls every 10

# Everything runs as root, in the foreground, without systemd and cgroups. What is not the default makes it quick:
# cred_expire is how long a requeued job is held (less than 5 would be 120), and MinJobAge how long a job that is over
# can be asked about.
_CONFIG = """
ClusterName=hosts
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldTimeout=10
SlurmdTimeout=20
MinJobAge=600
KillWait=3
EpilogMsgTime=1
NodeName={nodes} CPUs={cpus} CoresPerSocket={cpus} RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes={nodes} Default=YES MaxTime=01:00:00 DefaultTime=00:10:00 State=UP
"""
_GRES = "Name=gpu File=/dev/zero,/dev/full\n"
_OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")


@dataclass(frozen=True)
class Ended:
    """How a job of Slurm's ended: its state, its exit status, how often it was restarted, and what it printed."""

    state: str
    status: int
    restarts: int
    out: str


class Slurm:
    """Slurm on all of the hosts, ready for jobs; see the module. It must end before the hosts do."""

    def __init__(self, hosts):
        self.folder = hosts.folder  # shared by all nodes
        self._hosts = hosts
        self._login = hosts.names[0]
        self._folder = self.folder / "slurm"
        self._daemons = []
        self._ready = False
        self._configure()
        try:
            self._start_munge()
            self._daemon(self._login, "slurmctld", "-D", "-c", "-f", self._folder / "slurm.conf")
            self._until("the controller answers", lambda: " UP" in self.run(["scontrol", "ping"]).out)
            for name in hosts.names:
                self._daemon(name, "slurmd", "-D", "-N", name, "-f", self._folder / "slurm.conf")
            self._until("all nodes are idle", self._all_idle)
            self._ready = True
        except BaseException:
            self.close()
            raise

    def _configure(self):
        for name in ("munge", "state", *(f"spool-{name}" for name in self._hosts.names)):
            (self._folder / name).mkdir(parents=True)
        config = _CONFIG.format(
            controller=self._login,
            address=self._hosts.address(self._login),
            folder=self._folder,
            nodes=",".join(self._hosts.names),
            cpus=CPUS,
            gpus=GPUS,
        )
        (self._folder / "slurm.conf").write_text(config)
        (self._folder / "gres.conf").write_text(_GRES)

    def _start_munge(self):
        """One for all hosts: they share the file system, and with it the socket."""
        munge = self._folder / "munge"
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        options = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self._daemon(self._login, "munged", "--foreground", "--force", *options, f"--socket={munge / 'socket'}")
        self._until("munge is there", (munge / "socket").exists)

    def _daemon(self, host, *command):
        log = self._folder / f"{command[0]}-{host}.out"
        redirected = ["sh", "-c", 'log=$1; shift; exec "$@" >"$log" 2>&1', "sh", log, *command]
        self._daemons.append(self._hosts.start(host, redirected, env=self._environment()))

    def _environment(self):
        return {"SLURM_CONF": str(self._folder / "slurm.conf")}

    def _until(self, what, holds, deadline=30):
        end = time.monotonic() + deadline * slowness()
        while not holds():
            dead = [daemon for daemon in self._daemons if daemon.process.poll() is not None]
            if dead or time.monotonic() > end:
                logs = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self._logs())
                raise RuntimeError(f"Slurm: {'a daemon has ended' if dead else 'too late'}, before {what}\n{logs}")
            time.sleep(0.05)

    def _logs(self):
        return [path for pattern in ("munge/log", "*.log", "*.out") for path in sorted(self._folder.glob(pattern))]

    def _all_idle(self):
        states = self.run(["sinfo", "--noheader", "-N", "-o", "%T"]).out.split()
        return states == ["idle"] * len(self._hosts.names)

    def mpi_environment(self):
        """What MPI wants to be told in a job; how to start a process on another host, it knows from Slurm."""
        told = self._hosts.mpi_environment()
        told = {name: value for name, value in told.items() if "LAUNCHER" not in name and "rsh" not in Path(value).name}
        # Slurm's pmi2 cuts lines of more than 1024 characters, and those of MPICH with UCX grow with each device.
        return {**told, "UCX_NET_DEVICES": "eth0"}

    def run(self, command, cwd=None, env=None):
        """Run a command on node1 to its end."""
        return self._hosts.run(self._login, command, cwd, {**self._environment(), **(env or {})})

    def submit(self, script, *args, options=(), cwd=None, env=None):
        """The number of a job that is in the queue now."""
        job = self.run(["sbatch", "--parsable", *options, script, *args], cwd, env)
        assert job.status == 0, job.err
        return job.out.strip()

    def wait(self, job, deadline=DEADLINE):
        """Until a job is over; "7_1" is one of an array. At the deadline it is cancelled: an AssertionError."""
        begin, slower = time.monotonic(), 1.0
        while (ended := self._ended(job)) is None:
            slower = max(slower, slowness())
            if time.monotonic() > begin + deadline * slower:
                shown = self._show(job)
                self.run(["scancel", "--full", job])
                raise AssertionError(f"job {job} is not over after {deadline} s: {shown}\n{_output(shown)}")
            time.sleep(_POLL)
        return ended

    def output(self, job):
        """What a job has printed so far."""
        return _output(self._show(job))

    def _show(self, job):
        asked = self.run(["scontrol", "--oneliner", "show", "job", job])
        return dict(re.findall(r"(\S+?)=(\S*)", asked.out)) or {"JobState": f"UNKNOWN: {asked.err}"}

    def _ended(self, job):
        shown = self._show(job)
        if shown["JobState"] not in _OVER:
            return None
        status = int(shown["ExitCode"].split(":")[0])
        return Ended(shown["JobState"], status, int(shown["Restarts"]), _output(shown))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()

    def close(self):
        """Cancel what still runs, and stop the daemons, those that were started last first."""
        if self._ready:
            self._ready = False
            self.run(["scancel", "--user=root", "--full", "--signal=KILL"])
        while self._daemons:
            daemon = self._daemons.pop()
            daemon.process.terminate()
            daemon.wait(20)


def _output(shown):
    """A job's standard output and error, which are one file."""
    path = Path(shown.get("StdOut", ""))
    return path.read_text(errors="replace") if path.is_file() else ""
