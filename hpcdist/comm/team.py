"""The ranks of a call: as the caller names them, and with communicators of the library's own; what the teams of one job
share, its settings among them; and the keywords of verbs.

Context and team are terms of UCC (https://openucx.github.io/ucc).
"""

from __future__ import annotations

import secrets
import struct
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from hashlib import blake2b
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpcdist import activity
from hpcdist.comm.node_memory import Topology, Window, Windows
from hpcdist.comm.tuning import Place, Rule, Rules, Tuned
from hpcdist.comm.worker import Worker
from hpcdist.errors import HpcdistError, refusal
from hpcdist.layout import limits

if TYPE_CHECKING:
    from mpi4py import MPI
    from typing_extensions import TypeVar as TypeVarWithDefault

    S = TypeVarWithDefault("S", Tensor, list[Any], tuple[Any, ...], dict[Any, Any], default=Tensor)
    """A tensor or structure: the result is of the same kind as the argument; a tensor, if that is None."""

    class Options(TypedDict, total=False):
        """Keywords of verbs, for the overloads of their signatures."""

        group: GroupLike | None
        route: str

    class OutOptions(Options, total=False):
        out: Tensor | None

    class StructureOptions(OutOptions, total=False):
        allow_pickle: bool

    class SharedOptions(StructureOptions, total=False):
        shared: bool


WORLD = 0  # the key of the group of all ranks
HEADER = 64  # bytes of a rank's header: see hpcdist/validation/collective.py
ROUTES = ("auto", "nccl", "gloo", "mpi", "hdf5")
"""The values of ``route=``."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The values that do not change until the world ends.

    Attributes:
        device: device of this rank's tensors: one GPU per rank, or the CPU.
        own_gpus: whether every rank has a GPU to itself, and NCCL can be used.
        timeout: deadline of every call.
        nodes: number of nodes.
        node_of, memory: index of the node of each rank of the world, and its machine.capacity().
        tuned: rules of the file HPCDIST_TUNE, which rank 0 has read.
        staging: folder through which route "hdf5" moves data; rank 0's is used.
        child_environ: environment for a child process that runs MPI on its own, outside the job.
        making_group: makes a context in which gloo and NCCL find their network interfaces.
    """

    device: torch.device
    own_gpus: bool
    timeout: timedelta
    nodes: int
    node_of: tuple[int, ...] = field(repr=False)
    memory: tuple[tuple[int, int], ...] = field(repr=False)
    tuned: Tuned | None = field(repr=False)
    staging: str
    child_environ: Mapping[str, str] = field(repr=False)
    making_group: Callable[[], AbstractContextManager[None]] = field(repr=False)


GroupLike: TypeAlias = "dist.ProcessGroup | MPI.Comm | DeviceMesh"
"""The values of ``group=``."""


class Group:
    """The caller's ``group=``, as this rank sees it. Nothing here communicates.

    Args:
        rank: rank of this process in the group.
        peers: the world's rank of each rank of the group.
        handle: communicator or torch group; None for the whole world.

    Attributes:
        key: key of messages between two ranks of the group, the same on all of them; None before it is fixed.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[int],
        handle: MPI.Intracomm | dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = rank
        self.size = len(peers)
        self.peers = list(peers)
        self.key: int | None = WORLD if handle is None else None
        self.freed = False
        self._torch: weakref.ref[dist.ProcessGroup] | None = None
        if isinstance(handle, dist.ProcessGroup):
            self._torch = weakref.ref(handle)
            self.key = digest(handle.group_name, self.peers)

    @property
    def ended(self) -> bool:
        """Whether the communicator has been freed, or the torch group destroyed."""
        return self.freed or (self._torch is not None and not is_alive(self._torch()))

    def message_key(self) -> int:
        """Return the key for a message to or from another rank of the group.

        Raises:
            HpcdistError: on this rank, for a communicator without one, which the first collective call makes.
        """
        if self.key is None:
            raise HpcdistError(
                "HD204",
                "send and recv cannot use this communicator yet: call a collective on it first, on all its ranks, such "
                "as hpcdist.concat([], group=comm)",
            )
        return self.key


def digest(name: str, peers: Sequence[int]) -> int:
    """Return a positive number of 63 bits that is not WORLD."""
    text = repr((name, list(peers))).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1 or 1


@contextmanager
def freeing(owned: MPI.Group) -> Iterator[MPI.Group]:
    """A context that frees a group of MPI at its end."""
    try:
        yield owned
    finally:
        owned.Free()


def is_alive(group: dist.ProcessGroup | None) -> bool:
    """Whether a torch group has not been destroyed."""
    try:
        return group is not None and bool(dist.get_backend(group))
    except ValueError:
        return False


@contextmanager
def making(what: str, peers: list[int], name: str = "") -> Iterator[None]:
    """A context in which these ranks of the world make a group. It has the deadline of a call.

    Args:
        what: name of the call.
        name: of the group, if it has one.
    """
    team = SimpleNamespace(number=digest(f"making {name}", peers), begun=0)
    activity.peers[team.number] = peers
    with activity.InCall(what, team):
        yield
    activity.forget(team.number)


def create_group(comm: MPI.Intracomm, ranks: Sequence[int], tag: int) -> MPI.Intracomm:
    """Make a communicator of some ranks of another one. Collective over these ranks alone.

    Args:
        tag: separates the communicators that several threads make at once.
    """
    with freeing(comm.Get_group()) as whole, freeing(whole.Incl(ranks)) as part:
        return comm.Create_group(part, tag % 2**15)


class HeaderBuffers:
    """Memory in which the ranks of a team exchange headers, and the result of the latest exchange.

    Behind its header of HEADER bytes each rank may put data, so that small calls need no other message.

    Args:
        capacity: bytes of data that fit behind a header.

    Attributes:
        own: this rank's latest message: its header and data.
        all: the messages of all ranks, one after the other.
        recv: the same, as mpi4py takes it: memory, bytes of each message, type.
        starts: where the data of each rank begin in `all`.
        headers: returns the headers that are in `all`.
        memory: returns a buffer of some bytes at an address.
        last, agreed: headers that were last agreed on, and what was agreed.
    """

    def __init__(self, capacity: int, size: int) -> None:
        from mpi4py import MPI

        stride = HEADER + capacity
        self.own, self.all = bytes(stride), bytearray(stride * size)
        self.recv = [self.all, stride, MPI.BYTE]
        self.starts = range(HEADER, HEADER + stride * size, stride)
        self.headers = struct.Struct(f"{HEADER}s{capacity}x" * size).unpack
        self.memory = MPI.buffer.fromaddress
        self.last: tuple[bytes, ...] = ()
        self.agreed: Any = None

    def data(self, rank: int, start: int, nbytes: int) -> bytes:
        """Return a part of the data behind the header of a rank."""
        start += self.starts[rank]
        return bytes(self.all[start : start + nbytes])


def inline_capacity(size: int) -> int:
    """Return the bytes of data that may travel behind the header of a rank in a team of `size` ranks."""
    most = max(limits.SHORT // size - HEADER, min(limits.IN_LARGE_TEAM, limits.HEADERS // size - HEADER))
    return max(0, min(limits.INLINE, most)) // 16 * 16  # aligned for every dtype


class Team:
    """Some ranks of the world, in the order of a communicator: those of a verb's group, or of a process group of torch.

    All library traffic goes over communicators made here: it cannot be confused with the user's messages, nor with
    those of another group of the same ranks. Collective over `comm`.

    Args:
        comm: communicator of these ranks, which the team owns and frees.
        group: group of the caller that the team is for.
        settings: settings of the job.
        foreground: team in whose background this one works; None for a team in the foreground.
        number: a number that the ranks know. The team has no other communicator then.

    Attributes:
        rank, size: rank of this process in the team, and the number of its ranks.
        peers: rank in the world, and in torch.distributed, of each rank of the team.
        foreground: the team itself; for a team in the background, the team in the foreground.
        number: identity of the team in records of calls, the same on all ranks; that of its background is one more.
        begun: number of calls recorded.
        calls: number of verbs begun, in the foreground and (True) with async_op; in a background team, those of the
            foreground before the current one.
        torch_groups: torch backends by name, see :mod:`hpcdist.routes.c10d`.
        side_comm: communicator of the team in the background of this one, or of the messages of a process group.
        worker: thread of asynchronous calls: of a process group, or of the verbs of a background team.
        stream: the worker's stream on a GPU, after its first use.
        inline: bytes of data that may travel behind a rank's header.
        routes: routes chosen so far and why, by name and the kinds of memory of all ranks.
        cuda_aware: whether MPI takes GPU memory on all ranks; None before the test.
        unshared: why the latest result with shared=True is not shared; None if it is.
        window: memory through which the ranks of a process group on one node reduce and broadcast, after its first use.
        repeats: calls made before, which can be repeated with less work: see :mod:`hpcdist.collectives.kept`.
        planned: number of calls that were planned to be kept.
        saved: what the latest save was planned from, and its plan.
        plans_made: number of plans that the user has made.
        results: number of results through which gradients flow back.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        group: Group,
        settings: Settings,
        foreground: Team | None = None,
        number: int | None = None,
    ) -> None:
        self.comm = comm
        self.group = group
        self.settings = settings
        self.foreground = foreground or self
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.peers = group.peers
        self.calls = {False: 0, True: 0}
        self.begun = 0
        self.torch_groups: dict[str, Any] = {}
        self.number: int = number or _agree_on_number(comm, group)
        self.side_comm = comm if number else comm.Dup()
        self.worker = Worker("hpcdist")
        self.stream: Any = None
        self.inline = inline_capacity(self.size)
        self.routes: dict[tuple[str, tuple[int, ...]], Any] = {}
        self.cuda_aware: bool | None = None
        self.unshared: str | None = None
        self.window: Window | None = None
        self.repeats: dict[Any, Any] = {}
        self.saved: Any = None
        self.planned = self.plans_made = self.results = 0
        activity.peers[self.number] = self.peers

    @cached_property
    def background(self) -> Team:
        """The team of these ranks whose worker runs the verbs with async_op. Nothing is communicated."""
        return Team(self.side_comm, self.group, self.settings, self, self.number + 1)

    @cached_property
    def headers(self) -> HeaderBuffers:
        """Memory for headers."""
        return HeaderBuffers(self.inline, self.size)

    @property
    def node_of(self) -> list[int]:
        """The number of the node of each rank."""
        return [self.settings.node_of[peer] for peer in self.peers]

    @cached_property
    def rules(self) -> Rules:
        """The rules by which algorithms are chosen. The same on all ranks."""
        return Rules(Place.of(self.node_of), self.size, self.settings.tuned)

    @contextmanager
    def forced(self, operation: str, rule: Rule, repeats: dict[Any, Any]) -> Iterator[None]:
        """A context in which the team takes this algorithm, to measure it. Must agree on all ranks.

        Args:
            repeats: those of earlier such contexts.
        """
        table = self.rules.table
        before = table[operation], self.repeats
        table[operation], self.repeats = [rule], repeats
        try:
            yield
        finally:
            table[operation], self.repeats = before

    @cached_property
    def topology(self) -> Topology:
        """The ranks of the team by node. Collective over the team when it is first used."""
        return Topology(self.comm, self.node_of)

    @cached_property
    def windows(self) -> Windows:
        """The memory that the ranks of this node share. Collective over the team when it is first used."""
        return Windows(self.comm, self.topology)

    def leave_node(self) -> None:
        """Free the memory that the ranks of this node share, unless results still hold it. Nothing is communicated."""
        for name in ("windows", "topology"):
            if name in self.__dict__:
                self.__dict__.pop(name).free()
        self.window = None

    @property
    def freed(self) -> bool:
        return not self.comm  # COMM_NULL

    def free(self) -> dict[tuple[int, str], Any]:
        """Free the communicators and the torch backends; a second call does nothing.

        No rank waits for another one: programs end their groups in different orders on different ranks.

        Returns:
            The torch backends that all ranks must end together, by the team's number and their name.
        """
        if self.freed:
            return {}
        if "background" in self.__dict__:
            self.background.worker.stop()
            self.background.leave_node()
        self.worker.stop()
        self.leave_node()
        gloo = self.torch_groups.pop("gloo", None)
        if gloo is not None:
            gloo.shutdown()
        left = {(self.number, name): group for name, group in self.torch_groups.items()}
        self.torch_groups.clear()
        self.routes.clear()
        self.repeats.clear()
        for number in (self.number, self.number + 1):
            activity.forget(number)
        self.side_comm.Free()
        if self.comm:
            self.comm.Free()
        return left


def _agree_on_number(comm: MPI.Intracomm, group: Group) -> int:
    """Return a number for the team, and give the group a key if it has none. Collective; one small Bcast."""
    from mpi4py import MPI

    number = array("q", [2 * secrets.randbits(60) + 2])
    comm.Bcast([number, MPI.INT64_T])
    if group.key is None:
        group.key = number[0] + 1
    return number[0]


class Context:
    """The ranks of one job and the groups that they form, from init() to finalize(). Collective over `private`.

    Args:
        private: communicator of all ranks, which the context owns and frees.
        comm: the user's communicator of the same ranks.
        settings: settings of the job.

    Attributes:
        team, everyone: team and group of all ranks.
        teams: teams of the groups that collectives have used so far.
        header_comm, data_comm: communicators of send and recv, for headers and for data.
        unexpected: messages that arrived before their receive.
        most_tag: largest tag that this MPI allows.
        transport: thread that sends and receives messages in the background, see :mod:`hpcdist.p2p.transfers`.
    """

    def __init__(self, private: MPI.Intracomm, comm: MPI.Intracomm, settings: Settings) -> None:
        from mpi4py import MPI

        from hpcdist.comm.messages import Unexpected  # which imports MPI

        self.comm = comm
        self.settings = settings
        self.rank: int = private.rank
        self.everyone = Group(private.rank, range(private.size))
        self.team = Team(private, self.everyone, settings)
        self.teams = {self.everyone: self.team}
        self.header_comm, self.data_comm = private.Dup(), private.Dup()
        self.unexpected = Unexpected(self.header_comm)
        self.most_tag = int(self.data_comm.Get_attr(MPI.TAG_UB) or 32767)
        self.transport: Any = None  # before its first use
        self._torch_groups: dict[tuple[int, str], Any] = {}  # of teams that have ended; all ranks end them together

    def group_of(self, given: GroupLike | None) -> Group:
        """Return the group that the caller passed; all ranks for None. Nothing is communicated.

        Raises:
            TypeError: if `given` is not a torch group, a DeviceMesh or a communicator; on this rank alone, since there
                are no known ranks to agree with.
            ValueError: if this rank is not in it, it has been destroyed, or a mesh has more than one dimension.
            HpcdistError: if it has ranks that are not in hpcdist's world.
        """
        if given is None:
            return self.everyone
        from mpi4py import MPI

        if isinstance(given, MPI.Intracomm):
            return _of_comm(given, self)
        if isinstance(given, DeviceMesh):
            if given.ndim != 1:
                raise refusal(
                    ValueError,
                    "HD204",
                    f"group is a DeviceMesh of {given.ndim} dims, expected 1: pass mesh[NAME] for one",
                )
            if given.get_coordinate() is None:
                raise refusal(ValueError, "HD204", f"rank {self.rank} of the world is not in the mesh that it passed")
            try:
                given = given.get_group()
            except RuntimeError as error:
                raise refusal(ValueError, "HD204", f"group is a DeviceMesh without a process group: {error}") from error
        if isinstance(given, dist.ProcessGroup):
            return _of_torch(given, self)
        if given == MPI.COMM_NULL or given == dist.GroupMember.NON_GROUP_MEMBER:
            raise refusal(ValueError, "HD204", f"rank {self.rank} of the world is not in the group that it passed")
        raise refusal(
            TypeError,
            "HD204",
            f"group must be a torch ProcessGroup, a 1-d DeviceMesh or an mpi4py Intracomm, got {type(given).__name__}",
        )

    def team_of(self, given: GroupLike | None) -> Team:
        """Return the team of a torch group, a DeviceMesh or an mpi4py communicator; that of all ranks for None.

        Each communicator and each torch group has a team of its own, also where several have the same ranks.
        Collective over the group when it is first used.

        Raises:
            TypeError, ValueError, HpcdistError: as :meth:`group_of`.
        """
        if given is None:
            return self.team
        group = self.group_of(given)
        team = self.teams.get(group)
        if team is None:
            from mpi4py import MPI

            for ended in [group for group in self.teams if group.ended]:  # torch has no callback for that
                self.forget(ended)
            with making("the first use of a group", group.peers):
                if isinstance(given, MPI.Intracomm):
                    comm = given.Dup()
                else:
                    comm = create_group(self.team.comm, group.peers, group.key or 0)
                team = self.teams[group] = Team(comm, group, self.settings)
        return team

    def forget(self, group: Group) -> None:
        """Free the resources of a group that has ended. Nothing is communicated."""
        if group.key is not None:
            self.unexpected.drop(group.key)
        group.freed = True
        team = self.teams.pop(group, None)
        if team is not None:
            self._torch_groups.update(team.free())

    def free(self, messages: bool) -> None:
        """Free all teams, and with `messages` the communicators of send and recv. Collective over the world."""
        if messages:
            self.header_comm.Free()
            self.data_comm.Free()
        for team in self.teams.values():
            self._torch_groups.update(team.free())
        self.teams.clear()
        for _, group in sorted(self._torch_groups.items()):  # in the same order on all ranks
            group.shutdown()
        self._torch_groups.clear()


_torch_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Context, Group]] = weakref.WeakKeyDictionary()
_keyval: int | None = None  # of the MPI attribute that holds a communicator's context and Group


def _of_comm(comm: MPI.Intracomm, context: Context) -> Group:
    global _keyval
    from mpi4py import MPI

    if comm == MPI.COMM_NULL:
        raise refusal(
            ValueError,
            "HD204",
            f"rank {context.rank} of the world is not in the communicator that it passed (COMM_NULL), or has freed it",
        )
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval(delete_fn=_freed)
    kept = comm.Get_attr(_keyval)
    if isinstance(kept, tuple) and kept[0] is context:
        found: Group = kept[1]
        return found
    whole = context.team.comm
    if comm == context.comm and MPI.Comm.Compare(comm, whole) == MPI.CONGRUENT:  # not with torch's own order
        group = context.everyone
    else:
        with freeing(comm.Get_group()) as part, freeing(whole.Get_group()) as all_:
            peers = MPI.Group.Translate_ranks(part, None, all_)
        if MPI.UNDEFINED in peers:
            raise HpcdistError("HD204", "the communicator has ranks that are not in hpcdist's world")
        group = Group(comm.rank, peers, comm)
    comm.Set_attr(_keyval, (context, group))
    return group


def _freed(comm: MPI.Comm, keyval: int, kept: tuple[Context, Group]) -> None:
    """Called by MPI when the user frees a communicator."""
    context, group = kept
    if group is not context.everyone:
        context.forget(group)


def _of_torch(given: dist.ProcessGroup, context: Context) -> Group:
    if not is_alive(given):
        raise refusal(ValueError, "HD204", "the group has been destroyed (torch.distributed.destroy_process_group)")
    kept, group = _torch_groups.get(given, (None, context.everyone))
    if kept is not context:
        if given is dist.group.WORLD and given.size() == context.everyone.size:
            group = context.everyone
        else:
            ranks = dist.get_process_group_ranks(given)
            group = Group(ranks.index(context.rank), ranks, given)
        _torch_groups[given] = context, group
    return group
