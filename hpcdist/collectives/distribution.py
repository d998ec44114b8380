"""split of structures: the root cuts the structure, and sends each rank its part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.collectives import results
from hpcdist.collectives.run import Description
from hpcdist.collectives.structures import by_kinds, check_classes, classes, routes
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.routes import select
from hpcdist.routes.base import Message
from hpcdist.tensors import pool
from hpcdist.tensors.message import Contents, Header, encode, pack
from hpcdist.tensors.storage import as_bytes, copyable, of_bytes, row_major
from hpcdist.tensors.tree import Tree, decode, rebuild
from hpcdist.validation.call import Call
from hpcdist.validation.collective import Agreed

__all__ = ["Distribution"]


class Distribution:
    """The distribution of a structure that the root of split has cut. Collective.

    Args:
        call: the call; on the root, it has the structures of all ranks.
        kinds: kind of memory of each rank for tensors from a GPU.
    """

    def __init__(self, team: Team, call: Call, kinds: tuple[int, ...]) -> None:
        self._call = call
        self._contents = [Contents.of(tree.tensors) for tree in call.trees]
        self._texts = [encode(tree.spec, held) for tree, held in zip(call.trees, self._contents, strict=True)]
        schedule = json.dumps(_Schedule.of(call.trees, self._texts, self._contents)).encode() if call.trees else b""
        self._schedule = _Schedule(*json.loads(objects.broadcast_bytes(team.comm, schedule, call.root)))
        check_classes(call.verb, team, self._schedule.classes)
        used = {on_gpu for on_gpu in (False, True) if self._schedule.longest[on_gpu]}
        self._routes = routes(call.verb, team, call.route, kinds, used)

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

    def describe(self, team: Team, agreed: Agreed) -> Description:
        """See Operation.describe: only the root knows the bytes of the parts."""
        packed, sizes = sum(self._schedule.packed), [sum(held.nbytes) for held in self._contents]
        methods = [select.load("mpi").method(team, "scatterv", packed)] if packed else []
        methods += [
            route.method(team, "exchange", max(self._schedule.longest[on_gpu]))
            for on_gpu, route in self._routes.items()
        ]
        is_root = team.rank == self._call.root
        sent, received = (sum(sizes) - sizes[team.rank], 0) if is_root else (0, None)
        return Description(by_kinds(self._routes, agreed), methods, sent, received, "structure")

    def finish(self, received: tuple[Header, dict[int, Tensor]], allow_pickle: bool) -> Any:
        """Rebuild this rank's structure."""
        header, buffers = received
        return rebuild(header.spec, lambda kind, i: decode(kind, buffers[i], allow_pickle))


class _Schedule(NamedTuple):
    """The sizes and classes of the structures that the root has cut, for every rank.

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
        return cls([len(text) for text in texts], [held.packed for held in contents], longest, classes(trees))


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
