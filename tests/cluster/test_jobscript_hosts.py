"""A job script for PBS starts its ranks on the hosts that PBS_NODEFILE names, by the real mpirun of two MPIs."""

import os
import sys
from pathlib import Path

import pytest

from hpcdist.tools.jobscript import Shape, write

pytestmark = pytest.mark.cluster

MPICH = Path(__file__).resolve().parents[2] / ".venv" / "mpich"
ENVIRONMENTS = [Path(sys.executable).parents[1], *([MPICH] if MPICH.exists() else [])]

WHO = """
import os
from mpi4py import MPI
lines = MPI.COMM_WORLD.gather(f"{MPI.COMM_WORLD.rank} {os.uname().nodename}")
if lines:
    print("\\n".join(lines), flush=True)
"""


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=[folder.name for folder in ENVIRONMENTS])
def test_a_pbs_script_on_two_hosts(environment, hosts):
    """As PBS starts it: in the home folder, on the first of the hosts."""
    (hosts.folder / "who.py").write_text(WHO)
    (hosts.folder / "nodes").write_text("".join(f"{name}\n" * 2 for name in hosts.names[:2]))
    shape = Shape(
        scheduler="pbs", ntasks_per_node=2, gpus_per_node="2", venv=str(environment), command=("python", "who.py")
    )
    (hosts.folder / "job.pbs").write_text(write(shape))
    given = {"PBS_JOBID": "7.pbs", "PBS_NODEFILE": str(hosts.folder / "nodes"), "PBS_O_WORKDIR": str(hosts.folder)}
    env = {**hosts.mpi_environment(), **given}
    job = hosts.run(hosts.names[0], ["bash", hosts.folder / "job.pbs"], Path(os.sep), env)
    assert job.status == 0, job.err
    assert "cpu: job 7.pbs on 2 nodes: node1,node2\nranks: 4, 2 on each node, 8 CPUs each\n" in job.out
    assert job.out.endswith("\n0 node1\n1 node1\n2 node2\n3 node2\n")
    assert job.err.count("is not bound to the cores beside GPU") == 4  # there is none here
