"""load(into=): the weights of a file or of a folder of files, into a model that is sharded in any way.

The pieces of all tensors are one list, in the order of the files. Each rank reads a run of this list, of as many bytes
as the others, and sends the parts of each piece to the ranks that hold them. So every byte is read once, and the ranks
read different files.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import coded, listed
from hpcdist.formats.contents import Stored
from hpcdist.layout import Box
from hpcdist.layout.box import Listed, grid
from hpcdist.runtime import world
from hpcdist.staging.arguments import agreed, positive
from hpcdist.staging.pieces import PIECE, ROUND, exchange
from hpcdist.staging.reader import TensorReader, kept, open_agreed, raise_kept
from hpcdist.staging.save import wait_for
from hpcdist.tensors.storage import Scratch, written
from hpcdist.validation.local import ArgumentError

VERB = "staging.load"

LEAST = 2**16  # bytes: ranks read runs of so many on their own; they share the reading of shorter ones

_Boxes = dict[str, list[tuple[Box, torch.dtype]]]  # by name: what a rank holds of each tensor, with the model's dtype
_Memory = dict[str, list[tuple[Box, Tensor]]]  # the same of this rank


class IncompatibleKeys(NamedTuple):
    """The names that only the model has, and those that only the file has, as torch's load_state_dict() returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_into(arguments: dict[str, Any]) -> IncompatibleKeys:
    """Read the tensors of a file into a model. Collective: see :func:`hpcdist.staging.load`."""
    team = world.team_of(arguments.pop("group"))
    wait_for(arguments["path"])
    with agreed(team, VERB, lambda: _check(**arguments)) as (state, given):
        same, _ = objects.same(team.comm, VERB, given, given, objects.first_difference)
        with open_agreed(team, VERB, same["path"], same["name"], 4) as files:
            group = files.contents.key(same["name"] or "")
            tensors = {key.removeprefix(group).lstrip("/"): stored for key, stored in files.contents.tensors.items()}
            keys, boxes, memory = _match(team, state, tensors, same)
            readers = {
                key: TensorReader(files, stored, same["window"], same["verify"], arguments["progress"])
                for key, stored in tensors.items()
                if key not in keys.unexpected_keys
            }
            problems: list[str] = []
            apart = [key for key, reader in readers.items() if _apart(reader.stored, [of.get(key, []) for of in boxes])]
            first = len(apart) * team.rank // team.size  # so that ranks begin with different files
            own = [(readers[key], box, x) for key in apart[first:] + apart[:first] for box, x in memory.get(key, ())]
            for i, (reader, box, x) in enumerate(own):
                with kept(problems):
                    for r, b, _ in own[i + 1 : i + 2]:
                        r.ahead(b)
                    reader.read(box, written(x, x))
            _share(team, {key: of for key, of in readers.items() if key not in apart}, boxes, memory, problems, same["window"])
            raise_kept(team, VERB, problems)
    return keys


def _check(
    *, path: Any, name: Any, into: Any, strict: Any, convert: Any, window: Any, verify: Any, progress: Any, **others: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Check the arguments of load() on this rank: the model's tensors by name, and what must agree."""
    if not isinstance(into, torch.nn.Module):
        raise ArgumentError("HD419", f"into is a {type(into).__name__}, expected a torch.nn.Module")
    if odd := [option for option, value in others.items() if value is not None and (option, value) != ("dim", 0)]:
        raise ArgumentError("HD419", f"{odd[0]} is given together with into, which has the part of each rank")
    state = {key: x for key, x in into.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    if empty := [key for key, x in state.items() if x.is_meta]:
        raise ArgumentError("HD419", f"into is on the meta device, call its to_empty(device=...): {listed(empty)}")
    return state, {
        "path": os.fsdecode(path), "name": name, "into": "given", "strict": bool(strict), "convert": bool(convert),
        "window": positive("window", window), "verify": verify,
    }  # fmt: skip


def _match(
    team: Team, state: Mapping[str, Tensor], tensors: Mapping[str, Stored], same: Mapping[str, Any]
) -> tuple[IncompatibleKeys, list[_Boxes], _Memory]:
    """Compare the model of each rank with the file. Collective.

    Returns:
        What only one of them has, this rank of the model; the boxes of every rank, and the memory of this rank's.

    Raises:
        RankError: on every rank, if they differ.
    """
    common = {key: x for key, x in state.items() if key in tensors}
    loaded = {id(x) for x in common.values()}  # a file has tied tensors under one name
    missing = [key for key, x in state.items() if id(x) not in loaded]
    memory: _Memory = dict.fromkeys(common, [])

    def compare() -> tuple[dict[str, list[str]], _Boxes]:
        from hpcdist.staging.dcp import memory_of  # imports torch's checkpoints

        wrong = [text for key, x in common.items() if (text := _difference(x, tensors[key], same["convert"]))]
        memory.update({} if wrong else memory_of(common, tensors))
        boxes = {key: [(box, x.dtype) for box, x in held] for key, held in memory.items()}
        return {"missing": missing if same["strict"] else [], "other in the file": wrong}, boxes

    found, boxes = zip(*objects.run_on_all(team.comm, VERB, compare), strict=True)
    unexpected = [key for key in tensors if not any(key in held for held in boxes)]
    problems = {}
    for rank, lists in enumerate(found):
        lists = lists | {"unexpected": unexpected if same["strict"] else []}
        texts = [f"{len(names)} {what}: {listed(names)}" for what, names in lists.items() if names]
        if texts and (rank == 0 or found[rank] != found[0]):
            problems[rank] = coded("HD408", "; ".join(texts))
    objects.raise_problems(VERB, problems)
    return IncompatibleKeys(missing, unexpected), list(boxes), memory


def _difference(x: Tensor, stored: Stored, convert: bool) -> str | None:
    """How a tensor of the model differs from the file's, if it cannot be loaded."""
    there, here = (stored.shape, stored.dtype), (tuple(x.shape), x.dtype)
    if convert and there[0] == here[0]:
        torch.empty(1, dtype=stored.dtype, device="cpu").to(x.dtype)  # raises, if torch cannot convert
    elif there != here:
        return f"{stored.name} ({there[1]} of {there[0]}, in the model {here[1]} of {here[0]})"
    return None


def _apart(stored: Stored, boxes: Sequence[Sequence[tuple[Box, torch.dtype]]]) -> bool:
    """Whether each element is on one rank alone, in long runs of the file, so that each rank reads its own."""
    held = Listed.of([box for box, _ in chain(*boxes)], stored.shape)
    longest = held.run_lengths()[0].max(initial=0) * stored.dtype.itemsize
    return stored.raw is not None and longest >= LEAST and held.tile()


def _share(
    team: Team,
    readers: Mapping[str, TensorReader],
    boxes: Sequence[_Boxes],
    memory: _Memory,
    problems: list[str],
    window: int,
) -> None:
    """Read each piece on one rank, and send its parts to the ranks that hold them; keep the errors of this rank.
    Collective."""
    pinned = any(not x.is_cpu for _, x in chain(*memory.values()))
    planned = _rounds(readers, team.size, window)
    for i, pieces in enumerate(planned):
        with kept(problems):
            for part in planned[i : i + 2] if not i else planned[i + 1 : i + 2]:
                for owner, key, box in part:
                    if owner == team.rank:
                        readers[key].ahead(box)
        scratch = Scratch(pinned=pinned)
        sends, recvs = [], []
        for owner, key, box in pieces:
            if owner == team.rank:
                piece = scratch.take(box.shape, readers[key].stored.dtype)
                with kept(problems):
                    readers[key].read(box, piece)
                sends += [
                    (rank, piece[common.slices(box.offset)].to(dtype))
                    for rank, held in enumerate(boxes)
                    for want, dtype in held.get(key, ())
                    if (common := box.intersect(want)).size()
                ]
            recvs += [
                (owner, written(x, x)[common.slices(want.offset)])
                for want, x in memory.get(key, ())
                if (common := box.intersect(want)).size()
            ]
        exchange(team, VERB, sends, recvs, scratch)


def _rounds(readers: Mapping[str, TensorReader], size: int, window: int) -> list[list[tuple[int, str, Box]]]:
    """Plan the reading: for each round the pieces, of some MiB on each rank, with the rank that reads each."""
    pieces: list[tuple[int, str, Box]] = []
    total, room = 0, max(1, window // size)
    for key, reader in readers.items():
        boxes, itemsize = reader.stored.boxes, reader.stored.dtype.itemsize
        if not len(boxes) or int(boxes.sizes.max()) * itemsize > min(PIECE, room):
            boxes = grid(reader.stored.shape, max(1, min(ROUND, room) // itemsize))
        for box in boxes:
            pieces.append((total, key, box))
            total += box.size() * itemsize
    rounds = defaultdict(list)
    for start, key, box in pieces:
        rank, at = divmod(start * size, total)
        rounds[at // (size * min(ROUND, room))].append((rank, key, box))
    return [rounds[number] for number in sorted(rounds)]
