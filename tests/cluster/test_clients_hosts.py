"""Two programs of docs/clients over two hosts, by srun: they end as under torchrun on one host.

In the environment `libraries`, on Debian's Open MPI.
"""

import sys

import pytest
from clients import ENV, by_torchrun, difference, ended, programs

pytestmark = pytest.mark.cluster

ROUNDING = 4 * 2**-23  # float32's, in parts of the largest value; at most 0.75 * 2**-23 was measured


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["lightning_train.py", "deepspeed_train.py"])  # which look at launchers' variables
def test_two_hosts_by_srun(name, slurm):
    """By MPI, which adds the four ranks' terms in another order than gloo."""
    ours = slurm.folder / f"srun-{name}"
    ours.mkdir()
    srun = ["srun", "--mpi=pmix", "--nodes=2", "--ntasks-per-node=2", sys.executable]
    words = ["-m", "hpcdist.run", "--mpi", programs() / name, ours]
    ended(lambda: slurm.run([*srun, *words], env={**slurm.mpi_environment(), **ENV}))
    assert difference(ours, by_torchrun(name, 4)) <= ROUNDING
