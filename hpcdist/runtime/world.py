"""init() and World: turn an MPI job into a torch.distributed job. The only reader of the environment."""

from __future__ import annotations

import atexit
import os
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from hpcdist import activity, torch_names
from hpcdist.activity import recording
from hpcdist.comm import tuning
from hpcdist.comm.team import Context, Settings, Team
from hpcdist.comm.worker import report_failures
from hpcdist.control import objects
from hpcdist.errors import HpcdistError, coded, refusal
from hpcdist.formats.paths import private_folder
from hpcdist.launch import launcher, rendezvous, torchrun
from hpcdist.process import abort, forks, machine, streams
from hpcdist.runtime import background, registration, stopping
from hpcdist.runtime.stopping import Stop
from hpcdist.tensors import accelerator, pool
from hpcdist.validation import collective
from hpcdist.validation.collective import Call
from hpcdist.watch import ras
from hpcdist.watch.deadlines import deadline, first_meeting, guard_end, patience, starting_mpi
from hpcdist.watch.watcher import Watch, save_trace

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdist.comm.team import GroupLike


@dataclass(eq=False, kw_only=True)
class World:
    """The ranks of this job, as :func:`init` found them.

    Attributes:
        rank: rank of this process, from 0; the same for MPI and torch.distributed.
        world_size: number of processes.
        local_rank: rank among the processes of this node, from 0.
        node: index of this node, in the order of the lowest rank on each.
        comm: communicator that init() was given, or COMM_WORLD.
        settings: device, timeout, staging folder, and other constants of the job.
    """

    rank: int
    world_size: int
    local_rank: int
    node: int
    comm: MPI.Intracomm
    settings: Settings
    _context: Context = field(repr=False)
    _stop: Stop = field(repr=False)
    _ends: ExitStack = field(repr=False)  # ends what the world has begun
    _owns_group: bool = field(repr=False)
    _implicit: bool = field(repr=False)  # made by prepare()
    _asked: Asked = field(repr=False)

    @property
    def group(self) -> dist.ProcessGroup:
        """The torch.distributed group of all ranks; None after finalize(), if init() made it."""
        return dist.group.WORLD  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors: one GPU per rank, or the CPU."""
        return self.settings.device

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.settings.nodes

    @property
    def timeout(self) -> timedelta:
        """The timeout of every call."""
        return self.settings.timeout

    @property
    def staging(self) -> str:
        """The folder through which route "hdf5" moves data; rank 0's is used."""
        return self.settings.staging

    def should_stop(self, every: int = 1) -> bool:
        """Return whether the program must stop now: the same answer on all ranks, at the same call.

        Collective over the world; one small message. True once any rank has received one of the signals of
        ``init(stop_on=)``, or the job ends within ``init(stop_before=)`` seconds, and from then on. The first call, in
        the main thread, replaces the handlers of these signals, those of other libraries, too, until finalize(). If a
        program never calls it, these signals end the program as usual. A second signal, more than a second after the
        first one, ends this process at once.

        Args:
            every: the ranks agree in each `every`-th call, the first one included, and other calls return False
                without a message. The same on all ranks.

        Raises:
            RankError: on all ranks, if `every` differs or is not positive, or if a rank calls something else.

        Example::

            for step in range(steps):
                train(step)
                if world.should_stop():                  # True on all ranks, at the same step
                    save(step)
                    print(world.stop_reason)             # rank 3 received SIGUSR1
                    sys.exit(75)                         # requeue: see jobscripts/requeue.sbatch
        """
        return self._stop.agree(team_of(), every)

    @property
    def stop_reason(self) -> str | None:
        """Why should_stop() has returned True, the same text on all ranks; None before it has."""
        return self._stop.reason

    def time_left(self) -> float | None:
        """The seconds until the end of this batch job. Nothing is communicated.

        None without ``init(stop_before=)``, outside of a batch job, and if the job has no time limit.
        """
        return self._stop.time_left

    def finalize(self) -> None:
        """End torch.distributed, if init() started it, and free the library's communicators. MPI keeps running.

        Collective over the world. Called automatically at the end of the program. A second call does nothing. What
        init() has replaced, such as ``sys.exit`` and ``sys.excepthook``, is as before. What another library has
        replaced since is left, with a warning.

        Raises:
            RankError: on all ranks, if another rank calls a verb instead.
        """
        if _world is self:
            for loop in list(leaving):
                loop.leave()
            with activity.InCall("finalize", self._context.team), abort.InStep("finalize", self.world_size):
                # If it is refused, it can be repeated: nothing has been freed yet.
                collective.exchange(self._context.team, Call(collective.LEAVE))
                for done in background.leave_all(self._context.teams.values()):
                    done.wait()
            left = self._close()
            if left and not self._implicit:  # torch has set its hook after a world that it has begun
                text = f"hpcdist.finalize() has left what another library has replaced after init(): {', '.join(left)}"
                warnings.warn(text, stacklevel=2)

    def _close(self) -> list[str]:
        """End what has begun; return the names that have been replaced by others since, and are left."""
        global _world
        _world = None
        atexit.unregister(_leave)
        with activity.InCall("finalize", self._context.team):
            trace = recording.current
            if trace is not None:
                trace.compare_clocks(self._context.team.comm)
            transport = self._context.transport
            left = objects.all_gather_object(self._context.team.comm, transport is not None and transport.stop())
        self._context.free(messages=not any(left))  # else new groups could receive old messages
        save_trace(finished=True)
        self._ends.close()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        report_failures()
        return abort.uninstall()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finalize()
        else:
            abort.replace(error)  # the other ranks may wait for this one: nothing collective can be done here


class Asked(NamedTuple):
    """The arguments of init()."""

    comm: MPI.Intracomm | None = None
    device: torch.device | str | None = None
    backend: str | None = None
    timeout: timedelta | float | None = None
    staging: str | None = None
    bind: str | None = None
    stop_on: Sequence[int] | None = None
    stop_before: timedelta | float | None = None
    trace: str | os.PathLike[str] | None = None


_world: World | None = None
leaving: weakref.WeakSet[Any] = weakref.WeakSet()  # loops over batches, whose leave() is called before the world ends


def environ() -> MutableMapping[str, str]:
    """Return the environment, for code that needs it before there is a world."""
    return os.environ


def is_first() -> bool:
    """Whether this process is the launcher's number 0; does not start MPI."""
    return launcher.number(os.environ) == 0


def current() -> World:
    """Return the world that init() made.

    Raises:
        HpcdistError: if init() has not been called, or in a child process.
    """
    if _world is None:
        text = "hpcdist is not initialised: call hpcdist.init() first, on every rank"
        raise HpcdistError(forks.refusal() or coded("HD112", text))
    return _world


def at_end(callback: Callable[[], object]) -> None:
    """Call this when the current world ends."""
    current()._ends.callback(callback)


def context() -> Context:
    """Return the data that the teams of the job share."""
    return current()._context


def team_of(group: GroupLike | None = None) -> Team:
    """Return the team of a group; that of all ranks for None. Collective over the group when it is first used."""
    return (_world or current())._context.team_of(group)


def init(
    comm: MPI.Intracomm | None = None,
    *,
    device: torch.device | str | None = None,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    staging: str | os.PathLike[str] | None = None,
    bind: str | None = None,
    stop_on: Sequence[int] | None = None,
    stop_before: timedelta | float | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> World:
    """Start torch.distributed on the processes of an MPI job, however they were launched.

    Collective over `comm`. Works under ``mpirun`` of Open MPI, MPICH and Intel MPI, under ``srun`` and ``flux run``,
    and in a single process without a launcher; docs/do/launchers.md has others. If MPI or torch.distributed already
    runs, it is used. Until finalize(), the environment also has torchrun's variables, such as RANK and LOCAL_RANK.
    Variables that you have set are kept.

    After init(), a rank that raises or calls ``sys.exit(n)`` with n > 0 ends the whole job with that status. Use
    ``sys.exit``: ``exit()`` and ``raise SystemExit(n)`` are noticed only inside ``with hpcdist.init():``.

    Args:
        comm: the processes that take part; COMM_WORLD if None.
        device: this rank's device. By default GPU number local_rank of the visible ones, or the CPU where the node has
            no GPU. "cpu" on all ranks keeps the job off the GPUs.
        backend: torch's backend, the same on all ranks, in torch's own words. By default this package's own, "mpi";
            "cpu:mpi,cuda:nccl" where every rank has its own GPU, with torch 2.13 and before "cpu:gloo,cuda:nccl". Not
            used, like `timeout`, if torch.distributed already runs.
        timeout: how long a call may wait for other ranks, a timedelta or seconds; by default HPCDIST_TIMEOUT (s), else
            30 minutes. A rank that waits longer ends the job by a :class:`HangError`, with a table of the calls of all
            ranks. The end of the program counts as a call, so no rank may work alone for longer. torch.distributed gets
            this timeout, too.
        staging: the folder for the files of route "hdf5", which all nodes must share. The default is HPCDIST_STAGING.
            Without it, it is a private folder for temporary files on one node, and the current folder on several.
        bind: "numa" on all ranks binds each to the cores of one NUMA domain until its process ends. This is the domain
            nearest to its GPU. Without GPUs, ranks are spread over the domains. Ranks use only cores that the launcher
            has given them. If the launcher has bound them, nothing changes.
        stop_on: signals that make :meth:`World.should_stop` return True. If given, they are caught from init() on; the
            default (SIGTERM, SIGUSR1) is caught from the first should_stop() on. The same on all ranks.
        stop_before: a timedelta or seconds. should_stop() returns True from this time before the end of the batch job
            on. Rank 0 asks Slurm, PBS, LSF or Flux once for the end. The same on all ranks.
        trace: folder in which each rank writes a file of its calls when the job ends: see ``python -m hpcdist trace``.
            By default HPCDIST_TRACE; without both, nothing is recorded. The last 65,536 calls of each rank are kept.

    Returns:
        The :class:`World`. A second call without arguments, or with the same ones, returns the same world.

    Raises:
        LaunchError: on every rank that can detect it. The launcher does not belong to the MPI library, two ranks share
            a GPU that NCCL must use, or nodes cannot reach each other. Or this is a child process that was forked while
            MPI ran. The message names the fix.
        RankError: on every rank, if an argument is wrong on one of them.
        TypeError: on this rank, if `comm` is not a communicator or does not hold this rank.
        ValueError: on this rank, if the world exists and was made with other arguments.

    Example::

        import hpcdist as hd

        with hd.init() as world:        # mpirun -n 4 python program.py
            print(world.rank, world.world_size, world.device)   # 0 4 cuda:0, 1 4 cuda:1, ...
    """
    staging = None if staging is None else os.fspath(staging)
    asked = Asked(comm, device, backend, timeout, staging, bind, stop_on, stop_before, trace)
    if _world is not None and _world._implicit:
        _world.finalize()  # the next one has these arguments
    if _world is not None:
        if any(new is not None and new != old for new, old in zip(asked, _world._asked, strict=True)):
            raise refusal(ValueError, "HD112", "hpcdist is initialised with other arguments; call finalize() first")
        return _world
    return _make(asked)


def prepare(bind: str | None) -> World:
    """Make a world for a program that is written for torchrun, which starts torch.distributed itself, or calls init().

    Collective over all ranks. The world that is returned holds the store at MASTER_PORT.
    """
    return _make(Asked(device="cpu", bind=bind), implicit=True)


registration.host.variables = environ
registration.register()


def finalize() -> None:
    """Finalize the current world, if there is one: see :meth:`World.finalize`."""
    if _world is not None:
        _world.finalize()


def _forget() -> None:
    """Forget the world in a child process: the job belongs to its parent."""
    global _world
    if _world is not None:
        _world._stop.leave_child()
    _world = registration.host.comm = None
    recording.stop()
    atexit.unregister(_leave)
    why = forks.refusal()
    activity.refuse(None if why is None else lambda: HpcdistError(why))


os.register_at_fork(after_in_child=_forget)


def _leave() -> None:
    """Called at the end of the program. If a rank ends early, the verbs of the other ranks raise an error that names
    it."""
    from mpi4py import MPI

    from hpcdist.backend.operations import finish

    abort.check()  # the handler that install() has registered runs after this one
    if _world is None:
        return
    if MPI.Is_finalized():
        save_trace(finished=True)
        _world._ends.close()
        return
    for loop in list(leaving):
        loop.leave()
    with activity.InCall("", _world._context.team, text=b"the end of its program"):
        backgrounds = background.leave_all(_world._context.teams.values())  # answers calls of ranks that continue
        finish()
        collective.leave(_world._context.team)
        for done in backgrounds:
            done.wait()
        registration.leave()
    if _world.world_size > 1:
        guard_end(_world.timeout.total_seconds(), _world.rank)  # the watch ends before MPI does
    _world._close()


def _make(asked: Asked, implicit: bool = False) -> World:
    """Make the world, which ends with the program at the latest. Collective over all ranks."""
    global _world
    streams.reserve()
    forks.claim(os.environ, bool(launcher.described(os.environ)))
    env_timeout, env_cache = os.environ.get("HPCDIST_TIMEOUT"), os.environ.get("HPCDIST_CACHE")
    with starting_mpi(asked.timeout, env_timeout, launcher.described(os.environ)):
        comm = launcher.job(asked.comm, os.environ)
    if comm.rank == 0:
        torch_names.warn_if_newer()
    trace = asked.trace or os.environ.get("HPCDIST_TRACE") or None
    with ExitStack() as ends:  # now, if an error follows
        if comm.size > 1:
            abort.install()
            ends.push(_put_back_after)
        with first_meeting(asked.timeout, env_timeout, comm.size, launcher.library()):
            private = rendezvous.in_torch_order(comm)
            ends.callback(_free, private)
            ends.callback(pool.stop)
            with rendezvous.Nodes(private) as nodes:
                agreed, limit = _agree_on(private, asked._replace(trace=trace), env_timeout, env_cache)
                if trace is not None:
                    ends.callback(recording.stop)
                    _start_trace(private, trace)
                meeting = rendezvous.meet(private, nodes.count)
                address = None if meeting.shares_files else meeting.own
                watch = Watch(private, nodes.local, nodes.index, address, limit)
        stop = Stop(watch, agreed["stop_on"], agreed["stop_before"])
        ends.callback(stop.close)
        ends.callback(watch.stop)
        with activity.InCall("init", None):
            stop.begin(private, os.environ, listen=asked.stop_on is not None)
            settings = _settings(private, nodes, limit, asked, watch)
            registration.host.open(private, settings, meeting)
            ends.callback(registration.host.close)
            ends.callback(torchrun.give(private, nodes, meeting.host, os.environ, limit, implicit))
            if asked.bind:
                _bind(private, nodes, accelerator.of_rank(nodes.local_rank) if implicit else settings.device)
            name = None if implicit else asked.backend or registration.default_backend(settings.own_gpus)
            with abort.without_hook():
                owns_group = registration.start(private, meeting, name, limit, settings.device)
        ends = ends.pop_all()
    ours = Context(private, comm, settings)
    registration.host.team = ours.team
    background.prepare(ours.team)
    pool.start(pool.limit_of(env_cache, settings.memory[private.rank][0] // nodes.local_size))
    _world = World(
        rank=private.rank,
        world_size=private.size,
        local_rank=nodes.local_rank,
        node=nodes.index,
        comm=comm,
        settings=settings,
        _context=ours,
        _stop=stop,
        _ends=ends,
        _owns_group=owns_group,
        _implicit=implicit,
        _asked=asked._replace(comm=comm),
    )
    atexit.register(_leave)
    return _world


def _put_back_after(kind: object, error: BaseException | None, trace: object) -> None:
    """Put sys.exit and the like back if no rank has a world. After an error of this rank alone the others wait for
    it: they end with it, unless the program catches the error."""
    if isinstance(error, HpcdistError):
        abort.uninstall()


def _ras(rank: int) -> tuple[str, int] | None:
    """Return where NCCL's RAS answers on this host; None where it is off. Warns once of a malformed address."""
    if os.environ.get("NCCL_RAS_ENABLE") == "0":
        return None
    try:
        return ras.address(os.environ.get("NCCL_RAS_ADDR"))
    except ValueError as error:
        if rank == 0:
            warnings.warn(coded("HD114", f"NCCL_RAS_ADDR: {error}, expected HOST:PORT"), stacklevel=2)
        return ras.address(None)


def _free(comm: MPI.Intracomm) -> None:
    """Free the communicator of a world that could not be made; in others it belongs to a team, which frees it."""
    from mpi4py import MPI

    if comm and not MPI.Is_finalized():
        comm.Free()


def _settings(
    private: MPI.Intracomm, nodes: rendezvous.Nodes, limit: timedelta, asked: Asked, watch: Watch
) -> Settings:
    """Choose the device of each rank, and collect the ranks' data on each other. Collective over `private`."""
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # experimental, NCCL 2.30.3 and later
    chosen, own_gpus = accelerator.choose(private, nodes.local_rank, asked.device, asked.backend, shared)
    if own_gpus:
        watch.follow(chosen, _ras(private.rank))
    places = objects.all_gather_object(private, (nodes.index, machine.capacity()))
    return Settings(
        device=chosen,
        own_gpus=own_gpus,
        timeout=limit,
        nodes=nodes.count,
        node_of=tuple(node for node, _ in places),
        memory=tuple(nbytes for _, nbytes in places),
        tuned=_tuned(private, tuning.Place.of(node for node, _ in places)),
        staging=os.path.abspath(asked.staging or staging_folder(nodes.count)),
        child_environ=launcher.without_launcher(os.environ),
        making_group=registration.host.making,
    )


def _tuned(comm: MPI.Intracomm, place: tuning.Place) -> tuning.Tuned | None:
    """Return the rules of the file HPCDIST_TUNE of rank 0. Collective over `comm`; raises the same on all ranks."""

    def read() -> tuning.Tuned | None:
        if not (file := os.environ.get("HPCDIST_TUNE")):
            return None
        tuned, differs = tuning.read(file)
        if not differs and place not in tuned.samples:
            differs = f"it was not measured on {place}"
        if differs:
            warnings.warn(f"HPCDIST_TUNE: the rules of {file} do not apply: {differs}", stacklevel=2)
        return tuned

    return objects.run_on_root(comm, "init", read)


def _bind(comm: MPI.Intracomm, nodes: rendezvous.Nodes, device: torch.device) -> None:
    """Bind this process to the cores of one NUMA domain, beside its device if that is a GPU. Collective over `comm`."""
    beside = machine.beside(accelerator.address(device))
    places = objects.all_gather_object(comm, (nodes.index, sorted(os.sched_getaffinity(0)), sorted(beside)))
    ranks = [(set(own), set(beside)) for node, own, beside in places if node == nodes.index]
    chosen = machine.choose(ranks, machine.domains())
    cores = chosen[nodes.local_rank]
    machine.bind(cores)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), len(cores) // chosen.count(cores))))


def _agree_on(
    comm: MPI.Intracomm, asked: Asked, env_timeout: str | None, env_cache: str | None
) -> tuple[dict[str, Any], timedelta]:
    """Check the arguments and variables of init() on all ranks, and return what must be the same, and the deadline.

    Collective over `comm`.
    """

    def check() -> tuple[dict[str, Any], float]:
        backend, bind, trace = asked.backend, asked.bind, asked.trace
        if backend is not None and not isinstance(backend, str):
            raise refusal(TypeError, "HD114", f"backend must be a string, got {type(backend).__name__}")
        if backend is not None:
            dist.BackendConfig(dist.Backend(backend))
        if bind not in (None, "numa"):
            raise refusal(ValueError, "HD114", f"bind is {bind!r}, expected 'numa' or None")
        pool.limit_of(env_cache, 0)
        if not isinstance(trace, (str, os.PathLike, NoneType)):
            raise refusal(TypeError, "HD114", f"trace must be a folder, got {type(trace).__name__}")
        options = {
            "backend": backend,
            "bind": bind,
            "stop_on": stopping.signals(asked.stop_on),
            "stop_before": patience(asked.stop_before, "stop_before"),
            "trace": trace is not None,
        }
        return options, deadline(asked.timeout, env_timeout)

    abort.report_to(os.environ.get("HPCDIST_FACTS"), launcher.batch_job(os.environ), comm.rank)
    given = objects.run_on_all(comm, "init", check)
    differences = {rank: objects.first_difference(given[0][0], options) for rank, (options, _) in enumerate(given)}
    objects.raise_problems("init", differences)
    agreed, seconds = given[0]
    return agreed, timedelta(seconds=seconds)


def _start_trace(comm: MPI.Intracomm, folder: str | os.PathLike[str]) -> None:
    """Record the calls of all ranks from here on. Collective over `comm`; raises the same on all ranks."""
    job = objects.run_on_root(
        comm, "init", lambda: f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.urandom(4).hex()}"
    )
    objects.run_on_all(comm, "init", lambda: recording.start(os.fspath(folder), job, comm.rank, comm.size))
    assert recording.current is not None
    recording.current.compare_clocks(comm)


def staging_folder(nodes: int) -> str:
    """Return the default folder of route hdf5."""
    try:
        return os.environ.get("HPCDIST_STAGING") or (
            private_folder(tempfile.gettempdir()) if nodes == 1 else os.getcwd()
        )
    except FileNotFoundError:  # there is no such folder, which is an error only if the route is used
        return "/tmp"
