"""hpcdist as a backend of torch.distributed: ``backend="mpi"``, under mpirun and srun.

What is changed in torch, when, and why:

- on import, by register(): nothing but the backend's names, by torch's public call: "mpi", unless torch was built with
  MPI and has that backend itself, and "mpi4py", which torch 2.14 and later find by the entry point without an import;
- while there is a world, by :class:`GroupHost`: ``Backend.MPI``, which torch compares with "mpi"; the rendezvous by the
  environment, since MPI knows the ranks; the function in which torch makes each group, since gloo and NCCL read their
  network interfaces from the environment there, and ``hpcdist run --mpi`` replaces gloo; and from torch 2.14 on its
  hooks, by which the calls of its own groups are recorded: see :mod:`hpcdist.watch.torch_groups`.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from hpcdist import activity, torch_names
from hpcdist.errors import HpcdistError, LaunchError, refusal
from hpcdist.launch import launcher, rendezvous
from hpcdist.process.replaced import Replaced
from hpcdist.tensors import accelerator
from hpcdist.watch import torch_groups

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdist.comm.team import Settings, Team

NAME = "mpi"
OWN = "mpi4py" if dist.is_mpi_available() else NAME  # the name of this backend: torch's own keeps its name
PLUGINS = torch_names.PLUGINS  # a class in Python may be one of several backends of a group
BINDS = torch.__version__ >= "2.15.0a0"  # NVIDIA's containers have such versions
"""Whether torch binds every group of NCCL to a GPU: without device_id to LOCAL_RANK, else to the global rank modulo the
visible GPUs, which is another one where places are cyclic, ranks fewer than GPUs, or init(device=) says so.

Earlier ones take the GPU of the tensors, and with a bound one hang in new_group(some_ranks, backend="gloo" or "mpi"):
the other ranks split NCCL's communicator (pytorch#145376).
"""
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class _BackendName(str):
    """The name "mpi", as Backend.MPI has it while there is a world: equal to that text, and not to itself.

    torch makes groups of its own MPI backend without a store, ranks and a plugin, where a backend is equal to
    Backend.MPI.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return not isinstance(other, _BackendName) and str.__eq__(self, other)

    __hash__ = str.__hash__


class GroupHost:
    """The parts of a job that its groups need.

    Attributes:
        comm, team: communicator of all ranks, in torch's order, and their team; None while there is no world.
        settings: those of the world.
        variables: returns the environment.
        by_mpi: whether groups have this package's backend where the program asks for gloo.
        made: number of groups of this backend that were made in this world, by name and ranks.
    """

    comm: MPI.Intracomm | None = None
    team: Team | None = None
    by_mpi = False
    settings: Settings
    variables: Callable[[], MutableMapping[str, str]]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._making = 0  # contexts of making() that have begun, in all threads
        self._interfaces: Mapping[str, str] = {}
        self._added: list[str] = []
        self._changes = Replaced()
        self.made = Counter[str]()

    def open(self, comm: MPI.Intracomm, settings: Settings, meeting: rendezvous.Meeting) -> None:
        """Let groups be made in a world, through the interfaces by which its ranks have met."""
        self.comm, self.settings, self._meeting = comm, settings, meeting
        self._interfaces = rendezvous.variables(comm, meeting)
        self.made.clear()
        if OWN == NAME:
            self._changes.set(dist.Backend, "MPI", _BackendName(NAME))
        for place, around in (
            (torch_names.env_handler, self._rendezvous),
            (torch_names.group_maker, self._maker),
            (torch_names.group_register if PLUGINS else None, torch_groups.recording),
        ):
            if place is not None:
                self._changes.wrap(*place, around)
        if PLUGINS:
            from hpcdist.backend.works import METHODS, passing_on

            for name in METHODS:
                if hasattr(dist.Work, name):
                    self._changes.wrap(dist.Work, name, partial(passing_on, name))

    def _maker(self, helper: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(helper)
        def make(size: int, rank: int, ranks: list[int], backend: object, *args: Any, **options: Any) -> Any:
            with self.making():
                return helper(size, rank, ranks, self._replaced(backend), *args, **options)

        return make

    def _replaced(self, backend: object) -> object:
        """Return the backend that a group gets. Until torch 2.13 one in Python replaces the whole group."""
        if self.comm is None or not self.by_mpi:
            return backend
        gpus = f",{accelerator.KIND}:{accelerator.LIBRARY}" if accelerator.count() else ""
        asked = f"cpu:gloo{gpus}" if backend == dist.Backend.UNDEFINED else str(backend).lower()
        of_host = [part for part in asked.split(",") if part.endswith("gloo")]
        if not of_host or (not PLUGINS and of_host != asked.split(",")):
            return backend
        return asked.replace("gloo", OWN) if PLUGINS else OWN

    def _rendezvous(self, handler: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Return a rendezvous by MPI, unless the program or its user has set other variables: then `handler`'s.

        Every rendezvous by MPI has a store of its own. In one that remains, the keys of a destroyed group would be
        read.
        """

        def meet(url: str, timeout: timedelta = default_pg_timeout, **options: Any) -> Iterator[Any]:
            comm, environ = self.comm, self.variables()
            given = parse_qs(urlparse(url).query)  # rank and world_size of init_process_group()
            place = [given.get(name, [environ.get(name.upper())])[0] for name in ("rank", "world_size")]
            if comm is None or (any(map(environ.get, _VARIABLES)) and not launcher.is_given(environ)):
                yield from handler(url, timeout=timeout, **options)
                return
            _check_place(int(place[0] or comm.rank), int(place[1] or comm.size), comm)
            with activity.InCall("init_process_group", self.team):
                store = rendezvous.open_store(comm, self._meeting, timeout)
                comm.Barrier()  # here a rank that does not come is named: torch would wait for it in the store
            yield store, comm.rank, comm.size
            raise refusal(RuntimeError, "HD106", "Unable to perform re-rendezvous using MPI")

        return meet

    def close(self) -> None:
        """Let no more groups be made: the world ends."""
        self.comm, self.team, self._interfaces = None, None, {}
        self._changes.put_back()

    @contextmanager
    def making(self) -> Iterator[None]:
        """A context in which torch makes a group, and gloo and NCCL find their interfaces in the environment.

        Both read it there and then. A child process, a job that this one submits, or the next world would take what
        stays there for the user's.
        """
        with self._lock:
            self._making += 1
            environ = self.variables()
            for name in self._interfaces.keys() - environ.keys():  # the user's are kept
                environ[name] = self._interfaces[name]
                self._added.append(name)
        try:
            yield
        except RuntimeError as error:
            environ, name = self.variables(), rendezvous.GLOO
            problem = rendezvous.socket_problem(environ, socket.gethostname(), rendezvous.interfaces())
            if not problem:
                raise
            text = f"{name}={environ[name]}: {problem}; unset {name}: hpcdist.init() finds the interface by itself"
            raise LaunchError("HD114", text) from error
        finally:
            with self._lock:
                self._making -= 1
                if not self._making:
                    for name in self._added:
                        self.variables().pop(name, None)
                    self._added.clear()


host = GroupHost()


def register() -> None:
    """Register the backend with torch.distributed."""
    for name in (OWN, "mpi4py"):
        dist.Backend.register_backend(
            name, partial(_create, name), extended_api=True, devices=["cpu", accelerator.KIND]
        )


def start(
    comm: MPI.Intracomm,
    meeting: rendezvous.Meeting,
    backend: str | None,
    timeout: timedelta,
    device: torch.device,
) -> bool:
    """Start torch.distributed, unless it runs. Collective over `comm`.

    Args:
        backend: torch's; None if torch is making the group itself.
        device: this rank's; a GPU of its own, if the backend is NCCL's.

    Returns:
        Whether it was started here.
    """
    if backend is None or dist.is_initialized():
        return False
    dist.init_process_group(
        backend,
        store=rendezvous.open_store(comm, meeting, timeout),
        rank=comm.rank,
        world_size=comm.size,
        timeout=timeout,
        device_id=device if BINDS and "nccl" in backend else None,
    )
    return True


def default_backend(own_gpus: bool) -> str:
    """Return torch's backend of a job: MPI for host memory, and NCCL where every rank has a GPU of its own.

    Up to torch 2.13, a backend in Python replaces the whole group, and torch treats the group as one without NCCL. For
    example, it does not coalesce messages. Therefore jobs on GPUs keep gloo for host memory there.
    """
    if not own_gpus:
        return OWN
    return f"cpu:{OWN if PLUGINS else 'gloo'},{accelerator.KIND}:{accelerator.LIBRARY}"


def leave() -> None:
    """Destroy torch's groups at the end of the program, if the default one has this backend and is left.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL torch's wrapper would call a backend in Python after Python has ended.
    """
    backends = dist.get_backend_config() if PLUGINS and dist.is_initialized() else ""
    if {NAME, "mpi4py"}.intersection(backends.replace(",", ":").split(":")):
        dist.destroy_process_group()


def _create(name: str, options: Any, backend_options: Any = None) -> Any:
    """Make a process group, or from torch 2.14 a backend of one. Collective over its ranks.

    Args:
        name: name of the backend that torch was given.
        options: torch's: store, group_rank, group_size, timeout, group_id, global_ranks_in_group.
        backend_options: torch's options of a backend, or None.
    """
    from hpcdist.backend.operations import MpiBackend, MpiProcessGroup, team_of

    ranks, timeout = list(options.global_ranks_in_group), options.timeout
    if host.comm is None:
        text = "a group of backend mpi needs hpcdist's world: call hpcdist.init() first, on every rank"
        raise HpcdistError("HD112", text)
    comm = host.comm
    if not ranks:
        _check_place(options.group_rank, options.group_size, comm)
    if timeout == default_pg_timeout:  # the program asks for no other
        timeout = host.settings.timeout
    ranks = ranks or list(range(comm.size))
    identity = f"{options.group_id} {ranks}"
    host.made[identity] += 1
    team = team_of(comm, host.settings, range(comm.size), ranks, f"{host.made[identity]} {identity}")
    if PLUGINS:
        return MpiBackend(team, name, backend_options, timeout)
    return MpiProcessGroup(team, name, timeout)


def _check_place(given_rank: int, given_size: int, comm: MPI.Intracomm) -> None:
    """Check that torch was given the rank and size that MPI has."""
    if (given_rank, given_size) != (comm.rank, comm.size):
        raise LaunchError(
            "HD106",
            f"torch was given rank {given_rank} of {given_size}, but MPI has rank {comm.rank} of {comm.size}"
            ": leave out rank, world_size and the variables RANK and WORLD_SIZE, or start as many processes by mpirun "
            "or srun",
        )
