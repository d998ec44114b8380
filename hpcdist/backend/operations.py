"""The operations of a process group by the names that torch calls them, and the classes that torch makes groups of.

Each checks its arguments on this rank. It then runs at once, if its caller blocks and no earlier asynchronous call of
the group is under way. Otherwise the group's worker runs it.

From torch 2.14 on a backend in Python may be one of several of a group: "cpu:mpi,cuda:nccl". Until 2.13 it replaces the
whole torch.distributed.ProcessGroup: one object serves all devices there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch.distributed import BarrierOptions

from hpcdist import activity, torch_names
from hpcdist.backend import agreement, collectives
from hpcdist.backend.agreement import Counts, GroupCall, sizes
from hpcdist.backend.dispatcher import give_lazy_tensors, observed
from hpcdist.backend.host_copies import gpu_events, share_memory
from hpcdist.backend.reductions import Reduction, reduction
from hpcdist.backend.works import DONE, Finished, Queued, Transfer, forget_done, recv, send
from hpcdist.comm.team import Group, Settings, Team, create_group, digest, making
from hpcdist.errors import coded, described, refusal
from hpcdist.tensors import accelerator
from hpcdist.tensors.storage import problem, tensors_in
from hpcdist.validation.local import overlaps_itself

Tensors = list[Tensor]
_NOTHING = timedelta(0)
_SUM: Any = dist.ReduceOp.SUM
Base: Any = torch_names.BackendBase or object  # of a class that is used with torch_names.PLUGINS alone

_alive: set[Operations] = set()
"""Until their shutdown: the end of the program finishes their calls; torch's wrapper for TORCH_DISTRIBUTED_DEBUG=DETAIL
keeps the C++ part of a backend alone; and MPI may still use the memory of those that were aborted."""


def finish() -> None:
    """Finish the asynchronous calls of all groups: the program ends."""
    for group in list(_alive):
        group._team.worker.stop()


def _op(opts: Any, x: Tensor) -> Reduction:
    return reduction(_SUM if opts is None else opts.reduceOp, x.dtype)


def _agreed(verb: str) -> Callable[[Callable[..., dist.Work]], Callable[..., dist.Work]]:
    """Make a collective whose wrong arguments on one rank are the same error on all ranks: the others wait for it."""

    def decorate(method: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        @wraps(method)
        def run(self: Operations, *args: Any, **options: Any) -> dist.Work:
            calls = self._calls
            try:
                return method(self, *args, **options)
            except (TypeError, ValueError) as error:
                if self._calls != calls or self._team.size == 1:  # the ranks have compared their calls, or need not
                    raise
                call = GroupCall(verb, problem=described(error, "HD701").removeprefix(f"{verb}: "))
            opts = next((x for x in (*args, *options.values()) if hasattr(x, "asyncOp")), None)
            return self._run(call, opts, [], collectives.barrier)

        return run

    return decorate


def _blocks(name: str, single: bool = False, reduces: bool = False) -> Callable[..., dist.Work]:
    """Make a method: a collective on pairs of tensors, of which one has the size of the other on each rank.

    Args:
        single: whether it takes one pair; else lists of both.
        reduces: whether the larger one is the input, and what reduces it follows the pair.
    """
    step, verb = getattr(collectives, name), name if single else f"{name}_coalesced"

    @_agreed(verb)
    def method(self: Operations, output: Any, input: Any, opts: Any = None) -> dist.Work:
        whole, part = (input, output) if reduces else (output, input)
        pairs = [(whole, part)] if single else list(zip(whole, part, strict=True))
        for one in pairs:
            _check_multiple(verb, *one, self._team.size)
        ops = [_op(opts, x) for _, x in pairs] if reduces else []
        call = GroupCall(verb, sizes(*[x for x, _ in pairs]), (ops[0].name,) if ops else ())
        if single:
            return self._run(call, opts, output, step, output, input, *ops)
        return self._run(call, opts, output, _each, step, output, input, *([ops] if reduces else []))

    return method


class Operations:
    """Collectives and messages on the ranks of a team, which this object owns."""

    _team: Team
    _limit: float | None = None  # deadline of its calls, in seconds
    _calls = 0  # collectives so far

    def _start(self, team: Team, timeout: timedelta | None) -> None:
        self._team = team
        team.inline = agreement.capacity(team.size)
        self._most_tag = int(team.comm.Get_attr(MPI.TAG_UB) or 32767) - 1  # one tag less: see works.send()
        self._set_default_timeout(timeout)
        _alive.add(self)

    def _set_default_timeout(self, timeout: timedelta | None) -> None:
        self._limit = None if timeout is None else timeout.total_seconds()
        if self._limit is not None:
            activity.expect_limit(self._limit)

    def set_timeout(self, timeout: timedelta) -> None:
        self._set_default_timeout(timeout)

    setTimeout = set_timeout  # noqa: N815

    def shutdown(self) -> None:
        """Finish the asynchronous calls, and free the communicators; a second call does nothing."""
        self._team.free()
        forget_done()
        _alive.discard(self)

    def abort(self) -> None:
        """Keep all that MPI may still use, and wait for nothing: the calls may never end."""
        self._team.worker.abandon()

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def _set_sequence_number_for_group(self) -> None:
        return None  # all ranks count from 0

    def _run(
        self, call: GroupCall, opts: Any, tensors: Any, step: Callable[..., None], *args: Any, writes: bool = True
    ) -> dist.Work:
        """Run a collective, now or in its turn.

        Args:
            call: the description that is compared over all ranks first.
            opts: torch's options: `asyncOp`: the caller does not block; `timeout`: the call's deadline, if
                it is above 0, instead of the group's.
            tensors: what its future will hold.
            step, args: what to run, after the team as its first argument.
            writes: whether this rank's `tensors` are written.
        """
        team, verb, found = self._team, call.verb, tensors_in(args)
        if torch_names.AsyncTensor in map(type, found):
            args = _own(args)
            found = tensors_in(args)
        sparse = step is collectives.sparse_all_reduce
        sent = [torch.empty(0, dtype=x.dtype, device=x.device) for x in found] if sparse else found
        reason = next(filter(None, map(problem, sent)), None)
        if reason is not None:
            call, found = call._replace(problem=coded("HD202", f"a tensor {reason}")), []
        elif writes:
            _check_writable(verb, tensors)
        self._calls += 1
        if any(map(Tensor.is_inference, found)):
            step, args = _on_inference, (step, *args)
        blocks, limit = opts is not None and not opts.asyncOp, self._limit
        if opts is not None and opts.timeout > _NOTHING:
            limit = opts.timeout.total_seconds()
            activity.expect_limit(limit)
        worker = team.worker

        def run(text: bytes | None = None) -> None:
            with activity.InCall(verb, team, text=text, limit=limit, tensors=found, route="mpi"), worker.running:
                agreement.checked(team, call, step, *args)

        work: Finished = DONE
        # A callback of a future (of a hook of DDP) runs before the next call of the worker, and so do its own calls.
        if ((blocks or team.size == 1) and worker.idle) or worker.inside:
            run()
            if blocks:
                return work
            work = Finished(tensors)
        else:
            events = gpu_events(found)
            if events:
                step, args = _after, (events, step, *args)
            work = Queued(verb, team, run, tensors)
        work.number = self._calls
        return work

    @_agreed("broadcast")
    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        x, root = _single(tensors), 0 if opts is None else opts.rootRank
        _check_rank("broadcast", root, self._team.size)
        call, writes = GroupCall("broadcast", sizes(x), (root,)), self._team.rank != root
        return self._run(call, opts, tensors, collectives.broadcast, x, root, writes=writes)

    @_agreed("all_reduce")
    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        if len(tensors) == 1 and tensors[0].layout is torch.sparse_coo:
            if opts is not None and opts.reduceOp != _SUM:
                raise _refusal("all_reduce", f"sparse tensors can be summed only, got {opts.reduceOp}", "HD202")
            x = tensors[0]
            call = GroupCall("all_reduce", sizes(x), (f"sparse SUM of {x.sparse_dim()} dims",))
            return self._run(call, opts, tensors, collectives.sparse_all_reduce, x)
        x = _single(tensors)
        op = _op(opts, x)
        return self._run(GroupCall("all_reduce", sizes(x), (op.name,)), opts, tensors, collectives.all_reduce, x, op)

    @_agreed("all_reduce_coalesced")
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        _check_alike("all_reduce_coalesced", tensors)
        op = _op(opts, tensors[0])
        call = GroupCall("all_reduce_coalesced", sizes(*tensors), (op.name,))
        return self._run(call, opts, tensors, collectives.coalesced, tensors, op)

    @_agreed("reduce")
    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        x, root = _single(tensors), opts.rootRank
        _check_rank("reduce", root, self._team.size)
        op = _op(opts, x)
        call, writes = GroupCall("reduce", sizes(x), (op.name, root)), self._team.rank == root
        return self._run(call, opts, tensors, collectives.reduce, x, op, root, writes=writes)

    @_agreed("all_gather")
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._gathered("all_gather", opts, outputs, inputs)

    @_agreed("all_gather_coalesced")
    def allgather_coalesced(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        columns = [list(column) for column in zip(*output_lists, strict=True)]
        return self._gathered("all_gather_coalesced", opts, columns, inputs)

    def _gathered(self, verb: str, opts: Any, outputs: list[Tensors], inputs: Tensors) -> dist.Work:
        """Gather each input of all ranks into a list of outputs."""
        for outs, x in zip(outputs, inputs, strict=True):
            _check_gathered(verb, outs, x, self._team)
        call = GroupCall(verb, sizes(*chain.from_iterable(outputs)))
        if len(inputs) == 1:
            return self._run(call, opts, outputs, collectives.all_gather, outputs[0], inputs[0])
        return self._run(call, opts, outputs, _each, collectives.all_gather, outputs, inputs)

    all_gather_single = _blocks("all_gather_single", single=True)
    all_gather_single_coalesced = _blocks("all_gather_single")
    reduce_scatter_single = _blocks("reduce_scatter_single", single=True, reduces=True)
    reduce_scatter_single_coalesced = _blocks("reduce_scatter_single", reduces=True)

    @_agreed("gather")
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        return self._rooted("gather", opts, outputs, inputs, outputs)

    @_agreed("scatter")
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        return self._rooted("scatter", opts, outputs, outputs, inputs)

    def _rooted(self, verb: str, opts: Any, result: Any, tensors: Tensors, lists: list[Tensors]) -> dist.Work:
        """Gather, or scatter: each rank has one tensor, and the root alone a list of them, checked by torch."""
        team, root, x = self._team, opts.rootRank, _single(tensors)
        _check_rank(verb, root, team.size)
        here, there = {}, {root: x}
        if team.rank == root:
            _check_gathered(verb, lists[0], x, team)
            here = dict(enumerate(lists[0]))
        sends, recvs = (there, here) if verb == "gather" else (here, there)
        call = GroupCall(verb, (), (x.dtype, root), _counts(sends), _counts(recvs))
        step = collectives.gather if verb == "gather" else collectives.exchange
        return self._run(call, opts, result, step, sends, recvs)

    @_agreed("reduce_scatter")
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        out, xs = outputs[0], inputs[0]
        _check_gathered("reduce_scatter", xs, out, self._team)
        op = _op(opts, out)
        call = GroupCall("reduce_scatter", sizes(*xs), (op.name,))
        return self._run(call, opts, outputs, collectives.reduce_scatter, out, xs, op)

    @_agreed("all_to_all")
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        if len(inputs) != self._team.size:
            raise _refusal("all_to_all", f"expected {self._team.size} tensors, one for each rank, got {len(inputs)}")
        _check_gathered("all_to_all", outputs, inputs[self._team.rank], self._team)
        _check_alike("all_to_all", [*outputs, *inputs])
        sends, recvs = dict(enumerate(inputs)), dict(enumerate(outputs))
        call = GroupCall("all_to_all", (), (inputs[0].dtype,), _counts(sends), _counts(recvs))
        return self._run(call, opts, outputs, collectives.exchange, sends, recvs)

    @_agreed("all_to_all_single")
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> dist.Work:
        _check_alike("all_to_all_single", [output, input])
        recvs = _rows("output", output, output_splits, self._team.size)
        sends = _rows("input", input, input_splits, self._team.size)
        call = GroupCall("all_to_all_single", (), (input.dtype,), sends, recvs)
        return self._run(call, opts, output, collectives.all_to_all_single, output, input, recvs, sends)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._run(GroupCall("barrier"), opts, [], collectives.barrier)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks. After `timeout` the job ends, with a table that names the ranks that are missing.

        Args:
            timeout: a timedelta, or from torch 2.14 BarrierOptions that have one; that of the group if it is not above
                0.
        """
        opts = BarrierOptions()
        opts.asyncOp, opts.timeout = False, getattr(timeout, "timeout", timeout) or _NOTHING
        self._run(GroupCall("monitored_barrier"), opts, [], collectives.barrier)

    def send(self, tensors: Tensors, dest: int, tag: int = 0) -> dist.Work:
        return send(self._team, self._message("send", tensors, dest, tag), dest, tag, self._limit)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        return recv(self._team, self._message("recv", tensors, source, tag), source, tag, self._limit)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return recv(self._team, self._message("recv", tensors, 0, tag), None, tag, self._limit)

    def _message(self, verb: str, tensors: Tensors, peer: int, tag: int) -> Tensor:
        """Check the arguments of a message; return its tensor."""
        _check_rank(verb, peer, self._team.size)
        if not 0 <= tag <= self._most_tag:
            text = f"tag {tag} is not within 0 to {self._most_tag}, which this MPI allows"
            raise _refusal(verb, text, "HD204")
        x = _single(_own(tensors))
        if (reason := problem(x)) is not None:
            raise _refusal(verb, f"the tensor {reason}", "HD202")
        return x


for _name, _older in torch_names.OLDER_METHODS.items():
    setattr(Operations, _older, vars(Operations)[_name])


def _refusal(verb: str, text: str, code: str = "HD701", kind: type[ValueError] = ValueError) -> Exception:
    return refusal(kind, code, f"{verb}: {text}")


def _single(tensors: Tensors | Tensor) -> Tensor:
    """Return the only tensor of a list."""
    return tensors if isinstance(tensors, Tensor) else tensors[0]


def _check_writable(verb: str, outputs: Any) -> None:
    """Check that tensors, in lists of any depth, have a place for each element."""
    for x in tensors_in(outputs) if isinstance(outputs, (list, tuple)) else [outputs]:
        if x.layout is torch.strided and not x.is_contiguous() and overlaps_itself(x):
            text = f"elements of the tensor of shape {tuple(x.shape)} lie in one place, as from expand(): clone() it"
            raise _refusal(verb, text, "HD202")


def _check_rank(verb: str, number: int, size: int) -> None:
    if not 0 <= number < size:
        raise _refusal(verb, f"invalid rank {number} of a group of {size}", "HD204")


def _check_alike(verb: str, tensors: Sequence[Tensor]) -> None:
    """Check that tensors have one dtype and device."""
    if not tensors:
        raise _refusal(verb, "requires a non-empty list of tensors")
    dtype, device = tensors[0].dtype, tensors[0].device
    for x in tensors:
        if x.dtype != dtype or x.device != device:
            text = f"got {x.dtype} on {x.device} and {dtype} on {device}"
            raise _refusal(verb, f"tensors must have the same dtype and device, {text}")


def _check_gathered(verb: str, many: Sequence[Tensor], x: Tensor, team: Team) -> None:
    """Check a list with a tensor for each rank, of which that of this rank has the size of `x`."""
    if len(many) != team.size:
        raise _refusal(verb, f"expected a list of {team.size} tensors, one for each rank, got {len(many)}")
    _check_alike(verb, [x, *many])
    if many[team.rank].numel() != x.numel():
        text = f"the tensor of this rank has shape {tuple(x.shape)}, the list has {tuple(many[team.rank].shape)} there"
        raise _refusal(verb, text)


def _check_multiple(verb: str, whole: Tensor, part: Tensor, size: int) -> None:
    """Check that a tensor has the size of another on each rank."""
    _check_alike(verb, [whole, part])
    if whole.numel() != part.numel() * size:
        text = f"{whole.numel()} elements of shape {tuple(whole.shape)} are not {size} times the {part.numel()} of"
        raise _refusal(verb, f"{text} shape {tuple(part.shape)}")


class SplitsError(ValueError, RuntimeError):
    """Split sizes that do not fit: a RuntimeError as well, as from torch's own backends."""


def _rows(name: str, x: Tensor, splits: Sequence[int], size: int) -> Counts:
    """Return how many elements of the rows of a tensor belong to each rank; equal parts without splits."""
    if not splits:
        if x.dim() and x.shape[0] % size == 0:
            return dict.fromkeys(range(size), x.numel() // size)
        text = f"the {name} of shape {tuple(x.shape)} does not divide equally across group size {size}"
    elif len(splits) == size and min(splits) >= 0 and sum(splits) == x.shape[0]:
        row = x.shape[1:].numel()
        return {rank: row * rows for rank, rows in enumerate(splits)}
    else:
        text = f"{name}_split_sizes {list(splits)} are not {size} that add up to dim 0 of {tuple(x.shape)}"
    raise _refusal("all_to_all_single", text, kind=SplitsError)


def _own(x: Any) -> Any:
    """Return tensors that have memory: a functional collective's result stands for one that it waits for first.

    torch's dispatcher does so for C++ groups, and calls one in Python without.
    """
    if isinstance(x, dict):
        return {rank: _own(part) for rank, part in x.items()}
    if isinstance(x, (list, tuple)):
        return [_own(part) for part in x]
    return x.trigger_wait() if isinstance(x, torch_names.AsyncTensor) else x


def _on_inference(team: Team, step: Callable[..., None], *args: Any) -> None:
    """Run a collective on tensors that can be written in inference mode only; a worker's thread is not in it."""
    with torch.inference_mode():
        step(team, *args)


def _after(team: Team, events: Sequence[torch.Event], step: Callable[..., None], *args: Any) -> None:
    """Run a collective in a worker's thread, after the work of its caller's streams, until the GPU is done with it."""
    for event in events:
        event.synchronize()
    step(team, *args)
    for event in events:
        accelerator.synchronize(event.device)


def _counts(tensors: dict[int, Tensor]) -> Counts:
    return {rank: x.numel() for rank, x in tensors.items()}


def _each(
    team: Team, step: Callable[..., None], outputs: Sequence[Any], inputs: Tensors, *columns: Sequence[Any]
) -> None:
    """Run a collective once for each input, as if all inputs had been copied before the first one writes its output."""
    flat = chain.from_iterable(output if isinstance(output, list) else [output] for output in outputs)
    if share_memory([*flat, *inputs]):
        inputs = [x.detach().clone() for x in inputs]
    for args in zip(outputs, inputs, *columns, strict=True):
        step(team, *args)


def team_of(
    whole: MPI.Intracomm, settings: Settings, peers: Sequence[int], ranks: Sequence[int], name: str = ""
) -> Team:
    """Return a team of some ranks of a communicator. Collective over these ranks alone.

    Args:
        peers: rank in the world of each rank of `whole`.
        name: the same on these ranks, and of this group alone; if "", they agree on its number.
    """
    peers = [peers[rank] for rank in ranks]
    number = digest(name, peers) & -2
    with making("a new group", peers, name):
        comm = create_group(whole, ranks, number)  # the tag separates the groups that several threads make at once
        return Team(comm, Group(comm.rank, peers), settings, number=number if name else None)


class MpiBackend(Operations, Base):  # type: ignore[misc]
    """A backend on a communicator.

    Args:
        team: its ranks; freed by shutdown().
        name: name of the backend.
        options: torch's own, or None.
    """

    def __init__(self, team: Team, name: str, options: Any, timeout: timedelta) -> None:
        Base.__init__(self, team.rank, team.size)
        self._name = name
        self._options = options if isinstance(options, Base.Options) else Base.Options(name, timeout)
        self._start(team, timeout)
        give_lazy_tensors(Operations)

    @property
    def options(self) -> Any:
        return self._options

    def getBackendName(self) -> str:  # noqa: N802
        return self._name

    @property
    def supports_splitting(self) -> bool:
        return True

    # torch 2.14 and 2.15 ask the class in Python for what the base class would answer, which asks it again.
    supports_coalescing = supports_abort_hooks = supports_reconfigure = supports_window = False
    supports_shrinking = _supports_time_estimate = False

    def split(self, store: Any, ranks: Sequence[int], options: Any) -> MpiBackend:
        """Make a backend of some ranks, on these ranks. Collective over them alone."""
        if self._team.rank not in ranks:  # torch's PyBackend ends the process by a null pointer if it gets None
            raise refusal(
                RuntimeError,
                "HD701",
                f"split_group: rank {self._team.rank} is in none of split_ranks, which torch allows no backend in "
                "Python: give the ranks that are left a group of their own, or use new_group",
            )
        timeout = torch_names.timeout_of(self._options if options is None else options) or _NOTHING
        team = team_of(self._team.comm, self._team.settings, self._team.peers, ranks)
        return MpiBackend(team, self._name, options, timeout)

    def perform_nocolor_split(self, device: Any) -> None:
        return None

    def _set_default_timeout(self, timeout: timedelta | None) -> None:
        if timeout is not None:
            torch_names.set_timeout(self._options, timeout)
        super()._set_default_timeout(timeout)


class MpiProcessGroup(Operations, dist.ProcessGroup):
    """A process group on a communicator.

    Args:
        team: its ranks; freed by shutdown().
        name: name of the backend.
    """

    def __init__(self, team: Team, name: str, timeout: timedelta) -> None:
        dist.ProcessGroup.__init__(self, team.rank, team.size)  # type: ignore[call-arg]
        self._start(team, timeout)
        self._backend_name = name
        self._group_name = self._group_desc = ""

    def name(self) -> str:
        return self._backend_name

    getBackendName = _get_backend_name = name  # noqa: N815

    # torch.distributed names a group, but the base class keeps the name in its backends only.

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._group_desc = desc

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    # torch.distributed.checkpoint asks whether a group is for host memory; the base class knows C++ backends alone.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> MpiProcessGroup:  # type: ignore[override]
        return self

    def _has_hooks(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._group_name!r}: rank {self._team.rank} of {self._team.size}>"


_observed = observed(Operations)
for _name, _method in _observed.items():
    setattr(MpiProcessGroup, _name, _method)
# DDP's forward calls them within what torch compiles, and waits for them there.
torch_names.not_compiled([Operations, Finished, Queued, Transfer, *_observed.values()])
