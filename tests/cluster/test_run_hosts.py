"""``python -m hpcdist.run`` under srun, over two nodes."""

import json
import tempfile
from pathlib import Path

import pytest
from launch import python

pytestmark = pytest.mark.cluster

PROGRAM = """
import json, os
import torch, torch.distributed as dist
env = os.environ
store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)  # it listens before the program
store.set(env["RANK"], env["LOCAL_RANK"])
for backend in ("gloo", None):
    dist.init_process_group(backend)
    dist.all_reduce(x := torch.tensor([10.0 ** dist.get_rank()]))
    dist.destroy_process_group()
places = [int(env[name]) for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
others = [store.get(str(rank)).decode() for rank in range(4)]
os.write(1, (json.dumps([places, int(x), others, env["MASTER_ADDR"].startswith("127.")]) + "\\n").encode())
"""


def test_two_nodes_with_two_ranks_each(slurm):
    folder = Path(tempfile.mkdtemp(dir=slurm.folder))
    (folder / "program.py").write_text(PROGRAM)
    command = ["srun", "-N2", "--ntasks-per-node=2", "--mpi=pmix", *python(), "-m", "hpcdist.run"]
    job = slurm.run([*command, "program.py"], cwd=folder, env=slurm.mpi_environment())
    assert job.status == 0, job.err
    found = sorted(json.loads(line) for line in job.out.splitlines())
    assert found == [[[r, r // 2, r % 2, 4, 2], 1111, ["0", "1", "0", "1"], False] for r in range(4)]
