"""Every private name of torch that this package uses, once: what it is for, and what happens in a torch without it.

torch may rename them in any version. So each is looked up when this module is imported, and has a default with which
the rest of the package works. A feature that cannot do without its name calls :func:`need` when it is used. No other
module names anything private of torch; tests/test_torch_names.py checks that, and takes away each name in turn.
"""

from __future__ import annotations

import importlib
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from hpcdist.errors import refusal

TESTED = "2.15"  # the newest torch that the tests have run with; the oldest is in setup.cfg


class Name(NamedTuple):
    """A private name: where it is, its use, and what a torch without it means for users."""

    path: str
    use: str
    without: str


NAMES: list[Name] = []


def _find(path: str) -> Any:
    """Return what a path names, ``MODULE:NAME``; None if this torch does not have it."""
    module, _, name = path.partition(":")
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def _name(path: str, use: str, without: str, default: Any = None) -> Any:
    """Enter a name in the table; return what it names, or `default` if this torch does not have it."""
    NAMES.append(Name(path, use, without))
    value = _find(path)
    return default if value is None else value


def _attribute(path: str, use: str, without: str, default: Any = None, *thing: Any) -> Callable[..., Any]:
    """Enter an attribute of objects in the table; return a function that reads it, of `thing` if that is given, or
    returns `default`."""
    NAMES.append(Name(path, use, without))
    attribute = path.replace(":", ".").rpartition(".")[2]
    return partial(getattr, *thing, attribute, default) if thing else lambda x: getattr(x, attribute, default)


def need(name: str, feature: str) -> Exception:
    """Return the error of a feature that cannot do without what a name stands for, which this torch does not have."""
    text = f"{feature} needs {name} of torch, which this torch {torch.__version__} does not have"
    return refusal(RuntimeError, "HD102", f"{text}: install torch {TESTED} or older")


def warn_if_newer() -> None:
    """Warn if this torch is newer than any that was tested."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) > tuple(map(int, TESTED.split("."))):
        text = f"torch {torch.__version__} is newer than {TESTED}, the newest that this hpcdist was tested with [HD102]"
        warnings.warn(text, stacklevel=3)


# What surrounds a call: modes, tracers and transforms that would record it without moving data.

_UNSEEN = "a call within {} is not refused, and may move no data"
mode_count = _name(
    "torch._C:_len_torch_dispatch_stack",
    "whether the program runs within a dispatch mode, such as FakeTensorMode",
    _UNSEEN.format("a dispatch mode"),
    lambda: 0,
)
modes = _name(
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
    "which dispatch modes these are",
    _UNSEEN.format("a dispatch mode"),
    tuple,
)
mode_key = _attribute(
    "torch.utils._python_dispatch:TorchDispatchMode._mode_key",
    "tells modes that replace operations from those that observe them",
    _UNSEEN.format("a dispatch mode"),
)
FakeTensor = _name(
    "torch._subclasses:FakeTensor",
    "calls of torch's collectives over backend mpi have a result under FakeTensorMode, up to torch 2.13",
    "they are refused there",
    type(None),
)
transform = _name(
    "torch._C._functorch:peek_interpreter_stack",
    "whether a call is within vmap, grad or another transform of torch.func",
    _UNSEEN.format("torch.func"),
    lambda: None,
)
is_batched = _name(
    "torch._C._functorch:is_batchedtensor",
    "whether a gradient is one of a batch (vmap over a backward pass)",
    "vmap over a backward pass is not refused by name",
    lambda x: False,
)
is_legacy_batched = _name(
    "torch._C._functorch:is_legacy_batchedtensor",
    "the same, of torch.autograd.grad(is_grads_batched=True)",
    "is_grads_batched=True is not refused by name",
    lambda x: False,
)
is_jit_tracing: Callable[[], bool] = getattr(torch.jit, "is_tracing", lambda: False)  # public, but on its way out
is_fx_tracing = _name(
    "torch.fx._symbolic_trace:is_fx_symbolic_tracing",
    "whether torch.fx traces the program",
    _UNSEEN.format("torch.fx.symbolic_trace"),
    lambda: False,
)
_FrameAction = _name(
    "torch._C._dynamo.eval_frame:_FrameAction",
    "excludes this package's functions from torch.compile without an import of the compiler",
    "torch.compile traces into this package, and breaks its graph there in more places",
)
_FrameExecStrategy = _name("torch._C._dynamo.eval_frame:_FrameExecStrategy", *NAMES[-1][1:])
_set_code_exec_strategy = _name("torch._C._dynamo.eval_frame:set_code_exec_strategy", *NAMES[-1][1:])


def not_compiled(public: Iterable[object]) -> None:
    """Exclude these functions, the methods of these classes, the public names of these modules, and all that they call
    from torch.compile.

    It breaks its graph there and runs them eagerly, as after torch.compiler.disable, which would import the compiler
    (seconds) and wrap every call.
    """
    if _FrameAction is None or _FrameExecStrategy is None or _set_code_exec_strategy is None:
        return
    for item in public:
        if isinstance(item, type):
            not_compiled(vars(item).values())
        elif isinstance(item, ModuleType):
            not_compiled(vars(item)[name] for name in item.__all__)
        elif isinstance(item, FunctionType):
            item._torchdynamo_disable = True  # type: ignore[attr-defined]
            item._torchdynamo_disable_msg = "hpcdist moves data between processes"  # type: ignore[attr-defined]
            skip = _FrameAction.SKIP
            _set_code_exec_strategy(item.__code__, _FrameExecStrategy(skip, skip))


# The memory of tensors

handle_of_storage = _attribute(
    "torch:UntypedStorage._cdata",
    "counts the references to a block of the pool",
    "no pool: large results take new memory each time (hpcdist.memory.memory_stats() says so)",
)
references_of_storage = _name("torch._C:_storage_Use_Count", *NAMES[-1][1:])
base_of = _attribute("torch:Tensor._base", *NAMES[-1][1:])
offset_in_file = _attribute(
    "torch:UntypedStorage._checkpoint_offset",
    "where the bytes of a tensor lie in a .pt file",
    "a .pt file is read by torch.load, whole",
)
forward_level = _attribute(
    "torch.autograd.forward_ad:_current_level",
    "whether forward-mode gradients are in use, without a call of torch",
    "calls are some microseconds slower, since each tensor is looked at",
    0,
    forward_ad,
)
"""Return the level of forward-mode gradients; below 0 there are none."""

# torch.distributed: groups, works and their options

BackendBase = getattr(dist, "BackendBase", None) or _name(
    "torch._C._distributed_c10d:Backend",
    "the class of which a backend in Python is one, from torch 2.14 on",
    "backend mpi replaces a whole group, as up to torch 2.13",
)
PLUGINS = BackendBase is not None and hasattr(dist.ProcessGroup, "register_pre_hook")
"""Whether a backend in Python can be one of several of a group, from torch 2.14 on."""
AsyncTensor = _name(
    "torch.distributed._functional_collectives:AsyncCollectiveTensor",
    "the result of a functional collective, which backend mpi waits for before it reads it",
    "backend mpi reads such a result too early; call wait_tensor() on it",
    type(None),
)
works_registered = _name(
    "torch._C._distributed_c10d:_get_work_registry_size",
    "removes a finished work of backend mpi from torch's register of work in flight",
    "torch keeps the tensors of functional collectives over backend mpi until they are waited for",
    lambda: 0,
)
wait_tensor = _name("torch.ops:_c10d_functional.wait_tensor", *NAMES[-1][1:], lambda x: x)
is_profiled = _name(
    "torch.autograd:_profiler_enabled",
    "torch's collectives over backend mpi are events of torch.profiler, up to torch 2.13",
    "each takes some microseconds longer",
    lambda: True,
)
DispatchKey = _name(
    "torch._C:DispatchKey",
    "torch's collectives over backend mpi write lazily conjugated and negated tensors, from torch 2.14 on",
    "the dispatcher drops what they write into such a tensor: call resolve_neg() on it first",
)
default_store = _name(
    "torch.distributed.distributed_c10d:_get_default_store",
    "the store of the job, by which routes nccl and gloo connect",
    "routes nccl and gloo cannot be used (HD102); route mpi can",
)
start_coalescing = _attribute(
    "torch.distributed:ProcessGroup._start_coalescing",
    "makes messages of route nccl that may wait for each other one operation",
    "route nccl sends no messages (HD102)",
)
end_coalescing = _attribute("torch.distributed:ProcessGroup._end_coalescing", *NAMES[-1][1:])
_allgather_base = _attribute(
    "torch.distributed:ProcessGroup._allgather_base",
    "gathers blocks of one size on route nccl into one tensor",
    "NCCL's results are copied once more",
)


def gather_blocks(group: Any, whole: Tensor, block: Tensor, options: Any) -> Any:
    """Gather the blocks of all ranks of a group, of one size, into contiguous memory; return torch's work, or None."""
    at_once = _allgather_base(group)
    if at_once is None:
        return group.allgather([list(whole.view(group.size(), -1))], [block.view(-1)], options)
    return at_once(whole, block, options)


device_types = _attribute(
    "torch.distributed:ProcessGroup._device_types",
    "which backends a group of torch has, for the record of its calls",
    "calls of torch's own groups are not in the table of a hang",
    (),
)
backend_of = _attribute("torch.distributed:ProcessGroup._get_backend", *NAMES[-1][1:])
launched = _attribute(
    "torch.distributed:ProcessGroup._get_sequence_number_for_group",
    "how many collectives a rank has launched on its GPU, by which the watch finds those that wait",
    "a hang in torch's own collectives on GPUs ends with torch's error, without the table",
)
_timeout = _attribute(
    "torch.distributed:ProcessGroup.Options._timeout",
    "the deadline of a group",
    "groups of routes nccl and gloo have torch's default deadline",
)


def timeout_of(options: Any) -> timedelta | None:
    """Return the deadline in the options of a backend; None if it has none."""
    timeout = _timeout(options)
    return timeout if isinstance(timeout, timedelta) else None


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the deadline in the options of a backend."""
    if timeout_of(options) is not None:
        options._timeout = timeout


_UPLOAD = (
    "torch.distributed.checkpoint._async_process_executor:_ProcessBasedAsyncCheckpointExecutor._execute_save_impl",
    "dcp.async_save in a process: later saves and loads wait for the threads in which this runs",
    "they do not wait: wait on the future of each save before the next call",
)
NAMES.append(Name(*_UPLOAD))


def uploads(thread: threading.Thread) -> bool:
    """Whether a thread is one of ``dcp.async_save``; with AsyncCheckpointerType.PROCESS it has no name of its own."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_qualname != _UPLOAD[0].rpartition(":")[2]:
        frame = frame.f_back
    return frame is not None or thread.name.startswith("AsyncCheckpointExecutor")


class Attribute(NamedTuple):
    """Where torch keeps something that this package replaces while there is a world."""

    owner: Any  # a module, or a dict
    name: str


def _place(path: str, use: str, without: str) -> Attribute | None:
    """Enter the place of a private name in the table; None if this torch does not have it."""
    module, _, name = path.partition(":")
    return None if _name(path, use, without) is None else Attribute(importlib.import_module(module), name)


group_maker = _place(
    "torch.distributed.distributed_c10d:_new_process_group_helper",
    "groups of gloo and NCCL find the network interfaces by which the ranks have met; hpcdist run --mpi replaces gloo",
    "gloo and NCCL choose their interfaces by themselves, and hpcdist run --mpi leaves gloo as it is",
)
group_register = _place(
    "torch.distributed.distributed_c10d:_register_process_group",
    "records the calls of torch's own groups, from torch 2.14 on",
    "calls of torch's own groups are not in the table of a hang",
)
_handlers = _name(
    "torch.distributed.rendezvous:_rendezvous_handlers",
    "init_process_group() connects the ranks through MPI while there is a world",
    "it connects them through the store at MASTER_ADDR, as under torchrun",
)
env_handler = Attribute(_handlers, "env") if isinstance(_handlers, dict) and "env" in _handlers else None
_NAME_GROUPS = "torch.distributed.distributed_c10d:_world.pg_map"
NAMES.append(Name(_NAME_GROUPS, *NAMES[-2][1:]))


def groups() -> list[Any]:
    """Return the groups of torch that this process is in."""
    return list(_find(_NAME_GROUPS) or ())


# The methods of a process group in Python by their names until torch 2.12, which the dispatcher's operations have.
OLDER_METHODS = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "recv_anysource": "recv_any_source",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
