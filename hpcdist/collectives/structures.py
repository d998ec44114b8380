"""Structures in gather, concat and split: headers and small tensors over MPI, large ones in place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.collectives import results
from hpcdist.collectives.run import Description, Operation
from hpcdist.collectives.small import BEHIND_HEADERS
from hpcdist.comm.route import Message, Method, Route
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import RankError, coded
from hpcdist.routes import select
from hpcdist.tensors import pool
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.tensors.merge import check_same, merge
from hpcdist.tensors.message import Contents, Header, encode, pack
from hpcdist.tensors.storage import as_bytes, copyable, of_bytes, row_major
from hpcdist.tensors.tree import Tree, classes_in, decode, find_class, rebuild
from hpcdist.validation import local
from hpcdist.validation.call import Call, except_dim, show_shape
from hpcdist.validation.collective import Agreed

__all__ = ["Distribution", "JoinStructures"]


class JoinStructures(Operation):
    """Merge the structures of all ranks on the root, or on every rank if `root` is None."""

    validate = local.check_structure

    def __init__(self, name: str, x: Any, dim: Any, root: Any, route: Any, out: Any, allow_pickle: Any) -> None:
        self.name, self.x, self.dim, self.root, self.route, self.out = name, x, dim, root, route, out
        self.rooted, self.allow_pickle = name == "gather", allow_pickle

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        assert call.tree is not None
        self._tree, self._root = call.tree, call.root if self.rooted else None
        texts = _allgather_headers(team, call.header, agreed)
        self._headers = headers = [Header.read(text) for text in texts]
        self._lengths, self._inline, self._kinds = agreed.extents, agreed.inline, agreed.kinds
        self._joined = _Joined(self.name, headers, call.dim)
        _check_classes(self.name, team, _classes(headers))
        merge(self.name, [header.spec for header in headers], self._joined.add, lambda rank, kind, i: None)
        used = {header.metas[i].on_gpu for header in headers for i in header.large}
        self._routes = _routes(self.name, team, call.route, agreed.kinds, used)

    def describe(self, team: Team) -> Description:
        """See Plannable.describe."""
        sizes = [sum(header.nbytes) for header in self._headers]
        receivers = range(team.size) if self._root is None else [self._root]
        mine, receives = sizes[team.rank], team.rank in receivers
        sent, received = mine * (len(receivers) - receives), (sum(sizes) - mine) * receives
        used = _by_kinds(self._routes, self._kinds)
        return Description(used, self._methods(team), sent, received, "structure" if receives else "none")

    def _methods(self, team: Team) -> list[Method]:
        """Return how the data move: the small tensors, and the large ones in each kind of memory."""
        if self._inline:
            return [BEHIND_HEADERS]
        packed, name = sum(header.packed for header in self._headers), "allgatherv" if self._root is None else "gatherv"
        methods = [select.load("mpi").method(team, name, packed)] if packed else []
        for on_gpu, route in self._routes.items():
            large = [[header.nbytes[i] for i in header.large_of(on_gpu)] for header in self._headers]
            round_ = max(map(sum, zip_longest(*large, fillvalue=0)))
            methods.append(route.method(team, "allgather" if self._root is None else "exchange", round_))
        return methods

    def forward(self, team: Team) -> list[dict[int, Tensor]] | None:
        headers, receives, device = self._headers, self._root in (None, team.rank), team.settings.device
        nbytes = sum(sum(header.nbytes) for header in headers)
        sizes = [nbytes if self._root in (None, rank) else 0 for rank in range(team.size)]
        packed = sum(header.packed for header in headers) if receives and not self._inline else 0

        def make() -> tuple[list[dict[int, Tensor]], Tensor]:
            found = [self._joined.buffers(rank, device) if receives else {} for rank in range(team.size)]
            return found, pool.empty([packed], torch.uint8, "cpu", fixed=True)

        buffers, messages = results.allocate(self.name, team, sizes, make)
        if not self._inline:
            _gather_small(team, self._tree, headers, self._root, buffers, messages, device)
        elif receives:
            for rank, (header, length) in enumerate(zip(headers, self._lengths, strict=True)):
                buffers[rank].update(header.unpack(_behind(team, rank, length, header.packed), device))
        for on_gpu, route in self._routes.items():
            _gather_large(team, route, on_gpu, self._tree, headers, self._root, buffers)
        if receives:
            self._joined.copy_rest(buffers)
        return buffers if receives else None

    def finish(self, buffers: list[dict[int, Tensor]] | None) -> Any:
        """Merge the received structures. No other rank waits for this one any more, if a pickle fails to load."""
        if buffers is None:
            return None
        return merge(
            self.name,
            [header.spec for header in self._headers],
            lambda kind, path, numbers: decode(kind, self._joined.whole(numbers), self.allow_pickle),
            lambda rank, kind, i: decode(kind, buffers[rank][i], self.allow_pickle),
        )


def _behind(team: Team, rank: int, start: int, nbytes: int) -> Tensor:
    """Return a part of what came behind the header of a rank."""
    assert team.headers is not None
    return of_bytes(team.headers.all[team.headers.place(rank, start, nbytes)])


def _allgather_headers(team: Team, mine: bytes, agreed: Agreed) -> list[bytes]:
    """Gather the structures' headers of all ranks, unless they came behind those of the call."""
    lengths = agreed.extents
    if agreed.inline:
        return [_behind(team, rank, 0, length).numpy().tobytes() for rank, length in enumerate(lengths)]
    starts = layout.displs(lengths)
    texts = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
    select.load("mpi").allgatherv(team, of_bytes(mine), texts, lengths, starts)
    data = texts.numpy().tobytes()
    return [data[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def _check_classes(verb: str, team: Team, names: Sequence[str]) -> None:
    """Check that every rank has imported all classes. Collective if there are any; `names` agree on all ranks."""
    if names:

        def find_all() -> None:
            for name in names:
                find_class(name)

        objects.run_on_all(team.comm, verb, find_all)


def _classes(structures: Sequence[Header] | Sequence[Tree]) -> list[str]:
    return sorted(set().union(*(classes_in(one.spec) for one in structures)))


class _Joined:
    """The tensors to join: those with the same path in the structures of all ranks."""

    def __init__(self, verb: str, headers: Sequence[Header], dim: int) -> None:
        self.verb, self.headers, self.dim = verb, headers, dim
        self._numbers: list[list[int]] = []  # for each joined tensor, the number of its part on each rank
        self._wholes: dict[tuple[int, ...], Tensor] = {}

    def add(self, kind: str, path: str, numbers: list[int]) -> None:
        """Add a tensor, after checking that its parts can be joined."""
        metas = [header.metas[i] for header, i in zip(self.headers, numbers, strict=True)]
        check_same(self.verb, path, "has dtype", [str(meta.dtype) for meta in metas])
        check_same(self.verb, path, "has number of dims", [str(len(meta.shape)) for meta in metas])
        ndim = len(metas[0].shape) or 1
        if not -ndim <= self.dim < ndim:
            text = f"dim is {self.dim}, expected {-ndim} to {ndim - 1} for {path}, which has {len(metas[0].shape)} dims"
            raise RankError(self.verb, dict.fromkeys(range(len(metas)), coded("HD204", text)))
        dim = self.dim % ndim
        check_same(self.verb, path, "has shape", [show_shape(except_dim(meta.shape or (1,), dim)) for meta in metas])
        self._numbers.append(numbers)

    def buffers(self, rank: int, device: torch.device) -> dict[int, Tensor]:
        """Return receive buffers for the large tensors of a rank, by number: parts of joined tensors if contiguous."""
        found, header = {}, self.headers[rank]
        for numbers in self._numbers:
            part = self._part(numbers, rank, device)
            if part.is_contiguous() and header.is_large(numbers[rank]):
                found[numbers[rank]] = part
        for i in header.large:
            if i not in found:
                found[i] = header.recv_buffer(i, device)
        return found

    def _part(self, numbers: list[int], rank: int, device: torch.device) -> Tensor:
        """Return the part of a rank in a joined tensor."""
        metas = [header.metas[i] for header, i in zip(self.headers, numbers, strict=True)]
        shape = list(metas[0].shape) or [1]
        dim = self.dim % len(shape)
        extents = [meta.shape[dim] if meta.shape else 1 for meta in metas]
        key = tuple(numbers)
        if key not in self._wholes:
            shape[dim] = sum(extents)
            on = device if any(meta.on_gpu for meta in metas) else torch.device("cpu")
            self._wholes[key] = pool.empty(shape, metas[0].dtype, on)
        return self._wholes[key].narrow(dim, layout.displs(extents)[rank], extents[rank])

    def copy_rest(self, buffers: Sequence[dict[int, Tensor]]) -> None:
        """Copy the parts that were not received in the joined tensors into them."""
        for numbers in self._numbers:
            for rank, number in enumerate(numbers):
                part, received = self._part(numbers, rank, torch.device("cpu")), buffers[rank][number]
                if not self.headers[rank].is_large(number) or not part.is_contiguous():
                    copyable(part).copy_(copyable(received.view(part.shape)))

    def whole(self, numbers: list[int]) -> Tensor:
        return self._wholes[tuple(numbers)]


def _gather_small(
    team: Team,
    tree: Tree,
    headers: Sequence[Header],
    root: int | None,
    buffers: Sequence[dict[int, Tensor]],
    messages: Tensor,
    device: torch.device,
) -> None:
    """Gather the small tensors of all ranks, packed in one message per rank, over MPI."""
    counts = [header.packed for header in headers]
    starts, mpi = layout.displs(counts), select.load("mpi")
    packed = pack(tree.tensors, headers[team.rank])
    receives = root in (None, team.rank)
    if sum(counts) and root is None:
        mpi.allgatherv(team, packed, messages, counts, starts)
    elif sum(counts) and root is not None:
        mpi.gatherv(team, packed, messages if receives else None, counts, starts, root)
    if receives:
        for header, buffer, start, count in zip(headers, buffers, starts, counts, strict=True):
            buffer.update(header.unpack(messages[start : start + count], device))


def _gather_large(
    team: Team,
    route: Route,
    on_gpu: bool,
    tree: Tree,
    headers: Sequence[Header],
    root: int | None,
    buffers: Sequence[dict[int, Tensor]],
) -> None:
    """Gather the large tensors in one kind of memory, one per rank in each round."""
    numbers, me = [header.large_of(on_gpu) for header in headers], team.rank
    receivers = range(team.size) if root is None else [root]
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    for round_ in range(max(map(len, numbers))):
        now = {rank: of_rank[round_] for rank, of_rank in enumerate(numbers) if round_ < len(of_rank)}
        mine = as_bytes(row_major(tree.tensors[now[me]])) if me in now else nothing
        blocks = {rank: as_bytes(buffers[rank][number]) for rank, number in now.items()} if me in receivers else {}
        if root is None and route.allgather(team, mine, [blocks.get(rank, nothing) for rank in range(team.size)]):
            continue
        # The ranks after this one first, so that not all ranks send to the same one first.
        dests = sorted(receivers, key=lambda dest: (dest < me, dest)) if me in now else []
        if me in blocks:
            blocks.pop(me).copy_(mine)
        sends = [(dest, mine) for dest in dests if dest != me]
        route.exchange(team, sends, list(blocks.items()), max(headers[rank].nbytes[now[rank]] for rank in now))


def _routes(verb: str, team: Team, name: str, kinds: tuple[int, ...], used: set[bool]) -> dict[bool, Route]:
    """Select routes for the large tensors in host memory (False) and on GPUs (True). Collective.

    Args:
        kinds: kind of memory of each rank for tensors from a GPU.
        used: which of the two occur; the same on all ranks.
    """
    host = (MemoryKind.CPU,) * team.size
    return {on_gpu: select.agreed(verb, name, team, kinds if on_gpu else host) for on_gpu in sorted(used)}


def _by_kinds(used: dict[bool, Route], kinds: tuple[int, ...]) -> dict[tuple[int, ...], Route]:
    """Return what routes() has selected by the kinds of memory of all ranks."""
    host = (MemoryKind.CPU,) * len(kinds)
    return {kinds if on_gpu else host: route for on_gpu, route in used.items()}


class Distribution:
    """The distribution of a structure that the root of split has cut. Collective.

    Args:
        call: the call; on the root, it has the structures of all ranks.
        kinds: kind of memory of each rank for tensors from a GPU.
    """

    def __init__(self, team: Team, call: Call, kinds: tuple[int, ...]) -> None:
        self._call, self._kinds = call, kinds
        self._contents = [Contents.of(tree.tensors) for tree in call.trees]
        self._texts = [encode(tree.spec, held) for tree, held in zip(call.trees, self._contents, strict=True)]
        schedule = json.dumps(_Schedule.of(call.trees, self._texts, self._contents)).encode() if call.trees else b""
        self._schedule = _Schedule(*json.loads(objects.broadcast_bytes(team.comm, schedule, call.root)))
        _check_classes(call.verb, team, self._schedule.classes)
        used = {on_gpu for on_gpu in (False, True) if self._schedule.longest[on_gpu]}
        self._routes = _routes(call.verb, team, call.route, kinds, used)

    def forward(self, team: Team) -> tuple[Header, dict[int, Tensor]]:
        call, contents, schedule = self._call, self._contents, self._schedule
        device = team.settings.device
        text = of_bytes(b"".join(self._texts)) if self._texts else None
        header = Header.read(_scatter(team, text, schedule.lengths, call.root).numpy().tobytes())
        packed = [pack(tree.tensors, held) for tree, held in zip(call.trees, contents, strict=True)]
        small = _scatter(team, torch.cat(packed) if packed else None, schedule.packed, call.root)
        buffers = header.unpack(small, device)
        make = lambda: {i: header.recv_buffer(i, device) for i in header.large}  # noqa: E731
        buffers.update(results.everywhere(call.verb, team, sum(map(sum, schedule.longest)), make))
        for on_gpu, route in self._routes.items():
            for round_, longest in enumerate(schedule.longest[on_gpu]):
                sends, recvs = _messages(team.rank, call, contents, header, buffers, on_gpu, round_)
                route.exchange(team, sends, recvs, longest)
        return header, buffers

    def describe(self, team: Team) -> Description:
        """See Plannable.describe: only the root knows the bytes of the parts."""
        packed, sizes = sum(self._schedule.packed), [sum(held.nbytes) for held in self._contents]
        methods = [select.load("mpi").method(team, "scatterv", packed)] if packed else []
        methods += [
            route.method(team, "exchange", max(self._schedule.longest[on_gpu]))
            for on_gpu, route in self._routes.items()
        ]
        is_root = team.rank == self._call.root
        sent, received = (sum(sizes) - sizes[team.rank], 0) if is_root else (0, None)
        return Description(_by_kinds(self._routes, self._kinds), methods, sent, received, "structure")

    def finish(self, received: tuple[Header, dict[int, Tensor]], allow_pickle: bool) -> Any:
        """Rebuild this rank's structure."""
        header, buffers = received
        return rebuild(header.spec, lambda kind, i: decode(kind, buffers[i], allow_pickle))


class _Schedule(NamedTuple):
    """What every rank must know about the structures that the root has cut.

    Attributes:
        lengths, packed: bytes of each rank's header, and of its small tensors.
        longest: bytes of the longest large tensor of each round, in host memory and on GPUs.
        classes: names of all classes.
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
            longest.append([max(round_) for round_ in zip_longest(*sizes, fillvalue=0)])
        return cls([len(text) for text in texts], [held.packed for held in contents], longest, _classes(trees))


def _scatter(team: Team, messages: Tensor | None, counts: Sequence[int], root: int) -> Tensor:
    """Scatter bytes of the root; return this rank's part."""
    mine = pool.empty([counts[team.rank]], torch.uint8, "cpu", fixed=True)
    if sum(counts):
        select.load("mpi").scatterv(team, messages, mine, counts, layout.displs(counts), root)
    return mine


def _messages(
    rank: int,
    call: Call,
    contents: Sequence[Contents],
    header: Header,
    buffers: dict[int, Tensor],
    on_gpu: bool,
    round_: int,
) -> tuple[list[Message], list[Message]]:
    """Return this rank's sends and receives in a round, in which each rank receives one large tensor."""
    sends: list[Message] = []
    for dest, (tree, of_dest) in enumerate(zip(call.trees, contents, strict=True)):
        for number in of_dest.large_of(on_gpu)[round_ : round_ + 1]:
            if dest == rank:
                copyable(buffers[number]).copy_(copyable(tree.tensors[number]))
            else:
                sends.append((dest, as_bytes(row_major(tree.tensors[number]))))
    mine = header.large_of(on_gpu)[round_ : round_ + 1] if rank != call.root else []
    return sends, [(call.root, as_bytes(buffers[number])) for number in mine]
