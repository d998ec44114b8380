"""The names of ``horovod.torch``, over MPI: ``import hpcdist.horovod as hvd``.

The ranks may submit named operations in different orders. An operation waits until its rank makes a call that blocks:
synchronize(), barrier(), join(), or any form without "async". Then the ranks of its process set exchange the names that
they have submitted, and run the operations that all of them have, in the same order: a round. A rank stays in rounds
until its own operation is done. If all ranks are in a round, and no operation was submitted by all of them, they would
wait forever, so all of them raise the same error.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, zip_longest
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.collectives.join import concat
from hpcdist.control import objects
from hpcdist.errors import RankError, coded, listed, refusal
from hpcdist.runtime import world
from hpcdist.tensors import accelerator

HorovodInternalError = RankError
_wrong = partial(refusal, ValueError, "HD702")

# Ranks, sizes and process sets


def _world() -> world.World:
    """Return the world, from init() to shutdown(); programs take the ValueError for "not initialized"."""
    if not is_initialized():
        raise refusal(ValueError, "HD112", "Horovod has not been initialized; use hvd.init().")
    return world.current()


def mpi_threads_supported() -> bool:
    """Whether several threads may call MPI at once."""
    _world()
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def nccl_built() -> int:
    """The version of NCCL, such as 22809 for 2.28.9; 0 without NCCL."""
    parts = accelerator.library_version().split(".") if dist.is_nccl_available() else []
    return int("".join(part.zfill(2) for part in parts) or 0)


def is_initialized() -> bool:
    """Whether init() has been called, and neither shutdown() nor hpcdist.finalize() since then."""
    return bool(_registered)


def rank() -> int:
    """The rank of this process."""
    return _world().rank


def size() -> int:
    """The number of processes."""
    return _world().world_size


def local_rank() -> int:
    """The rank among the processes of this node."""
    return _world().local_rank


def cross_rank() -> int:
    """This node's number."""
    return _world().node


def local_size() -> int:
    """The processes on this node."""
    return _world().settings.node_of.count(cross_rank())


def cross_size() -> int:
    """The number of nodes."""
    return _world().nodes


def is_homogeneous() -> bool:
    """Whether all nodes have as many."""
    return len({*Counter(_world().settings.node_of).values()}) == 1


def mpi_built() -> bool:
    """True."""
    return True


def cuda_built() -> bool:
    """Whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None


def gloo_built() -> bool:
    """False: MPI and NCCL send everything."""
    return False


mpi_enabled, gloo_enabled, ddl_built, ccl_built = mpi_built, gloo_built, gloo_built, gloo_built
mpi_ops = sys.modules[f"{__name__}.mpi_ops"] = sys.modules[__name__]  # Horovod defines these names there


class ProcessSet:
    """Some of the ranks, which run operations together: a list of ranks, in any order, or an mpi4py communicator."""

    ranks: Any = None  # sorted; of a communicator None until it is registered
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Any) -> None:
        if hasattr(ranks_or_comm, "Get_rank"):
            self.mpi_comm = ranks_or_comm
        else:
            self.ranks = sorted(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [None]
            if any(type(r) is not int for r in self.ranks):
                raise _wrong(f"ProcessSet: expected a list of ranks or an mpi4py communicator, got {ranks_or_comm!r}")
        self._reset()

    def _reset(self, process_set_id: int | None = None) -> None:
        self.process_set_id = process_set_id  # from init() or add_process_set(), until remove_process_set()
        self.group: dist.ProcessGroup | None = None  # None: all ranks
        self.pending: dict[str, Submission] = {}  # submitted by this rank, and not run yet
        self.submitted: Counter[str] = Counter()  # without a name, by kind
        self.joined: dict[int, None] = {}  # ranks that have called join(), in this order

    def size(self) -> int | None:
        """The number of ranks; None if the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This rank's number in the set; None if the set is not registered."""
        if self.process_set_id is None:
            return None
        if not self.included():
            raise refusal(ValueError, "HD114", f"rank {rank()} is not in {self}")
        return int(self.ranks.index(rank()))

    def included(self) -> bool | None:
        """Whether this rank is in the set; None if its ranks are not known yet."""
        return None if self.ranks is None else rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set._reset(0)
_registered: dict[int, ProcessSet] = {}


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Start torch.distributed over MPI, by :func:`hpcdist.init`. Collective over all ranks; may be repeated. `comm` is
    used in place of COMM_WORLD. `process_sets` replace those that are registered; "dynamic" and None replace none."""
    if comm is not None and not hasattr(comm, "Get_rank"):
        raise _wrong("init(): pass an mpi4py communicator as `comm`, and ranks as process_sets=[ProcessSet(ranks)]")
    here = world.init(comm)
    global_process_set.ranks, global_process_set.mpi_comm = list(range(here.world_size)), here.comm
    if not _registered:
        world.at_end(_forget)
    _registered.setdefault(0, global_process_set)
    if process_sets and not isinstance(process_sets, str):
        for old in list(_registered.values()):
            remove_process_set(old)
        _register(process_sets)


def _register(process_sets: Sequence[ProcessSet], same: bool = False) -> None:
    """Make the group of each set that a rank passes. Collective over all ranks, with the same sets if `same`: a
    communicator may hold other ranks on each."""
    comm = _world().comm
    for added in process_sets:
        if added.mpi_comm is not None:
            members, whole = added.mpi_comm.Get_group(), comm.Get_group()
            added.ranks = sorted(members.Translate_ranks(None, whole))
            members.Free()
            whole.Free()
    asked: list[list[tuple[int, ...]]] = concat([[tuple(added.ranks) for added in process_sets]])
    if same:
        first = asked[0]
        odd = {r: coded("HD303", f"{sets}, where rank 0 has {first}") for r, sets in enumerate(asked) if sets != first}
        objects.raise_problems("add_process_set", odd)
    for ranks in dict.fromkeys(ranks for place in zip_longest(*asked) for ranks in place if ranks is not None):
        if all(known.ranks != list(ranks) for known in _registered.values()):
            added = next((added for added in process_sets if added.ranks == list(ranks)), None) or ProcessSet(ranks)
            added._reset(max(_registered) + 1)
            added.group = dist.new_group(added.ranks)
            _registered[max(_registered) + 1] = added
    if twice := [added for added in process_sets if added not in _registered.values()]:
        raise refusal(ValueError, "HD114", f"a process set with the same ranks exists: {twice[0]}")


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, which no other equals. Collective over all ranks, with the same set."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _register([added], same=True)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Collective over all ranks. Returns whether it was registered, and not the global set."""
    if not process_set.process_set_id:
        return False
    del _registered[process_set.process_set_id]
    if process_set.included():
        dist.destroy_process_group(process_set.group)
    process_set._reset()
    return True


def shutdown() -> None:
    """Free the process sets, and finalize the world. Collective over all ranks."""
    for process_set in list(_registered.values()):
        remove_process_set(process_set)
    world.finalize()


def _forget() -> None:
    for process_set in _registered.values():
        process_set._reset()
    _registered.clear()
    global_process_set._reset(0)


# Operations, and the rounds that run them

Average, Sum, Min, Max, Product, Adasum = "Average", "Sum", "Min", "Max", "Product", "Adasum"
_REDUCE: dict[str | None, Any] = {Average: dist.ReduceOp.SUM, Sum: dist.ReduceOp.SUM, Min: dist.ReduceOp.MIN}
_REDUCE |= {Max: dist.ReduceOp.MAX, Product: dist.ReduceOp.PRODUCT}
_SAME = ("kind", "op", "prescale_factor", "postscale_factor", "root_rank")  # must agree, as dtypes and shapes
_FUSED = 2**25  # bytes: smaller tensors are reduced in one message of at most this size


@dataclass(frozen=True)
class Compressor:
    """Sends floating-point tensors as `dtype`; None: as they are."""

    dtype: torch.dtype | None

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and the data that decompress() needs."""
        return tensor.to(self.dtype) if self.dtype and tensor.is_floating_point() else tensor, tensor.dtype

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return a tensor of the dtype before compress()."""
        return tensor.to(ctx)


class Compression:
    """The dtypes in which tensors can be sent."""

    none, fp16, bf16 = Compressor(None), Compressor(torch.float16), Compressor(torch.bfloat16)


@dataclass(eq=False)
class Submission(Future[Any]):
    """An operation that this rank submits, and its handle. Raises a ValueError if it cannot run."""

    kind: str  # such as "allreduce"
    given: Any  # the caller's tensor, or tensors
    in_place: bool = False
    name: str | None = None  # the ranks match operations by it
    process_set: ProcessSet = global_process_set
    op: str | None = None  # of reductions, as the factors
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    root_rank: int | None = None
    compression: Any = Compression.none
    polled = False

    def __post_init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []  # of every rank, when it runs: rows of each tensor; of alltoall, the splits
        if problem := self._problem():
            raise _wrong(f"{self.kind}: {problem}")
        self.process_set.submitted[self.kind] += not self.name
        self.name = str(self.name or f"{self.kind}.noname.{self.process_set.submitted[self.kind]}")
        sent = [self.compression.compress(x.detach()) for x in _listed(self.given)]
        self.contexts = [context for _, context in sent]
        self.tensors = [_scaled(x, self.prescale_factor).contiguous() for x, _ in sent]
        if self.kind in ("allreduce", "broadcast") and not self.in_place:  # which write the tensors
            self.tensors = [x.clone() for x in self.tensors]
        self.process_set.pending[self.name] = self

    def _problem(self) -> str | None:
        for x in _listed(self.given):
            if not isinstance(x, Tensor) or x.layout is not torch.strided:
                return f"expected dense tensors, got {getattr(x, 'layout', type(x))}; sparse: sparse_allreduce_async()"
            if not x.dim() and self.kind in ("allgather", "reducescatter"):
                return "a tensor without dimensions has no rows"
        if self.process_set.process_set_id is None:
            return f"{self.process_set} is not registered: call add_process_set()"
        if not self.process_set.included():
            return f"rank {rank()} is not in {self.process_set}"
        if "reduce" in self.kind and self.op not in _REDUCE:
            return f"op is {self.op!r}: expected one of {', '.join(map(str, _REDUCE))}"
        if self.kind == "broadcast" and self.root_rank not in self.process_set.ranks:
            return f"root_rank {self.root_rank} is not in {self.process_set}"
        if str(self.name) in self.process_set.pending:
            return f"an operation with the name {self.name!r} has not been synchronized yet"
        return None

    def request(self) -> dict[str, Any]:
        """The description for the other ranks: values that must agree, and rows, which need not."""
        pair, ragged = self.kind == "alltoall", self.kind in ("allgather", "alltoall")
        rows = self.tensors[1].tolist() if pair else [len(x) for x in self.tensors if ragged]
        xs = self.tensors[:1] if pair else self.tensors
        tensors = [(str(x.dtype).removeprefix("torch."), x.device.type, *x.shape[ragged:]) for x in xs]
        return {"tensors": tensors, "rows": rows, **{key: getattr(self, key) for key in _SAME}}

    def finish(self, outputs: list[Tensor]) -> None:
        """Make the result of the tensors that were received."""
        for at, (y, context) in enumerate(zip(outputs, self.contexts, strict=True)):
            if self.op == Average:
                whole = not (y.is_floating_point() or y.is_complex())
                y.div_(len(self.process_set.ranks), rounding_mode="trunc" if whole else None)
            outputs[at] = self.compression.decompress(_scaled(y, self.postscale_factor), context)
        for x, y in zip(_listed(self.given), outputs, strict=True) if self.in_place else ():
            x.detach().copy_(y)  # nothing, if it was written
        several = isinstance(self.given, (list, tuple))
        self.set_result(self.given if self.in_place else outputs if several else outputs[0])
        self.tensors = []

    # Each kind: runs on the tensors of one or more operations with the same arguments. Returns what is received.

    def allreduce(self, xs: list[Tensor]) -> list[Tensor]:
        for few in _batches(xs):
            flat = few[0].view(-1) if len(few) == 1 else torch.cat([x.view(-1) for x in few])
            dist.all_reduce(flat, _REDUCE[self.op], self.process_set.group)
            for x, part in zip(few, torch.split(flat, [x.numel() for x in few]), strict=True):
                x.copy_(part.view_as(x))  # nothing, if there is one
        return xs

    def allgather(self, xs: list[Tensor]) -> list[Tensor]:
        return [concat(x, group=self.process_set.group) for x in xs]

    def broadcast(self, xs: list[Tensor]) -> list[Tensor]:
        for x in xs:
            dist.broadcast(x, self.root_rank, self.process_set.group)
        return xs

    def alltoall(self, xs: list[Tensor]) -> list[Tensor]:
        me, outputs = self.process_set.rank() or 0, []
        sends, recvs = self.rows[me], [rows[me] for rows in self.rows]
        for x, splits in zip(xs[::2], xs[1::2], strict=True):
            outputs += [x.new_empty((sum(recvs), *x.shape[1:])), torch.tensor(recvs, device=splits.device)]
            dist.all_to_all_single(outputs[-2], x[: sum(sends)], recvs, sends, group=self.process_set.group)
        return outputs

    def reducescatter(self, xs: list[Tensor]) -> list[Tensor]:
        parts = [list(x.tensor_split(len(self.process_set.ranks))) for x in xs]
        outputs = [torch.empty_like(some[self.process_set.rank() or 0]) for some in parts]
        for out, some in zip(outputs, parts, strict=True):
            dist.reduce_scatter(out, some, _REDUCE[self.op], self.process_set.group)
        return outputs

    def barrier(self, xs: list[Tensor]) -> list[Tensor]:
        return xs


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Give tensors of one dtype and device in lists that one message carries."""
    alike: dict[object, list[Tensor]] = {}
    for x in tensors:
        waiting = alike.setdefault((x.dtype, x.device), [])
        if waiting and sum(y.nbytes for y in waiting) + x.nbytes > _FUSED:
            yield waiting.copy()
            waiting.clear()
        waiting.append(x)
    yield from filter(None, alike.values())


def _scaled(x: Tensor, factor: float) -> Tensor:
    """Return a multiple; of integers in float64, rounded towards zero."""
    if factor == 1:
        return x
    return x * factor if x.is_floating_point() or x.is_complex() else (x.double() * factor).to(x.dtype)


def synchronize(handle: Submission) -> Any:
    """Wait for an operation, and return its result: a tensor, or a list. Collective over its process set, where other
    ranks may wait for other operations. Raises a RankError on every rank if their calls differ, or if they wait for
    operations that others have not submitted."""
    if not isinstance(handle, Submission):
        raise _wrong(f"expected a handle, which the forms with 'async' return, got {type(handle).__name__}")
    while not handle.done():
        if handle.process_set.pending.get(str(handle.name)) is not handle:
            raise _wrong(f"{handle.kind} {handle.name!r}: its process set has been removed, or an error has ended it")
        _round(handle.process_set, handle.name)
    return handle.result()


def poll(handle: Submission) -> bool:
    """Return whether an operation is done. The first poll of it only looks; a later one does what synchronize() does,
    since nothing runs in the background."""
    if not isinstance(handle, Submission) or (handle.polled and not handle.done()):
        synchronize(handle)
    handle.polled = True
    return handle.done()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for all ranks of a process set. Operations that all of them have submitted run first."""
    synchronize(Submission("barrier", [], process_set=process_set))


def join(device: int = -1) -> int:
    """Wait until all ranks have called join(); until then, add zeros to allreduce of the others. Returns the last rank
    that called it. `device` is not used."""
    everyone = global_process_set
    while rank() not in everyone.joined or len(everyone.joined) < len(everyone.ranks):
        _round(everyone, None)
    last = list(everyone.joined)[-1]
    everyone.joined.clear()
    everyone.submitted.clear()  # ranks that joined early have submitted fewer
    return last


def _round(process_set: ProcessSet, waits: str | None) -> None:
    """Run the operations that all ranks have submitted. `waits` is the one that this rank waits for; None in join()."""
    pending = process_set.pending
    mine = waits, {name: one.request() for name, one in pending.items()}
    try:
        every = _gathered(mine, process_set)
    except RankError as error:
        what = "is in join()" if waits is None else f"waits for {waits!r}"
        error.add_note(f"This rank {what}: concat() compares what the ranks have submitted to hpcdist.horovod.")
        raise
    told = dict(zip(process_set.ranks, every, strict=True))
    process_set.joined |= {r: None for r, (name, _) in told.items() if not name}
    names = dict.fromkeys(name for _, calls in told.values() for name in calls)
    lacking = {name: [r for r, (waits, calls) in told.items() if waits and name not in calls] for name in names}
    ready = [name for name in names if not lacking[name]]
    if not ready and any(name for name, _ in told.values()):
        pending.clear()
        process_set.joined.clear()
        problems = {r: coded("HD301", "it is in join()") for r in told}
        for r, name in [(r, name) for r, (name, _) in told.items() if name]:
            text = f"it waits for {name!r}, which was not submitted on rank {listed(lacking[name])}"
            problems[r] = coded("HD301", text)
        raise RankError("synchronize", problems)
    agreed = [_agree(process_set, name, {r: calls.get(name) for r, (_, calls) in told.items()}) for name in ready]
    alike = groupby(filter(None, agreed), lambda one: [getattr(one, key) for key in (*_SAME, "rows")])
    for together in [list(group) for _, group in alike]:
        try:
            found = iter(getattr(together[0], together[0].kind)([x for one in together for x in one.tensors]))
            for one in together:
                one.finish([next(found) for _ in one.tensors])
        except Exception as error:
            for one in together:
                if not one.done():
                    one.set_exception(error)


def _agree(process_set: ProcessSet, name: str, requests: dict[int, Any]) -> Submission | None:
    """Take an operation from the queue. Returns it, or zeros in join(); None if the ranks' requests do not agree, which
    is the operation's error."""
    first = next(filter(None, requests.values()))
    problems = {}
    for r, request in requests.items():
        odd = next((key for key in (*_SAME, "tensors") if request and request[key] != first[key]), None)
        if odd:
            problems[r] = coded("HD303", f"{odd} is {request[odd]}, where another rank has {first[odd]}")
        elif request is None and first["kind"] != "barrier" and first["op"] not in (Average, Sum):
            problems[r] = coded("HD301", "it is in join(), which allows allreduce (Sum, Average) and barrier only")
    if name not in process_set.pending and not problems:
        zeros = [torch.zeros(shape, dtype=getattr(torch, d), device=device) for d, device, *shape in first["tensors"]]
        Submission(given=zeros, name=name, process_set=process_set, **{key: first[key] for key in _SAME})
    one = process_set.pending.pop(name, None)
    if one is not None:
        one.rows = [(request or first)["rows"] for request in requests.values()]
        if problems:
            one.set_exception(RankError(f"{one.kind} {name!r}", problems))
    return None if problems else one


# The forms of operations, and their gradients

# The arguments after the tensor. `compression` has a place among those of X alone, not of X_async, X_ and X_async_.
_ARGUMENTS = {
    "allreduce": "average name compression op prescale_factor postscale_factor process_set",
    "allgather": "name process_set",
    "broadcast": "root_rank name process_set",
    "alltoall": "splits name process_set",
    "reducescatter": "name compression op process_set prescale_factor postscale_factor",
}


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, fields: Any, *tensors: Tensor) -> Any:
        ctx.operation = Submission(kind, tensors, **fields)
        outputs = synchronize(ctx.operation)
        ctx.operation.given = ctx.operation._result = None  # else the result would keep itself alive
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *_gradients(ctx.operation, [grad.contiguous() for grad in grads])


def _gradients(operation: Submission, grads: list[Tensor]) -> Any:
    """Return the gradients of the tensors of an operation, from those of its results."""
    everyone, factors = operation.process_set, (operation.prescale_factor, operation.postscale_factor)
    me = everyone.rank() or 0
    if operation.kind == "allreduce":
        return allreduce(grads, None, None, operation.compression, operation.op, *factors, everyone)
    if operation.kind == "alltoall":
        return alltoall(grads[0], [rows[me] for rows in operation.rows], None, everyone)[0], None
    if operation.kind == "reducescatter":
        factor = factors[0] * factors[1] * (len(everyone.ranks) if operation.op == Sum else 1)
        return [grad * factor for grad in allgather(grads, None, everyone)]
    mean = allreduce(grads, process_set=everyone)
    if operation.kind == "broadcast":
        return [grad if rank() == operation.root_rank else torch.zeros_like(grad) for grad in mean]
    return [grad.split([rows[at] for rows in operation.rows])[me] for at, grad in enumerate(mean)]


def _fields(
    kind: str, suffix: str, tensor: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the tensors of an operation, and its other fields."""
    names = _ARGUMENTS[kind].split()
    places = [name for name in names if not suffix or name != "compression"]
    fields = dict(zip(places, args, strict=False)) | options
    if len(fields) < len(args) + len(options) or fields.keys() - set(names):
        raise refusal(TypeError, "HD702", f"{kind}{suffix}: expected the arguments tensor, {', '.join(places)}")
    if "reduce" in kind:
        average, op = fields.pop("average", None), fields.get("op")
        if op is not None and average is not None:
            raise _wrong("pass `op` or `average`, not both: `average` is deprecated in Horovod")
        if op == Adasum:
            text = "op=Adasum is not supported: use Average, and scale the learning rate"
            raise refusal(NotImplementedError, "HD702", text)
        fields["op"] = op or (Sum if average is False else Average)
    if kind == "alltoall":
        ranks, asked = fields.get("process_set", global_process_set).size() or 1, fields.pop("splits", None)
        splits = [len(tensor) // ranks] * ranks if asked is None else asked
        splits = splits if isinstance(splits, Tensor) else torch.tensor(splits, dtype=torch.int32, device="cpu")
        even = asked is not None or len(tensor) % ranks == 0
        good = even and not splits.is_floating_point() and splits.shape == (ranks,) and not (splits < 0).any()
        if not good or splits.sum() > len(tensor):
            raise _wrong(f"alltoall: splits {splits.tolist()} do not fit {ranks} ranks and {len(tensor)} rows")
        tensor = tensor, splits
    return tensor, fields


def _form(kind: str, suffix: str) -> Callable[..., Any]:
    def form(tensor: Any, *args: Any, **options: Any) -> Any:
        given, fields = _fields(kind, suffix, tensor, args, options)
        xs = _listed(given)
        if not suffix and torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in xs):
            result = _Function.apply(kind, fields, *xs)  # type: ignore[no-untyped-call]
            return list(result) if isinstance(given, (list, tuple)) else result[0]
        handle = Submission(kind, given, suffix.endswith("_"), **fields)
        return handle if "async" in suffix else synchronize(handle)

    form.__name__ = form.__qualname__ = kind + suffix
    form.__doc__ = f"Run {kind} on a tensor, or a list of them. Arguments: {_ARGUMENTS[kind]}."
    return form


_SUFFIXES = "", "_async", "_", "_async_"
allreduce, allreduce_async, allreduce_, allreduce_async_ = (_form("allreduce", suffix) for suffix in _SUFFIXES)
broadcast, broadcast_async, broadcast_, broadcast_async_ = (_form("broadcast", suffix) for suffix in _SUFFIXES)
allgather, allgather_async = (_form("allgather", suffix) for suffix in _SUFFIXES[:2])
reducescatter, reducescatter_async = (_form("reducescatter", suffix) for suffix in _SUFFIXES[:2])
_alltoall_both, alltoall_async = (_form("alltoall", suffix) for suffix in _SUFFIXES[:2])
grouped_allreduce, grouped_allreduce_async = allreduce, allreduce_async
grouped_allreduce_, grouped_allreduce_async_ = allreduce_, allreduce_async_
grouped_allgather, grouped_allgather_async = allgather, allgather_async
grouped_reducescatter, grouped_reducescatter_async = reducescatter, reducescatter_async


def alltoall(tensor: Tensor, splits: Any = None, *args: Any, **options: Any) -> Any:
    """Return the rows that this rank receives and, if `splits` are given, their numbers."""
    received = _alltoall_both(tensor, splits, *args, **options)
    return received[0] if splits is None else received


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: str, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Submit an allreduce of a sparse tensor. Returns a function that waits for the result and returns it."""
    if op not in (Average, Sum):
        raise _wrong(f"sparse_allreduce_async: op is {op}: expected Average or Sum")
    whole = tensor.coalesce()
    handle = allgather_async([whole.indices().t(), whole.values()], name, process_set)

    def result() -> Tensor:
        indices, values = synchronize(handle)
        values = values / (process_set.size() or 1) if op == Average else values
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, device=tensor.device, check_invariants=False)

    return result


# The optimizer, and the broadcasts at the start of a training


class _Distributed(torch.optim.Optimizer):
    """The methods added to an optimizer: it reduces gradients before its step."""

    process_set: ProcessSet
    backward_passes_per_step: int
    _parameter_names: dict[Tensor, str]
    _fields: dict[str, Any]  # of each Submission
    _passes: Counter[Tensor]  # backward passes since the last synchronize(), by parameter
    _sparse_as_dense = _synchronized = _skips = False

    def _count(self, p: Tensor) -> None:
        self._passes[p] += 1
        if self._passes[p] > self.backward_passes_per_step:
            text = f"the gradient of {self._parameter_names[p]} was computed more than backward_passes_per_step="
            raise refusal(AssertionError, "HD702", f"{text}{self.backward_passes_per_step} times before step()")

    def load_state_dict(self, *args: Any, **options: Any) -> None:
        self._passes.clear()
        self._synchronized = False
        super().load_state_dict(*args, **options)

    def synchronize(self) -> None:
        """Reduce the gradients of all parameters. Collective over the process set. One that this rank has not computed
        counts as zeros."""
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        for p, wait in [(p, self._submit(p)) for p in params if self.process_set.included()]:
            reduced = wait()
            if p.grad is not None and p.grad.is_sparse:
                p.grad = reduced.to(p.grad.dtype).to_sparse(p.grad.sparse_dim())
        self._passes.clear()
        self._synchronized = True

    def _submit(self, p: Tensor) -> Callable[[], Tensor]:
        name = self._parameter_names.setdefault(p, f"added.{len(self._parameter_names)}")
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if p.grad.is_sparse and not self._sparse_as_dense:
            return sparse_allreduce_async(p.grad, name, self._fields["op"], self.process_set)
        return partial(synchronize, Submission("allreduce", p.grad.to_dense(), True, name, **self._fields))

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which step() does not reduce gradients, after a call of synchronize()."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Any = None) -> Any:
        """Reduce the gradients, and let the optimizer make its step."""
        if not self._skips:
            if self._synchronized:
                text = "optimizer.step() called without optimizer.skip_synchronize() context after "
                warnings.warn(text + "optimizer.synchronize(): the gradients are reduced twice.", stacklevel=2)
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """Zero the gradients; not between backward() and step()."""
        if self._passes:
            text = "zero_grad() is called after backward() and before step() or synchronize()"
            raise refusal(AssertionError, "HD702", text)
        super().zero_grad(*args, **options)


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class that reduces the gradients of all ranks before each step. `groups` and
    `num_groups` are not used: all gradients are fused."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    named = [(f"noname.{i}", p) for i, p in enumerate(params)] if named_parameters is None else list(named_parameters)
    if not all(isinstance(pair, tuple) for pair in named):
        raise _wrong("named_parameters: expected pairs of name and parameter")
    names = {p: name for name, p in named}
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    unnamed = sum(p not in names for p in params)
    wrong = {
        f"gradient_predivide_factor needs op=Average, got op={op}": gradient_predivide_factor != 1 and op != Average,
        f"backward_passes_per_step is {backward_passes_per_step}: expected 1 or more": backward_passes_per_step <= 0,
        f"named_parameters: names must be unique, found twice: {', '.join(twice)}": twice,
        f"named_parameters: {unnamed} parameters of the optimizer have no name": unnamed,
    }
    for text in [text for text, is_wrong in wrong.items() if is_wrong]:
        raise _wrong(text)
    factors = {"prescale_factor": 1 / gradient_predivide_factor, "postscale_factor": gradient_predivide_factor}
    options = {"compression": compression, "op": op, "process_set": process_set, **factors}
    kind = type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (_Distributed, kind), {"__module__": __name__}))
    made.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})  # a scheduler's
    made._fields = _fields("allreduce", "", None, (), options)[1]
    made._parameter_names, made._passes, made._sparse_as_dense = names, Counter(), sparse_as_dense
    made.backward_passes_per_step, made.process_set = backward_passes_per_step, process_set
    count = WeakMethod(made._count)  # an optimizer that is dropped counts no more
    for p in params:
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: (counts := count()) and counts(p))
    return made


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Write the root's parameters into those of every rank: ``model.state_dict()``, ``model.named_parameters()`` or
    ``model.parameters()``."""
    pairs = sorted(params.items()) if isinstance(params, dict) else params
    pairs = [pair if isinstance(pair, tuple) else (None, pair) for pair in pairs]
    for handle in [broadcast_async_(p, root_rank, name) for name, p in pairs]:
        synchronize(handle)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Load the root's state of the optimizer on every rank: momenta, step counts, learning rates. `model` is not
    used."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise _wrong("the state of torch.optim.LBFGS cannot be broadcast")
    state = _of_root(optimizer.state_dict(), root_rank, global_process_set)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def _of_root(value: Any, root_rank: int, process_set: ProcessSet) -> Any:
    """Return the root's value, a structure of hpcdist's, on every rank."""
    rank()  # raises before init()
    if root_rank not in (process_set.ranks or ()):
        raise _wrong(f"root_rank {root_rank} is not in {process_set}")
    barrier(process_set)  # operations that were submitted before run first
    values = concat([value] if rank() == root_rank else [], group=process_set.group)
    if len(values) != 1:
        raise _wrong(f"root_rank {root_rank} means {len(values)} ranks")
    return values[0]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks on every rank, by pickle. `name` is not used."""
    barrier(process_set)
    return _gathered(obj, process_set)


def _gathered(value: Any, process_set: ProcessSet) -> list[Any]:
    return list(map(pickle.loads, concat([pickle.dumps(value)], group=process_set.group)))


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on every rank, by pickle. `root_rank` is a rank of the world; `name` is not used."""
    pickled = _of_root(pickle.dumps(obj), root_rank, process_set)
    return obj if rank() == root_rank else pickle.loads(pickled)


_REFUSED = {
    "elastic": "elastic jobs are not supported: an MPI job has the same ranks until it ends. Save checkpoints",
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    **dict.fromkeys(("start_timeline", "stop_timeline"), "use torch.profiler"),
}


def __getattr__(name: str) -> Any:
    if name in _REFUSED:
        raise refusal(NotImplementedError, "HD702", f"hpcdist.horovod has no {name}: {_REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
