"""A load as all ranks plan it together: the arguments of each, the file, and who reads what. Nothing is read here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import torch
from torch import Tensor

from hpcdist.comm.team import Team
from hpcdist.comm.topology import by_node
from hpcdist.control import digests, objects
from hpcdist.layout import Box
from hpcdist.staging.arguments import agreed, count, positive
from hpcdist.staging.boxes import BoxSequence, Copies, Listed
from hpcdist.staging.catalog import Stored
from hpcdist.staging.once import Plan, plan_once
from hpcdist.staging.opened import Opened, opened_by_all
from hpcdist.staging.reader import DatasetReader
from hpcdist.staging.wants import Arguments, alike, find_wants, reads_alone
from hpcdist.validation import local

__all__ = ["Load", "check", "planned"]

_ONCE_PER = ("auto", "rank", "node", "job")
LEAST = 2**16  # bytes that ranks read together by default; below, to read them takes less time than to send them


@dataclass(frozen=True)
class Load:
    """What a call of load() reads on this rank.

    Attributes:
        opened: the file, or folder of files.
        same: options that are the same on all ranks.
        wants: by name of the tensor, the box of each rank.
        device: of this rank's results, without `out`.
        progress: called with the number of bytes just read.
        together: names of the tensors of which this rank reads a share, for others that want the same.
        plan: how they are read; None if there are none.
        why: why these ranks read together, or do not.
    """

    opened: Opened
    same: Mapping[str, Any]
    wants: Mapping[str, BoxSequence]
    device: torch.device
    progress: Callable[[int], None] | None
    together: Sequence[str]
    plan: Plan | None
    why: str

    @property
    def datasets(self) -> Mapping[str, Stored]:
        """The tensors by name."""
        return self.opened.datasets

    def alone(self, key: str) -> bool:
        """Return whether every rank reads its own box of a tensor, if it does not read it together with others."""
        stored, same = self.datasets[key], self.same
        alone = same["readers"] is None and reads_alone(stored, self.wants[key], same["verify"])
        return stored.raw is None or alone

    def reader(self, key: str) -> DatasetReader:
        """Return a reader of one tensor; what it computes from the table of its pieces is freed with it."""
        stored = replace(self.datasets[key])
        return DatasetReader(*self.opened.places[key], stored, self.same["verify"], self.progress)


def check(
    team: Team,
    *,
    path: Any,
    name: Any,
    dim: Any,
    counts: Any,
    box: Any,
    out: Any,
    device: Any,
    window: Any,
    readers: Any,
    verify: Any,
    once_per: Any,
    shared: Any,
    progress: Any,
) -> tuple[Arguments, torch.device, Any]:
    """Check the arguments of load() on this rank; return them, the device of the result, and `progress`."""
    if name is not None and not isinstance(name, str):
        raise local.WrongError("HD419", f"name must be a string or None, got {name!r}")
    if box is not None and (dim != 0 or counts is not None):
        raise local.WrongError("HD419", "box is given together with dim or counts, which it replaces")
    if once_per not in _ONCE_PER:
        raise local.WrongError("HD419", f"once_per is {once_per!r}, expected one of {', '.join(_ONCE_PER)}")
    mine = None if box is None else Box(tuple(index(o) for o in box[0]), tuple(index(n) for n in box[1]))
    if out is not None:
        local.tensor(out, 0, "out")
    target = torch.device("cpu" if device is None else device)
    if shared:
        _check_shared(dim, box, out, target, once_per)
    same = {
        "path": os.fsdecode(path), "name": None if name is None else name.strip("/"),
        "dim": {str(k): _dim(v) for k, v in dim.items()} if isinstance(dim, Mapping) else _dim(dim),
        "counts": counts if counts is None or isinstance(counts, str) else tuple(index(c) for c in counts),
        "window": positive("window", window), "readers": count("readers", readers, team.size), "verify": verify,
        "box": "not given" if box is None else "given", "once_per": once_per, "shared": bool(shared),
    }  # fmt: skip
    held = None if out is None else (out.dtype, tuple(out.shape))
    direct = target.type == "cpu" if out is None else out.is_cpu and out.is_contiguous()
    return Arguments(same, mine, held, direct), target, progress


def _check_shared(dim: Any, box: Any, out: Tensor | None, device: torch.device, once_per: str) -> None:
    why = None
    if out is not None:
        why = "out is given, but shared=True returns memory that the ranks of a node share: omit one of them"
    elif box is not None or not (dim is None or isinstance(dim, Mapping)):
        why = "shared=True is for tensors that every rank wants whole: pass dim=None, or a dict with None for these"
    elif device.type != "cpu":
        why = f"device is {device}, but shared=True is for host memory"
    elif once_per == "rank":
        why = "once_per is 'rank', but with shared=True no rank has a copy of its own: use 'node' or 'job'"
    if why is not None:
        raise local.WrongError("HD203", why)


def _dim(dim: Any) -> int | None:
    return None if dim is None else index(dim)


@contextmanager
def planned(team: Team, verb: str, arguments: Mapping[str, Any]) -> Iterator[Load]:
    """Agree on a load, open the file on every rank, and plan who reads what. Collective.

    Args:
        arguments: this rank's, of load().

    Raises:
        RankError: on every rank: see load().
    """
    with agreed(team, verb, lambda: check(team, **arguments)) as (own, device, progress):
        same = digests.same(team.comm, verb, own.same, own.same, objects.first_difference)
        with opened_by_all(team, verb, own, str(same["path"]), same["name"]) as opened:
            wants, wrong = find_wants(opened.datasets, [replace(ask, same=same) for ask in opened.asks])
            objects.raise_problems(verb, wrong)
            load = Load(opened, same, wants, device, progress, [], None, "")
            yield _shared_out(team, load, all(ask.direct for ask in opened.asks))


def _shared_out(team: Team, load: Load, direct: bool) -> Load:
    """Plan which tensors this rank reads together with others, and how."""
    same, wants, datasets = load.same, load.wants, load.datasets
    node_of = [team.settings.node_of[peer] for peer in team.peers]
    mode, kept_by_node = same["once_per"], False
    if mode == "auto":
        # The ranks of a node read what is not compressed from the page cache as fast as they could send it.
        mode, kept_by_node = "job", len(set(node_of)) == 1 and not same["shared"]
    keys = [key for key in datasets if _can_share(load, key, team.rank)]
    if not keys:
        return replace(load, why="no two ranks want the same part")
    if mode == "rank":
        return replace(load, why="once_per='rank' was passed")
    if kept_by_node:
        keys = [key for key in keys if datasets[key].raw is None]
        if not keys:
            return replace(load, why="on one node, the system keeps what was read once")
    nbytes = sum(wants[key][team.rank].size() * datasets[key].dtype.itemsize for key in keys)
    if same["once_per"] == "auto" and not same["shared"] and nbytes < LEAST:
        return replace(load, why=f"what several ranks want is less than {LEAST} bytes")
    ranks = alike(wants[keys[0]], team.rank)
    if mode == "node":
        ranks = [rank for rank in ranks if node_of[rank] == node_of[team.rank]]
    if len(ranks) == 1 and not same["shared"]:  # here; for the rest, other ranks do not wait for this one either
        keys = [key for key in keys if not load.alone(key)]
        if not keys:
            return replace(load, why="no two ranks want the same part")
    nodes = [[ranks[i] for i in places] for places in by_node([node_of[rank] for rank in ranks])]
    tensors = [(load.reader(key), wants[key][team.rank]) for key in keys]
    plan = plan_once(tensors, nodes, same["readers"], same["window"], direct, same["shared"])
    return replace(load, together=keys, plan=plan, why=f"ranks that want the same part read it once a {mode}")


def _can_share(load: Load, key: str, rank: int) -> bool:
    """Return whether this rank can read its box of a tensor together with those that want the same."""
    wants = load.wants[key]
    if not isinstance(wants, (Copies, Listed)) or not wants[rank].size():
        return False
    return isinstance(wants, Copies) or load.alone(key)
