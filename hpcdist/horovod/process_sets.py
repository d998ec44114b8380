"""Ranks, sizes and process sets, by Horovod's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcdist.collectives.join import concat
from hpcdist.errors import RankError, coded, refusal
from hpcdist.runtime import world
from hpcdist.tensors import accelerator

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    *(
        "ProcessSet",
        "add_process_set",
        "global_process_set",
        "init",
        "is_initialized",
        "remove_process_set",
        "shutdown",
    ),
    *("cross_rank", "cross_size", "is_homogeneous", "local_rank", "local_size", "rank", "size"),
    *("ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "mpi_built", "mpi_enabled"),
    *("mpi_threads_supported", "nccl_built", "rocm_built", "registered"),
]


class ProcessSet:
    """Some of the ranks, which run operations together.

    Args:
        ranks_or_comm: their ranks, in any order, or an mpi4py communicator.
    """

    process_set_id: int | None = None  # from init() or add_process_set(), until remove_process_set()
    ranks: list[int] | None = None
    mpi_comm: MPI.Intracomm | None = None

    def __init__(self, ranks_or_comm: Iterable[int] | MPI.Intracomm) -> None:
        if isinstance(ranks_or_comm, Iterable):
            self.ranks = sorted(ranks_or_comm)
        else:
            self.mpi_comm = ranks_or_comm
        known = hasattr(ranks_or_comm, "Get_rank") if self.ranks is None else all(type(r) is int for r in self.ranks)
        if not known:
            text = f"ProcessSet: expected a list of ranks or an mpi4py communicator, got {ranks_or_comm!r}"
            raise refusal(ValueError, "HD201", text)
        self._forget()

    def _forget(self) -> None:
        self.process_set_id = None
        self.group: dist.ProcessGroup | None = None  # None: all ranks
        self.pending: dict[str, Any] = {}  # operations submitted by this rank, and not run yet
        self.submitted: Counter[str] = Counter()  # without a name, by kind
        self.joined: dict[int, None] = {}  # ranks that have called join(), in this order

    def size(self) -> int | None:
        """The number of ranks; None if the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """This rank's number in the set; None if the set is not registered."""
        if self.process_set_id is None:
            return None
        if not self.included():
            raise refusal(ValueError, "HD114", f"rank {rank()} is not in {self}")
        return (self.ranks or []).index(rank())

    def included(self) -> bool | None:
        """Whether this rank is in the set; None if its ranks are not known yet."""
        return None if self.ranks is None else rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0
_registered: dict[int, ProcessSet] = {}


def registered() -> dict[int, list[int]]:
    """Return the ranks of each process set by its id."""
    return {number: list(one.ranks or ()) for number, one in _registered.items()}


def init(comm: MPI.Intracomm | None = None, process_sets: Sequence[ProcessSet] = ()) -> None:
    """Start torch.distributed over MPI, by :func:`hpcdist.init`. Collective over all ranks; may be repeated.

    Args:
        comm: an mpi4py communicator that takes the place of COMM_WORLD.
        process_sets: these replace the sets that are registered.

    Raises:
        ValueError: on this rank, if two of its sets have the same ranks. The others are registered.
    """
    if comm is not None and not hasattr(comm, "Get_rank"):
        text = "init(): pass an mpi4py communicator as `comm`, and lists of ranks as process_sets=[ProcessSet(ranks)]"
        raise refusal(ValueError, "HD201", text)
    found = world.init(comm)
    global_process_set.ranks, global_process_set.mpi_comm = list(range(found.world_size)), found.comm
    _registered.setdefault(0, global_process_set)
    if process_sets:
        _register_all(process_sets)


def _register_all(process_sets: Sequence[ProcessSet]) -> None:
    """Register sets in the place of those there are. A communicator may stand for other ranks on each rank."""
    for old in list(_registered.values())[1:]:
        remove_process_set(old)
    for one in process_sets:
        one.ranks = _ranks_of(one)
    lists: list[list[tuple[int, ...]]] = concat([[tuple(one.ranks or ()) for one in process_sets]])
    longest = max(map(len, lists))
    wanted = dict.fromkeys(ranks[place] for place in range(longest) for ranks in lists if place < len(ranks))
    known = {tuple(range(size())): global_process_set}
    own = {tuple(one.ranks or ()): one for one in reversed(process_sets)}
    for ranks in wanted:
        if ranks not in known:
            known[ranks] = own.get(ranks) or ProcessSet(ranks)
            _register(known[ranks])
    if twice := [one for one in process_sets if known[tuple(one.ranks or ())] is not one]:
        raise refusal(ValueError, "HD114", f"init(): a process set with the same ranks exists: {twice[0]}")


def _ranks_of(one: ProcessSet) -> list[int]:
    """Return the ranks of a set in the world."""
    from mpi4py import MPI

    if one.mpi_comm is None:
        return one.ranks or []
    mine, whole = one.mpi_comm.Get_group(), world.current().comm.Get_group()
    try:
        return sorted(MPI.Group.Translate_ranks(mine, None, whole))
    finally:
        mine.Free()
        whole.Free()


def _register(one: ProcessSet) -> None:
    """Make the group of a set. Collective over all ranks."""
    one._forget()
    one.group = dist.new_group(one.ranks)
    one.process_set_id = max(_registered) + 1
    _registered[one.process_set_id] = one


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set. Collective over all ranks, with the same set.

    Raises:
        ValueError: if a set with these ranks exists.
        RankError: on every rank, if they pass different sets.
    """
    one = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    one.ranks = _ranks_of(one)
    asked: list[list[int]] = concat([one.ranks])
    if problems := {r: coded("HD303", f"{ranks}") for r, ranks in enumerate(asked) if ranks != asked[0]}:
        raise RankError(f"add_process_set({asked[0]})", problems)
    if one.ranks in registered().values():
        raise refusal(ValueError, "HD114", f"add_process_set(): a process set with the same ranks exists: {one}")
    _register(one)
    return one


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Collective over all ranks. Returns whether it was registered, and not the global set."""
    if not process_set.process_set_id:
        return False
    del _registered[process_set.process_set_id]
    if process_set.included():
        dist.destroy_process_group(process_set.group)
    process_set._forget()
    return True


def shutdown() -> None:
    """Free the process sets, and finalize the world. Collective over all ranks."""
    for one in list(_registered.values())[1:]:
        remove_process_set(one)
    _registered.clear()
    global_process_set._forget()
    global_process_set.process_set_id = 0
    world.finalize()


def is_initialized() -> bool:
    """Whether :func:`init` has been called, and :func:`shutdown` has not."""
    return bool(_registered)


def rank() -> int:
    """The rank of this process."""
    return world.current().rank


def size() -> int:
    """The number of processes."""
    return world.current().world_size


def local_rank() -> int:
    """The rank among the processes of this node."""
    return world.current().local_rank


def _per_node() -> Counter[int]:
    return Counter(world.current().settings.node_of)


def local_size() -> int:
    """The number of processes on this node."""
    return _per_node()[world.current().node]


def _peers() -> list[int]:
    """The nodes that have a process with this local rank."""
    return sorted(node for node, count in _per_node().items() if count > local_rank())


def cross_rank() -> int:
    """This node's number among the nodes that have a process with this local rank."""
    return _peers().index(world.current().node)


def cross_size() -> int:
    """The number of nodes that have a process with this local rank."""
    return len(_peers())


def is_homogeneous() -> bool:
    """Whether all nodes have the same number of processes."""
    return len(set(_per_node().values())) == 1


def mpi_threads_supported() -> bool:
    """Whether several threads may call MPI at once."""
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def mpi_built() -> bool:
    """True."""
    return True


def gloo_built() -> bool:
    """False: the ranks communicate through MPI, and NCCL."""
    return False


mpi_enabled = mpi_built
gloo_enabled = ddl_built = ccl_built = gloo_built


def nccl_built() -> int:
    """The version of NCCL, such as 22809 for 2.28.9; 0 without NCCL."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch = map(int, accelerator.library_version().split("."))
    return major * 10000 + minor * 100 + patch


def cuda_built() -> bool:
    """Whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None
