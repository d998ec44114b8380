"""stage_env over several hosts: what goes over the wires, what each has afterwards, and jobs that are killed."""

import os
import subprocess
import sys

import pytest
from launch import Job

pytestmark = pytest.mark.cluster

COMMAND = ("-m", "hpcdist", "stage-env")
MIB = 2**20
SIZE = 40 * MIB
STORE = f"/tmp/hpcdist-{os.getuid()}/stage_env"


@pytest.fixture
def venv(hosts):
    """A venv with a script and some MiB of data, in a folder that all hosts share."""
    made = hosts.folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    (made / "data").write_bytes(os.urandom(SIZE))
    script = made / "bin" / "tool"
    script.write_text(f"#!{made}/bin/python\nimport sys; print(sys.prefix)\n")
    script.chmod(0o755)
    return made


def _staged(hosts, ranks, *words):
    job = hosts.mpirun(ranks, *COMMAND, "venv", *words, python=sys.executable)
    assert job.status == 0, job.err
    return job


def _received(hosts, before=None):
    return {name: each.received - (before or {}).get(name, 0) for name, each in hosts.bytes().items()}


def test_each_host_is_sent_the_environment_once_and_runs_from_it(hosts, venv):
    """Several ranks a host, too. A host that has lost it gets it again; the others keep theirs."""
    before = _received(hosts)
    path = _staged(hosts, [2, 2, 1]).out.strip()
    got = _received(hosts, before)
    assert got["node1"] < SIZE / 10
    assert all(SIZE < got[name] < 1.6 * SIZE for name in ("node2", "node3")), got
    assert path.startswith(STORE) and path.endswith("/venv")
    for name in hosts.names:
        assert hosts.run(name, [f"{path}/bin/tool"]).out == f"{path}\n"
    assert hosts.run("node3", ["rm", f"{path}/bin/tool"]).status == 0
    again = _staged(hosts, [1, 1, 1])
    assert "copied to 1 node" in again.err and "2 nodes had it" in again.err
    assert hosts.run("node3", [f"{path}/bin/tool"]).out == f"{path}\n"
    for name in hosts.names:
        cleaned = hosts.run(name, [sys.executable, *COMMAND, "--cleanup", path])
        assert cleaned == Job(0, "", ""), cleaned
        assert hosts.run(name, ["ls", "-A", STORE]).out == ""
