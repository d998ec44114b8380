"""split: scatter the parts of a tensor of the root. mpirun -n 2 python benchmarks/split.py"""

from __future__ import annotations

import peers
import shards

from hpcdist.compare import byhand
from hpcdist.compare.timing import Contender

CONTENDERS = [
    *shards.CONTENDERS,
    Contender("gloo, broadcast the whole, keep a part", peers.split_broadcast),
    Contender("gloo, sends from the root", peers.split_sends),
    Contender("gloo, scatter_object_list", byhand.objects),
]

if __name__ == "__main__":
    shards.run("split", CONTENDERS)
