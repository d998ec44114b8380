"""split: scatter the parts of a tensor of the root. mpirun -n 2 python benchmarks/split.py"""

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
from torch import Tensor

import hpcdist as hd


def split(case: Case, route: str = "auto", out: Tensor | None = None) -> Tensor:
    """Call hpcdist as a user would: only the root passes counts."""
    counts = None if case.whole is None else case.counts
    part: Tensor = hd.split(case.whole, counts=counts, route=route, out=out)
    return part


def plan(case: Case) -> Callable[..., Any]:
    counts = None if case.whole is None else case.counts
    return case.plan(lambda: hd.plan(hd.split, case.whole, counts=counts))


CONTENDERS = [
    Contender(BASELINE, peers.split_mpi4py),
    Contender(CONTROL, peers.split_mpi4py),
    Contender(HPCDIST_OUT, lambda case: split(case, out=case.out)),
    Contender(HPCDIST_NEW, lambda case: split(case)),
    Contender(PLAN_OUT, lambda case: plan(case)(case.whole, case.out)),
    Contender("hpcdist plan", lambda case: plan(case)(case.whole)),
    *(Contender(name, lambda case, r=r: split(case, r)) for r, name in ROUTES.items()),
    Contender(MPI4PY_NEW, peers.split_mpi4py_new),
    Contender(MPI4PY_PICKLE, peers.split_mpi4py_pickle),
    Contender(GLOO_PADDED, peers.split_gloo_padded),
    Contender("gloo, broadcast the whole, keep a part", peers.split_gloo_broadcast),
    Contender("gloo, sends from the root", peers.split_gloo_sends),
    Contender("gloo, scatter_object_list", peers.split_gloo_object),
]

if __name__ == "__main__":
    run("split", CONTENDERS)
