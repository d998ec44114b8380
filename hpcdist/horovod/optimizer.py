"""DistributedOptimizer, and what a training broadcasts at its start."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hpcdist.errors import refusal
from hpcdist.horovod.differentiable import (
    Compression,
    _op,
    allgather_async,
    allreduce_async_,
    broadcast_async_,
    sparse_allreduce_async,
)
from hpcdist.horovod.negotiation import Average, synchronize
from hpcdist.horovod.process_sets import ProcessSet, global_process_set, rank
from hpcdist.runtime import world

__all__ = [
    *("DistributedOptimizer", "allgather_object", "broadcast_object", "broadcast_optimizer_state"),
    "broadcast_parameters",
]


class _Distributed(torch.optim.Optimizer):
    """What an optimizer gets: gradients are reduced before its step."""

    _parameter_names: dict[Tensor, str]
    _options: dict[str, Any]

    def _prepare(self, backward_passes_per_step: int, compression: Any, sparse_as_dense: bool, **options: Any) -> None:
        self.backward_passes_per_step, self._compression = backward_passes_per_step, compression
        self._sparse_as_dense, self._options, self.process_set = sparse_as_dense, options, options["process_set"]
        self._passes: Counter[Tensor] = Counter()  # backward passes since the last synchronize(), by parameter
        self._synchronized, self._skips = False, False
        self._required = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        for p in self._required:
            p.register_post_accumulate_grad_hook(self._count)

    def _count(self, p: Tensor) -> None:
        self._passes[p] += 1
        if self._passes[p] > self.backward_passes_per_step:
            text = (
                f"the gradient of {self._parameter_names[p]} was computed more than backward_passes_per_step="
                f"{self.backward_passes_per_step} times before step()"
            )
            raise refusal(AssertionError, "HD112", text)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before each step."""
        self.backward_passes_per_step = passes
        self._passes.clear()

    def load_state_dict(self, *args: Any, **options: Any) -> None:
        self._passes.clear()
        self._synchronized = False
        super().load_state_dict(*args, **options)

    def synchronize(self) -> None:
        """Reduce the gradients of all parameters. Collective over the process set. One that this rank has not computed
        counts as zeros."""
        if self.process_set.included():
            for p, handle, ctx in [(p, *self._submit(p)) for p in self._required]:
                assert p.grad is not None
                found = handle() if callable(handle) else self._compression.decompress(synchronize(handle), ctx)
                if p.grad.is_sparse:
                    p.grad = found.to(p.grad.dtype) if found.is_sparse else found.to_sparse()
                elif found is not p.grad:
                    p.grad.copy_(found)
        self._passes.clear()
        self._synchronized = True

    def _submit(self, p: Tensor) -> tuple[Any, Any]:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        name, grad = self._parameter_names[p], p.grad
        if grad.is_sparse and not self._sparse_as_dense:
            return sparse_allreduce_async(grad, name, self._options["op"], self.process_set), None
        sent, ctx = self._compression.compress(grad.to_dense() if grad.is_sparse else grad)
        return allreduce_async_(sent, name=name, **self._options), ctx

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
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are reduced twice.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """Zero the gradients; not between backward() and step()."""
        if self._passes:
            text = "zero_grad() is called after backward() and before step() or synchronize()"
            raise refusal(AssertionError, "HD112", text)
        super().zero_grad(*args, **options)


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class that reduces the gradients of all ranks before each step.

    Args:
        named_parameters: such as ``model.named_parameters()``; all parameters of the optimizer, or None.
        compression: what gradients are sent as: Compression.none, fp16 or bf16.
        backward_passes_per_step: the number of backward passes whose gradients add up before a step.
        op: Average, Sum, Min, Max or Product.
        gradient_predivide_factor: with Average, gradients are divided by it before they are added, and multiplied by it
            after.
        num_groups, groups: checked, and not used: all gradients are fused.
        sparse_as_dense: whether sparse gradients are made dense and reduced, or gathered.
        process_set: the ranks that reduce; the others keep their own gradients.
    """
    if gradient_predivide_factor != 1 and op != Average:
        raise refusal(ValueError, "HD701", f"gradient_predivide_factor needs op=Average, got op={op}")
    if backward_passes_per_step <= 0:
        raise refusal(
            ValueError, "HD701", f"backward_passes_per_step is {backward_passes_per_step}: expected 1 or more"
        )
    _check_groups(groups if groups is not None else num_groups)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    named = [(f"noname.{i}", p) for i, p in enumerate(params)] if named_parameters is None else list(named_parameters)
    if any(not isinstance(one, tuple) for one in named):
        raise refusal(ValueError, "HD701", "named_parameters: expected pairs of name and parameter")
    if twice := [name for name, count in Counter(name for name, _ in named).items() if count > 1]:
        raise refusal(ValueError, "HD701", f"named_parameters: names must be unique, found twice: {', '.join(twice)}")
    names = {p: name for name, p in named}
    if missing := sum(p not in names for p in params):
        raise refusal(ValueError, "HD701", f"named_parameters: {missing} parameters of the optimizer have no name")
    kind = type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (_Distributed, kind), {"__module__": __name__}))
    made.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})  # a scheduler's
    made._parameter_names = names
    factors = {"prescale_factor": 1 / gradient_predivide_factor, "postscale_factor": gradient_predivide_factor}
    made._prepare(
        backward_passes_per_step, compression, sparse_as_dense, op=_op(op), process_set=process_set, **factors
    )
    return made


def _check_groups(groups: Any) -> None:
    if isinstance(groups, int):
        good = groups >= 0
    else:
        members = [p for group in groups for p in group]
        good = all(isinstance(p, Tensor) for p in members) and len(set(members)) == len(members)
    if not good:
        text = "groups: expected a number, 0 or more, or lists of parameters, each parameter once"
        raise refusal(ValueError, "HD701", text)


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Write the root's parameters into those of every rank.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
    """
    pairs = (
        sorted(params.items())
        if isinstance(params, dict)
        else [p if isinstance(p, tuple) else (None, p) for p in params]
    )
    for handle in [broadcast_async_(p, root_rank, name) for name, p in pairs]:
        synchronize(handle)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Load the root's state of the optimizer on every rank: momenta, step counts, learning rates.

    Args:
        model: not used.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise refusal(ValueError, "HD701", "the state of torch.optim.LBFGS cannot be broadcast")
    leaves, spec = pytree.tree_flatten(optimizer.state_dict())
    described = [x.to("meta") if isinstance(x, Tensor) else x for x in leaves]
    gpus = [isinstance(x, Tensor) and x.device.type != "cpu" for x in leaves]
    described, gpus, spec = broadcast_object((described, gpus, spec), root_rank)
    if rank() != root_rank:
        device = world.current().device
        leaves = [
            torch.empty_like(x, device=device if gpu else "cpu") if isinstance(x, Tensor) else x
            for x, gpu in zip(described, gpus, strict=True)
        ]
    for handle in [broadcast_async_(x, root_rank) for x in leaves if isinstance(x, Tensor)]:
        synchronize(handle)
    if rank() != root_rank:
        optimizer.load_state_dict(pytree.tree_unflatten(leaves, spec))


def _gather_pickles(data: bytes, name: str | None, process_set: ProcessSet) -> list[bytes]:
    mine = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
    handle = allgather_async(mine, name, process_set)
    whole = synchronize(handle)
    return [part.numpy().tobytes() for part in whole.split(handle.rows[0])]


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on every rank, by pickle. `root_rank` is a rank of the world."""
    members = process_set.ranks or []
    if root_rank not in members:
        raise refusal(ValueError, "HD204", f"broadcast_object: root_rank {root_rank} is not in {process_set}")
    found = _gather_pickles(pickle.dumps(obj) if rank() == root_rank else b"", name, process_set)
    return obj if rank() == root_rank else pickle.loads(found[members.index(root_rank)])


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks on every rank, by pickle."""
    return [pickle.loads(data) for data in _gather_pickles(pickle.dumps(obj), name, global_process_set)]
