"""The variables that torchrun sets, for programs and libraries that find their place in the job in them.

The names are those of torch.distributed.run ("Environment Variables"), and NODE_RANK, which Lightning reads. A process
that is started by a rank inherits them; ROLE_NAME tells it, and a job that it submits, whose they are.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hpcdist.control import objects
from hpcdist.errors import LaunchError
from hpcdist.launch import launcher
from hpcdist.launch.rendezvous import Nodes, served
from hpcdist.tensors import accelerator

if TYPE_CHECKING:
    from mpi4py import MPI

_ADDRESS, _PORT, _THREADS = "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"


def _place(comm: MPI.Intracomm, nodes: Nodes) -> dict[str, str]:
    """Return the variables that tell a rank its place.

    Programs take LOCAL_RANK for the number of their GPU, which is 0 where the launcher shows each rank one.
    """
    values = {"RANK": comm.rank, "WORLD_SIZE": comm.size, "ROLE_RANK": comm.rank, "ROLE_WORLD_SIZE": comm.size}
    values |= {"LOCAL_RANK": 0 if accelerator.count() == 1 else nodes.local_rank, "LOCAL_WORLD_SIZE": nodes.local_size}
    values |= {"GROUP_RANK": nodes.index, "NODE_RANK": nodes.index, "GROUP_WORLD_SIZE": nodes.count}
    return {name: str(value) for name, value in values.items()}


def give(
    comm: MPI.Intracomm,
    nodes: Nodes,
    host: str,
    environ: MutableMapping[str, str],
    timeout: timedelta,
    program: bool,
) -> Callable[[], None]:
    """Set the variables; those that the user has set, and not to "", are kept. Collective over `comm`.

    MASTER_PORT is bound on rank 0 as long as they are set: no other program gets it, and torch can open a store there.

    Args:
        host: address of rank 0's host that all ranks reach.
        program: the job runs a program for torchrun: refuse contradictions, let a store listen at once, and set what
            tells of torchrun itself.

    Returns:
        A function that restores the environment and frees the port, unless there is a program, to its end. It holds
        the store.

    Raises:
        RankError: on all ranks, if the user's variables contradict MPI or those of rank 0, for a program.
    """
    held: list[Any] = []
    place = _place(comm, nodes)
    kept = {} if launcher.is_given(environ) else {name: value for name, value in environ.items() if value}
    own = {name: kept.get(name, "") for name in (_ADDRESS, _PORT)}

    def bind() -> tuple[int, str, dict[str, str]]:
        if program:
            store = served(host, comm.size, timeout, multi_tenant=True)
            kept_by_child = partial(ctypes.pythonapi.Py_IncRef, ctypes.py_object(store))
            os.register_at_fork(after_in_child=kept_by_child)  # a child has no thread that the store's end could join
            held.append(store)
            return store.port, secrets.token_hex(8), own
        port = socket.socket()
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch's own store binds it, too
        port.bind((host, 0))
        held.append(port)
        return port.getsockname()[1], "", own

    number, run, first = objects.run_on_root(comm, "init", bind)
    values = {**place, _ADDRESS: host, _PORT: str(number)}
    if program:
        values |= {"TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
        values |= {_THREADS: "1"} if int(place["LOCAL_WORLD_SIZE"]) > 1 else {}
    kept = {name: kept[name] for name in values if name in kept}
    if program:
        claimed = {**place, **own, **kept}
        wrong = {name: f"MPI says {value}" for name, value in place.items() if claimed[name] != value}
        wrong |= {name: f"rank 0 has {value or 'none'}" for name, value in first.items() if claimed[name] != value}

        def check() -> None:
            if wrong:
                text = ", ".join(f"{name}={claimed[name]}, but {value}" for name, value in wrong.items())
                raise LaunchError("HD106", f"{text}: unset {' '.join(wrong)}")

        objects.run_on_all(comm, "run", check)
        if _THREADS in values.keys() - kept.keys():
            torch.set_num_threads(1)
    wanted = {**values, **kept, **launcher.GIVEN}
    before = {name: environ[name] for name in wanted if name in environ}
    environ.update(wanted)

    def take_back() -> None:
        if program:
            return  # it may have groups that use the store
        for name in wanted:
            if environ.get(name) == wanted[name]:
                del environ[name]
                environ.update({name: before[name]} if name in before else {})
        while held:  # the port, since there is no program
            held.pop().close()

    return take_back
