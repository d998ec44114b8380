"""concat: concatenate the shards of all ranks on every rank. mpirun -n 2 python benchmarks/concat.py"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peers
from harness import Contender
from results import BASELINE, CONTROL, GLOO_PADDED, HPCDIST_NEW, HPCDIST_OUT, PLAN_OUT
from shards import Case, run

import hpcdist as hd


def plan(case: Case) -> Callable[..., Any]:
    return case.plan(lambda: hd.plan_concat(case.shard, route="mpi"))


CONTENDERS = [
    Contender(BASELINE, peers.concat_mpi4py),
    Contender(CONTROL, peers.concat_mpi4py),
    Contender(HPCDIST_OUT, lambda case: hd.concat(case.shard, route="mpi", out=case.out)),
    Contender(HPCDIST_NEW, lambda case: hd.concat(case.shard, route="mpi")),
    Contender(PLAN_OUT, lambda case: plan(case)(case.shard, case.out)),
    Contender("hpcdist plan", lambda case: plan(case)(case.shard)),
    Contender("hpcdist gloo, out=", lambda case: hd.concat(case.shard, route="gloo", out=case.out)),
    Contender("mpi4py, counts exchanged, new memory", peers.concat_mpi4py_new),
    Contender("mpi4py, pickle", peers.concat_mpi4py_pickle),
    Contender(GLOO_PADDED, peers.concat_gloo_padded),
    Contender("gloo, all_reduce + all_gather_into_tensor", peers.concat_gloo_into_tensor),
    Contender("gloo, sends to the root, broadcast", peers.concat_gloo_by_root),
    Contender("gloo, all_gather_object", peers.concat_gloo_object),
]

if __name__ == "__main__":
    run("concat", CONTENDERS, with_peaks=True)
