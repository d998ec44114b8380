"""The explanation of a load: which bytes each rank would read and send. Only the file's structure is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.runtime import world
from hpcdist.runtime.explanation import Explanation, explained
from hpcdist.staging.load import load
from hpcdist.staging.loading import Load, planned
from hpcdist.staging.pieces import PIECE
from hpcdist.staging.reader import DatasetReader, Part
from hpcdist.staging.wants import plan_load
from hpcdist.tensors import pool

__all__: list[str] = []

_VERB = "explain of staging.load"


class _Traffic(NamedTuple):
    """Bytes of this rank."""

    read: int
    sent: int
    received: int


def _explain(*, group: Any, **arguments: Any) -> Explanation:
    """Explain a call of load(). Collective: see :func:`hpcdist.explain`."""
    team = world.current().context.team_of(group)
    with planned(team, _VERB, arguments) as call:
        kinds, parts = dict[str, None](), list[_Traffic]()
        for key in call.datasets:
            if key not in call.together:
                alone = call.alone(key)
                kinds["each rank reads its part" if alone else "each piece is read once, and its parts sent"] = None
                parts.append(_alone(call, team.rank, key) if alone else _in_rounds(call, team, key))
        shared = refusal = None
        if call.plan is not None:
            shared, refusal = _can_share(team, call)
            parts.append(_together(call, team.rank, bool(shared)))
    mine = _Traffic(*(sum(column) for column in zip(_Traffic(0, 0, 0), *parts, strict=True)))
    everywhere = objects.all_gather_object(team.comm, (list(kinds), call.plan is not None, call.why, *mine), _VERB)
    methods = dict.fromkeys(kind for of, *_ in everywhere for kind in of)
    if any(together for _, together, *_ in everywhere):
        methods["memory that the ranks of a node share" if shared else "read once, and sent on"] = None
    total_read, total_sent = (sum(row[i] for row in everywhere) for i in (3, 4))
    reasons = [why for _, _, why, *_ in everywhere] + ([f"the result is not shared: {refusal}"] if refusal else [])
    return Explanation(
        verb="staging.load",
        route="mpi" if total_sent else "none",
        methods=tuple(methods),
        sent=mine.sent,
        received=mine.received,
        result=_result(call, arguments["out"], bool(shared)),
        reasons=tuple(dict.fromkeys(reasons)),
        read=mine.read,
        read_by_all=total_read,
        sent_by_all=total_sent,
    )


def _can_share(team: Team, call: Load) -> tuple[bool, str | None]:
    """Return whether the ranks of a node would share what they read together; else why not, if they were to."""
    from hpcdist.routes import window  # which imports MPI

    if not call.same["shared"]:
        return False, None
    refusal = window.refusal(team, sum(call.datasets[key].nbytes() for key in call.together))
    return refusal is None, refusal


def _result(call: Load, out: Any, shared: bool) -> str:
    if out is not None:
        return "out"
    if len(call.datasets) > 1:
        return "shared" if shared and len(call.together) == len(call.datasets) else "structure"
    ((key, stored),) = call.datasets.items()
    if shared and key in call.together:
        return "shared"
    return "pool" if pool.holds(stored.nbytes(), call.device) else "new"


def _alone(call: Load, rank: int, key: str) -> _Traffic:
    reader, want = call.reader(key), call.wants[key][rank]
    limit = max(1, min(PIECE, call.same["window"] // 2) // reader.stored.dtype.itemsize)
    return _Traffic(_read(reader, reader.parts(want, limit)), 0, 0)


def _in_rounds(call: Load, team: Team, key: str) -> _Traffic:
    reader, wants, same, me = call.reader(key), call.wants[key], call.same, team.rank
    stored, verify = reader.stored, same["verify"]
    plan, rows = plan_load(stored, wants, same["window"], same["readers"] or team.size, verify)
    mine, sent, received = list[Part](), 0, 0
    if verify and rows is None:
        mine += [Part(stored.boxes[row]) for row in range(me, len(stored.boxes), team.size)]
    for rank in range(team.size):
        for row in plan.rows(rank):
            box = plan.pieces[row]
            dests = wants.intersecting(box).tolist()
            if rank == me and ((verify and rows is not None) or dests):
                mine.append(Part(box))
                sent += sum(box.intersect(wants[dest]).size() for dest in dests if dest != me)
            elif rank != me:
                received += box.intersect(wants[me]).size()
    size = stored.dtype.itemsize
    return _Traffic(_read(reader, mine), sent * size, received * size)


def _together(call: Load, rank: int, shared: bool) -> _Traffic:
    """What is read once for several ranks."""
    assert call.plan is not None
    plan = replace(call.plan, shared=shared)
    readers = [call.reader(key) for key in call.together]
    read = sum(
        _read(readers[block.tensor], [Part(block.box, block.row, block.checks)])
        for round_ in plan.rounds
        if rank in round_
        for block in round_[rank].blocks
    )
    sent, received = (
        sum(plan.rounds[round_][reader].nbytes for step in plan.steps for _, round_, reader in of(rank, step))
        for of in (plan.sends, plan.recvs)
    )
    return _Traffic(read, sent, received)


def _read(reader: DatasetReader, parts: Iterable[Part]) -> int:
    """Return the bytes that are read for some parts of a dataset."""
    stored, elements = reader.stored, 0
    checked = set[int]()
    for box, row, checks in parts:
        again = stored.raw is not None and stored.raw.swapped and row is not None
        for piece in {*checks, *([row] if again and row is not None else [])} - checked:
            elements += stored.boxes[piece].size()
            checked.add(piece)
        elements += box.size() if stored.raw is None or not box.size() else stored.raw.cover(box).size()
    return elements * stored.dtype.itemsize


explained[load] = _explain
