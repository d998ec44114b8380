"""The data of a call, and common ways to write the call by hand. Each is correct for ragged shards.

Only preallocated mpi4py and torch's lists have the counts of all ranks in advance; the others exchange them, as a
program must.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.collectives.join import concat, gather
from hpcdist.collectives.plans import plan
from hpcdist.collectives.redistribute import redistribute
from hpcdist.collectives.split import split
from hpcdist.compare.timing import Contender
from hpcdist.layout import Split

if TYPE_CHECKING:
    from mpi4py import MPI

VERBS: dict[str, Callable[..., Any]]
VERBS = {"concat": concat, "gather": gather, "split": split, "redistribute": redistribute}
# Those that gloo carries
_NAMES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
_MPI = {"concat": "allgather", "gather": "gather", "split": "scatter", "redistribute": "alltoall"}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Copies = list[tuple[Tensor, Tensor]]  # (to, of)


class Case:
    """The data of one call on this rank; a value is its index in the whole tensor, modulo what the dtype holds exactly.

    Args:
        shapes: of all ranks' shards: of the input of concat, gather and redistribute, and of the result of split. They
            differ in dim 0 only. redistribute changes blocks of rows to blocks of columns.
        group: torch's group of all ranks, for what is written with torch; None is the default group.

    Attributes:
        x, expected, out: the input and the result of this rank, if any, and memory for the result.
        rows, nbytes: of the shard of each rank.
        call: hpcdist's verb and its arguments.
        plan: the same as a plan; made at its first use, which is collective.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        verb: str,
        dtype: torch.dtype,
        shapes: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.comm, self.rank, self.verb, self.dtype, self.group = comm, comm.rank, verb, dtype, group
        self.rows, self.rest = [shape[0] for shape in shapes], list(shapes[0][1:])
        self.nbytes = [prod(shape) * dtype.itemsize for shape in shapes]
        self.x: Any
        self.out: Any
        self.x, self.expected = self._data()
        self.out = None if self.expected is None else torch.empty_like(self.expected)
        self._kept = [(x, x.clone()) for x in (self.x, self.expected) if x is not None]
        self.packs, self.unpacks = Copies(), Copies()
        self._prepare()

    def _data(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the input and the expected result of this rank."""
        edges = [*accumulate(self.rows, initial=0)]
        index = torch.arange(edges[-1] * prod(self.rest), device=self.device)
        values = index.remainder_(self._bound()).to(self.dtype).view(edges[-1], *self.rest)
        shard = values[edges[self.rank] : edges[self.rank + 1]].clone()
        whole = values if self.verb == "concat" or self.rank == 0 else None
        if self.verb == "redistribute":
            return shard, values.tensor_split(self.comm.size, 1)[self.rank].contiguous()
        return (whole, shard) if self.verb == "split" else (shard, whole)

    def _bound(self) -> int:
        """Return an odd number, since sizes are mostly even, up to which the dtype holds every integer."""
        floating = self.dtype.is_floating_point
        return int(2 / torch.finfo(self.dtype).eps) - 1 if floating else torch.iinfo(self.dtype).max

    def _prepare(self) -> None:
        """Make what mpi4py sends and receives, in host memory, and the copies from and to there."""
        send: Any = self.x
        recv, pinned = self.out, self.device.type != "cpu"
        counts = sent = received = [rows * prod(self.rest) for rows in self.rows]
        if send is not None and (pinned or self.verb == "redistribute"):
            parts = send.tensor_split(self.comm.size, 1) if self.verb == "redistribute" else [send]
            sent = [part.numel() for part in parts]
            send = torch.empty(sum(sent), dtype=self.dtype, device="cpu", pin_memory=pinned)
            views = zip(send.split(sent), parts, strict=True)
            self.packs = [(view.view(part.shape), part) for view, part in views]
        if recv is not None:
            received = [rows * prod(recv.shape[1:]) for rows in self.rows]
            if pinned:
                recv = torch.empty_like(recv, device="cpu", pin_memory=True)
                self.unpacks = [(self.out, recv)]
        whole = self.verb in ("concat", "gather", "redistribute")
        self.send = _message(send, counts if self.verb == "split" else sent if self.verb == "redistribute" else None)
        self.recv = _message(recv, received if whole else None)

    def reset(self) -> None:
        if self.out is not None:
            self.out.fill_(self._bound())  # which no value is

    def correct(self, result: Tensor | None) -> bool:
        if result is None or self.expected is None:
            return result is None and self.expected is None
        return torch.equal(result, self.expected)

    def intact(self) -> bool:
        return all(torch.equal(x, kept) for x, kept in self._kept)

    @property
    def call(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        layouts = (Split(0, counts=tuple(self.rows)), Split(1)) if self.verb == "redistribute" else ()
        options = {"counts": self.rows} if self.verb == "split" and self.rank == 0 else {}
        return VERBS[self.verb], (self.x, *layouts), options

    def cloned(self, x: Any) -> list[Tensor] | None:
        """Return the parts of x that go to the ranks, in memory of their own."""
        if x is None:
            return None
        parts = x.split(self.rows) if self.verb == "split" else x.tensor_split(self.comm.size, 1)
        return [part.clone() for part in parts]

    def mine(self, parts: list[Any] | None) -> Tensor | None:
        """Return this rank's result from the shards of all ranks."""
        if parts is None:
            return None
        whole = torch.cat([part.to(self.device) for part in parts])
        return whole.tensor_split(self.comm.size, 1)[self.rank] if self.verb == "redistribute" else whole

    @cached_property
    def plan(self) -> Callable[..., Any]:
        verb, args, options = self.call
        return plan(verb, *args, **options)


def _message(x: Tensor | None, counts: Sequence[int] | None = None) -> Any:
    """Return mpi4py's specification of a buffer; numpy does not know all dtypes."""
    if x is None:
        return None
    buffer = x.view(_BITS[x.itemsize]).numpy()
    return buffer if counts is None else [buffer, counts]


def _call(case: Case, kind: str = "") -> Callable[..., Any]:
    """Return the call of mpi4py that pickles, or (kind "v") the one for memory of different sizes."""
    name = _MPI[case.verb]
    return getattr(case.comm, f"{name.capitalize()}v" if kind else name)  # type: ignore[no-any-return]


def _on_host(case: Case) -> Any:
    return None if case.x is None else case.x.cpu()


def padded_to(x: Tensor, rows: int) -> Tensor:
    """Return `x` with that many rows, the last ones of any value."""
    return x if len(x) == rows else torch.cat([x, x.new_empty(rows - len(x), *x.shape[1:])])


def ours(case: Case, **options: Any) -> Any:
    """hpcdist's verb, as a program calls it."""
    verb, args, more = case.call
    return verb(*args, **more, **options)


def preallocated(case: Case) -> Any:
    """mpi4py as in its tutorial for arrays: into preallocated memory, counts known. redistribute packs the columns."""
    for to, of in case.packs:
        to.copy_(of)
    _call(case, "v")(case.send, case.recv)
    for to, of in case.unpacks:
        to.copy_(of)
    return case.out


def exchanged(case: Case) -> Any:
    """mpi4py, into a new tensor each time; the counts are exchanged first, with the lower-case call."""
    width, x, splits = prod(case.rest), _on_host(case), case.verb == "split"
    rows: Any = _call(case)(case.rows if splits else len(case.x))  # of this rank, or of all; None but on the root
    numbers = [rows] if splits else rows or []
    out = None if rows is None else torch.empty(sum(numbers), *case.rest, dtype=case.dtype, device="cpu")
    counts = [n * width for n in (case.rows if splits else numbers)]
    _call(case, "v")(_message(x, counts if splits else None), _message(out, None if splits else counts))
    return None if out is None else out.to(case.device)


def pickled(case: Case) -> Any:
    """mpi4py's lower-case calls, which pickle tensors; parts are cloned: torch would pickle the whole with each."""
    x = _on_host(case)
    found = _call(case)(x if case.verb in ("concat", "gather") else case.cloned(x))
    whole = torch.cat(found) if isinstance(found, list) else found
    return None if whole is None else whole.to(case.device)


def padded(case: Case) -> Any:
    """torch: exchange sizes, pad to the largest, all_gather (or gather, scatter) a list, trim, cat.

    torchmetrics' gather_all_tensors does so, and it is the usual answer on the PyTorch forum
    (discuss.pytorch.org, topic 44819). gloo's scatter refuses unequal parts (pytorch#84566).
    """
    sizes = sizes_of_all(case)
    empty = torch.empty(max(sizes), *case.rest, dtype=case.dtype, device=case.device)
    if case.verb == "split":
        parts = None if case.x is None else [padded_to(part, len(empty)) for part in case.x.split(sizes)]
        dist.scatter(empty, parts, 0, group=case.group)
        return empty[: sizes[case.rank]]
    parts = [torch.empty_like(empty) for _ in sizes] if case.verb != "gather" or case.rank == 0 else None
    if case.verb == "gather":
        dist.gather(padded_to(case.x, len(empty)), parts, 0, group=case.group)
    else:
        dist.all_gather(parts, padded_to(case.x, len(empty)), group=case.group)
    return case.mine(None if parts is None else [part[:size] for part, size in zip(parts, sizes, strict=True)])


def known(case: Case) -> Any:
    """torch, the sizes known and into preallocated memory: lists without padding; redistribute by all_to_all_single."""
    x, out, group = case.x, case.out, case.group
    if case.verb == "redistribute":
        parts = x.tensor_split(case.comm.size, 1)
        received = [rows * prod(out.shape[1:]) for rows in case.rows]
        sent = [part.numel() for part in parts]
        packed = torch.cat([part.flatten() for part in parts])
        dist.all_to_all_single(out.view(-1), packed, received, sent, group=group)
    elif case.verb == "split":
        dist.scatter(out, None if x is None else list(x.split(case.rows)), 0, group=group)
    elif case.verb == "gather":
        dist.gather(x, None if out is None else list(out.split(case.rows)), 0, group=group)
    else:
        dist.all_gather(list(out.split(case.rows)), x, group=group)
    return out


def _uneven(case: Case) -> str | None:
    even = len({*case.rows}) == 1 or case.verb == "redistribute"
    ragged = case.verb == "concat" and dist.get_backend(case.group) == "nccl"
    return None if even or ragged else "torch refuses lists of unequal sizes"


def objects(case: Case) -> Any:
    """all_gather_object and its kin: torch pickles, pads and unpickles; as in detectron2 and many evaluation loops."""
    parts: list[Any] = [None] * case.comm.size
    if case.verb == "split":
        dist.scatter_object_list(mine := parts[:1], case.cloned(case.x), 0, group=case.group)
        return mine[0].to(case.device)
    if case.verb == "gather":
        dist.gather_object(case.x, parts if case.rank == 0 else None, 0, group=case.group)
    else:
        dist.all_gather_object(parts, case.x, group=case.group)
    return case.mine(parts if case.verb != "gather" or case.rank == 0 else None)


def _no_rows(case: Case) -> str | None:
    return "not for redistribute" if case.verb == "redistribute" else None


def sizes_of_all(case: Case) -> list[int]:
    """Exchange the rows of every rank's shard by torch: an all_gather of one integer, or a broadcast from the root."""
    if case.verb == "split":
        sizes = torch.tensor(case.rows, device=case.device)
        dist.broadcast(sizes if case.rank == 0 else sizes.zero_(), 0, group=case.group)
        return sizes.tolist()
    mine = torch.tensor([len(case.x)], device=case.device)
    found = [torch.empty_like(mine) for _ in case.rows]
    dist.all_gather(found, mine, group=case.group)
    return [int(size) for size in found]


CONTENDERS = [  # the name begins with the kind
    Contender("mpi4py, preallocated", preallocated),
    Contender("mpi4py, counts exchanged, new memory", exchanged, _no_rows),
    Contender("mpi4py, pickle", pickled),
    Contender("torch, padded", padded),
    Contender("torch, sizes known", known, _uneven),
    Contender("torch, objects", objects),
    Contender("hpcdist", ours),
    Contender("hpcdist, out=", lambda case: ours(case, out=case.out)),
    Contender("hpcdist plan, out=", lambda case: case.plan(case.x, case.out)),
]
