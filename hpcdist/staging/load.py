"""load(): each rank gets its part of the tensors of a file, or of a folder of files, whatever wrote it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.runtime import world
from hpcdist.staging.exchange import deliver
from hpcdist.staging.in_flight import wait_for
from hpcdist.staging.loading import Load, planned
from hpcdist.staging.names import SINGLE, nest
from hpcdist.staging.node_memory import NodeMemory
from hpcdist.staging.target import WINDOW
from hpcdist.staging.together import Source, kept, read_together
from hpcdist.staging.wants import plan_load
from hpcdist.tensors import pool
from hpcdist.tensors.pinned import Scratch
from hpcdist.tensors.storage import written

if TYPE_CHECKING:
    from hpcdist.comm.signatures import GroupLike

__all__ = ["load"]

VERB = "staging.load"


def load(
    path: str | os.PathLike[str],
    name: str | None = None,
    *,
    dim: int | Mapping[str, int | None] | None = 0,
    counts: str | Sequence[int] | None = None,
    box: tuple[Sequence[int], Sequence[int]] | None = None,
    out: Tensor | None = None,
    device: torch.device | str | None = None,
    window: int = WINDOW,
    readers: int | None = None,
    verify: bool | None = None,
    once_per: str = "auto",
    shared: bool = False,
    progress: Callable[[int], None] | None = None,
    group: GroupLike | None = None,
) -> Any:
    """Read each rank's part of the tensors of a file, with any number of ranks, whatever wrote it.

    Collective over `group`. Waits for a save in flight to this name. Along dim 0 every rank reads straight into its
    result. What several ranks want is read once: each reads a share of it, straight into its result, and sends that to
    the others while it reads on. Where parts are so narrow that reading them alone would read everything many times,
    the ranks share the reading and send each other their parts, a window at a time.

    Args:
        path: of the file, seen by all ranks: HDF5, or .safetensors; or of a folder of .safetensors files, with or
            without an index of Hugging Face's libraries; or of the index. Must agree.
        name: of a tensor, or of a group of them; None for all of the file. Must agree.
        dim: the dimension along which tensors are split; None for the whole on every rank; or a dict of these by full
            name, 0 for those that are not in it. Must agree. Every rank gets the whole of 0-d tensors.
        counts: the extent along `dim` for each rank, or a rule, as in :func:`hpcdist.split`: "block" by default. Must
            agree.
        box: this rank's part as (offset, shape), each with an entry for every dim; instead of `dim` and `counts`, on
            all ranks or on none. Each rank has a box of its own; boxes may overlap.
        out: memory for this rank's part of the one tensor that is read, of its shape and dtype, any strides, any
            device. Each rank may give it or not. If the call fails, its contents are undefined.
        device: device of the result, without `out`; the CPU by default.
        window: bytes of host memory that a rank may use besides the result. Must agree.
        readers: how many ranks read from the file, of those that want the same (with `once_per="node"`, on each
            node); by default all. Must agree.
        verify: True: check every piece of which something is read against its checksum; None: those that are read
            whole; False: none. Files of other tools have no checksums. Must agree.
        once_per: how often the file is read for ranks that want the same (`dim=None`, 0-d tensors, or an equal `box`):
            "job": once; each byte comes to a node once, where the ranks pass it on to each other. "node": once on each
            node, without messages between nodes. "rank": by every rank for itself. "auto": as "job" on several nodes,
            and for what is compressed; on one node, the others read the rest from the system's cache, which is faster;
            so is "rank" for less than 64 KiB. Must agree. :func:`hpcdist.explain` reports what is read and sent.
        shared: whether the ranks of a node share one copy of what all ranks want whole (`dim=None`): it is read, or
            received, by one of them, into memory for all. As with :func:`hpcdist.concat`, the tensors are to be read:
            what a rank writes in place it alone sees, and the pages that it writes become its own. The memory of all
            tensors of a call is used again once no rank has one of them. For host memory; where the node has none for
            it, or for less than 64 KiB, each rank gets its own. Must agree.
        progress: called on each rank, from time to time, with the number of bytes just read.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None for all ranks.

    Returns:
        On each rank its part: a contiguous tensor that it owns (or `out`), of the dtype that was saved and of native
        byte order; a nested dict of these if `name` is a group, or if it is None and the file holds anything but one
        tensor "data". What no tensor can hold, such as text, is left out.

    Raises:
        RankError: on every rank: no such regular file, of another format, a tensor whose data are in another file,
            incomplete, truncated, damaged, no such tensor, only data that no tensor can hold, an argument that is wrong
            on one rank or does not agree. The job can go on.

    Example, on 3 ranks::

        >>> hd.staging.load("x.h5")                    # saved from 5 rows
        tensor([[0, 1], [2, 3]])                       # on rank 0; two rows on rank 1, one on rank 2
        >>> hd.staging.load("x.h5", "data", box=((rank, 0), (1, 2)))
        tensor([[0, 1]])                               # on rank 0; row 1 on rank 1, row 2 on rank 2
    """
    team = world.current().context.team_of(group)
    arguments: dict[str, Any] = {
        "path": path, "name": name, "dim": dim, "counts": counts, "box": box, "out": out, "device": device,
        "window": window, "readers": readers, "verify": verify, "once_per": once_per, "shared": shared,
        "progress": progress,
    }  # fmt: skip
    wait_for(path)
    with planned(team, VERB, arguments) as call:
        memory = NodeMemory.taken(team, call) if shared else None
        targets: dict[str, Tensor] = {}
        objects.all_gather(team.comm, VERB, lambda: targets.update(_allocate(team, call, out, memory)))
        written(out, None)
        problems: list[str] = []
        for key in call.datasets:
            if key not in call.together:
                problems += _read(team, call, key, targets[key])
        _read_shared_out(team, call, targets, memory is not None, problems)
        if memory is not None:
            targets |= memory.results()
    if out is not None:
        return out
    return nest(targets, call.same["name"] or (SINGLE if list(targets) == [SINGLE] else ""))


def _read_shared_out(team: Team, call: Load, targets: Mapping[str, Tensor], shared: bool, problems: list[str]) -> None:
    """Read what is wanted by several ranks together with them; report the errors of all ranks. Collective.

    Args:
        problems: errors on this rank so far.

    Raises:
        RankError: on every rank, if there are any.
    """
    rank, stale = team.rank, list[tuple[int, int]]()
    plan = None if call.plan is None else replace(call.plan, shared=shared)
    sources = [Source(call.reader(key), call.wants[key][rank], targets[key]) for key in call.together]
    for last in (False, True):
        if plan is not None:
            found, stale = read_together(team, VERB, plan, sources, call.same["window"], last)
            problems += found
        everywhere = objects.all_gather_object(team.comm, (problems[:1], stale), VERB)
        objects.raise_problems(VERB, {i: texts[0] for i, (texts, _) in enumerate(everywhere) if texts})
        if not any(pieces for _, pieces in everywhere):
            return
        call.opened.forget()
        if plan is not None:
            ranks = {i for node in plan.nodes for i in node}
            plan = plan.only({(i, row) for r, (_, pieces) in enumerate(everywhere) if r in ranks for i, row in pieces})


def _allocate(team: Team, call: Load, out: Tensor | None, memory: NodeMemory | None) -> dict[str, Tensor]:
    """Return memory for this rank's box of each tensor: new, `out`, or of the node."""
    boxes = {key: call.wants[key][team.rank] for key in call.datasets}
    if out is not None:
        return {key: out.detach().view(box.shape) for key, box in boxes.items()}
    found = {} if memory is None else memory.targets()
    for key, box in boxes.items():
        if key not in found:
            found[key] = pool.empty(box.shape, call.datasets[key].dtype, call.device, fixed=True)
    return {key: found[key] for key in boxes}


def _read(team: Team, call: Load, key: str, out: Tensor) -> list[str]:
    """Read this rank's box of a tensor; return the errors of this rank. Collective."""
    reader, wants, window = call.reader(key), call.wants[key], call.same["window"]
    stored, readers, problems = reader.stored, call.same["readers"], list[str]()
    if call.alone(key):
        with kept(problems):
            reader.read(wants[team.rank], out, window)
        return problems
    plan, rows = plan_load(stored, wants, window, readers or team.size, reader.verify)
    if reader.verify and rows is None:  # pieces too large for the window: checked on their own
        with kept(problems):
            for number in range(team.rank, len(stored.boxes), team.size):
                reader.check(number, window)
    scratch = Scratch(pinned=out.is_cuda)
    for round_ in plan.rounds:
        scratch.reset()
        piece = None
        row = plan.piece(team.rank, round_)
        if row is not None:
            box = plan.pieces[row]
            piece = scratch.take(box.shape, stored.dtype)
            in_table = None if rows is None or reader.verify is False else int(rows[row])
            if (reader.verify and rows is not None) or len(wants.intersecting(box)):
                with kept(problems):
                    reader.fill(box, in_table, piece, window)
        deliver(team, plan, piece, out, round_, scratch)
    return problems
