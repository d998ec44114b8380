"""Structures in gather, concat and split: headers and small tensors over MPI, large ones in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from hpcdist.collectives import results
from hpcdist.collectives.run import Operation
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.control.codec import classes_in, same_class
from hpcdist.errors import RankError, coded
from hpcdist.routes import select
from hpcdist.routes.route import Route, Vector
from hpcdist.tensors import pool
from hpcdist.tensors.accelerator import MemoryKind
from hpcdist.tensors.blocks import Blocks, blocks
from hpcdist.tensors.message import MessageContents, MessageHeader, check_memory, encode, join, pack, parse
from hpcdist.tensors.storage import as_bytes, copyable, of_bytes, row_major
from hpcdist.tensors.tree import Tree, check_same, decode, merge, restore
from hpcdist.validation import local
from hpcdist.validation.collective import Agreed, Call, show_shape

Buffers = dict[int, Tensor]  # the tensors of one rank, by their numbers


@dataclass(eq=False)
class Joining(Operation):
    """A call of gather (`rooted`) or concat, whose arguments are not validated."""

    name: str
    x: Any
    dim: Any
    route: Any
    out: Any
    allow_pickle: Any
    root: Any = -1
    rooted: bool = False
    shared: bool = False


class JoinStructures(Joining):
    """Merge the structures of all ranks on the root, or on every rank if `root` is None."""

    validate = local.check_structure

    def plan(self, team: Team, call: Call, agreed: Agreed) -> None:
        assert call.tree is not None
        self._tree, self._agreed, self._dim = call.tree, agreed, call.dim
        self._joined: dict[tuple[int, ...], Blocks] = {}  # the tensors to join, by the number of the part on each rank
        self._wholes: dict[tuple[int, ...], Tensor] = {}
        self._receivers: Sequence[int] = [call.root] if self.rooted else range(team.size)
        if agreed.inline:
            texts = [team.headers.data(rank, 0, length) for rank, length in enumerate(agreed.extents)]
        else:
            texts = team.comm.allgather(call.header)
        self._headers = headers = list(map(MessageHeader.read, texts))
        check_classes(self.name, team, classes_of(headers))
        merge(self.name, [header.spec for header in headers], self._join, lambda rank, kind, i: None)
        used = {header.metas[i].on_gpu for header in headers for i in header.large}
        self._routes = _routes(team, call, agreed.kinds, used)

    def _join(self, kind: str, path: str, numbers: list[int]) -> None:
        """Plan a joined tensor, after checking that its parts can be joined."""
        metas = [header.metas[i] for header, i in zip(self._headers, numbers, strict=True)]
        check_same(self.name, path, "has dtype", [str(meta.dtype) for meta in metas])
        check_same(self.name, path, "has number of dims", [str(len(meta.shape)) for meta in metas])
        shapes = [meta.shape or (1,) for meta in metas]
        ndim = len(shapes[0])
        if not -ndim <= self._dim < ndim:
            dims = f"{-ndim} to {ndim - 1} for {path}, which has {len(metas[0].shape)} dims"
            text = coded("HD204", f"dim is {self._dim}, expected {dims}")
            raise RankError(self.name, dict.fromkeys(range(len(metas)), text))
        dim = self._dim % ndim
        others = [show_shape((*shape[:dim], -1, *shape[dim + 1 :])) for shape in shapes]
        check_same(self.name, path, "has shape", others)
        self._joined[tuple(numbers)] = blocks(shapes[0], dim, tuple(shape[dim] for shape in shapes), metas[0].dtype)

    def forward(self, team: Team) -> list[Buffers] | None:
        headers, receives, device = self._headers, team.rank in self._receivers, team.settings.device
        nbytes, packed = sum(sum(header.nbytes) for header in headers), [header.packed for header in headers]
        sizes = [nbytes if rank in self._receivers else 0 for rank in range(team.size)]
        parts: list[Buffers] = [{} for _ in headers]  # the views of the joined tensors

        def make() -> tuple[list[Buffers], Tensor]:
            for numbers, cut in self._joined.items() if receives else ():
                on_gpu = any(header.metas[i].on_gpu for header, i in zip(headers, numbers, strict=True))
                whole = self._wholes[numbers] = pool.empty(cut.shape, cut.dtype, device if on_gpu else "cpu")
                for part, (box,), i in zip(parts, cut.boxes, numbers, strict=True):
                    part[i] = whole[box.slices()]
            large = [
                {i: _buffer(header, part, i, device) for i in header.large}
                for header, part in zip(headers, parts, strict=True)
                if receives
            ]
            nothing_small = self._agreed.inline or not receives
            return large, pool.empty([0 if nothing_small else sum(packed)], torch.uint8, "cpu", fixed=True)

        buffers, messages = results.allocate(self.name, team, sizes, make)
        if self._agreed.inline:
            behind = zip(self._agreed.extents, packed, strict=True)
            small = [of_bytes(team.headers.data(rank, length, nbytes)) for rank, (length, nbytes) in enumerate(behind)]
        else:
            self._gather_small(team, messages, packed)
            small = list(torch.split(messages, packed)) if receives else []
        for buffer, header, message in zip(buffers, headers, small, strict=False):
            buffer.update(header.unpack(message, device))
        for on_gpu, route in self._routes.items():
            self._gather_large(team, route, on_gpu, buffers)
        for buffer, part in zip(buffers, parts, strict=False):
            for i, into in part.items():
                if buffer[i] is not into:  # it was not received in place
                    copyable(into).copy_(copyable(buffer[i].view(into.shape)))
        return buffers if receives else None

    def _gather_small(self, team: Team, messages: Tensor, packed: list[int]) -> None:
        """Gather the small tensors of all ranks, packed in one message per rank, over MPI."""
        if any(packed):
            operation, root = ("gatherv", self._receivers[0]) if self.rooted else ("allgatherv", 0)
            transfer = select.load("mpi").prepare(team, operation, Vector.packed(packed, root))
            mine = pack(self._tree.tensors, self._headers[team.rank])
            transfer(mine, messages if team.rank in self._receivers else None)

    def _gather_large(self, team: Team, route: Route, on_gpu: bool, buffers: list[Buffers]) -> None:
        """Gather the large tensors in one kind of memory, one per rank in each round."""
        headers, me, nothing = self._headers, team.rank, torch.empty(0, dtype=torch.uint8, device="cpu")
        for numbers in zip_longest(*(header.large_of(on_gpu) for header in headers)):
            now = {rank: number for rank, number in enumerate(numbers) if number is not None}
            mine = as_bytes(row_major(self._tree.tensors[now[me]])) if me in now else nothing
            recvs = {rank: as_bytes(buffers[rank][number]) for rank, number in now.items() if buffers}
            every = [recvs.get(rank, nothing) for rank in range(team.size)]
            if not self.rooted and route.allgather(team, mine, every):
                continue
            sends = [(dest, mine) for dest in self._receivers] if me in now else []
            longest = max(headers[rank].nbytes[number] for rank, number in now.items())
            route.exchange(team, sends, recvs.items(), longest)

    def finish(self, buffers: list[Buffers] | None) -> Any:
        """Merge the received structures. No other rank waits for this one any more, if a pickle fails to load."""
        if buffers is None:
            return None
        return merge(
            self.name,
            [header.spec for header in self._headers],
            lambda kind, path, numbers: decode(kind, self._wholes[tuple(numbers)], self.allow_pickle),
            lambda rank, kind, i: decode(kind, buffers[rank][i], self.allow_pickle),
        )


def _buffer(header: MessageHeader, parts: Buffers, i: int, device: torch.device) -> Tensor:
    """Return memory to receive a large tensor: its part of a joined tensor if that is contiguous."""
    part, on_host = parts.get(i), device.type == "cpu" or not header.metas[i].on_gpu
    if part is not None and part.is_contiguous() and part.is_cpu == on_host:
        return part
    return header.recv_buffer(i, device)


def check_classes(verb: str, team: Team, classes: Sequence[Sequence[Any]]) -> None:
    """Check that every rank has imported all classes, with the same fields. Collective if there are any.

    Args:
        classes: arguments of same_class(); the same on all ranks.
    """
    if classes:

        def find_all() -> None:
            for name, *fields in classes:
                same_class(name, *fields)

        objects.run_on_all(team.comm, verb, find_all)


def classes_of(structures: Sequence[MessageHeader] | Sequence[Tree]) -> list[Sequence[Any]]:
    return sorted(set().union(*(classes_in(one.spec) for one in structures)), key=repr)


def _routes(team: Team, call: Call, kinds: tuple[int, ...], used: set[bool]) -> dict[bool, Route]:
    """Select routes for the large tensors in host memory (False) and on GPUs (True). Collective.

    Args:
        kinds: kind of memory of each rank for tensors from a GPU.
        used: which of the two occur; the same on all ranks.
    """
    on_host = (MemoryKind.CPU,) * team.size
    return {on_gpu: select.agreed(call.verb, call.route, team, kinds if on_gpu else on_host) for on_gpu in sorted(used)}


class Distribution:
    """The distribution of a structure that the root of split has cut. Collective.

    Args:
        call: the call; on the root, it has the structures of all ranks.
        kinds: kind of memory of each rank for tensors from a GPU.
        allow_pickle: whether this rank loads pickles.
    """

    def __init__(self, team: Team, call: Call, kinds: tuple[int, ...], allow_pickle: bool) -> None:
        self._call, self._allow_pickle = call, allow_pickle
        self._contents = [MessageContents.of(tree.tensors) for tree in call.trees]
        self._messages: list[Tensor] = []  # for each rank, the header and the small tensors

        for tree, held in zip(call.trees, self._contents, strict=True):
            self._messages.append(join(tree.tensors, held, encode(tree.spec, held)))
        longest = []  # bytes of the longest large tensor of each round, on the host and on GPUs
        for on_gpu in (False, True):
            sizes = [[held.nbytes[i] for i in held.large_of(on_gpu)] for held in self._contents]
            longest.append([max(round_) for round_ in zip_longest(*sizes, fillvalue=0)])
        schedule = list(map(len, self._messages)), longest, classes_of(call.trees)
        self._lengths, self._longest, classes = team.comm.bcast(schedule, call.root)
        check_classes(call.verb, team, classes)
        used = {on_gpu for on_gpu in (False, True) if self._longest[on_gpu]}
        self._routes = _routes(team, call, kinds, used)

    def forward(self, team: Team) -> tuple[MessageHeader, Buffers]:
        call, device, lengths = self._call, team.settings.device, self._lengths
        message = pool.empty([lengths[team.rank]], torch.uint8, "cpu", fixed=True)
        messages = torch.cat(self._messages) if self._messages else None
        select.load("mpi").prepare(team, "scatterv", Vector.packed(lengths, call.root))(messages, message)
        header, small = parse(message)
        check_memory(sum(header.nbytes))
        buffers = header.unpack(small, device)
        make = lambda: {i: header.recv_buffer(i, device) for i in header.large}  # noqa: E731
        buffers.update(results.everywhere(call.verb, team, sum(map(sum, self._longest)), make))
        for on_gpu, route in self._routes.items():
            for round_, longest in enumerate(self._longest[on_gpu]):  # in which each rank receives one tensor
                now = slice(round_, round_ + 1)
                sends, recvs = [], [(call.root, as_bytes(buffers[i])) for i in header.large_of(on_gpu)[now]]
                for dest, (tree, held) in enumerate(zip(call.trees, self._contents, strict=True)):
                    for i in held.large_of(on_gpu)[now]:
                        if dest == team.rank:
                            copyable(buffers[i]).copy_(copyable(tree.tensors[i]))
                        else:
                            sends.append((dest, as_bytes(row_major(tree.tensors[i]))))
                route.exchange(team, sends, recvs, longest)
        return header, buffers

    def finish(self, received: tuple[MessageHeader, Buffers]) -> Any:
        """Rebuild this rank's structure."""
        header, buffers = received
        return restore(header.spec, buffers, self._allow_pickle)
