"""Hangs over several hosts: the ranks ask each other by UDP, and look at those of their node that do not answer."""

import os
import re
import signal
import time

import pytest
from hosts import TESTS, Hosts
from launch import limit, slowness
from test_security import SOCKETS

pytestmark = pytest.mark.cluster
PROGRAM = TESTS / "watch" / "hanging.py"
UNKNOWN = r".*; its calls are unknown \[HD601\]"
ENDS = 12  # seconds of a quiet machine after which a launcher that waits for a lost host is ended


def hang(hosts, ranks, reasons, seconds=1.5):
    return hosts.start_mpirun(ranks, PROGRAM, reasons, "concat", env={"LIMIT": limit(seconds)["HPCDIST_TIMEOUT"]})


SAID = {
    "sleep": r"has not reached this call: it is in Python, at .*hanging.py:\d+ in sleep",
    "stop": r"is stopped, by a signal or a debugger",
    "stop alone": rf"does not answer: it is stopped, in native code {UNKNOWN}",
}


@pytest.mark.parametrize(
    ("ranks", "reasons"), [([2, 2], {2: "stop", 3: "sleep"}), ([1, 1], {1: "stop alone"})], ids=["asked", "alone"]
)
def test_the_reason_is_told_across_hosts(ranks, reasons):
    """Of a rank that is killed: see tests/faults.py."""
    told = ",".join(f"{rank}:{reason.split()[0]}" for rank, reason in reasons.items())
    with Hosts(2, useless=True) as hosts:
        job = hang(hosts, ranks, told).wait()
    assert job.status != 0
    for rank, reason in reasons.items():
        assert re.search(rf"rank {rank} \(node2, pid \d+\) {SAID[reason]}", job.err), job.err
    for other in set(range(sum(ranks))) - set(reasons):
        assert re.search(rf"{other} +node\d +\d+ +concat\(\) at .* ago +concat\(\) at .* s +waits", job.err), job.err


def test_a_network_that_misleads_open_mpi_is_named():
    """Both ranks call init(). docker0 has the same address on all hosts."""
    with Hosts(2, useless=True) as hosts:
        misleads = {"OMPI_MCA_btl_tcp_if_include": "172.17.0.0/16"}
        job = hosts.mpirun([1, 1], code="import hpcdist as hd; hd.init(timeout=5)", env=misleads)
    assert job.status != 0
    assert re.search(r"the 2 ranks have not met, .*export OMPI_MCA_btl_tcp_if_include=.* \[HD601\]", job.err), job.err


def test_a_host_that_is_cut_off_is_told():
    with Hosts(2) as hosts:
        started = hang(hosts, [1, 1], "1:sleep", 4)
        _wait_for(started, 2)
        hosts.unplug("node2")
        found = _error(started)
    assert re.search(
        rf"rank 1 \(node2, pid \d+\) does not answer: .* or its node is down or cut off{UNKNOWN}", found
    ), found
    assert re.search(r"1 +node2 +\d+ +unknown +unknown +does not answer", found), found


def test_a_signal_prints_the_table_of_all_hosts():
    with Hosts(2) as hosts:
        started = hang(hosts, [1, 2], "1:sleep", 60)
        pids = _wait_for(started, 3)
        os.kill(pids[2], signal.SIGUSR2)
        time.sleep(4 * slowness())
        started.process.terminate()
        found = _error(started)
    for rank, node in enumerate((1, 2, 2)):
        assert re.search(rf"^{rank} +node{node} +{pids[rank]} +concat\(\) at ", found, re.MULTILINE), found


def test_sockets_are_in_the_network_of_the_job_alone():
    with Hosts(2, useless=True) as hosts:
        job = hosts.mpirun([1, 1], code=SOCKETS)
    assert job.status == 0, job.err
    assert job.out.count("done") == 2
    opened = [bytes.fromhex(address) for address in re.findall(r"OPEN \w+ (\w{8}):", job.out)]
    assert opened
    assert {".".join(map(str, reversed(address))) for address in opened} <= {"10.77.0.1", "10.77.0.2"}, job.out


def _wait_for(started, ranks):
    """The processes of the ranks, once they have started to wait."""
    found = {}
    while len(found) < ranks:
        line = started.process.stdout.readline()
        assert line, "the job has ended"
        found |= {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d) is (\d+)", line)}
    time.sleep(1.5 * slowness())
    return [found[rank] for rank in range(ranks)]


def _error(started):
    """What the job says; a launcher that waits for a host which is gone is ended."""
    end = time.monotonic() + ENDS * slowness()
    while started.process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    started.kill()
    job = started.wait(5)
    return job.err + job.out
