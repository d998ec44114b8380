"""The calls of torch's own process groups, those of NCCL and gloo, in the record of calls: from torch 2.14, by hooks.

A call on the CPU is recorded until its work is done. One on a GPU is recorded when it has been issued, because its
progress is known to the stream alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from hpcdist import activity, torch_names
from hpcdist.activity import callsite
from hpcdist.tensors import accelerator
from hpcdist.watch.hang_table import ISSUED

OURS = ("mpi", "mpi4py")  # backends that record their calls themselves
_HOOK = 0x68706364  # identifies this module's hooks among those of a group
_EARLIER, _PART = 10.0, 0.25  # the deadline in the record is earlier than torch's: by a quarter, 10 seconds at most
_MESSAGES = ("SEND", "RECV")
_recorded: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # groups that have the hooks
_issuing = threading.local()  # `call`: group, number of the hook, whether on the CPU, whether it waits for all ranks


def _name_of(operation: str) -> str:
    """Return the name of torch's function for the name of an operation of a hook."""
    name = operation.removesuffix("_BASE").lower()
    return {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}.get(name, name)


class TorchGroup:
    """A process group of torch as the record of calls counts it, and its hooks.

    Attributes:
        number, begun: see :class:`hpcdist.activity.InCall`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.begun = 0
        name = group.group_name
        digest = blake2b(f"torch {name}".encode(), digest_size=8).digest()
        self.number = int.from_bytes(digest, "little") >> 2 << 1 or 2  # an odd number would be one in the background

    @cached_property
    def _backends(self) -> dict[str, tuple[str, float | None]]:
        """Name and deadline in seconds of the backend of each type of device."""
        group = self._group()
        assert group is not None
        backends: dict[str, tuple[str, float | None]] = {}
        for device in torch_names.device_types(group):
            backend = torch_names.backend_of(group)(device)
            limit = _limit(backend)
            backends[device.type] = backend.name(), limit
            if limit:
                activity.expect_limit(limit)
        if not {name for name, _ in backends.values()} <= {*OURS}:
            activity.peers[self.number] = dist.get_process_group_ranks(group)
            weakref.finalize(group, activity.forget, self.number).atexit = False
        return backends

    def _device(self, args: Any) -> str:
        """Return the type of device of a call."""
        devices = list(self._backends)
        if len(devices) == 1 or len({name for name, _ in self._backends.values()}) == 1:
            return "cpu" if "cpu" in devices else devices[0]
        x = next(iter(args.input_tensors or args.output_tensors), None)
        if isinstance(x, torch.Tensor):
            return x.device.type
        return next(device for device in devices if device != "cpu")  # torch has the GPU of a barrier's group wait

    def begin(self, args: Any) -> None:
        """Record that a call begins: a pre-hook."""
        own = activity.thread_calls() if activity.thread_records else None
        if own is None or own.depth:  # there is no world, or this library makes the call
            return
        device = self._device(args)
        name, limit = self._backends.get(device, ("", None))
        if not name or name in OURS:
            return
        operation = args.name.name
        peer = args.root if operation in _MESSAGES else None
        if peer is None:
            self.begun += 1
        number = self.begun if peer is None else -1 - (peer if peer >= 0 else activity.ANYBODY)
        kind = f"{_name_of(operation)}() {'of ' if device == 'cpu' else ISSUED.lstrip()}{name}"
        own.record.patient = True  # if issuing it raises, no hook reports its end
        own.record.limit = limit
        own.record.tensors = args.input_tensors or args.output_tensors
        own.record.route = name
        own.record.begin(self.number, number, callsite.where(kind))
        _issuing.call = (self, args.op_id, device == "cpu", peer is None)

    def end(self, args: Any) -> None:
        """Record that a call was issued: a post-hook."""
        own, call = activity.thread_calls() if activity.thread_records else None, getattr(_issuing, "call", None)
        if own is None or own.depth or call is None or call[:2] != (self, args.op_id):
            return
        _, _, on_cpu, waits_for_all = call
        _issuing.call = None
        if on_cpu and args.work is not None:
            own.record.patient = not waits_for_all  # a message has no fixed position among the receiver's calls
            own.record.follow(args.work)
        else:
            own.record.end()


def launched() -> tuple[dict[str, int], float]:
    """Return the number of collectives launched in each of torch's groups on GPUs, and their latest deadline."""
    numbers, latest = dict[str, int](), 0.0
    for group in torch_names.groups():
        with suppress(Exception):  # the group is for host memory, or torch does not report its number
            backend = torch_names.backend_of(group)(torch.device(accelerator.KIND))
            numbers[group.group_name] = torch_names.launched(backend)()
            latest = max(latest, _limit(backend) or inf)
    return numbers, latest or inf


def _limit(backend: object) -> float | None:
    """Return the deadline of a backend's calls in seconds, earlier than torch's own."""
    timeout = torch_names.timeout_of(getattr(backend, "options", None))
    limit = None if timeout is None else timeout.total_seconds()
    return limit and limit - min(_EARLIER, _PART * limit)


def _record(group: Any) -> None:
    """Record the calls of a group from now on; a second time does nothing."""
    if group in _recorded:
        return
    _recorded.add(group)
    calls = TorchGroup(group)
    group.register_pre_hook(_HOOK, calls.begin)
    group.register_post_hook(_HOOK, calls.end)


def recording(register: Callable[..., None]) -> Callable[..., None]:
    """Record the calls of all groups that torch has made, and return a function that replaces the one by which it
    registers each new group, and records their calls, too."""

    def registered(name: str, group: dist.ProcessGroup) -> None:
        register(name, group)
        _record(group)

    for group in torch_names.groups():
        _record(group)
    return registered
