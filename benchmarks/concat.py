"""concat: concatenate the shards of all ranks on every rank. mpirun -n 2 python benchmarks/concat.py"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peers
from harness import Contender
from results import (
    BASELINE,
    CONTROL,
    GLOO_BY_ROOT,
    GLOO_OBJECT,
    GLOO_PADDED,
    HPCDIST_NEW,
    HPCDIST_OUT,
    HPCDIST_SHARED,
    MPI4PY_NEW,
    MPI4PY_PICKLE,
    PLAN_OUT,
    ROUTES,
)
from shards import Case, run

import hpcdist as hd


def plan(case: Case) -> Callable[..., Any]:
    return case.plan(lambda: hd.plan(hd.concat, case.shard))


CONTENDERS = [
    Contender(BASELINE, peers.concat_mpi4py),
    Contender(CONTROL, peers.concat_mpi4py),
    Contender(HPCDIST_OUT, lambda case: hd.concat(case.shard, out=case.out)),
    Contender(HPCDIST_NEW, lambda case: hd.concat(case.shard)),
    Contender(HPCDIST_SHARED, lambda case: hd.concat(case.shard, shared=True)),
    Contender(PLAN_OUT, lambda case: plan(case)(case.shard, case.out)),
    Contender("hpcdist plan", lambda case: plan(case)(case.shard)),
    *(Contender(name, lambda case, r=r: hd.concat(case.shard, route=r)) for r, name in ROUTES.items()),
    Contender(MPI4PY_NEW, peers.concat_mpi4py_new),
    Contender(MPI4PY_PICKLE, peers.concat_mpi4py_pickle),
    Contender(GLOO_PADDED, peers.concat_gloo_padded),
    Contender("gloo, all_reduce + all_gather_into_tensor", peers.concat_gloo_into_tensor),
    Contender(GLOO_BY_ROOT, peers.concat_gloo_by_root),
    Contender(GLOO_OBJECT, peers.concat_gloo_object),
]

if __name__ == "__main__":
    run("concat", CONTENDERS, with_peaks=True)
