"""load(): each rank gets its part of the tensors of a file or a folder of files."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import FileError, coded, listed, reason, refusal
from hpcdist.formats.contents import Stored
from hpcdist.formats.known import describe
from hpcdist.layout import Box
from hpcdist.layout.box import BoxSequence, Copies, Ints, Listed, Shards, grid, summed
from hpcdist.runtime import world
from hpcdist.runtime.plan import Plan, planners
from hpcdist.staging.arguments import SINGLE, agreed, check_inside, check_memory, check_out, nest, window_bytes
from hpcdist.staging.pieces import ROUND, PiecePlan, Progress, block_bounds, deliver, exchange, piece_limit
from hpcdist.staging.reader import OpenFiles, TensorReader, open_files
from hpcdist.staging.save import wait_for
from hpcdist.staging.writer import WINDOW
from hpcdist.tensors import pool
from hpcdist.tensors.storage import Scratch, written
from hpcdist.validation import local
from hpcdist.validation.local import ArgumentError

if TYPE_CHECKING:
    from hpcdist.comm.team import GroupLike

VERB = "staging.load"
_PLAN = "plan of staging.load"
ALONE, ROUNDS = "each rank reads its part", "each piece is read once, and its parts sent"  # how ranks read a tensor
SHORT = 2**12  # bytes: where runs are shorter, ranks share the reading
_Boxes = dict[str, list[tuple[int, Box, torch.dtype]]]  # by name, the boxes that ranks hold, and the model's dtype
_Memory = dict[str, list[tuple[Box, Tensor]]]  # by name, those of this rank
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
    into: torch.nn.Module | None = None,
    strict: bool = True,
    convert: bool = False,
    window: int = WINDOW,
    verify: bool | None = None,
    progress: Callable[[int], None] | None = None,
    group: GroupLike | None = None,
) -> Any:
    """Read each rank's part of the tensors of a file, with any number of ranks.

    Collective over `group`. Waits for a save in flight to this name. Along dim 0 every rank reads directly into its
    result. For narrow parts, which would need many reads of the same data, the ranks share the reading, and send each
    other their parts, a window at a time. On several nodes, and for compressed data, they also do so for whole tensors
    (`dim=None`) from 64 KiB on.

    Args:
        path: a file that all ranks see (HDF5, .safetensors, .npy, .npz or .pt), a folder of torch's DCP or of
            .safetensors files, or an index. Sharded .safetensors files need their index. Must agree.
        name: the name of a tensor, or of a group of them; None for all of the file. Must agree.
        dim: the dimension along which tensors are split; None for the whole on every rank; or a dict of these by full
            name, with 0 for missing names. Must agree. Every rank gets the whole of 0-d tensors.
        counts: the extent along `dim` for each rank, or a rule, as in :func:`hpcdist.split`: "block" by default. Must
            agree.
        box: this rank's part as (offset, shape), each with an entry for every dim; instead of `dim` and `counts`, on
            all ranks or on none. Each rank has a box of its own; boxes may overlap.
        out: memory for this rank's part of the one tensor that is read, of its shape and dtype, any strides, any
            device; optional on each rank. If the call fails, its contents are undefined.
        device: device of the result, without `out`; the CPU by default.
        into: a model, whose parameters and persistent buffers are filled, instead of `dim`, `counts`, `box`, `out` and
            `device`. They may be tensors or DTensors, as of FSDP2 and tensor parallelism, but not copies, as of FSDP1,
            nor on the meta device: call ``model.to_empty(device=...)`` before. Of DDP, pass ``model.module``. Each byte
            of the file is read once. On all ranks or on none. If the call fails while it reads, the contents of the
            model are undefined.
        strict: whether `into` and the file must have the same names. One of the names of tied tensors is enough; of
            several, the last is read. Must agree.
        convert: whether to convert values to the dtypes of `into`; without it, other dtypes are an error. Must agree.
        window: bytes of host memory that a rank may use besides the result, 256 MiB by default. Must agree.
        verify: True: compare the checksum of every piece that is read at least in part; None: of pieces that are read
            whole; False: of none. Files of other tools have no checksums. Must agree.
        progress: called on each rank, from time to time, with the number of bytes just read.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None for all ranks.

    Returns:
        On each rank its part: a contiguous tensor that it owns (or `out`), of the saved dtype, in native byte order.
        Along ``dim=0`` its shape is ``(rows of this rank, *shape[1:])`` of the saved shape; with ``dim=None`` the saved
        shape. If `name` is a group, or if it is None and the file holds anything but one tensor "data", a nested dict
        of these. Data that no tensor can hold, such as text, are left out, and rank 0 warns of them. With `into`, a
        named tuple of two lists, as of torch's load_state_dict(): ``missing_keys`` of this rank's model, and
        ``unexpected_keys`` of the file that no rank's model has.

    Raises:
        RankError: on every rank, if the file or the tensor does not exist, or an argument is wrong on one rank or does
            not agree. Also if the file has another format, is incomplete, truncated or damaged, has its data in another
            file, or holds only data that no tensor can hold. With `into`, before anything is read, if names, shapes or
            dtypes differ. The job can continue.

    Example, on 3 ranks::

        >>> hd.staging.load("x.h5")                    # saved from 5 rows
        tensor([[0, 1], [2, 3]])                       # on rank 0; two rows on rank 1, one on rank 2
        >>> hd.staging.load("x.h5", "data", box=((rank, 0), (1, 2)))
        tensor([[0, 1]])                               # on rank 0; row 1 on rank 1, row 2 on rank 2
        >>> hd.staging.load("hf_folder", into=model)   # each rank's shards
        IncompatibleKeys(missing_keys=[], unexpected_keys=[])
    """
    arguments = dict(locals())
    team = world.team_of(arguments.pop("group"))
    wait_for(path)
    problems: list[str] = []
    with _opened(team, VERB, arguments) as call:
        result = _parts(call, problems) if into is None else _fill(call, problems)

        def check() -> None:
            if problems:
                raise FileError(problems[0] + ("" if into is None else "; into is incomplete"))

        objects.run_on_all(team.comm, VERB, check)
    return result


class IncompatibleKeys(NamedTuple):
    """Names that only the model has, and names that only the file has: as torch's load_state_dict() returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass
class _Load:
    """A call of load(), checked on this rank.

    Attributes:
        same: options that must agree.
        box: box that this rank wants, if the caller gives one.
        out: memory for it, if the caller passes any.
        device: of the result, without `out`.
        progress: called with the number of bytes just read.
        state: the tensors of the model that is filled, by name.
        files: the file, or the files of the folder, open on this rank.
        wants: by name of the tensor, the box of each rank.
        methods: by name of the tensor, ALONE or ROUNDS; the same on all ranks.
    """

    team: Team
    same: dict[str, Any]
    box: Box | None
    out: Tensor | None
    device: torch.device
    progress: Progress
    state: dict[str, Tensor]
    files: OpenFiles = field(init=False)
    wants: dict[str, BoxSequence] = field(init=False)
    methods: dict[str, str] = field(init=False)

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """The tensors by name, in the order of the files."""
        return self.files.contents.tensors

    def stored(self, key: str) -> Stored:
        """A tensor, which is freed with the table of its pieces. Collective if it is read in rounds: all ranks then get
        the table from rank 0."""
        stored = replace(self.tensors[key])

        if self.methods[key] == ALONE:
            return stored
        return objects.run_on_root(self.team.comm, VERB, stored.with_table)


def _parts(call: _Load, problems: list[str]) -> Any:
    """Read this rank's parts; keep the errors of this rank. Collective."""
    _plan(call, VERB)
    targets: dict[str, Tensor] = {}
    objects.run_on_all(call.team.comm, VERB, lambda: targets.update(_targets(call)))
    written(call.out, None)
    for key, target in targets.items():
        _read(call, key, target, problems)
    return nest(targets, call.same["name"]) if call.out is None else call.out


def _targets(call: _Load) -> Iterator[tuple[str, Tensor]]:
    """Yield memory for this rank's part of each tensor; a ValueError if `out` does not fit."""
    out = call.out
    if out is not None and len(call.tensors) != 1:
        what = f"out is given for one tensor, but {len(call.tensors)} are read: {listed(call.tensors)}"
        raise refusal(ValueError, "HD208", what)
    shapes = {key: call.wants[key][call.team.rank].shape for key in call.tensors}
    if out is None:
        check_memory(
            call.same["path"], sum(prod(shape) * call.tensors[key].dtype.itemsize for key, shape in shapes.items())
        )
    for key, stored in call.tensors.items():
        shape = shapes[key]
        if out is None:
            yield key, pool.empty(shape, stored.dtype, call.device, fixed=True)
            continue
        check_out(out, shape, stored.dtype, key)
        yield key, out.detach().view(shape)


@contextmanager
def kept(problems: list[str]) -> Iterator[None]:
    """Keep an error of this rank, so that it continues with the others, which get it at the end."""
    try:
        yield
    except Exception as error:
        problems.append(coded("HD402", reason(error)))


def _read(call: _Load, key: str, out: Tensor, problems: list[str]) -> None:
    """Read a tensor, of which `out` is this rank's part; keep the errors of this rank. Collective."""
    stored, wants, me = call.stored(key), call.wants[key], call.team.rank
    reader = TensorReader(call.files, stored, call.same["window"], call.same["verify"], call.progress)
    if call.methods[key] == ALONE:
        with kept(problems):
            reader.read(wants[me], out)
        return
    plan, rows = plan_load(stored, wants, reader.window, reader.verify)
    if reader.verify and rows is None:  # pieces too large for the window: checked on their own
        with kept(problems):
            for number in range(me, len(reader.stored.boxes), call.team.size):
                reader.check(number)
    scratch = Scratch(pinned=not out.is_cpu)
    for round_ in plan.rounds:
        scratch.reset()
        piece, row = None, plan.piece(me, round_)
        if row is not None:
            box = plan.pieces[row]
            piece = scratch.take(box.shape, reader.stored.dtype)
            in_table = None if rows is None or reader.verify is False else int(rows[row])
            if (reader.verify and rows is not None) or len(wants.intersecting(box)):
                with kept(problems):
                    reader.fill(box, in_table, piece)
        deliver(call.team, plan, piece, out, round_, scratch)


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
    into: Any,
    strict: Any,
    convert: Any,
    window: Any,
    verify: Any,
    progress: Any,
) -> _Load:
    """Check the arguments of load() on this rank."""
    if name is not None and not isinstance(name, str):
        raise ArgumentError("HD419", f"name must be a string or None, got {name!r}")
    state: dict[str, Tensor] = {}
    if into is not None:
        if not isinstance(into, torch.nn.Module):
            raise ArgumentError("HD419", f"into is a {type(into).__name__}, expected a torch.nn.Module")
        if dim != 0 or any(x is not None for x in (counts, box, out, device)):
            raise ArgumentError("HD419", "into is given together with dim, counts, box, out or device")
        prefix = f"{name.strip('/')}/" if name else ""
        for key, x in into.state_dict(keep_vars=True).items():
            if isinstance(x, Tensor) and not key.endswith("_extra_state"):  # which only the module can load
                state[prefix + key] = x
        held = {id(x) for x in chain(into.parameters(), into.buffers())}  # now: state_dict() shards those of FSDP2
        if copies := [key for key, x in state.items() if id(x) not in held]:
            raise ArgumentError("HD419", f"into.state_dict(keep_vars=True) has copies, as of FSDP1: {listed(copies)}")
        if empty := [key for key, x in state.items() if x.is_meta]:
            raise ArgumentError("HD419", f"into is on the meta device, call its to_empty(device=...): {listed(empty)}")
    elif not strict or convert:
        raise ArgumentError("HD419", "strict=False or convert=True is given without into")
    if box is not None and (dim != 0 or counts is not None):
        raise ArgumentError("HD419", "box is given together with dim or counts, which it replaces")
    mine = None if box is None else Box(tuple(index(o) for o in box[0]), tuple(index(n) for n in box[1]))
    if out is not None:
        local.ready(out, "out")
    target = torch.device("cpu" if device is None else device)
    same = {
        "path": os.fsdecode(path), "name": name,
        "dim": {k: _dim(dim[k]) for k in sorted(dim)} if isinstance(dim, Mapping) else _dim(dim),
        "counts": counts if counts is None or isinstance(counts, str) else tuple(index(c) for c in counts),
        "window": window_bytes(window), "verify": verify, "box": "not given" if box is None else "given",
        "into": "not given" if into is None else "given", "strict": bool(strict), "convert": bool(convert),
    }  # fmt: skip
    return _Load(team, same, mine, out, target, progress, state)


def _dim(dim: Any) -> int | None:
    return None if dim is None else index(dim)


@contextmanager
def _opened(team: Team, verb: str, arguments: Mapping[str, Any]) -> Iterator[_Load]:
    """Agree on a load, and open the file on every rank. Collective.

    Args:
        arguments: this rank's, of load().

    Raises:
        RankError: on every rank: see load().
    """
    with agreed(team, verb, lambda: _check(team, **arguments), lambda call: call.same.items()) as call:
        path, name = str(call.same["path"]), call.same["name"]
        find = lambda: objects.run_on_root(team.comm, verb, lambda: describe(path).chosen(name))  # noqa: E731
        with open_files(find, lambda sees: objects.run_on_all(team.comm, verb, sees)) as call.files:
            if team.rank == 0 and (contents := call.files.contents).left_out:
                warnings.warn(coded("HD511", f"{path}: left out: {contents.others()}"), stacklevel=4)
            yield call


def _plan(call: _Load, verb: str) -> None:
    """Plan who reads what. Collective."""
    team, same, tensors, name = call.team, call.same, call.tensors, call.same["name"]
    whole = name is None
    if name is None:
        name = SINGLE if list(tensors) == [SINGLE] else ""
    same["name"] = call.files.contents.key(name)
    boxes = list[Box]()
    if (box := call.box) is not None:
        boxes = objects.run_on_all(team.comm, verb, lambda: _inside(tensors, box))
    try:
        nest(dict.fromkeys(tensors), same["name"])
        dim = same["dim"]
        whole = whole or not same["name"]  # else `dim` may also name what is not loaded
        if whole and isinstance(dim, dict) and (odd := sorted(dim.keys() - tensors.keys())):
            what = f"dim names {odd[0]!r}, which is not there; it has: {listed(tensors)}"
            raise refusal(ValueError, "HD408", what)
        call.wants = {key: _wants(stored, same, boxes, team.size) for key, stored in tensors.items()}
    except ValueError as error:
        objects.raise_problems(verb, dict.fromkeys(range(team.size), str(error)))
    nodes = len({team.settings.node_of[peer] for peer in team.peers})
    call.methods = {key: _method(tensors[key], wants, same["verify"], nodes) for key, wants in call.wants.items()}


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


def _method(stored: Stored, wants: BoxSequence, verify: bool | None, nodes: int) -> str:
    """Choose how a tensor is read: compressed data once per job, and on several nodes also tensors that each rank wants
    whole. The ranks of a node read the rest from the system's cache as fast as they could send it."""
    if isinstance(wants, Copies):
        once = nodes > 1 or (stored.raw is None and stored.parts is None)
        return ROUNDS if once and stored.nbytes() >= LEAST and len(wants) > 1 else ALONE
    return ALONE if stored.raw is None or _reads_alone(stored, wants, verify) else ROUNDS


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
    stored: Stored, wants: BoxSequence, window: int, verify: bool | None
) -> tuple[PiecePlan, Sequence[int] | Ints | None]:
    """Plan each rank's reads; and if the pieces of the file's table are read, the number of each."""
    size, itemsize = len(wants), stored.dtype.itemsize
    pieces, workers = stored.boxes, size
    largest = int(pieces.sizes.max()) * itemsize if len(pieces) else 0
    rows: Sequence[int] | Ints | None = range(len(pieces))
    if largest and 2 * largest <= window:
        workers = min(size, window // (2 * largest))
    else:
        pieces, rows = grid(stored.shape, piece_limit(window // (2 * size), itemsize)), None
    if isinstance(wants, Listed) and not (verify and rows is not None):
        chosen = pieces.intersecting(wants.cover)  # no rank may want some of the pieces within these
        if len(chosen) < len(pieces):
            pieces = Listed(pieces.offsets[chosen], pieces.shapes[chosen], pieces.shape)
            rows = None if rows is None else chosen
    return PiecePlan(pieces, block_bounds(len(pieces), size, workers), wants), rows


def _fill(call: _Load, problems: list[str]) -> IncompatibleKeys:
    """Read the tensors of the model; keep the errors of this rank. Collective.

    The ranks read a tensor apart if they hold no more of it than there is, in long runs of the file. The pieces of the
    others are one list, in the order of the files. Each rank reads a run of it, of as many bytes as the others, and
    sends the parts of a piece to the ranks that hold them. So each byte is read once, if the ranks hold all of it.
    """
    keys, memory, shared = _match(call)
    comm, window, verify = call.team.comm, call.same["window"], call.same["verify"]
    apart = [key for key in call.tensors if memory.get(key) and key not in shared]
    first = len(apart) * call.team.rank // call.team.size  # so that ranks begin with different files
    for key in apart[first:] + apart[:first]:
        reader = TensorReader(call.files, replace(call.tensors[key]), window, verify, call.progress)
        for box, x in memory[key]:
            with kept(problems):
                reader.read(box, x)
    if shared:
        held = {key: [(box, x.dtype) for box, x in memory.get(key, ())] for key in shared}
        everywhere = objects.all_gather_object(comm, held, VERB)
        boxes = {key: [(rank, *of) for rank, all_ in enumerate(everywhere) for of in all_[key]] for key in shared}
        tables = objects.run_on_root(comm, VERB, lambda: [call.tensors[key].with_table() for key in shared])
        readers = {of.name: TensorReader(call.files, of, window, verify, call.progress) for of in tables}
        _share(call, readers, boxes, memory, problems)
    return keys


def _match(call: _Load) -> tuple[IncompatibleKeys, _Memory, list[str]]:
    """Compare the file with the model of each rank. Collective.

    Returns:
        The names that differ; this rank's boxes; and the tensors that ranks must read together.

    Raises:
        RankError: on every rank, if they differ.
    """
    tensors, state, strict, convert = call.tensors, call.state, call.same["strict"], call.same["convert"]
    common = {key: x for key, x in state.items() if key in tensors}
    loaded = {id(x): key for key, x in common.items()}  # of tied tensors one is enough, and the last one is read
    missing = [key for key, x in state.items() if id(x) not in loaded]
    memory: _Memory = {key: [] for key in common}
    # Of each tensor: whether the model has it, the elements that this rank holds, and whether in many short runs.
    mine = np.zeros((len(tensors), 3), np.int64)

    def compare() -> tuple[list[str], list[str]]:
        from hpcdist.staging.dcp import memory_of  # imports torch's checkpoints

        wrong = []
        for key, x in common.items():
            (there, kind), (here, own) = ((tuple(of.shape), of.dtype) for of in (tensors[key], x))
            if there != here or not (convert or kind == own):
                wrong.append(f"{key} ({kind} of {there}, in the model {own} of {here})")
            torch.empty(1, dtype=kind, device="cpu").to(own)  # raises if torch cannot convert them
        memory.update({} if wrong else memory_of({key: common[key] for key in loaded.values()}, tensors))
        for i, key in enumerate(tensors):
            if key in memory:
                parts = Listed.of([box for box, _ in memory[key] if box.size()], tensors[key].shape)
                lengths, counts = parts.run_lengths()
                short = counts.sum() > 1 and lengths.min() * tensors[key].dtype.itemsize < LEAST
                mine[i] = True, parts.sizes.sum(), short
        return missing if strict else [], wrong

    found = objects.run_on_all(call.team.comm, VERB, compare)
    of_all = np.empty_like(mine)
    call.team.comm.Allreduce(mine, of_all)
    unexpected = [key for key, (have, *_) in zip(tensors, of_all, strict=True) if not have]
    problems = {}
    for rank, (gone, wrong) in enumerate(found):
        lists = {"missing": gone, "unexpected": unexpected if strict else [], "of another shape or dtype": wrong}
        text = "; ".join(f"{len(names)} {what}: {listed(names)}" for what, names in lists.items() if names)
        if text and (rank == 0 or (gone, wrong) != found[0]):
            problems[rank] = coded("HD408", f"{call.same['path']}: {text}")
    objects.raise_problems(VERB, problems)
    shared = [
        key
        for (key, stored), (_, held, short) in zip(tensors.items(), of_all, strict=True)
        if held and (held > prod(stored.shape) or short or stored.raw is None)
    ]
    return IncompatibleKeys(missing, unexpected), memory, shared


def _share(
    call: _Load, readers: Mapping[str, TensorReader], boxes: _Boxes, memory: _Memory, problems: list[str]
) -> None:
    """Read each piece of some tensors on one rank, and send its parts to those that hold them. Collective."""
    me, pinned = call.team.rank, any(not x.is_cpu for _, x in chain(*memory.values()))
    rounds = _rounds(readers, call.team.size, call.same["window"])
    for i, pieces in enumerate(rounds):
        for owner, key, box in chain(*rounds[i + 1 : i + 2]):
            if owner == me:
                with kept(problems):
                    readers[key].ahead(box)
        scratch = Scratch(pinned=pinned)
        sends, recvs = [], []
        for owner, key, box in pieces:
            if owner == me:
                piece = scratch.take(box.shape, readers[key].stored.dtype)
                with kept(problems):
                    readers[key].read(box, piece)
                pieces_of = {dtype: piece.to(dtype) for dtype in {dtype for *_, dtype in boxes[key]}}
                for rank, of, dtype in boxes[key]:
                    if (part := box.intersect(of)).size():
                        sends.append((rank, pieces_of[dtype][part.slices(box.offset)]))
            for of, x in memory.get(key, ()):
                if (part := box.intersect(of)).size():
                    recvs.append((owner, x[part.slices(of.offset)]))
        exchange(call.team, VERB, sends, recvs, scratch)


def _rounds(readers: Mapping[str, TensorReader], size: int, window: int) -> list[list[tuple[int, str, Box]]]:
    """Plan the reading: for each round the pieces, of some MiB on each rank, with the rank that reads each."""
    starts, total, room = list[tuple[int, str, Box]](), 0, max(1, min(ROUND, window // size))
    for key, reader in readers.items():
        itemsize = reader.stored.dtype.itemsize
        boxes = reader.stored.boxes
        if not len(boxes) or int(boxes.sizes.max()) * itemsize > window // size:
            boxes = grid(reader.stored.shape, max(1, room // itemsize))
        for box in boxes:
            starts.append((total, key, box))
            total += box.size() * itemsize
    rounds = defaultdict(list)
    for start, key, box in starts:
        rank, at = divmod(start * size, total)
        rounds[at // (size * room)].append((rank, key, box))
    return [rounds[number] for number in sorted(rounds)]


def _planned_load(*, group: Any, **arguments: Any) -> Plan:
    """Plan a call of load(). Collective: see :func:`hpcdist.plan`."""
    team = world.team_of(group)
    with _opened(team, _PLAN, arguments) as call:
        if arguments["into"] is not None:
            objects.raise_problems(_PLAN, {0: coded("HD419", "into is given, for which nothing is planned")})
        _plan(call, _PLAN)
        traffic = [_traffic(call, key) for key in call.tensors]
        nbytes = call.files.contents.nbytes()
    result = "pool" if pool.holds(nbytes, call.device) else "new"
    if call.out is not None:
        result = "out"
    elif len(call.wants) > 1:
        result = "structure"
    file_bytes, sent, received = (sum(of) for of in zip((0, 0, 0), *traffic, strict=True))
    everywhere = objects.all_gather_object(team.comm, (file_bytes, sent), _PLAN)
    of_all, by_all = (sum(of) for of in zip(*everywhere, strict=True))
    return Plan(
        VERB, "mpi" if by_all else "none", tuple(sorted(set(call.methods.values()), reverse=True)), sent, received,
        result, (), file_bytes=file_bytes, file_bytes_of_all=of_all, sent_by_all=by_all,
        _call=partial(load, **arguments, group=group),
    )  # fmt: skip


def _traffic(call: _Load, key: str) -> tuple[int, int, int]:
    """The bytes of a tensor that this rank reads, sends and receives."""
    stored, wants, me = call.stored(key), call.wants[key], call.team.rank
    if call.methods[key] == ALONE:
        return wants[me].size() * stored.dtype.itemsize, 0, 0
    plan, _ = plan_load(stored, wants, call.same["window"], call.same["verify"])
    return plan.traffic(me, stored.dtype.itemsize)


planners[load] = _planned_load
