"""The operations of a process group by the names that torch calls them, for all of torch's interfaces.

Each checks its arguments on this rank, and then runs at once, if torch says that its caller blocks and no earlier
asynchronous call of the group is under way; else in the group's queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist import activity
from hpcdist.backend import agreement, collectives, operands, p2p, sparse
from hpcdist.backend.agreement import Call, Counts, sizes
from hpcdist.backend.host_copies import Spans, gpu_events
from hpcdist.backend.monitored import monitored_barrier
from hpcdist.backend.reductions import reduction
from hpcdist.backend.works import DONE, Finished, Queued
from hpcdist.errors import refusal
from hpcdist.tensors import accelerator, eager

if TYPE_CHECKING:
    from hpcdist.backend.communicator import Communicator

__all__ = ["Operations"]

Tensors = list[Tensor]
_BARRIER = 1800  # seconds, as torch's default
_NOTHING = timedelta(0)


class Operations:
    """Collectives and messages on the ranks of `_team`."""

    _team: Communicator
    _calls = 0  # collectives so far

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def _set_sequence_number_for_group(self) -> None:
        return None  # all ranks count from 0

    def _run(
        self, call: Call, opts: Any, tensors: Any, step: Callable[..., None], *args: Any, writes: bool = True
    ) -> dist.Work:
        """Run a collective, now or in its turn.

        Args:
            call: what is compared over all ranks first.
            opts: torch's options: `asyncOp`: the caller does not block; `timeout`: the call's deadline, if
                it is above 0, instead of the group's.
            tensors: what its future will hold.
            step, args: what to run, after the communicator as its first argument.
            writes: whether this rank's `tensors` are written.
        """
        team, verb = self._team, call.verb
        if writes:
            operands.writable(verb, tensors)
        self._calls += 1
        if _holds_inference(args):
            step, args = _on_inference, (step, *args)
        blocks, limit = opts is not None and not opts.asyncOp, team.limit
        if opts is not None and opts.timeout > _NOTHING:
            limit = opts.timeout.total_seconds()
            activity.expect_limit(limit)
        # A callback of a future (of a hook of DDP) runs before the next call of the queue, and so do its own calls.
        inside = team.queue.inside
        if not inside:
            team.note_thread()
        if inside or ((blocks or team.size == 1) and team.queue.idle):
            with activity.InCall(verb, team, limit=limit, tensors=args):
                try:
                    with team.queue.running:
                        agreement.checked(team, call, step, *args)
                except BaseException as error:
                    agreement.fail(error, verb, team.size)
                    raise
            if blocks:
                return DONE
            done = Finished(tensors)
            done.number = self._calls
            return done
        events = gpu_events(args)
        step, args = agreement.checked, (call, step, *args)
        if events:
            step, args = _after, (events, step, *args)
        work = Queued(verb, team, limit, step, args, tensors)
        work.number = self._calls
        team.queue.submit(work)
        return work

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        x, root = operands.single("broadcast", tensors), 0 if opts is None else opts.rootRank
        operands.rank("broadcast", root, self._team.size)
        call, writes = Call("broadcast", sizes(x), (root,)), self._team.rank != root
        return self._run(call, opts, tensors, collectives.broadcast, x, root, writes=writes)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        if len(tensors) == 1 and tensors[0].layout is torch.sparse_coo:
            operands.sums("all_reduce", opts)
            x = tensors[0]
            call = Call("all_reduce", sizes(x), (f"sparse SUM of {x.sparse_dim()} dims",))
            return self._run(call, opts, tensors, sparse.all_reduce, x)
        x = operands.single("all_reduce", tensors)
        op = reduction(operands.SUM if opts is None else opts.reduceOp, x.dtype)
        return self._run(Call("all_reduce", sizes(x), (op.name,)), opts, tensors, collectives.all_reduce, x, op)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        operands.alike("all_reduce_coalesced", tensors)
        op = reduction(operands.SUM if opts is None else opts.reduceOp, tensors[0].dtype)
        call = Call("all_reduce_coalesced", sizes(*tensors), (op.name,))
        return self._run(call, opts, tensors, collectives.coalesced, tensors, op)

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        x, root = operands.single("reduce", tensors), opts.rootRank
        operands.rank("reduce", root, self._team.size)
        op = reduction(opts.reduceOp, x.dtype)
        call, writes = Call("reduce", sizes(x), (op.name, root)), self._team.rank == root
        return self._run(call, opts, tensors, collectives.reduce, x, op, root, writes=writes)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        outs, x = operands.single_list("all_gather", outputs), operands.single("all_gather", inputs)
        operands.gathered("all_gather", outs, x, self._team)
        return self._run(Call("all_gather", sizes(*outs)), opts, outputs, collectives.all_gather, outs, x)

    def allgather_coalesced(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        if len(output_lists) != self._team.size:
            raise refusal(
                ValueError,
                "HD701",
                f"all_gather_coalesced: {len(output_lists)} output lists for {self._team.size} ranks",
            )
        columns = [list(column) for column in zip(*output_lists, strict=True)]
        for outs, x in zip(columns, inputs, strict=True):
            operands.gathered("all_gather_coalesced", outs, x, self._team)
        call = Call("all_gather_coalesced", sizes(*(out for outs in columns for out in outs)))
        return self._run(call, opts, output_lists, _each, collectives.all_gather, columns, inputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        operands.multiple("all_gather_single", output, input, self._team.size)
        call = Call("all_gather_single", sizes(output))
        return self._run(call, opts, output, collectives.all_gather_single, output, input)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        verb = "all_gather_single_coalesced"
        for output, x in zip(outputs, inputs, strict=True):
            operands.multiple(verb, output, x, self._team.size)
        call = Call(verb, sizes(*outputs))
        return self._run(call, opts, outputs, _each, collectives.all_gather_single, outputs, inputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        x, root = operands.single("gather", inputs), opts.rootRank
        outs = operands.rooted("gather", outputs, root, self._team)
        if outs:
            operands.gathered("gather", outs, x, self._team)
        call = Call("gather", (), (x.dtype, root), {root: x.numel()}, _counts(outs))
        return self._run(call, opts, outputs, collectives.gather, outs, x, root)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        out, root = operands.single("scatter", outputs), opts.rootRank
        xs = operands.rooted("scatter", inputs, root, self._team)
        if xs:
            operands.gathered("scatter", xs, out, self._team)
        call = Call("scatter", (), (out.dtype, root), _counts(xs), {root: out.numel()})
        return self._run(call, opts, outputs, collectives.scatter, out, xs, root)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        out, xs = operands.single("reduce_scatter", outputs), operands.single_list("reduce_scatter", inputs)
        operands.gathered("reduce_scatter", xs, out, self._team)
        op = reduction(operands.SUM if opts is None else opts.reduceOp, out.dtype)
        call = Call("reduce_scatter", sizes(*xs), (op.name,))
        return self._run(call, opts, outputs, collectives.reduce_scatter, out, xs, op)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        operands.multiple("reduce_scatter_single", input, output, self._team.size)
        op = reduction(operands.SUM if opts is None else opts.reduceOp, output.dtype)
        call = Call("reduce_scatter_single", sizes(input), (op.name,))
        return self._run(call, opts, output, collectives.reduce_scatter_single, output, input, op)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        verb = "reduce_scatter_single_coalesced"
        for output, x in zip(outputs, inputs, strict=True):
            operands.multiple(verb, x, output, self._team.size)
        kind = operands.SUM if opts is None else opts.reduceOp
        ops = [reduction(kind, output.dtype) for output in outputs]
        call = Call(verb, sizes(*inputs), tuple(op.name for op in ops[:1]))
        return self._run(call, opts, outputs, _each, collectives.reduce_scatter_single, outputs, inputs, ops)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        operands.exchanged("all_to_all", outputs, inputs, self._team)
        call = Call("all_to_all", (), (inputs[0].dtype,), _counts(inputs), _counts(outputs))
        return self._run(call, opts, outputs, collectives.all_to_all, outputs, inputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        splits = list(output_split_sizes or ()), list(input_split_sizes or ())
        operands.splits("all_to_all_single", output, input, *splits, self._team.size)
        recvs, sends = (self._row_counts(x, rows) for x, rows in zip((output, input), splits, strict=True))
        call = Call("all_to_all_single", (), (input.dtype,), sends, recvs)
        return self._run(call, opts, output, collectives.all_to_all_single, output, input, *splits)

    def _row_counts(self, x: Tensor, splits: Sequence[int]) -> Counts:
        """Return the elements of the rows of each rank; equal parts without splits."""
        row = x.shape[1:].numel()
        return {rank: row * rows for rank, rows in enumerate(splits)} if splits else x.numel() // self._team.size

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._run(Call("barrier"), opts, [], collectives.barrier)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; raise an error that names those that do not come within `timeout`.

        Args:
            timeout: a timedelta, or from torch 2.14 BarrierOptions that have one; if below 0, that of the group.
        """
        team = self._team
        self._barriers = number = getattr(self, "_barriers", 0) + 1
        timeout = getattr(timeout, "timeout", timeout)
        if timeout is None or timeout < timedelta(0):
            timeout = timedelta(seconds=team.limit or _BARRIER)
        with activity.InCall("monitored_barrier", team, activity.NOBODY):
            monitored_barrier(team, number, timeout, wait_all_ranks)

    def send(self, tensors: Tensors, dest: int, tag: int = 0) -> dist.Work:
        x = operands.single("send", tensors)
        operands.rank("send", dest, self._team.size)
        operands.tag("send", tag, self._team.most_tag)
        return p2p.send(self._team, x, dest, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        x = operands.single("recv", tensors)
        operands.rank("recv", source, self._team.size)
        operands.tag("recv", tag, self._team.most_tag)
        return p2p.recv(self._team, x, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        operands.tag("recv", tag, self._team.most_tag)
        return p2p.recv(self._team, operands.single("recv", tensors), None, tag)

    # The names of older and newer versions of torch.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _holds_inference(args: Sequence[Any]) -> bool:
    """Whether there are tensors of torch.inference_mode() among nested lists."""
    for arg in args:
        if arg.is_inference() if isinstance(arg, Tensor) else isinstance(arg, (list, tuple)) and _holds_inference(arg):
            return True
    return False


def _on_inference(team: Communicator, step: Callable[..., None], *args: Any) -> None:
    """Run a collective on tensors that can be written in inference mode only; a queue's thread is not in it."""
    with torch.inference_mode():
        step(team, *args)


def _after(team: Communicator, events: Sequence[torch.Event], step: Callable[..., None], *args: Any) -> None:
    """Run a collective in a queue's thread, after the work of its caller's streams, until the GPU is done with it."""
    for event in events:
        event.synchronize()
    step(team, *args)
    for event in events:
        accelerator.synchronize(event.device)


def _counts(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Return the number of elements of the tensor of each rank."""
    return {rank: x.numel() for rank, x in enumerate(tensors)}


def _each(
    team: Communicator, step: Callable[..., None], outputs: Sequence[Any], inputs: Tensors, *columns: Sequence[Any]
) -> None:
    """Run a collective once for each input, as if all inputs had been copied before the first one writes its output."""
    flat = [output if isinstance(output, list) else [output] for output in outputs]
    written = Spans(chain.from_iterable(flat))
    disjoint = written.disjoint
    inputs = [
        x if not written.meet(x) or (disjoint and Spans(own).hold(x)) else x.detach().clone()
        for own, x in zip(flat, inputs, strict=True)
    ]
    for args in zip(outputs, inputs, *columns, strict=True):
        step(team, *args)


# DDP's forward calls them within what torch compiles, and waits for them there.
eager.not_compiled([Operations, Finished, Queued, p2p.Transfer])
