"""gather: gather the shards of all ranks on the root. mpirun -n 2 python benchmarks/gather.py"""

from __future__ import annotations

import peers
import shards

from hpcdist.compare import byhand
from hpcdist.compare.timing import Contender

CONTENDERS = [
    *shards.CONTENDERS,
    Contender("gloo, all_reduce + all_gather_into_tensor", peers.gather_into_tensor),
    Contender("gloo, sends to the root", peers.gather_sends),
    Contender("gloo, gather_object", byhand.objects),
]

if __name__ == "__main__":
    shards.run("gather", CONTENDERS)
