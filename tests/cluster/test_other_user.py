"""What another user of a node can do to a job without root: nothing on one node, and little on several."""

import pytest
from hosts import Hosts
from launch import finished

pytestmark = pytest.mark.cluster

_ATTACK = """
    import os, re, socket, sys, threading, time
    import torch
    import torch.distributed as dist
    from mpi4py import MPI
    import hpcdist as hd
    def attack(step):
        child = os.fork()
        if not child:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            step()
            os._exit(0)
        return child
    def inodes():
        mine = {}
        for fd in os.listdir("/proc/self/fd"):
            try: mine[os.readlink(f"/proc/self/fd/{fd}")] = fd
            except OSError: pass
        return mine
    def ports(table):
        found = [line.split() for line in open(f"/proc/net/{table}").readlines()[1:]]
        return {int(w[1].split(":")[1], 16) for w in found if f"socket:[{w[9]}]" in inodes() and w[2].endswith(":0000")}
"""

ONE_NODE = (
    _ATTACK
    + """
    before = ports("tcp") | ports("udp")
    old = set(open("/proc/net/unix").read().splitlines())
    world = hd.init()
    files = world.comm.allgather((os.getpid(), sorted(os.listdir("/proc/self/fd"))))
    assert any("memfd" in name for name in inodes()) and any("pipe" in name for name in inodes())
    def look():
        opened = []
        for pid, fds in files:
            for fd in fds:
                try: opened.append(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK))
                except OSError: pass
        os.write(1, f"opened {len(opened)}\\n".encode())
    os.waitpid(attack(look), 0)
    new = [line for line in open("/proc/net/unix").read().splitlines() if line not in old]
    named = [line for line in new if "hpcdist" in line and "/hpcdist-fork-" not in line]  # a server of the tests
    ours = (ports("tcp") | ports("udp")) - before
    os.write(1, f"ports {len(ours)}, names {len(named)}\\n".encode())
    x = torch.ones(3)
    dist.all_reduce(x)
    os.write(1, f"sum {x[0]:g}\\n".encode())
"""
)

# Rank 1 is on another host. Its user's watching thread is flooded, and the job goes on.
FLOOD = (
    _ATTACK
    + """
    world = hd.init()
    def used():
        thread = next(t for t in threading.enumerate() if t.name == "hpcdist-watch")
        fields = open(f"/proc/self/task/{thread.native_id}/stat").read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    if world.rank == 1:
        (port,) = ports("udp")
        def flood():
            end, sent, attacker = time.monotonic() + 3, 0, socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            while time.monotonic() < end:
                attacker.sendto(bytes(1000), ("10.77.0.2", port))
                sent += 1
            os.write(1, f"sent {sent}\\n".encode())
        begin = used()
        os.waitpid(attack(flood), 0)
        os.write(1, f"used {used() - begin:.2f}\\n".encode())
    x = torch.ones(3)
    dist.all_reduce(x)
    os.write(1, f"sum {x[0]:g}\\n".encode())
"""
)


def test_on_one_node_nothing_is_open_to_another_user():
    job = finished(2, code=ONE_NODE)
    assert job.out.count("opened 0\n") == job.out.count("ports 0, names 0\n") == job.out.count("sum 2\n") == 2, job.out


def test_a_flood_of_datagrams_takes_no_core():
    with Hosts(2) as hosts:
        job = hosts.mpirun([1, 1], code=FLOOD)
    assert job.status == 0, job.err
    assert job.out.count("sum 2\n") == 2
    words = job.out.split()
    assert int(words[words.index("sent") + 1]) > 10_000, job.out
    assert float(words[words.index("used") + 1]) < 0.15, job.out  # of 3 s: 0.03 to 0.04 when it was measured
