"""The explanation of a load: which bytes each rank would read and send. Only the file's structure is read."""

from __future__ import annotations

from typing import Any

from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.runtime import world
from hpcdist.runtime.explanation import Explanation, explained
from hpcdist.staging.load import Load, Method, load, plan_load, planned
from hpcdist.staging.pieces import PIECE
from hpcdist.staging.reader import Part, TensorReader
from hpcdist.tensors import pool

__all__: list[str] = []

_VERB = "explain of staging.load"


def _explain(*, group: Any, **arguments: Any) -> Explanation:
    """Explain a call of load(). Collective: see :func:`hpcdist.explain`."""
    team = world.current().context.team_of(group)
    with planned(team, _VERB, arguments) as call:
        methods = {key: call.method(key) for key in call.tensors}
        traffic = [_traffic(call, team, key, how) for key, how in methods.items()]
        read, sent, received = (sum(row[i] for row in traffic) for i in range(3))
        result = _result(call, arguments["out"], set(methods.values()))
    everywhere = objects.all_gather_object(
        team.comm, (read, sent, list({how.value for how in methods.values()})), _VERB
    )
    total_read, total_sent = (sum(row[i] for row in everywhere) for i in range(2))
    found = dict.fromkeys(how for *_, of in everywhere for how in of)
    why = f"once_per={call.same['once_per']!r}, on {call.nodes} node{'s' * (call.nodes > 1)}"
    return Explanation(
        verb="staging.load",
        route="mpi" if total_sent else "none",
        methods=tuple(found),
        sent=sent,
        received=received,
        result=result,
        reasons=(why,),
        read=read,
        read_by_all=total_read,
        sent_by_all=total_sent,
    )


def _result(call: Load, out: Any, methods: set[Method]) -> str:
    if out is not None:
        return "out"
    if methods == {Method.SHARED}:
        return "shared"
    if len(call.tensors) > 1:
        return "structure"
    (stored,) = call.tensors.values()
    return "pool" if pool.holds(stored.nbytes(), call.device) else "new"


def _traffic(call: Load, team: Team, key: str, how: Method) -> tuple[int, int, int]:
    """The bytes of a tensor that this rank reads, sends and receives."""
    reader, wants, same, me = call.reader(key), call.wants[key], call.same, team.rank
    stored, verify = reader.stored, same["verify"]
    if how is Method.ALONE:
        limit = max(1, min(PIECE, same["window"] // 2) // stored.dtype.itemsize)
        return _read(reader, reader.parts(wants[me], limit)), 0, 0
    plan, rows = plan_load(stored, wants, same["window"], same["readers"] or team.size, verify)
    nodes = team.topology.nodes
    firsts = {ranks[0] for ranks in nodes} if how is Method.SHARED and len(nodes) > 1 else set[int]()
    mine, sent, received = list[Part](), 0, 0
    if verify and rows is None:
        mine += [Part(stored.boxes[row]) for row in range(me, len(stored.boxes), team.size)]
    for rank in range(team.size):
        for row in plan.rows(rank):
            box = plan.pieces[row]
            dests = set(wants.intersecting(box).tolist())
            if how is Method.SHARED:
                dests &= firsts
            if rank == me and ((verify and rows is not None) or dests or how is Method.SHARED):
                mine.append(Part(box))
                sent += sum(box.intersect(wants[dest]).size() for dest in dests if dest != me)
            elif rank != me and me in dests:
                received += box.intersect(wants[me]).size()
    size = stored.dtype.itemsize
    return _read(reader, mine), sent * size, received * size


def _read(reader: TensorReader, parts: list[Part]) -> int:
    """Return the bytes that are read for some parts of a dataset."""
    stored, elements = reader.stored, 0
    checked = set[int]()
    for box, _, checks in parts:
        elements += sum(stored.boxes[piece].size() for piece in {*checks} - checked)
        checked |= {*checks}
        elements += box.size() if stored.raw is None or not box.size() else stored.raw.cover(box).size()
    return elements * stored.dtype.itemsize


explained[load] = _explain
