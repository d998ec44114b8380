"""redistribute: change the layout of a tensor; compared with hand-written Alltoallv and Alltoallw, DTensor and Heat.

mpirun -n 4 python benchmarks/redistribute.py --kinds columns,tiles
"""

from __future__ import annotations

from functools import partial
from itertools import product

import harness
import redistribute_peers as peers
from harness import Step
from results import (
    ALLTOALLV_OWN,
    ALLTOALLW,
    ALLTOALLW_COPY,
    BASELINE,
    CONTROL,
    DTENSOR,
    HPCDIST_NEW,
    HPCDIST_OUT,
    KINDS,
    MESSAGES,
    PLAN_OUT,
    ROUTES,
)

import hpcdist as hd
from hpcdist.compare.timing import Contender

CONTENDERS = [
    Contender(BASELINE, peers.by_hand),
    Contender(CONTROL, peers.by_hand),
    Contender(ALLTOALLV_OWN, peers.by_hand_own),
    Contender(ALLTOALLW, peers.alltoallw),
    Contender(ALLTOALLW_COPY, peers.alltoallw_copy),
    Contender(MESSAGES, peers.messages),
    Contender(PLAN_OUT, lambda case: peers.plan(case)(case.shard, out=case.out)),
    Contender("hpcdist plan", lambda case: peers.plan(case)(case.shard)),
    Contender(HPCDIST_OUT, lambda case: hd.redistribute(case.shard, *case.layouts, out=case.out)),
    Contender(HPCDIST_NEW, lambda case: hd.redistribute(case.shard, *case.layouts)),
    *(
        Contender(name, lambda case, r=r: hd.redistribute(case.shard, *case.layouts, route=r))
        for r, name in ROUTES.items()
    ),
    Contender("Alltoallv, new memory", peers.by_hand_new),
    Contender("Alltoallw, new memory", peers.alltoallw_new),
    Contender(DTENSOR, peers.dtensor, peers.no_dtensor),
    Contender("Heat, resplit", peers.heat, peers.no_heat),
]


def main() -> None:
    parser = harness.parser(__doc__, "64K,16M,64M", seconds=240)
    parser.add_argument(
        "--kinds", type=harness.some_of(KINDS), default=",".join(KINDS), metavar="LIST", help="%(default)s"
    )
    asked = parser.parse_args()
    with hd.init(device="cpu", backend="gloo") as world:
        few = world.world_size < 4 or world.world_size % 2  # on 2 ranks, tiles are columns
        steps = [
            Step(partial(peers.make_case, size=size, kind=kind), CONTENDERS)
            for kind, size in product(asked.kinds, asked.sizes)
            if not (kind == "tiles" and few)
        ]
        harness.run(harness.start("redistribute", world.comm), world.comm, steps, asked)


if __name__ == "__main__":
    main()
