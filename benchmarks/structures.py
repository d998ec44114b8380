"""Send lists of tensors to another rank, or gather them on all ranks: compared with one by one, and with pickle.
Reduce dicts of numbers: compared with an Allreduce of the same numbers in an array, and with pickle.

mpirun -n 2 python benchmarks/structures.py --kinds small,large,many,metrics --sizes 64M

By hand, receivers know the number of tensors in advance, and, except with pickle, their shapes and dtypes.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import harness
import numpy as np
import torch
import torch.distributed as dist
from harness import Step
from mpi4py import MPI
from results import BASELINE, CONTROL, GLOO_OBJECT, HPCDIST_NEW, MPI4PY_PICKLE, ROUTES
from torch import Tensor

import hpcdist as hd
from hpcdist.tools.timing import Contender

# torch 2.13 has a new name for it; existing code uses this one.
warnings.filterwarnings("ignore", ".*all_gather_into_tensor.* is deprecated", FutureWarning)
TENSORS = {"small": 1000, "large": 10, "many": 16, "metrics": 1000}  # per list; numbers of a dict
LARGE = 2**23  # bytes of each large tensor
MPI_TYPES = {torch.float32: MPI.FLOAT, torch.int64: MPI.INT64_T}
EXACT = 2**24  # up to here float32 holds every integer


@dataclass(frozen=True)
class Case(harness.Data):
    """Lists of alternating float32 and int64 tensors; values encode rank, tensor and index, modulo EXACT.

    Attributes:
        size: bytes of a rank's list.
        skew, what: key of TENSORS, and "send" (each even rank to the next one) or "gather" (all to all).
        shapes, dtypes: shapes and dtypes in a list.
        tree: list of this rank; empty if it sends nothing.
        expected: list that this rank must get, or None.
        out: preallocated memory for it; the baseline of gather allocates its own.
    """

    size: int
    skew: str
    what: str
    comm: MPI.Intracomm
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    tree: list[Tensor]
    expected: list[Tensor] | None
    out: list[Tensor]

    @property
    def nbytes(self) -> list[int]:
        return [self.size if self.what == "gather" or rank % 2 == 0 else 0 for rank in range(self.comm.size)]

    @property
    def sends(self) -> bool:
        return self.comm.rank % 2 == 0

    @property
    def peer(self) -> int:
        return self.comm.rank ^ 1

    def empty(self) -> list[Tensor]:
        """Allocate memory for a list."""
        return [torch.empty(shape, dtype=dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]

    def reset(self) -> None:
        for x in self.out:
            x.fill_(-1)

    def correct(self, result: list[Tensor] | None) -> bool:
        if result is None or self.expected is None:
            return result is None and self.expected is None
        return equal(result, self.expected)

    def intact(self) -> bool:
        made = make_tree(self.comm.rank, self.shapes, self.dtypes) if self.tree else []
        return equal(self.tree, made)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether two lists have the same tensors, including dtypes."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def make_tree(rank: int, shapes: Iterable[tuple[int, ...]], dtypes: Iterable[torch.dtype]) -> list[Tensor]:
    """Make the list of a rank."""
    found = []
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        first = 1000 * i + 7 * rank
        found.append((torch.arange(first, first + prod(shape)) % EXACT).to(dtype).view(shape))
    return found


def make_case(comm: MPI.Intracomm, kind: str, size: int = 0) -> Case:
    """Make the lists of one kind on this rank; for "many", of `size` bytes."""
    number = TENSORS[kind]
    dtypes = [(torch.float32, torch.int64)[i % 2] for i in range(number)]
    if kind == "small":
        lengths = [random.Random(i).randint(1, 64) for i in range(number)]
    elif kind == "large":
        lengths = [LARGE // dtype.itemsize for dtype in dtypes]
    else:
        lengths = [size // number // dtype.itemsize for dtype in dtypes]
    shapes = [(n // 4, 4) if n % 4 == 0 else (n,) for n in lengths]
    nbytes = sum(n * dtype.itemsize for n, dtype in zip(lengths, dtypes, strict=True))
    me, what = comm.rank, "gather" if kind == "many" else "send"
    if what == "gather":
        tree = make_tree(me, shapes, dtypes)
        expected: list[Tensor] | None = [x for rank in range(comm.size) for x in make_tree(rank, shapes, dtypes)]
    else:
        tree = [] if me % 2 else make_tree(me, shapes, dtypes)
        expected = make_tree(me - 1, shapes, dtypes) if me % 2 else None
    out = [] if what == "gather" or expected is None else [torch.full_like(x, -1) for x in expected]
    return Case(nbytes, kind, what, comm, shapes, dtypes, tree, expected, out)


@dataclass(frozen=True)
class Metrics(harness.Data):
    """A dict of numbers that encode rank and key, the same in an array, and memory for their sums.

    Attributes:
        expected: the sum of each number over all ranks.
    """

    size: int
    comm: MPI.Intracomm
    x: dict[str, float]
    array: np.ndarray[Any, Any]
    out: np.ndarray[Any, Any]
    expected: list[float]
    skew: str = "metrics"
    what: str = "reduce"

    def reset(self) -> None:
        self.out.fill(-1)

    def correct(self, result: Any) -> bool:
        return [*(result.values() if isinstance(result, dict) else result)] == self.expected

    def intact(self) -> bool:
        return [*self.x.values()] == [*self.array] == numbers(self.comm.rank)


def numbers(rank: int) -> list[float]:
    return [i + 0.5 * rank for i in range(TENSORS["metrics"])]


def make_metrics(comm: MPI.Intracomm) -> Metrics:
    mine, every = numbers(comm.rank), [numbers(rank) for rank in range(comm.size)]
    x, array = {f"layers.{i}.loss": value for i, value in enumerate(mine)}, np.array(mine)
    return Metrics(array.nbytes, comm, x, array, np.empty_like(array), [sum(of) for of in zip(*every, strict=True)])


def reduce_mpi4py(case: Metrics) -> Any:
    """The baseline: the numbers of all ranks in arrays, in the same order."""
    case.comm.Allreduce(case.array, case.out)
    return case.out


def reduce_mpi4py_pickle(case: Metrics) -> dict[str, float]:
    """mpi4py's lower-case allgather: pickle."""
    dicts = case.comm.allgather(case.x)
    return {key: sum(x[key] for x in dicts) for key in case.x}


def message(x: Tensor) -> list[object]:
    """Return an mpi4py buffer specification."""
    return [x.numpy(), MPI_TYPES[x.dtype]]


# From each even rank to the next one


def send_mpi4py(case: Case) -> list[Tensor] | None:
    """The baseline: mpi4py's Send and Recv, one by one, into preallocated memory, with prepared arguments."""
    messages = case.once("messages", lambda: [message(x) for x in (case.tree if case.sends else case.out)])
    if case.sends:
        for one in messages:
            case.comm.Send(one, case.peer)
        return None
    for one in messages:
        case.comm.Recv(one, case.peer)
    return case.out


def send_mpi4py_new(case: Case) -> list[Tensor] | None:
    """mpi4py's Send and Recv, one by one, into new tensors."""
    if case.sends:
        for x in case.tree:
            case.comm.Send(message(x), case.peer)
        return None
    out = case.empty()
    for x in out:
        case.comm.Recv(message(x), case.peer)
    return out


def send_mpi4py_packed(case: Case) -> list[Tensor] | None:
    """One message a dtype: torch.cat, mpi4py's Send and Recv, split: possible if all shapes are known."""
    if case.sends:
        for dtype in MPI_TYPES:
            flat = torch.cat([x.view(-1) for x in case.tree if x.dtype == dtype])
            case.comm.Send(message(flat), case.peer)
        return None
    found: list[Tensor | None] = [None] * len(case.shapes)
    for dtype in MPI_TYPES:
        mine = [i for i, other in enumerate(case.dtypes) if other == dtype]
        lengths = [prod(case.shapes[i]) for i in mine]
        flat = torch.empty(sum(lengths), dtype=dtype)
        case.comm.Recv(message(flat), case.peer)
        for i, part in zip(mine, flat.split(lengths), strict=True):
            found[i] = part.view(case.shapes[i])
    return [x for x in found if x is not None]


def send_mpi4py_pickle(case: Case) -> list[Tensor] | None:
    """mpi4py's lower-case send and recv: pickle of the whole list."""
    if case.sends:
        case.comm.send(case.tree, case.peer)
        return None
    found: list[Tensor] = case.comm.recv(None, case.peer)
    return found


def send_gloo(case: Case) -> list[Tensor] | None:
    """torch.distributed's send and recv on gloo, one by one."""
    if case.sends:
        for x in case.tree:
            dist.send(x, case.peer)
        return None
    out = case.empty()
    for x in out:
        dist.recv(x, case.peer)
    return out


def send_gloo_async(case: Case) -> list[Tensor] | None:
    """isend and irecv on gloo, all posted, then all waited for."""
    out = None if case.sends else case.empty()
    works = [dist.isend(x, case.peer) for x in case.tree] if out is None else [dist.irecv(x, case.peer) for x in out]
    for work in works:
        if work is not None:  # None for a rank outside the group
            work.wait()
    return out


def send_gloo_object(case: Case) -> list[Tensor] | None:
    """send_object_list on gloo: the list as one object, pickled; a list of objects would be pickled one by one."""
    if case.sends:
        dist.send_object_list([case.tree], case.peer)
        return None
    found: list[Any] = [None]
    dist.recv_object_list(found, case.peer)
    tree: list[Tensor] = found[0]
    return tree


def send_hpcdist(case: Case) -> list[Tensor] | None:
    """hpcdist: the receiver has no advance knowledge."""
    if case.sends:
        hd.send(case.tree, case.peer)
        return None
    found: list[Tensor] = hd.recv(case.peer)
    return found


# From all ranks to all


def gather_mpi4py(case: Case) -> list[Tensor]:
    """The baseline: one Allgather per tensor, directly into preallocated memory, with prepared arguments."""
    messages, out = case.once("messages", lambda: _gathers(case))
    for send, recv in messages:
        case.comm.Allgather(send, recv)
    found: list[Tensor] = out
    return found


def _gathers(case: Case) -> tuple[list[tuple[object, object]], list[Tensor]]:
    """Return (the arguments, the result as views of their memory)."""
    wholes = [whole.fill_(-1) for whole in _wholes(case)]
    return [(message(x), message(y)) for x, y in zip(case.tree, wholes, strict=True)], _lists(case, wholes)


def _wholes(case: Case) -> list[Tensor]:
    """Allocate memory for each tensor of a list, of all ranks."""
    return [torch.empty((case.comm.size, *x.shape), dtype=x.dtype) for x in case.tree]


def _lists(case: Case, wholes: list[Tensor]) -> list[Tensor]:
    """Return the lists of all ranks, concatenated."""
    return [whole[rank] for rank in range(case.comm.size) for whole in wholes]


def gather_mpi4py_new(case: Case) -> list[Tensor]:
    """One Allgather per tensor, into new memory."""
    wholes = _wholes(case)
    for x, whole in zip(case.tree, wholes, strict=True):
        case.comm.Allgather(message(x), message(whole))
    return _lists(case, wholes)


def gather_mpi4py_pickle(case: Case) -> list[Tensor]:
    """mpi4py's lower-case allgather: pickle."""
    return [x for tree in case.comm.allgather(case.tree) for x in tree]


def gather_gloo(case: Case) -> list[Tensor]:
    """all_gather_into_tensor on gloo, one for each tensor: for lists of the same shapes on all ranks."""
    wholes = _wholes(case)
    for x, whole in zip(case.tree, wholes, strict=True):
        dist.all_gather_into_tensor(whole.view(-1), x.view(-1))
    return _lists(case, wholes)


def gather_gloo_object(case: Case) -> list[Tensor]:
    """all_gather_object on gloo: torch pickles, pads and unpickles."""
    trees: list[Any] = [None] * case.comm.size
    dist.all_gather_object(trees, case.tree)
    return [x for tree in trees for x in tree]


SENDS = [
    Contender(BASELINE, send_mpi4py),
    Contender(CONTROL, send_mpi4py),
    Contender(HPCDIST_NEW, send_hpcdist),
    Contender("mpi4py, a message a dtype, shapes known", send_mpi4py_packed),
    Contender("mpi4py, one by one, new memory", send_mpi4py_new),
    Contender(MPI4PY_PICKLE, send_mpi4py_pickle),
    Contender("gloo, one by one", send_gloo),
    Contender("gloo, isend and irecv, one by one", send_gloo_async),
    Contender("gloo, send_object_list", send_gloo_object),
]
GATHERS = [
    Contender(BASELINE, gather_mpi4py),
    Contender(CONTROL, gather_mpi4py),
    Contender(HPCDIST_NEW, lambda case: hd.concat(case.tree)),
    Contender(ROUTES["gloo"], lambda case: hd.concat(case.tree, route="gloo")),
    Contender("mpi4py, one by one, new memory", gather_mpi4py_new),
    Contender(MPI4PY_PICKLE, gather_mpi4py_pickle),
    Contender("gloo, one by one", gather_gloo),
    Contender(GLOO_OBJECT, gather_gloo_object),
]
REDUCTIONS = [
    Contender(BASELINE, reduce_mpi4py),
    Contender(CONTROL, reduce_mpi4py),
    Contender(HPCDIST_NEW, lambda case: hd.reduce(case.x, root=None)),
    Contender(MPI4PY_PICKLE, reduce_mpi4py_pickle),
]


def main() -> None:
    parser = harness.parser(__doc__, "64M", budget=30)
    harness.choice(parser, "--kinds", TENSORS)
    asked = parser.parse_args()
    with hd.init(device="cpu", backend="gloo") as world:
        if world.world_size % 2:
            raise SystemExit("ranks send in pairs: start an even number of them")
        steps = []
        for kind in asked.kinds:
            if kind == "metrics":
                steps.append(Step(make_metrics, REDUCTIONS))
            elif kind == "many":
                steps += [Step(partial(make_case, kind=kind, size=size), GATHERS) for size in asked.sizes]
            else:
                steps.append(Step(partial(make_case, kind=kind), SENDS))
        harness.run(harness.start("structures", world.comm), world.comm, steps, asked)


if __name__ == "__main__":
    main()
