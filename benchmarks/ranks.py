"""Time and memory of concat by some ranks of one node, with few cores. mpirun -n 8 python benchmarks/ranks.py"""

from __future__ import annotations

from functools import partial

import concat
import harness
import memory
import results
import shards
from harness import Step
from results import BASELINE, GLOO_PADDED, HPCDIST_NEW, HPCDIST_SHARED, MPI4PY_NEW

import hpcdist as hd
from hpcdist.compare.timing import check

NAMES = (BASELINE, MPI4PY_NEW, GLOO_PADDED, HPCDIST_NEW, HPCDIST_SHARED)
CONTENDERS = [contender for contender in concat.CONTENDERS if contender.name in NAMES]


def main() -> None:
    asked = harness.parser(__doc__, "8,64K,8M").parse_args()
    with hd.init(device="cpu", backend="gloo") as world:
        comm = world.comm
        record = harness.start("ranks", comm)
        case = shards.Case(comm, "concat", max(asked.sizes), "even")
        for contender in CONTENDERS:
            if contender.name != BASELINE:  # whose result has its memory already
                check(contender, case)
                extra = memory.node(comm, partial(contender.call, case))
                record.nodes.append(results.Peak(contender.name, extra, sum(case.nbytes)))
        del case
        steps = [Step(partial(shards.Case, verb="concat", size=size, skew="even"), CONTENDERS) for size in asked.sizes]
        harness.run(record, comm, steps, asked)


if __name__ == "__main__":
    main()
