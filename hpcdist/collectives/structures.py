"""gather, concat and split of structures: headers and small tensors over MPI, large ones from and into place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.collectives import results
from hpcdist.collectives.run import Operation
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import RankError
from hpcdist.routes import select
from hpcdist.routes.base import Message, Route
from hpcdist.tensors.dtypes import MemoryKind
from hpcdist.tensors.merge import merge, same
from hpcdist.tensors.message import Contents, Header, encode, pack
from hpcdist.tensors.storage import as_bytes, copyable, of_bytes, row_major
from hpcdist.tensors.tree import Tree, classes_in, find_class, finished, rebuild
from hpcdist.validation import local
from hpcdist.validation.call import Call, others, show_shape
from hpcdist.validation.collective import Agreed

__all__ = ["Distribution", "Join"]


class Join(Operation):
    """The structures of all ranks merged on the root, or on every rank if there is none."""

    def __init__(
        self, name: str, x: Any, dim: Any, root: Any, rooted: bool, route: Any, out: Any, allow_pickle: Any
    ) -> None:
        self.name, self.x, self.dim, self.root, self.route, self.out = name, x, dim, root, route, out
        self.rooted, self.allow_pickle = rooted, allow_pickle

    def validate(self, team: Team) -> Call:
        return local.structure_call(self, team.size, team.settings.device.type == "cuda")

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        assert call.tree is not None
        self._tree = call.tree
        self._headers = headers = [Header(text) for text in _all_texts(team, call.header, agreed.extents)]
        self._joins = _Joins(self.name, headers, call.dim)
        _know_classes(self.name, team, _classes(headers))
        merge(self.name, [header.spec for header in headers], self._joins.note, lambda rank, kind, i: None)
        used = {header.metas[i].cuda for header in headers for i in header.large}
        self._routes = _routes(self.name, team, call.route, agreed.kinds, used)

    def forward(self, team: Team) -> list[dict[int, Tensor]] | None:
        headers, receives, device = self._headers, self.root in (None, team.rank), team.settings.device
        nbytes = sum(sum(header.nbytes) for header in headers)
        sizes = [nbytes if self.root in (None, rank) else 0 for rank in range(team.size)]
        make = lambda: [self._joins.places(rank, device) if receives else {} for rank in range(team.size)]  # noqa: E731
        places = results.allocate(self.name, team, sizes, make)
        _bring_small(team, self._tree, headers, self.root, places, device)
        for on_gpu, route in self._routes.items():
            _bring_large(team, route, on_gpu, self._tree, headers, self.root, places)
        if receives:
            self._joins.finish(places)
        return places if receives else None

    def finish(self, places: list[dict[int, Tensor]] | None) -> Any:
        """Merge what has arrived. Nobody waits for this rank any more: a pickle may fail to load."""
        if places is None:
            return None
        return merge(
            self.name,
            [header.spec for header in self._headers],
            lambda kind, path, numbers: finished(kind, self._joins.result(numbers), self.allow_pickle),
            lambda rank, kind, i: finished(kind, places[rank][i], self.allow_pickle),
        )


def _all_texts(team: Team, mine: bytes, lengths: Sequence[int]) -> list[bytes]:
    """The headers of all ranks; their lengths are known."""
    starts = layout.displs(lengths)
    texts = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
    select.load("mpi").allgatherv(team, of_bytes(mine), texts, lengths, starts)
    data = texts.numpy().tobytes()
    return [data[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def _know_classes(verb: str, team: Team, names: Sequence[str]) -> None:
    """Every rank must know every class. Collective if there are any, which all ranks see alike."""
    if names:

        def find_all() -> None:
            for name in names:
                find_class(name)

        objects.all_gather(team.comm, verb, find_all)


def _classes(described: Sequence[Header] | Sequence[Tree]) -> list[str]:
    return sorted(set().union(*(classes_in(one.spec) for one in described)))


class _Joins:
    """The tensors that become one: on each rank one, in the same place of the structure."""

    def __init__(self, verb: str, headers: Sequence[Header], dim: int) -> None:
        self.verb, self.headers, self.dim = verb, headers, dim
        self._joins: list[list[int]] = []  # of each, the number of its tensor on each rank
        self._wholes: dict[tuple[int, ...], Tensor] = {}

    def note(self, kind: str, path: str, numbers: list[int]) -> None:
        """Check that they can be joined, while the structures are first merged."""
        metas = [header.metas[i] for header, i in zip(self.headers, numbers, strict=True)]
        same(self.verb, path, "has dtype", [str(meta.dtype) for meta in metas])
        same(self.verb, path, "has number of dims", [str(len(meta.shape)) for meta in metas])
        ndim = len(metas[0].shape) or 1
        if not -ndim <= self.dim < ndim:
            text = f"dim is {self.dim}, expected {-ndim} to {ndim - 1} for {path}, which has {len(metas[0].shape)} dims"
            raise RankError(self.verb, dict.fromkeys(range(len(metas)), text))
        dim = self.dim % ndim
        same(self.verb, path, "has shape", [show_shape(others(meta.shape or (1,), dim)) for meta in metas])
        self._joins.append(numbers)

    def places(self, rank: int, device: torch.device) -> dict[int, Tensor]:
        """Where the large tensors of a rank are to arrive, by number: in the joined tensor, if that can be."""
        places, header = {}, self.headers[rank]
        for numbers in self._joins:
            part = self._part(numbers, rank, device)
            if part.is_contiguous() and header.is_large(numbers[rank]):
                places[numbers[rank]] = part
        for i in header.large:
            if i not in places:
                places[i] = header.recv_buffer(i, device)
        return places

    def _part(self, numbers: list[int], rank: int, device: torch.device) -> Tensor:
        """The part of the joined tensor that is a rank's."""
        metas = [header.metas[i] for header, i in zip(self.headers, numbers, strict=True)]
        shape = list(metas[0].shape) or [1]
        dim = self.dim % len(shape)
        extents = [meta.shape[dim] if meta.shape else 1 for meta in metas]
        key = tuple(numbers)
        if key not in self._wholes:
            shape[dim] = sum(extents)
            on = device if any(meta.cuda for meta in metas) else torch.device("cpu")
            self._wholes[key] = torch.empty(shape, dtype=metas[0].dtype, device=on)
        return self._wholes[key].narrow(dim, layout.displs(extents)[rank], extents[rank])

    def finish(self, places: Sequence[dict[int, Tensor]]) -> None:
        """Bring the parts that have not arrived in the joined tensors there."""
        for numbers in self._joins:
            for rank, number in enumerate(numbers):
                part, arrived = self._part(numbers, rank, torch.device("cpu")), places[rank][number]
                if not self.headers[rank].is_large(number) or not part.is_contiguous():
                    copyable(part).copy_(copyable(arrived.view(part.shape)))

    def result(self, numbers: list[int]) -> Tensor:
        return self._wholes[tuple(numbers)]


def _bring_small(
    team: Team,
    tree: Tree,
    headers: Sequence[Header],
    root: int | None,
    places: Sequence[dict[int, Tensor]],
    device: torch.device,
) -> None:
    """The small tensors of all ranks, each rank's packed in one message, over MPI."""
    counts = [header.packed for header in headers]
    starts, mpi = layout.displs(counts), select.load("mpi")
    packed = pack(tree.tensors, headers[team.rank])
    receives = root in (None, team.rank)
    messages = torch.empty(sum(counts) if receives else 0, dtype=torch.uint8, device="cpu")
    if sum(counts) and root is None:
        mpi.allgatherv(team, packed, messages, counts, starts)
    elif sum(counts) and root is not None:
        mpi.gatherv(team, packed, messages if receives else None, counts, starts, root)
    if receives:
        for header, place, start, count in zip(headers, places, starts, counts, strict=True):
            place.update(header.unpack(messages[start : start + count], device))


def _bring_large(
    team: Team,
    route: Route,
    on_gpu: bool,
    tree: Tree,
    headers: Sequence[Header],
    root: int | None,
    places: Sequence[dict[int, Tensor]],
) -> None:
    """The large tensors of one kind of memory: of each rank the first, of each the second, ..."""
    numbers = [header.large_of(on_gpu) for header in headers]
    receivers = range(team.size) if root is None else [root]
    for turn in range(max(map(len, numbers))):
        now = [(rank, of_rank[turn]) for rank, of_rank in enumerate(numbers) if turn < len(of_rank)]
        sends, recvs = [], []
        for rank, number in now:
            if rank == team.rank:
                x = row_major(tree.tensors[number])
                sends = [(dest, as_bytes(x)) for dest in _from(team.rank, receivers) if dest != rank]
                if team.rank in receivers:
                    copyable(places[rank][number]).copy_(copyable(x).view(places[rank][number].shape))
            elif team.rank in receivers:
                recvs.append((rank, as_bytes(places[rank][number])))
        route.exchange(team, sends, recvs, max(headers[rank].nbytes[number] for rank, number in now))


def _from(rank: int, receivers: Sequence[int]) -> list[int]:
    """The receivers, those behind `rank` first, so that not all ranks turn to the same one."""
    return sorted(receivers, key=lambda dest: (dest < rank, dest))


def _routes(verb: str, team: Team, name: str, kinds: tuple[int, ...], used: set[bool]) -> dict[bool, Route]:
    """The routes of the large tensors: of those in host memory, and of those on GPUs (True). Collective.

    Args:
        kinds: what the ranks have for tensors from a GPU.
        used: which of the two there are; the same on all ranks.
    """
    host = (MemoryKind.CPU,) * team.size
    return {on_gpu: select.agreed(verb, name, team, kinds if on_gpu else host) for on_gpu in sorted(used)}


class Distribution:
    """A structure that split's root has cut: each rank gets its own. Collective.

    Args:
        call: on the root with the structures of all ranks.
        kinds: what the ranks have for tensors from a GPU.
    """

    def __init__(self, team: Team, call: Call, kinds: tuple[int, ...]) -> None:
        self._call = call
        self._contents = [Contents.of(tree.tensors) for tree in call.trees]
        self._texts = [encode(tree.spec, held) for tree, held in zip(call.trees, self._contents, strict=True)]
        told = json.dumps(_Schedule.of(call.trees, self._texts, self._contents)).encode() if call.trees else b""
        self._schedule = _Schedule(*json.loads(objects.broadcast_bytes(team.comm, told, call.root)))
        _know_classes(call.verb, team, self._schedule.classes)
        used = {on_gpu for on_gpu in (False, True) if self._schedule.longest[on_gpu]}
        self._routes = _routes(call.verb, team, call.route, kinds, used)

    def forward(self, team: Team) -> tuple[Header, dict[int, Tensor]]:
        call, contents, schedule = self._call, self._contents, self._schedule
        device = team.settings.device
        text = of_bytes(b"".join(self._texts)) if self._texts else None
        header = Header(_scattered(team, text, schedule.lengths, call.root).numpy().tobytes())
        packed = [pack(tree.tensors, held) for tree, held in zip(call.trees, contents, strict=True)]
        small = _scattered(team, torch.cat(packed) if packed else None, schedule.packed, call.root)
        places = header.unpack(small, device)
        places.update({i: header.recv_buffer(i, device) for i in header.large})
        for on_gpu, route in self._routes.items():
            for turn, longest in enumerate(schedule.longest[on_gpu]):
                sends, recvs = _turn(team.rank, call, contents, header, places, on_gpu, turn)
                route.exchange(team, sends, recvs, longest)
        return header, places

    def finish(self, arrived: tuple[Header, dict[int, Tensor]], allow_pickle: bool) -> Any:
        """Rebuild this rank's structure."""
        header, places = arrived
        return rebuild(header.spec, lambda kind, i: finished(kind, places[i], allow_pickle))


class _Schedule(NamedTuple):
    """What every rank has to know of a structure that the root has cut.

    Attributes:
        lengths, packed: bytes of each rank's header, and of its small tensors.
        longest: of the large tensors in host memory, and of those on a GPU: for each turn the bytes of the longest.
        classes: the names of those in it.
    """

    lengths: list[int]
    packed: list[int]
    longest: list[list[int]]
    classes: list[str]

    @classmethod
    def of(cls, trees: Sequence[Tree], texts: Sequence[bytes], contents: Sequence[Contents]) -> _Schedule:
        longest = []
        for on_gpu in (False, True):
            sizes = [[held.nbytes[i] for i in held.large_of(on_gpu)] for held in contents]
            longest.append([max(turn) for turn in zip_longest(*sizes, fillvalue=0)])
        return cls([len(text) for text in texts], [held.packed for held in contents], longest, _classes(trees))


def _scattered(team: Team, messages: Tensor | None, counts: Sequence[int], root: int) -> Tensor:
    """This rank's part of bytes that the root holds."""
    mine = torch.empty(counts[team.rank], dtype=torch.uint8, device="cpu")
    if sum(counts):
        select.load("mpi").scatterv(team, messages, mine, counts, layout.displs(counts), root)
    return mine


def _turn(
    rank: int,
    call: Call,
    contents: Sequence[Contents],
    header: Header,
    places: dict[int, Tensor],
    on_gpu: bool,
    turn: int,
) -> tuple[list[Message], list[Message]]:
    """What this rank sends and receives when each rank gets its large tensor of this number."""
    sends: list[Message] = []
    for dest, (tree, of_dest) in enumerate(zip(call.trees, contents, strict=True)):
        for number in of_dest.large_of(on_gpu)[turn : turn + 1]:
            if dest == rank:
                copyable(places[number]).copy_(copyable(tree.tensors[number]))
            else:
                sends.append((dest, as_bytes(row_major(tree.tensors[number]))))
    mine = header.large_of(on_gpu)[turn : turn + 1] if rank != call.root else []
    return sends, [(call.root, as_bytes(places[number])) for number in mine]
