"""Several hosts on one machine: Linux namespaces with names, addresses and folders of their own, joined by a switch.

Needs root, and the packages util-linux and iproute2::

    with Hosts(3) as hosts:                             # node1, node2, node3; 10.77.0.1 to .3 on eth0
        job = hosts.mpirun([2, 2], "program.py")        # ranks 0, 1 on node1, 2, 3 on node2, by this Python's MPI
        assert job.status == 0, job.err
        job = hosts.run("node1", ["sinfo"])  # one command on one host
        server = hosts.start("node2", ["sleep", "60"])  # goes on; server.wait(deadline) gives its Job
        hosts.rate("1gbit")                             # of every wire, both ways; None: as fast as memory
        before = hosts.bytes()["node1"].received        # by its wire
        hosts.unplug("node2")                           # its wire

A host has its own network, host name, /etc/hosts (``hosts.hosts_file(name)``), IPC, /tmp and /dev/shm; all else, and
the process numbers, are the machine's; so is this checkout, in /tmp or not. ``hosts.folder``, in /var/tmp, is shared by
all hosts, and the current folder of what runs there. What runs on a host can become a daemon: it ends with the host.
The hosts end with :meth:`Hosts.close`, and also when the Python that made them dies in any way. Any number of sets can
exist at once: each has a switch of its own, and nothing is added to the machine's own network.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from launch import DEADLINE, Job, communicate, launcher, python as forked, start
from settings import ROOT_AND_MORE

TESTS = Path(__file__).resolve().parent.parent
NETWORK = "10.77.0.0/24"
_MARK = "HOSTS_JOB"

# The first process on a host. It lives as long as its standard input, a pipe from us: when we close it, or die, every
# other process on the host is killed, and with the last one the kernel removes the host's namespaces and mounts.
_HOLD = """
echo ready
read -r _
while others=$(find -L /proc/[0-9]*/ns/net -maxdepth 0 -samefile /proc/$$/ns/net 2>/dev/null |
    cut -d/ -f3 | grep -vx $$); [ "$others" ]; do
    alive=
    for pid in $others; do kill -9 $pid 2>/dev/null && alive=yes; done
    [ "$alive" ] || break  # only find, cut and grep were there
done
"""

_HOST = """
set -e
hostname {name}
mount --bind {folder}/{name}/hosts /etc/hosts
mount --bind {checkout} /mnt
mount -o remount,bind,ro /mnt  # nothing on a host is to write there
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp
[ -e {checkout} ] || {{ mkdir -p {checkout} && mount --move /mnt {checkout}; }}
[ ! -e /mnt/setup.cfg ] || umount /mnt
ip link set lo up
set +e
"""

_USELESS = """link add docker0 type bridge
addr add 172.17.0.1/16 dev docker0
link set docker0 up
link add ib0 type veth peer name nowhere
addr add 192.168.99.{number}/24 dev ib0
link set ib0 up
link set nowhere up
link add eth1 type veth peer name nothing
addr add 10.99.0.{number}/24 dev eth1"""

# What mpirun calls in place of ssh.
_RSH = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec nsenter -t "$(cat {folder}/$host/pid)" -n -u -m -i -- /bin/sh -c "$*"
"""


class Traffic(NamedTuple):
    """What a host has received and sent by its wire, headers included."""

    received: int
    sent: int


@dataclass
class Started:
    """A command that runs on a host, and all that it has started, on any of the hosts."""

    process: subprocess.Popen[str]
    mark: str  # is in the environment of all that it starts, as _MARK

    def wait(self, deadline=DEADLINE):
        """How it ended; an AssertionError if it has not within `deadline` seconds, or more on a busy machine, after it
        was ended by force."""
        try:
            out, err = communicate(self.process, deadline)
        except subprocess.TimeoutExpired as late:
            self.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"the job did not end within {deadline} s\n{out}\n{err}") from late
        return Job(self.process.returncode, out, err)

    def pids(self):
        """What is left of it on all hosts: none, if it has ended well."""
        mark = f"{_MARK}={self.mark}".encode()
        return [pid for pid in _processes() if mark in _read(pid, "environ").split(b"\0")]

    def kill(self):
        """End it, and all that it has started."""
        while pids := self.pids():
            _kill(pids)
            self.process.poll()
            time.sleep(0.02)


class Hosts:
    """`count` hosts; see the module. `useless` gives each of them the interfaces that mislead a bootstrap.

    Useless are: ``docker0``, with the same address on every host; ``ib0``, up, in a network that leads nowhere, and the
    one that the host's own name stands for, on that host; ``eth1``, down.
    """

    def __init__(self, count, useless=False):
        self.names = [f"node{number}" for number in range(1, count + 1)]
        self.folder = Path(tempfile.mkdtemp(prefix=f"hosts-{os.getpid()}-", dir="/var/tmp"))  # /tmp is a host's own
        self._useless = useless
        self._started = 0
        self._holders = {}
        try:
            self._rsh = self.folder / "rsh"
            self._rsh.write_text(_RSH.format(folder=self.folder))
            self._rsh.chmod(0o700)
            # If we are killed, nobody removes the folder but the switch.
            self._switch = self._hold("", f"{_HOLD}\nsleep 1\nrm -rf {self.folder}", "--net")
            self._ip(self._switch, "link add br0 type bridge stp_state 0 forward_delay 0")
            self._ip(self._switch, "link set br0 up")
            for name in self.names:
                self.boot(name)
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()

    def close(self):
        """End all that runs on the hosts, and remove them, and the shared folder."""
        for name in list(self._holders):
            self.off(name)
        if hasattr(self, "_switch"):
            self._switch.kill()
            self._switch.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)

    def address(self, name):
        """By which the others reach it."""
        return NETWORK.replace("0/24", str(self.names.index(name) + 1))

    def hosts_file(self, name):
        """Its /etc/hosts: write into it, do not replace it."""
        return self.folder / name / "hosts"

    def start(self, host, command, cwd=None, env=None):
        """Start a command on a host; `env` is added to our environment."""
        self._started += 1
        mark = f"{self.folder.name}.{self._started}"
        words = ["sh", "-c", 'cd "$0" && exec "$@"', str(cwd or self.folder), *map(str, command)]
        return Started(start([*self._inside(host), *words], env={**(env or {}), _MARK: mark}), mark)

    def run(self, *what, **how):
        """As :meth:`start`, to its end; an AssertionError, after it was ended, if it takes too long."""
        return self.start(*what, **how).wait()

    def mpirun(self, *what, **how):
        """As :meth:`start_mpirun`, to its end."""
        return self.start_mpirun(*what, **how).wait()

    def start_mpirun(self, ranks, *args, code="", cwd=None, env=None, python=None):
        """Start ``python *args`` (or ``python -c code``) by mpirun on node1, with ``ranks[i]`` ranks on host i.

        It is this Python's MPI, whichever `python` runs.
        """
        machines = {}
        for form in (" slots=", ":"):  # of Open MPI, and of MPICH
            machines[form] = self.folder / f"machines{form.strip()}{self._started}"
            placed = zip(self.names, ranks, strict=False)
            machines[form].write_text("".join(f"{name}{form}{count}\n" for name, count in placed))
        files = {
            "OMPI_MCA_orte_default_hostfile": str(machines[" slots="]),
            "PRTE_MCA_prte_default_hostfile": str(machines[" slots="]),
            "HYDRA_HOST_FILE": str(machines[":"]),
        }
        args = ("-c", textwrap.dedent(code)) if code else args
        command = [*launcher(sum(ranks)), *([python] if python else forked()), *args]
        return self.start(self.names[0], command, cwd, {**self.mpi_environment(), **files, **(env or {})})

    def mpi_environment(self):
        """What mpirun of Open MPI 4 and 5 and of MPICH want to be told: how to start a process on another host, by
        which network to talk, and that there are fewer cores than ranks, and root."""
        rsh = str(self._rsh)
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS / "helpers"), os.environ.get("PYTHONPATH")])),
            **ROOT_AND_MORE,
            "OMPI_MCA_plm_rsh_agent": rsh,
            "OMPI_MCA_btl_tcp_if_include": NETWORK,
            "OMPI_MCA_oob_tcp_if_include": NETWORK,
            "OMPI_MCA_btl_tcp_flags": "1",  # sends only: with its puts the two directions of a wire take turns
            "PRTE_MCA_plm_ssh_agent": rsh,
            "PRTE_MCA_prte_if_include": NETWORK,
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": rsh,
            "HYDRA_IFACE": "eth0",
            "FI_TCP_IFACE": "eth0",
            "UCX_NET_DEVICES": "eth0",
        }

    def bytes(self):
        """What each host's wire has carried since it was booted."""
        found = {}
        for name, holder in self._holders.items():
            lines = _read(holder.pid, "net/dev").decode().splitlines()
            values = next(line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
            found[name] = Traffic(int(values[0]), int(values[8]))
        return found

    def rate(self, rate):
        """Limit every wire, in each direction, as tc says it: "100mbit", "1gbit"; None ends it."""
        for name, holder in self._holders.items():
            for process, device in ((holder, "eth0"), (self._switch, name)):
                tc = [*_enter(process, "-n"), "tc", "qdisc"]
                subprocess.run([*tc, "del", "dev", device, "root"], stderr=subprocess.DEVNULL, check=False)
                if rate is not None:
                    bucket = ["tbf", "rate", rate, "burst", "128kb", "latency", "20ms"]
                    subprocess.run([*tc, "add", "dev", device, "root", *bucket], check=True)

    def unplug(self, name):
        """Nothing comes to or from it."""
        self._ip(self._switch, f"link set {name} down")

    def boot(self, name):
        """It comes up: its wire, addresses, empty /tmp and /dev/shm."""
        (self.folder / name).mkdir(exist_ok=True)
        self.hosts_file(name).write_text(self._names(name))
        namespaces = ("--net", "--uts", "--mount", "--ipc", "--propagation", "private")
        script = _HOST.format(name=name, folder=self.folder, checkout=shlex.quote(str(TESTS.parent))) + _HOLD
        holder = self._holders[name] = self._hold(name, script, *namespaces)
        if self._useless:  # first, so that they are found first
            for command in _USELESS.format(number=self.names.index(name) + 1).splitlines():
                self._ip(holder, command)
        self._ip(self._switch, f"link add {name} type veth peer name eth0 netns {holder.pid}")
        self._ip(self._switch, f"link set {name} master br0 up")
        self._ip(holder, f"addr add {self.address(name)}/24 dev eth0")
        self._ip(holder, "link set eth0 up")
        (self.folder / name / "pid").write_text(str(holder.pid))

    def _names(self, name):
        addresses = {other: self.address(other) for other in self.names}
        if self._useless:
            addresses[name] = f"192.168.99.{self.names.index(name) + 1}"
        return "\n".join(["127.0.0.1 localhost", *(f"{address} {other}" for other, address in addresses.items()), ""])

    def _hold(self, name, script, *namespaces):
        """The process that holds a host, or the switch; it is set up when this returns."""
        holder = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", script],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if holder.stdout.readline() != "ready\n":
            holder.kill()
            holder.communicate()
            raise RuntimeError(f"{name or 'the switch'} cannot be set up: is this root, with iproute2 and util-linux?")
        return holder

    def off(self, name):
        """It loses power: all its processes are killed."""
        holder = self._holders.pop(name)
        holder.stdin.close()
        holder.wait(120)  # it ends what is left, by looking at each process of a busy machine
        holder.stdout.close()

    def _inside(self, host):
        return _enter(self._holders[host], "-n", "-u", "-m", "-i")

    def _ip(self, where, command):
        subprocess.run([*_enter(where, "-n"), "ip", *command.split()], check=True)


def _enter(holder, *namespaces):
    return ["nsenter", "-t", str(holder.pid), *namespaces, "--"]


def _processes():
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _read(pid, what):
    """A file of a process; nothing, if it is gone."""
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


def _kill(pids):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
