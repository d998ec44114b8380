"""Send lists of tensors to another rank, or gather them on all ranks: compared with one by one, and with pickle.

mpirun -n 2 python benchmarks/structures.py --kinds small,large,many --sizes 64M
"""

from __future__ import annotations

from functools import partial

import harness
import structures_peers as peers
from harness import Step
from results import ALL_GATHER_OBJECT, BASELINE, CONTROL, GLOO_ONE_BY_ONE, HPCDIST_NEW, ROUTES
from structures_peers import TENSORS

import hpcdist as hd
from hpcdist.compare.timing import Contender

SENDS = [
    Contender(BASELINE, peers.send_mpi4py),
    Contender(CONTROL, peers.send_mpi4py),
    Contender(HPCDIST_NEW, peers.send_hpcdist),
    Contender("mpi4py, a message a dtype, shapes known", peers.send_mpi4py_packed),
    Contender("mpi4py, one by one, new memory", peers.send_mpi4py_new),
    Contender("mpi4py, pickle", peers.send_mpi4py_pickle),
    Contender(GLOO_ONE_BY_ONE, peers.send_gloo),
    Contender("gloo, isend and irecv, one by one", peers.send_gloo_async),
    Contender("gloo, send_object_list", peers.send_gloo_object),
]
GATHERS = [
    Contender(BASELINE, peers.gather_mpi4py),
    Contender(CONTROL, peers.gather_mpi4py),
    Contender(HPCDIST_NEW, lambda case: hd.concat(case.tree)),
    Contender(ROUTES["gloo"], lambda case: hd.concat(case.tree, route="gloo")),
    Contender("mpi4py, one by one, new memory", peers.gather_mpi4py_new),
    Contender("mpi4py, pickle", peers.gather_mpi4py_pickle),
    Contender("gloo, one by one", peers.gather_gloo),
    Contender(ALL_GATHER_OBJECT, peers.gather_gloo_object),
]


def main() -> None:
    parser = harness.parser(__doc__, "64M", budget=30)
    parser.add_argument(
        "--kinds", type=harness.some_of(TENSORS), default=",".join(TENSORS), metavar="LIST", help="%(default)s"
    )
    asked = parser.parse_args()
    with hd.init(device="cpu", backend="gloo") as world:
        if world.world_size % 2:
            raise SystemExit("ranks send in pairs: start an even number of them")
        steps = []
        for kind in asked.kinds:
            if kind == "many":
                steps += [Step(partial(peers.make_case, kind=kind, size=size), GATHERS) for size in asked.sizes]
            else:
                steps.append(Step(partial(peers.make_case, kind=kind), SENDS))
        harness.run(harness.start("structures", world.comm), world.comm, steps, asked)


if __name__ == "__main__":
    main()
