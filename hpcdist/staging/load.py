"""load(): each rank gets its part of the tensors of a file or a folder of files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache, partial
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import coded, listed, reason, refusal
from hpcdist.formats.contents import Contents, Stored
from hpcdist.formats.known import describe
from hpcdist.formats.plain import SHORT
from hpcdist.layout import Box
from hpcdist.layout.box import BoxSequence, Copies, Ints, Listed, Shards, grid, summed
from hpcdist.runtime import world
from hpcdist.runtime.plan import Plan, planners
from hpcdist.staging.arguments import SINGLE, agreed, count, nest, positive
from hpcdist.staging.pieces import PIECE, PiecePlan, block_bounds, deliver, piece_limit
from hpcdist.staging.reader import OpenFiles, Part, TensorReader, open_files
from hpcdist.staging.save import wait_for
from hpcdist.staging.writer import WINDOW
from hpcdist.tensors import pool
from hpcdist.tensors.storage import Scratch, written
from hpcdist.validation import local
from hpcdist.validation.local import ArgumentError

if TYPE_CHECKING:
    from hpcdist.comm.settings import GroupLike
    from hpcdist.comm.windows import Window

__all__ = ["load", "plan_load"]

VERB = "staging.load"
_PLAN = "plan of staging.load"
_ONCE_PER = ("auto", "rank", "job")
LEAST = 2**16  # bytes that ranks read together by default; below, to read them takes less time than to send them


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
    """Read each rank's part of the tensors of a file, with any number of ranks.

    Collective over `group`. Waits for a save in flight to this name. Along dim 0 every rank reads directly into its
    result. If all ranks want the whole, or narrow parts that would need many reads of the same data, the ranks share
    the reading and send each other their parts, a window at a time.

    Args:
        path: of the file, which all ranks see: HDF5, .safetensors, .npy, .npz or .pt; or of a folder of torch's DCP or
            of .safetensors files, which need their index if they are shards; or of an index. Must agree.
        name: of a tensor, or of a group of them; None for all of the file. Must agree.
        dim: the dimension along which tensors are split; None for the whole on every rank; or a dict of these by full
            name, with 0 for missing names. Must agree. Every rank gets the whole of 0-d tensors.
        counts: the extent along `dim` for each rank, or a rule, as in :func:`hpcdist.split`: "block" by default. Must
            agree.
        box: this rank's part as (offset, shape), each with an entry for every dim; instead of `dim` and `counts`, on
            all ranks or on none. Each rank has a box of its own; boxes may overlap.
        out: memory for this rank's part of the one tensor that is read, of its shape and dtype, any strides, any
            device; optional on each rank. If the call fails, its contents are undefined.
        device: device of the result, without `out`; the CPU by default.
        window: bytes of host memory that a rank may use besides the result. Must agree.
        readers: how many ranks read data that are sent to others; by default all. Must agree.
        verify: True: compare the checksum of every piece that is read at least in part; None: of pieces that are read
            whole; False: of none. Files of other tools have no checksums. Must agree.
        once_per: how whole tensors (`dim=None`, 0-d tensors) are read. "job": once, by all ranks together, which send
            each other the data. "rank": by every rank on its own. "auto": as "job" on several nodes and for compressed
            data; as "rank" on one node and below 64 KiB. Must agree. ``print(hpcdist.plan(staging.load, ...))`` reports
            the bytes read and sent.
        shared: whether the ranks of a node share one copy of whole tensors (`dim=None`). Treat it as read-only: writes
            are private (copy-on-write). The memory of a tensor is reused when no rank has it. For host memory. If the
            node has too little shared memory, or below 64 KiB, each rank gets its own. Must agree.
        progress: called on each rank, from time to time, with the number of bytes just read.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None for all ranks.

    Returns:
        On each rank its part: a contiguous tensor that it owns (or `out`), of the dtype that was saved and of native
        byte order; a nested dict of these if `name` is a group, or if it is None and the file holds anything but one
        tensor "data". Data that no tensor can hold, such as text, are left out.

    Raises:
        RankError: on every rank, if the file or the tensor does not exist, the file has another format, is incomplete,
            truncated or damaged, has its data in another file, or holds only data that no tensor can hold; or if an
            argument is wrong on one rank or does not agree. The job can continue.

    Example, on 3 ranks::

        >>> hd.staging.load("x.h5")                    # saved from 5 rows
        tensor([[0, 1], [2, 3]])                       # on rank 0; two rows on rank 1, one on rank 2
        >>> hd.staging.load("x.h5", "data", box=((rank, 0), (1, 2)))
        tensor([[0, 1]])                               # on rank 0; row 1 on rank 1, row 2 on rank 2
    """
    arguments = dict(locals())
    team = world.team_of(arguments.pop("group"))
    wait_for(path)
    with _planned(team, VERB, arguments) as call:
        methods = {key: call.method(key) for key in call.tensors}
        windows = {key: _window(team, call.tensors[key]) for key, how in methods.items() if how is _Method.SHARED}
        targets: dict[str, Tensor] = {}

        def allocate() -> None:
            if out is not None:
                _check_out(call.tensors, out, call.wants, team.rank)
            for key, stored in call.tensors.items():
                want, memory = call.wants[key][team.rank], windows.get(key)
                if out is not None:
                    targets[key] = out.detach().view(want.shape)
                elif memory is not None:
                    targets[key] = memory.target(want.shape, stored.dtype)
                else:
                    targets[key] = pool.empty(want.shape, stored.dtype, call.device, fixed=True)

        objects.run_on_all(team.comm, VERB, allocate)
        written(out, None)
        problems: list[str] = []
        for key, how in methods.items():
            if how is _Method.ALONE:
                with kept(problems):
                    call.reader(key).read(call.wants[key][team.rank], targets[key], call.same["window"])
            elif windows.get(key) is None:
                problems += _read_in_rounds(team, call, key, call.wants[key], targets[key])
            else:
                problems += _read_shared(team, call, key, targets[key])
        found = enumerate(objects.all_gather_object(team.comm, problems[:1], VERB))
        objects.raise_problems(VERB, {rank: texts[0] for rank, texts in found if texts})
        for key, memory in windows.items():
            if memory is not None:
                team.topology.comm.Barrier()  # all ranks of the node have written
                targets[key] = memory.tensor(call.tensors[key].shape, call.tensors[key].dtype)
    if out is not None:
        return out
    return nest(targets, call.same["name"])


def _window(team: Team, stored: Stored) -> Window | None:
    """Take memory of the node for a tensor; None on all ranks if it has none: see ``team.unshared``. Collective."""
    from hpcdist.routes import window  # which imports MPI

    return window.take(team, stored.nbytes(), stored.nbytes())


@contextmanager
def kept(problems: list[str]) -> Iterator[None]:
    """Keep an error of this rank, so that it continues with the others, which get it at the end."""
    try:
        yield
    except Exception as error:
        problems.append(coded("HD402", reason(error)))


def _read_in_rounds(team: Team, call: _Load, key: str, wants: BoxSequence, out: Tensor) -> list[str]:
    """Read the pieces of a tensor, each on one rank, and send their parts to those that want them; return the errors of
    this rank. Collective."""
    reader, window = call.reader(key), call.same["window"]
    stored, problems = reader.stored, list[str]()
    plan, rows = plan_load(stored, wants, window, call.same["readers"] or team.size, reader.verify)
    if reader.verify and rows is None:  # pieces too large for the window: checked on their own
        with kept(problems):
            for number in range(team.rank, len(stored.boxes), team.size):
                reader.check(number, window)
    scratch = Scratch(pinned=not out.is_cpu)
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


def _read_shared(team: Team, call: _Load, key: str, out: Tensor) -> list[str]:
    """Read a tensor into memory that the ranks of a node share; return the errors of this rank. Collective."""
    stored, problems, nodes = call.tensors[key], list[str](), team.topology.nodes
    if len(nodes) == 1:
        plan, _ = plan_load(stored, call.wants[key], call.same["window"], call.same["readers"] or team.size, None)
        reader = call.reader(key)
        with kept(problems):
            for row in plan.rows(team.rank):
                box = plan.pieces[row]
                reader.read(box, out[box.slices()], call.same["window"])
        return problems
    receives = team.rank in {ranks[0] for ranks in nodes}
    return _read_in_rounds(team, call, key, _receivers(team, stored), out if receives else out[out.shape[0] :])


def _receivers(team: Team, stored: Stored) -> Listed:
    """The whole tensor for one rank of each node, which receives it for all; nothing for the others."""
    shapes = np.zeros((team.size, len(stored.shape)), np.int64)
    shapes[[ranks[0] for ranks in team.topology.nodes]] = stored.shape
    return Listed(np.zeros_like(shapes), shapes, stored.shape)


class _Method(Enum):
    """How the ranks read a tensor."""

    ALONE = "each rank reads its part"
    ROUNDS = "each piece is read once, and its parts sent"
    SHARED = "read once, into memory that the ranks of a node share"


@dataclass(frozen=True)
class _Load:
    """The data that a call of load() reads on this rank.

    Attributes:
        files: the file, or the files of the folder, open on this rank.
        same: options that are the same on all ranks.
        wants: by name of the tensor, the box of each rank.
        device: of this rank's results, without `out`.
        progress: called with the number of bytes just read.
        nodes: number of nodes of the ranks.
    """

    files: OpenFiles
    same: Mapping[str, Any]
    wants: Mapping[str, BoxSequence]
    device: torch.device
    progress: Callable[[int], None] | None
    nodes: int

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """The tensors by name, in the order of the files."""
        return self.files.contents.tensors

    def method(self, key: str) -> _Method:
        """Return how a tensor is read. What each rank wants whole, "auto" reads once a job on several nodes, and what
        is compressed; the ranks of a node read the rest from the system's cache as fast as they could send it."""
        stored, wants, same = self.tensors[key], self.wants[key], self.same
        if isinstance(wants, Copies):
            if same["shared"] and stored.nbytes() >= LEAST and stored.shape:
                return _Method.SHARED
            once = same["once_per"] == "job" or same["readers"] is not None
            if same["once_per"] == "auto" and stored.nbytes() >= LEAST:
                once = once or self.nodes > 1 or (stored.raw is None and stored.parts is None)
            return _Method.ROUNDS if once and stored.nbytes() and len(wants) > 1 else _Method.ALONE
        alone = same["readers"] is None and _reads_alone(stored, wants, same["verify"])
        return _Method.ALONE if alone or stored.raw is None else _Method.ROUNDS

    def reader(self, key: str) -> TensorReader:
        """Return a reader of one tensor; what it computes from the table of its pieces is freed with it."""
        return TensorReader(self.files, replace(self.tensors[key]), self.same["verify"], self.progress)


@dataclass(frozen=True)
class _Ask:
    """One rank's request to load, checked on this rank.

    Attributes:
        same: options that must agree.
        box: box that this rank wants, if the caller gives one.
        out: memory for it, if the caller passes any.
        device: of the result, without `out`.
        progress: called with the number of bytes just read.
    """

    same: dict[str, Any]
    box: Box | None
    out: Tensor | None
    device: torch.device
    progress: Callable[[int], None] | None


def _check(
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
) -> _Ask:
    """Check the arguments of load() on this rank."""
    if name is not None and not isinstance(name, str):
        raise ArgumentError("HD419", f"name must be a string or None, got {name!r}")
    if box is not None and (dim != 0 or counts is not None):
        raise ArgumentError("HD419", "box is given together with dim or counts, which it replaces")
    if once_per not in _ONCE_PER:
        raise ArgumentError("HD419", f"once_per is {once_per!r}, expected one of {', '.join(_ONCE_PER)}")
    mine = None if box is None else Box(tuple(index(o) for o in box[0]), tuple(index(n) for n in box[1]))
    if out is not None:
        local.tensor(out, 0, "out")
    target = torch.device("cpu" if device is None else device)
    if shared:
        _check_shared(dim, box, out, target, once_per)
    same = {
        "path": os.fsdecode(path), "name": name,
        "dim": {str(k): _dim(v) for k, v in dim.items()} if isinstance(dim, Mapping) else _dim(dim),
        "counts": counts if counts is None or isinstance(counts, str) else tuple(index(c) for c in counts),
        "window": positive("window", window), "readers": count("readers", readers, team.size), "verify": verify,
        "box": "not given" if box is None else "given", "once_per": once_per, "shared": bool(shared),
    }  # fmt: skip
    return _Ask(same, mine, out, target, progress)


def _check_shared(dim: Any, box: Any, out: Tensor | None, device: torch.device, once_per: str) -> None:
    why = None
    if out is not None:
        why = "out is given, but shared=True returns memory that the ranks of a node share: omit one of them"
    elif box is not None or not (dim is None or isinstance(dim, Mapping)):
        why = "shared=True is for tensors that every rank wants whole: pass dim=None, or a dict with None for these"
    elif device.type != "cpu":
        why = f"device is {device}, but shared=True is for host memory"
    elif once_per == "rank":
        why = "once_per is 'rank', but with shared=True no rank has a copy of its own: use 'job'"
    if why is not None:
        raise ArgumentError("HD211", why)


def _dim(dim: Any) -> int | None:
    return None if dim is None else index(dim)


@contextmanager
def _planned(team: Team, verb: str, arguments: Mapping[str, Any]) -> Iterator[_Load]:
    """Agree on a load, open the file on every rank, and plan who reads what. Collective.

    Args:
        arguments: this rank's, of load().

    Raises:
        RankError: on every rank: see load().
    """
    with agreed(team, verb, lambda: _check(team, **arguments)) as ask:
        same, _ = objects.same(team.comm, verb, ask.same, ask.same, objects.first_difference)
        with _opened(team, verb, str(same["path"]), same["name"]) as files:
            tensors = files.contents.tensors
            same["name"] = _prefix(same["name"], files.contents)
            boxes = list[Box]()
            if (box := ask.box) is not None:
                boxes = objects.run_on_all(team.comm, verb, lambda: _inside(tensors, box))
            try:
                nest(dict.fromkeys(tensors), same["name"])
                _check_dims(same, tensors)
                wants = {key: _wants(stored, same, boxes, team.size) for key, stored in tensors.items()}
            except ValueError as error:
                objects.raise_problems(verb, dict.fromkeys(range(team.size), str(error)))
            nodes = len({team.settings.node_of[peer] for peer in team.peers})
            yield _Load(files, same, wants, ask.device, ask.progress, nodes)


def _opened(team: Team, verb: str, path: str, name: str | None) -> OpenFiles:
    """Open what a file or folder holds of `name`, the same on every rank; a RankError everywhere if a rank cannot."""
    find = lambda: objects.run_on_root(team.comm, verb, lambda: describe(path).chosen(name))  # noqa: E731
    return open_files(find, lambda sees: objects.run_on_all(team.comm, verb, sees))


def _prefix(name: str | None, contents: Contents) -> str:
    """The common prefix of the names of these tensors, which are all of `name`."""
    if name is None:
        return SINGLE if list(contents.tensors) == [SINGLE] else ""
    return contents.key(name)


def _check_dims(same: Mapping[str, Any], tensors: Mapping[str, Stored]) -> None:
    """Raise a ValueError if `dim` names a tensor that does not exist."""
    dim = same["dim"]
    if isinstance(dim, dict) and not same["name"] and (odd := sorted(dim.keys() - tensors.keys())):
        raise refusal(ValueError, "HD408", f"dim names {odd[0]!r}, which is not there; it has: {listed(tensors)}")


def _inside(tensors: Mapping[str, Stored], box: Box) -> Box:
    """The box that this rank wants; a ValueError if it is not in each tensor."""
    for key, stored in tensors.items():
        if not box.is_in(stored.shape):
            what = f"(offset {box.offset}, shape {box.shape}), which is not in shape {stored.shape}"
            raise refusal(ValueError, "HD213", f"{key}: box is {what}")
    return box


def _wants(stored: Stored, same: Mapping[str, Any], boxes: Sequence[Box], size: int) -> BoxSequence:
    """The box of a tensor for each of `size` ranks."""
    if boxes:
        return Listed.of(boxes, stored.shape)
    try:
        return _along_dim(stored, same, size)
    except ValueError as error:
        raise refusal(ValueError, "HD213", f"{stored.name}: {error}") from None


def _along_dim(stored: Stored, same: Mapping[str, Any], size: int) -> BoxSequence:
    """The boxes of a tensor along the dim that was given; a ValueError if it has no such dim or counts."""
    shape, dim = stored.shape, same["dim"]
    if isinstance(dim, dict):
        dim = dim.get(stored.name, 0)
    if dim is None or not shape:
        return Copies(shape, size)
    if not -len(shape) <= dim < len(shape):
        what = f"dim is {dim}, expected {-len(shape)} to {len(shape) - 1} for {len(shape)} dims"
        raise refusal(ValueError, "HD204", what)
    dim %= len(shape)
    return Shards(shape, dim, _displs(same["counts"], shape[dim], size))


@lru_cache(maxsize=256)
def _displs(counts: str | tuple[int, ...] | None, extent: int, size: int) -> Ints:
    found = summed(layout.counts_of(counts, extent, size))
    found.setflags(write=False)  # tensors of the same extent have the same
    return found


def _check_out(tensors: Mapping[str, Stored], out: Tensor, wants: Mapping[str, BoxSequence], rank: int) -> None:
    """Raise a ValueError if `out` does not fit what a rank gets."""
    if len(wants) != 1:
        raise refusal(ValueError, "HD208", f"out is given for one tensor, but {len(wants)} are read: {listed(wants)}")
    ((key, boxes),) = wants.items()
    dtype, shape = tensors[key].dtype, boxes[rank].shape
    if out.dtype != dtype:
        what = f"out has dtype {out.dtype}, expected {dtype}, that of {key!r} in the file"
        raise refusal(ValueError, "HD208", what)
    if tuple(out.shape) != shape:
        raise refusal(ValueError, "HD208", f"out has shape {tuple(out.shape)}, expected {shape}")


def _reads_alone(stored: Stored, wants: BoxSequence, verify: bool | None) -> bool:
    """Decide whether every rank reads on its own: long runs, or little in all; and whole pieces, if verified."""
    size = stored.dtype.itemsize
    if isinstance(wants, Listed):
        if not verify and 2 * wants.sizes.sum(dtype=float) < prod(stored.shape):
            return True
        lengths, counts = wants.run_lengths()
        lengths = lengths[(counts > 1) & (wants.sizes > 0)]
        return not len(lengths) or not (verify or int(lengths.min()) * size < SHORT)
    if not isinstance(wants, Shards):
        return True  # the whole
    extents = np.diff(wants.displs)
    filled = extents[extents > 0]
    if not len(filled) or not prod(stored.shape):
        return True
    length, count = layout.runs(wants[int(np.flatnonzero(extents == filled.min())[0])], stored.shape)
    return count == 1 or not (verify or length * size < SHORT)


def plan_load(
    stored: Stored, wants: BoxSequence, window: int, readers: int, verify: bool | None
) -> tuple[PiecePlan, Sequence[int] | Ints | None]:
    """Plan each rank's reads; and if the pieces of the file's table are read, the number of each."""
    size, itemsize = len(wants), stored.dtype.itemsize
    pieces, workers = stored.boxes, readers
    largest = int(pieces.sizes.max()) * itemsize if len(pieces) else 0
    rows: Sequence[int] | Ints | None = range(len(pieces))
    if largest and 2 * largest <= window:
        workers = max(1, min(readers, window // (2 * largest)))
    else:
        pieces, rows = grid(stored.shape, piece_limit(window // (2 * readers), itemsize)), None
    if isinstance(wants, Listed) and not (verify and rows is not None):
        chosen = pieces.intersecting(wants.cover)  # no rank may want some of the pieces within these
        if len(chosen) < len(pieces):
            pieces = Listed(pieces.offsets[chosen], pieces.shapes[chosen], pieces.shape)
            rows = None if rows is None else chosen
    return PiecePlan(pieces, block_bounds(len(pieces), size, workers), wants, straight=False), rows


def _planned_load(*, group: Any, **arguments: Any) -> Plan:
    """Plan a call of load(). Collective: see :func:`hpcdist.plan`."""
    team = world.team_of(group)
    with _planned(team, _PLAN, arguments) as call:
        methods = {key: call.method(key) for key in call.tensors}
        traffic = [_traffic(call, team, key, how) for key, how in methods.items()]
        read, sent, received = (sum(row[i] for row in traffic) for i in range(3))
        result = _result(call, arguments["out"], set(methods.values()))
    everywhere = objects.all_gather_object(
        team.comm, (read, sent, list({how.value for how in methods.values()})), _PLAN
    )
    total_read, total_sent = (sum(row[i] for row in everywhere) for i in range(2))
    return Plan(
        verb=VERB,
        route="mpi" if total_sent else "none",
        methods=tuple(dict.fromkeys(how for *_, of in everywhere for how in of)),
        sent=sent,
        received=received,
        result=result,
        reasons=(f"once_per={call.same['once_per']!r}, on {call.nodes} node{'s' * (call.nodes > 1)}",),
        file_bytes=read,
        file_bytes_of_all=total_read,
        sent_by_all=total_sent,
        _call=partial(load, **arguments, group=group),
    )


def _result(call: _Load, out: Any, methods: set[_Method]) -> str:
    if out is not None:
        return "out"
    if methods == {_Method.SHARED}:
        return "shared"
    if len(call.tensors) > 1:
        return "structure"
    (stored,) = call.tensors.values()
    return "pool" if pool.holds(stored.nbytes(), call.device) else "new"


def _traffic(call: _Load, team: Team, key: str, how: _Method) -> tuple[int, int, int]:
    """The bytes of a tensor that this rank reads, sends and receives."""
    reader, wants, same, me = call.reader(key), call.wants[key], call.same, team.rank
    stored, verify = reader.stored, same["verify"]
    if how is _Method.ALONE:
        limit = max(1, min(PIECE, same["window"] // 2) // stored.dtype.itemsize)
        return _read(reader, reader.parts(wants[me], limit)), 0, 0
    shared = how is _Method.SHARED
    if shared and len(team.topology.nodes) > 1:
        wants = _receivers(team, stored)
    plan, rows = plan_load(stored, wants, same["window"], same["readers"] or team.size, verify)
    pieces, size = [plan.pieces[row] for row in plan.rows(me)], stored.dtype.itemsize
    if shared and len(team.topology.nodes) == 1:
        return _read(reader, [Part(box) for box in pieces]), 0, 0
    pieces = [box for box in pieces if (verify and rows is not None) or len(wants.intersecting(box))]
    own = sum(box.intersect(wants[me]).size() for box in pieces)
    sent = sum(box.intersect(wants[dest]).size() for box in pieces for dest in wants.intersecting(box).tolist())
    if verify and rows is None:
        pieces += [stored.boxes[row] for row in range(me, len(stored.boxes), team.size)]
    return _read(reader, [Part(box) for box in pieces]), (sent - own) * size, (wants[me].size() - own) * size


def _read(reader: TensorReader, parts: list[Part]) -> int:
    """Return the bytes that are read for some parts of a dataset."""
    stored, elements = reader.stored, 0
    checked = set[int]()
    for box, _, checks in parts:
        elements += sum(stored.boxes[piece].size() for piece in {*checks} - checked)
        checked |= {*checks}
        elements += box.size() if stored.raw is None or not box.size() else stored.raw.cover(box).size()
    return elements * stored.dtype.itemsize


planners[load] = _planned_load
