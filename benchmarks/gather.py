"""gather: gather the shards of all ranks on the root. mpirun -n 2 python benchmarks/gather.py"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peers
from harness import Contender
from results import (
    BASELINE,
    CONTROL,
    GLOO_PADDED,
    HPCDIST_NEW,
    HPCDIST_OUT,
    MPI4PY_NEW,
    MPI4PY_PICKLE,
    PLAN_OUT,
    ROUTES,
)
from shards import Case, run

import hpcdist as hd


def plan(case: Case) -> Callable[..., Any]:
    return case.plan(lambda: hd.plan(hd.gather, case.shard))


CONTENDERS = [
    Contender(BASELINE, peers.gather_mpi4py),
    Contender(CONTROL, peers.gather_mpi4py),
    Contender(HPCDIST_OUT, lambda case: hd.gather(case.shard, out=case.out)),
    Contender(HPCDIST_NEW, lambda case: hd.gather(case.shard)),
    Contender(PLAN_OUT, lambda case: plan(case)(case.shard, case.out)),
    Contender("hpcdist plan", lambda case: plan(case)(case.shard)),
    *(Contender(name, lambda case, r=r: hd.gather(case.shard, route=r)) for r, name in ROUTES.items()),
    Contender(MPI4PY_NEW, peers.gather_mpi4py_new),
    Contender(MPI4PY_PICKLE, peers.gather_mpi4py_pickle),
    Contender(GLOO_PADDED, peers.gather_gloo_padded),
    Contender("gloo, all_reduce + all_gather_into_tensor", peers.gather_gloo_into_tensor),
    Contender("gloo, sends to the root", peers.gather_gloo_sends),
    Contender("gloo, gather_object", peers.gather_gloo_object),
]

if __name__ == "__main__":
    run("gather", CONTENDERS)
