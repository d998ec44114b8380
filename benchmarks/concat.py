"""concat: concatenate the shards of all ranks on every rank. mpirun -n 2 python benchmarks/concat.py"""

from __future__ import annotations

import peers
import shards
from results import GLOO_BY_ROOT, GLOO_OBJECT, HPCDIST_SHARED

from hpcdist.compare import byhand
from hpcdist.compare.timing import Contender

CONTENDERS = [
    *shards.CONTENDERS,
    Contender(HPCDIST_SHARED, lambda case: byhand.ours(case, shared=True)),
    Contender("gloo, all_reduce + all_gather_into_tensor", peers.concat_into_tensor),
    Contender(GLOO_BY_ROOT, peers.concat_by_root),
    Contender(GLOO_OBJECT, byhand.objects),
]

if __name__ == "__main__":
    shards.run("concat", CONTENDERS, with_peaks=True)
