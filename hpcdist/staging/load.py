"""load(): each rank gets its part of the tensors of a file or a folder of files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from hpcdist.formats.contents import Stored
from hpcdist.formats.known import describe
from hpcdist.layout import Box
from hpcdist.layout.box import BoxSequence, Copies, Ints, Listed, Shards, grid, summed
from hpcdist.runtime import world
from hpcdist.runtime.plan import Plan, planners
from hpcdist.staging.arguments import SINGLE, agreed, check_inside, check_out, count, nest, positive
from hpcdist.staging.pieces import PiecePlan, block_bounds, deliver, piece_limit
from hpcdist.staging.reader import OpenFiles, Part, TensorReader, open_files
from hpcdist.staging.save import plan_of_file, wait_for
from hpcdist.staging.writer import WINDOW
from hpcdist.tensors import pool
from hpcdist.tensors.storage import Scratch, written
from hpcdist.validation import local
from hpcdist.validation.local import ArgumentError

if TYPE_CHECKING:
    from hpcdist.comm.settings import GroupLike
    from hpcdist.comm.windows import Window

VERB = "staging.load"
_PLAN = "plan of staging.load"
_ONCE_PER = ("auto", "rank", "job")
SHORT = 2**12  # bytes: where runs are shorter, ranks share the reading
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
    result. Sometimes all ranks want the whole, or narrow parts that would need many reads of the same data. The ranks
    then share the reading, and send each other their parts, a window at a time.

    Args:
        path: a file that all ranks see (HDF5, .safetensors, .npy, .npz or .pt), a folder of torch's DCP or of
            .safetensors files, or an index. Sharded .safetensors files need their index. Must agree.
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
        On each rank its part: a contiguous tensor that it owns (or `out`), of the saved dtype, in native byte order. If
            `name` is a group, or if it is None and the file holds anything but one tensor "data", a nested dict of
            these. Data that no tensor can hold, such as text, are left out.

    Raises:
        RankError: on every rank, if the file or the tensor does not exist, or an argument is wrong on one rank or does
            not agree. Also if the file has another format, is incomplete, truncated or damaged, has its data in another
            file, or holds only data that no tensor can hold. The job can continue.

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
        windows = _windows(call)
        targets: dict[str, Tensor] = {}
        objects.run_on_all(team.comm, VERB, lambda: targets.update(_targets(call, windows)))
        written(out, None)
        problems: list[str] = []
        for key, target in targets.items():
            _read(call, key, target, problems)
        found = enumerate(objects.all_gather_object(team.comm, problems[:1], VERB))
        objects.raise_problems(VERB, {rank: texts[0] for rank, texts in found if texts})
        for key, memory in windows.items():
            team.topology.comm.Barrier()  # all ranks of the node have written
            targets[key] = memory.tensor(call.tensors[key].shape, call.tensors[key].dtype)
    return nest(targets, call.same["name"]) if out is None else out


class _Method(Enum):
    """How the ranks read a tensor."""

    ALONE = "each rank reads its part"
    ROUNDS = "each piece is read once, and its parts sent"
    SHARED = "read once, into memory that the ranks of a node share"


@dataclass
class _Load:
    """A call of load(), checked on this rank.

    Attributes:
        same: options that must agree.
        box: box that this rank wants, if the caller gives one.
        out: memory for it, if the caller passes any.
        device: of the result, without `out`.
        progress: called with the number of bytes just read.
        files: the file, or the files of the folder, open on this rank.
        wants: by name of the tensor, the box of each rank.
        methods: by name of the tensor, how it is read; the same on all ranks.
    """

    team: Team
    same: dict[str, Any]
    box: Box | None
    out: Tensor | None
    device: torch.device
    progress: Callable[[int], None] | None
    files: OpenFiles = field(init=False)
    wants: dict[str, BoxSequence] = field(init=False)
    methods: dict[str, _Method] = field(init=False)

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """The tensors by name, in the order of the files."""
        return self.files.contents.tensors

    def reader(self, key: str) -> TensorReader:
        """Return a reader of one tensor; what it computes from the table of its pieces is freed with it."""
        return TensorReader(self.files, replace(self.tensors[key]), self.same["verify"], self.progress)


def _windows(call: _Load) -> dict[str, Window]:
    """Take memory of the node for shared tensors; of those for which it has none, see ``team.unshared``, each rank gets
    its own. Collective."""
    from hpcdist.comm import window  # which imports MPI

    found = {}
    for key, stored in call.tensors.items():
        if call.methods[key] is _Method.SHARED:
            memory = window.take(call.team, stored.nbytes(), stored.nbytes())
            if memory is None:
                call.methods[key] = _Method.ROUNDS
            else:
                found[key] = memory
    return found


def _targets(call: _Load, windows: Mapping[str, Window]) -> Iterator[tuple[str, Tensor]]:
    """Yield memory for this rank's part of each tensor; a ValueError if `out` does not fit."""
    if call.out is not None and len(call.tensors) != 1:
        what = f"out is given for one tensor, but {len(call.tensors)} are read: {listed(call.tensors)}"
        raise refusal(ValueError, "HD208", what)
    for key, stored in call.tensors.items():
        shape = call.wants[key][call.team.rank].shape
        if call.out is not None:
            check_out(call.out, shape, stored.dtype, key)
            yield key, call.out.detach().view(shape)
        elif key in windows:
            yield key, windows[key].target(shape, stored.dtype)
        else:
            yield key, pool.empty(shape, stored.dtype, call.device, fixed=True)


@contextmanager
def kept(problems: list[str]) -> Iterator[None]:
    """Keep an error of this rank, so that it continues with the others, which get it at the end."""
    try:
        yield
    except Exception as error:
        problems.append(coded("HD402", reason(error)))


def _read(call: _Load, key: str, out: Tensor, problems: list[str]) -> None:
    """Read a tensor, of which `out` is this rank's part; keep the errors of this rank. Collective."""
    reader, window, me = call.reader(key), call.same["window"], call.team.rank
    own = call.wants[key][me].offset
    if (boxes := _in_place(call, key)) is not None:
        with kept(problems):
            for box in boxes:
                reader.read(box, out if out.shape == box.shape else out[box.slices(own)], window)
        return
    wants, plan, rows = _rounds(call, key)
    if reader.verify and rows is None:  # pieces too large for the window: checked on their own
        with kept(problems):
            for number in range(me, len(reader.stored.boxes), call.team.size):
                reader.check(number)
    out, scratch = out[wants[me].slices(own)], Scratch(pinned=not out.is_cpu)
    for round_ in plan.rounds:
        scratch.reset()
        piece, row = None, plan.piece(me, round_)
        if row is not None:
            box = plan.pieces[row]
            piece = scratch.take(box.shape, reader.stored.dtype)
            in_table = None if rows is None or reader.verify is False else int(rows[row])
            if (reader.verify and rows is not None) or len(wants.intersecting(box)):
                with kept(problems):
                    reader.fill(box, in_table, piece, window)
        deliver(call.team, plan, piece, out, round_, scratch)


def _in_place(call: _Load, key: str) -> list[Box] | None:
    """The boxes that this rank reads straight into the result; None if the ranks send each other their data."""
    me, how, wants = call.team.rank, call.methods[key], call.wants[key]
    if how is _Method.ALONE:
        return [wants[me]]
    if how is _Method.ROUNDS or len(call.team.topology.nodes) > 1:
        return None
    plan, _ = plan_load(call.tensors[key], wants, call.same["window"], _readers(call), None)
    return [plan.pieces[row] for row in plan.rows(me)]


def _rounds(call: _Load, key: str) -> tuple[BoxSequence, PiecePlan, Sequence[int] | Ints | None]:
    """The box that each rank receives, of shared memory one rank of each node for all of them, and plan_load()."""
    stored, wants = call.tensors[key], call.wants[key]
    if call.methods[key] is _Method.SHARED:
        shapes = np.zeros((call.team.size, len(stored.shape)), np.int64)
        shapes[[ranks[0] for ranks in call.team.topology.nodes]] = stored.shape
        wants = Listed(np.zeros_like(shapes), shapes, stored.shape)
    return wants, *plan_load(stored, wants, call.same["window"], _readers(call), call.same["verify"])


def _readers(call: _Load) -> int:
    return int(call.same["readers"] or call.team.size)


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
) -> _Load:
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
    return _Load(team, same, mine, out, target, progress)


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
    with agreed(team, verb, lambda: _check(team, **arguments)) as call:
        same, _ = objects.same(team.comm, verb, call.same, call.same, objects.first_difference)
        path, name = str(same["path"]), same["name"]
        find = lambda: objects.run_on_root(team.comm, verb, lambda: describe(path).chosen(name))  # noqa: E731
        with open_files(find, lambda sees: objects.run_on_all(team.comm, verb, sees)) as call.files:
            tensors, named = call.tensors, name is not None
            if not named:
                name = SINGLE if list(tensors) == [SINGLE] else ""
            same["name"], call.same = call.files.contents.key(name), same
            boxes = list[Box]()
            if (box := call.box) is not None:
                boxes = objects.run_on_all(team.comm, verb, lambda: _inside(tensors, box))
            try:
                nest(dict.fromkeys(tensors), same["name"])
                dim = same["dim"]
                whole = not named or not same["name"]  # else `dim` may also name what is not loaded
                if whole and isinstance(dim, dict) and (odd := sorted(dim.keys() - tensors.keys())):
                    what = f"dim names {odd[0]!r}, which is not there; it has: {listed(tensors)}"
                    raise refusal(ValueError, "HD408", what)
                call.wants = {key: _wants(stored, same, boxes, team.size) for key, stored in tensors.items()}
            except ValueError as error:
                objects.raise_problems(verb, dict.fromkeys(range(team.size), str(error)))
            nodes = len({team.settings.node_of[peer] for peer in team.peers})
            call.methods = {key: _method(tensors[key], wants, same, nodes) for key, wants in call.wants.items()}
            yield call


def _inside(tensors: Mapping[str, Stored], box: Box) -> Box:
    """The box that this rank wants; a ValueError if it is not in each tensor."""
    for key, stored in tensors.items():
        check_inside(box, stored.shape, f"{key}: ")
    return box


def _wants(stored: Stored, same: Mapping[str, Any], boxes: Sequence[Box], size: int) -> BoxSequence:
    """The box of a tensor for each of `size` ranks; a ValueError if it has no such dim or counts."""
    shape, dim = stored.shape, same["dim"]
    if boxes:
        return Listed.of(boxes, shape)
    if isinstance(dim, dict):
        dim = dim.get(stored.name, 0)
    if dim is None or not shape:
        return Copies(shape, size)
    if not -len(shape) <= dim < len(shape):
        what = f"dim is {dim}, expected {-len(shape)} to {len(shape) - 1} for {len(shape)} dims"
        raise refusal(ValueError, "HD204", f"{stored.name}: {what}")
    try:
        return Shards(shape, dim % len(shape), _displs(same["counts"], shape[dim], size))
    except ValueError as error:
        raise refusal(ValueError, "HD213", f"{stored.name}: {error}") from None


@lru_cache(maxsize=256)
def _displs(counts: str | tuple[int, ...] | None, extent: int, size: int) -> Ints:
    found = summed(layout.counts_of(counts, extent, size))
    found.setflags(write=False)  # tensors of the same extent have the same
    return found


def _method(stored: Stored, wants: BoxSequence, same: Mapping[str, Any], nodes: int) -> _Method:
    """Choose how a tensor is read. "auto" reads compressed data once per job, and on several nodes also tensors that
    each rank wants whole. The ranks of a node read the rest from the system's cache as fast as they could send it."""
    if isinstance(wants, Copies):
        if same["shared"] and stored.nbytes() >= LEAST and stored.shape:
            return _Method.SHARED
        once = same["once_per"] == "job" or same["readers"] is not None
        if same["once_per"] == "auto" and stored.nbytes() >= LEAST:
            once = once or nodes > 1 or (stored.raw is None and stored.parts is None)
        return _Method.ROUNDS if once and stored.nbytes() and len(wants) > 1 else _Method.ALONE
    alone = same["readers"] is None and _reads_alone(stored, wants, same["verify"])
    return _Method.ALONE if alone or stored.raw is None else _Method.ROUNDS


def _reads_alone(stored: Stored, wants: BoxSequence, verify: bool | None) -> bool:
    """Decide whether every rank reads on its own: long runs, or little in all; and whole pieces, if verified."""
    if isinstance(wants, Listed):
        if not verify and 2 * wants.sizes.sum(dtype=float) < prod(stored.shape):
            return True
    elif isinstance(wants, Shards):  # the narrowest has the shortest runs
        extents = np.diff(wants.displs)
        narrowest = int(np.where(extents, extents, extents.max()).argmin())
        wants = Listed.of([wants[narrowest]], stored.shape)
    else:
        return True  # the whole
    lengths, counts = wants.run_lengths()
    lengths = lengths[(counts > 1) & (wants.sizes > 0)]
    return not len(lengths) or not (verify or int(lengths.min()) * stored.dtype.itemsize < SHORT)


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
        traffic = [_traffic(call, key) for key in call.tensors]
        nbytes = sum(stored.nbytes() for stored in call.tensors.values())
    methods, result = set(call.methods.values()), "pool" if pool.holds(nbytes, call.device) else "new"
    if call.out is not None:
        result = "out"
    elif methods == {_Method.SHARED}:
        result = "shared"
    elif len(call.wants) > 1:
        result = "structure"
    how, reason = tuple(how.value for how in _Method if how in methods), f"once_per={call.same['once_per']!r}"
    run = partial(load, **arguments, group=group)
    return plan_of_file(team, _PLAN, traffic, verb=VERB, methods=how, result=result, reasons=(reason,), _call=run)


def _traffic(call: _Load, key: str) -> tuple[int, int, int]:
    """The bytes of a tensor that this rank reads, sends and receives."""
    reader, me, verify, moved = call.reader(key), call.team.rank, call.same["verify"], (0, 0)
    stored, size = reader.stored, reader.stored.dtype.itemsize
    if (boxes := _in_place(call, key)) is not None:
        limit = piece_limit(call.same["window"] // 2, size)
        parts = [part for box in boxes for part in reader.parts(box, limit)]
    else:
        wants, plan, rows = _rounds(call, key)
        pieces = [plan.pieces[row] for row in plan.rows(me)]
        meets = [wants.intersecting(box).tolist() for box in pieces]
        sent, own = 0, 0
        for box, dests in zip(pieces, meets, strict=True):
            sizes = {dest: box.intersect(wants[dest]).size() for dest in dests}
            own += sizes.get(me, 0)
            sent += sum(sizes.values())
        moved = (sent - own) * size, (wants[me].size() - own) * size
        parts = [Part(box) for box, dests in zip(pieces, meets, strict=True) if dests or (verify and rows is not None)]
        if verify and rows is None:
            parts += [Part(stored.boxes[row]) for row in range(me, len(stored.boxes), call.team.size)]
    checked = {part.check for part in parts if part.check is not None}
    covers = [part.box if stored.raw is None or not part.box.size() else stored.raw.cover(part.box) for part in parts]
    return sum(box.size() for box in (*covers, *(stored.boxes[row] for row in checked))) * size, *moved


planners[load] = _planned_load
