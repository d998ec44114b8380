"""save(): every rank's shards become the tensors of one file, HDF5 or safetensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.team import Team
from hpcdist.control import digests, objects
from hpcdist.files import safetensors
from hpcdist.files.commit import check_target
from hpcdist.files.h5 import Dataset
from hpcdist.files.raw import Ints
from hpcdist.runtime import world
from hpcdist.staging import drivers
from hpcdist.staging.arguments import agreed, count, positive
from hpcdist.staging.exchange import collect
from hpcdist.staging.host import outgoing
from hpcdist.staging.names import check_attrs, check_safetensors, flatten
from hpcdist.staging.pieces import PiecePlan, Sharded, check_shape, plan_save
from hpcdist.staging.saving import Saving
from hpcdist.staging.sharded_files import divide, shard_size, write_index
from hpcdist.staging.target import WINDOW, SaveOptions
from hpcdist.tensors.pinned import Scratch
from hpcdist.validation import local

if TYPE_CHECKING:
    from hpcdist.comm.signatures import GroupLike

__all__ = ["save"]

VERB = "staging.save"
_CHUNK = 2**20  # bytes of a chunk, where the caller does not give its shape


@dataclass(frozen=True)
class _Arguments:
    """What one rank wants to save.

    Attributes:
        shards: by name: dtype, dim, and the shape.
        same: options that must be the same on all ranks, by name.
    """

    shards: dict[str, tuple[torch.dtype, int | None, tuple[int, ...]]]
    same: dict[str, Any]


def save(
    path: str | os.PathLike[str],
    tensors: Tensor | Mapping[str, Any],
    dim: int | Mapping[str, int | None] | None = 0,
    *,
    attrs: Mapping[str, Mapping[str, Any]] | None = None,
    compression: str | int | Mapping[str, Any] | None = None,
    chunks: tuple[int, ...] | None = None,
    window: int = WINDOW,
    writer: str = "auto",
    writers: int | None = None,
    align: int | None = None,
    hints: Mapping[str, str] | None = None,
    resume: bool = False,
    max_shard_size: int | str | None = None,
    progress: Callable[[int], None] | None = None,
    group: GroupLike | None = None,
) -> None:
    """Write the shards of all ranks to one HDF5 file, each tensor whole, as one ordinary dataset.

    To a file of the safetensors library, if its name ends with .safetensors: without checksums, otherwise as said here.

    Collective over `group`. The file appears under its name when it is complete and on the disk: until then, even if
    the job dies, the name keeps the old file. The new file gets the mode, owner, group, ACL and user attributes of the
    one that it replaces, as far as the system permits. Along dim 0 every rank writes its shard straight from its
    memory; along other dims the ranks first bring the pieces of the file together, a window at a time.

    Args:
        path: of the file, in a folder that all ranks see.
        tensors: this rank's shard, which gets the name "data", or a dict of shards by name; dicts may be nested, and
            names may contain slashes: ``{"model": {"w": x}}`` and ``{"model/w": x}`` are the same. Any shape, dtype
            and strides, on the CPU or a GPU. Names, dtypes and the extents besides `dim` must agree on all ranks.
        dim: the dimension along which the shards are joined, in rank order, extents of zero included; None if every
            rank holds the whole tensor; or a dict of these by name. Must agree. 0-d shards are stacked.
        attrs: HDF5 attributes by name of the tensor, and of the file for the name "". Rank 0's are written. A
            .safetensors file has text by name for "" alone, by default ``{"format": "pt"}``.
        compression: "gzip", a gzip level, or h5py's arguments for another filter, such as ``hdf5plugin.Zstd()``. The
            file is then chunked, and a save that died starts anew. Must agree.
        chunks: shape of a chunk, for compressed tensors; by default, rows of about 1 MiB. Must agree.
        window: bytes of host memory that a rank may use for data in transit. Must agree.
        writer: "mpio" (HDF5 through MPI-IO, needs an h5py built with it), "posix" (any h5py), or "auto": see
            :func:`hpcdist.staging.writer`. The file is the same. Must agree. A .safetensors file has no compression,
            chunks, alignment and hints, and is written by "posix".
        writers: how many ranks write; all by default. Must agree.
        align: alignment of the tensors in the file, in bytes; by default the file system's stripe, or 1 MiB.
        hints: for MPI-IO, such as ``{"striping_factor": "8"}``; only with "mpio".
        resume: continue what a job that died in the same save, with `resume`, has left: pieces whose checksums prove
            that they are complete, and hold the same data, are not written again. If this call fails, what it has
            written is kept for another try. With other shards than before (along dim 0: on another number of ranks) it
            begins anew.
        max_shard_size: of a .safetensors file: bytes, or text such as "5GB". What has more data becomes several files,
            ``NAME-00001-of-00002.safetensors``, and ``NAME.safetensors.index.json``, which Hugging Face's libraries
            load by their index. They get their names when all are complete, one after the other, the index last.
            Must agree.
        progress: called on each rank, from time to time, with the number of bytes just done.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None for all ranks.

    Raises:
        RankError: on every rank, if an argument is wrong on one or they do not agree, if the folder is missing, not
            writable, full or not shared, if `path` is not a regular file, or read-only, or a write fails. The old file
            is as it was, and the job can go on.

    Example, on 3 ranks::

        >>> hd.staging.save("x.h5", torch.full((rank, 2), rank))
        >>> h5py.File("x.h5")["data"][:, 0]
        array([1, 2, 2])
    """
    team = world.current().context.team_of(group)
    flat: dict[str, Tensor] = {}

    def check() -> tuple[_Arguments, SaveOptions]:
        shards = {}
        given = flatten(tensors)
        for name, along in _dims(dim, given).items():
            shard, at = local.tensor(given[name], along or 0, name)
            flat[name] = shard.view(given[name].shape) if along is None else shard
            shards[name] = (shard.dtype, None if along is None else at, tuple(flat[name].shape))
        filters, chunk = _filters(compression, chunks)
        check_attrs(attrs, given)
        same: dict[str, Any] = {
            "path": os.fsdecode(path), "compression": filters, "chunks": chunk,
            "writers": count("writers", writers, team.size) or team.size, "writer": _driver_of(writer, filters, hints),
            "window": positive("window", window), "align": None if align is None else positive("align", align),
            "resume": bool(resume), "max_shard_size": shard_size(max_shard_size, os.fsdecode(path)),
            "hints": {str(k): str(v) for k, v in (hints or {}).items()},
        }  # fmt: skip
        taken = {key: same[key] for key in ("writer", "window", "align", "hints", "resume")}
        options = SaveOptions(**taken, attrs=dict((attrs or {}).get("", {})), progress=progress)
        if same["path"].endswith(safetensors.SUFFIX):
            check_safetensors(given, attrs or {}, same)
            metadata = {"format": "pt", **options.attrs}
            options = replace(options, writer="posix", lay_out=partial(safetensors.lay_out, metadata=metadata))
        return _Arguments(shards, same), options

    with agreed(team, VERB, check) as (arguments, options):
        datasets, plans = _plan(team, arguments, attrs or {})
        files = divide(arguments.same["path"], datasets, arguments.same["max_shard_size"])
        with ExitStack() as stack:
            savings = []
            for name, rows in files:
                held, planned = [datasets[i] for i in rows], [plans[i] for i in rows]
                savings.append(stack.enter_context(_saving(team, name, held, planned, options)))
                savings[-1].prove([plan.rows(team.rank) for plan in planned])
                for i, plan in enumerate(planned):
                    _write(savings[-1], i, plan, flat[held[i].name])
            if len(savings) > 1:
                _settle(team, savings)
        if len(files) > 1:
            objects.broadcast(team.comm, VERB, lambda: write_index(arguments.same["path"], datasets, files))


def _saving(team: Team, path: str, datasets: list[Dataset], plans: list[PiecePlan], options: SaveOptions) -> Saving:
    owner = lambda i, elements: plans[i].owners_at(datasets[i].shape, elements)  # noqa: E731
    return Saving(team, VERB, path, datasets, owner, options)


def _settle(team: Team, savings: list[Saving]) -> None:
    """Bring all files to the disk before one of them gets its name; a RankError if that failed. Collective."""
    for saving in savings:
        saving.sync()
    problem = next((saving.problem for saving in savings if saving.problem is not None), None)
    found = enumerate(objects.all_gather_object(team.comm, problem))
    objects.raise_problems(VERB, {rank: text for rank, text in found if text is not None})


def _write(saving: Saving, i: int, plan: PiecePlan, x: Tensor) -> None:
    """Write one tensor of a file, of which `x` is this rank's box. Collective."""
    team = saving.team
    if plan.straight:
        rows = plan.rows(team.rank)
        origin = plan.held[team.rank].offset
        parts = [plan.pieces[row].relative_to(origin) for row in rows]
        for row, piece in zip(rows, outgoing(x, parts), strict=True):
            saving.put(i, row, piece)
        return
    scratch = Scratch(pinned=x.is_cuda)
    for round_ in plan.rounds:
        collected = collect(team, plan, x, round_, scratch)
        mine = plan.piece(team.rank, round_)
        if saving.datasets[i].chunks is not None:
            saving.put_filtered(i, mine, collected)
        elif collected is not None and mine is not None:
            saving.put(i, mine, collected)


def _dims(dim: Any, given: Mapping[str, Any]) -> dict[str, int | None]:
    """The dim of each tensor, in their order; None where every rank holds the whole."""
    if not isinstance(dim, Mapping):
        return dict.fromkeys(given, dim)
    dims = flatten(dim)
    odd = sorted(set(dims) ^ set(given))
    if odd:
        raise local.WrongError(f"dim and tensors have different names: {odd[0]!r} is in one of them only")
    return {name: dims[name] for name in given}


def _driver_of(writer: Any, filters: Mapping[str, Any], hints: Any) -> str:
    if writer not in drivers.NAMES:
        raise local.WrongError(f"writer is {writer!r}, expected one of {', '.join(drivers.NAMES)}")
    reason = drivers.missing(writer)
    if reason is not None:
        raise local.WrongError(f"writer {writer} cannot be used: {reason}")
    if hints and drivers.active(writer)[0] != "mpio":
        raise local.WrongError(f"hints are for MPI-IO, and the writer is posix ({drivers.active(writer)[1]})")
    return drivers.for_filters(writer, filters)


def _filters(compression: Any, chunks: Any) -> tuple[dict[str, Any], tuple[int, ...] | None]:
    """h5py's arguments for the filters of chunks, which are empty without compression."""
    if compression is None:
        if chunks is not None:
            raise local.WrongError("chunks is given without compression: tensors are contiguous then")
        return {}, None
    if isinstance(compression, Mapping):
        filters = dict(compression)
    elif compression == "gzip" or (isinstance(compression, int) and 0 <= compression <= 9):
        filters = {"compression": "gzip", "compression_opts": 4 if compression == "gzip" else compression}
    else:
        raise local.WrongError(f"compression is {compression!r}, expected 'gzip', 0 to 9, or h5py's arguments")
    if "scaleoffset" in filters:
        raise local.WrongError("compression with scaleoffset is lossy: what is loaded would not be what was saved")
    if chunks is not None and (not chunks or min(index(c) for c in chunks) < 1):
        raise local.WrongError(f"chunks is {chunks}, expected an extent >= 1 for each dim")
    return filters, None if chunks is None else tuple(index(c) for c in chunks)


def _plan(
    team: Team, arguments: _Arguments, attrs: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Dataset], list[PiecePlan]]:
    """The tensors of the file and how each is written. Collective; the same on all ranks but for the attributes."""
    shards = [(name, dtype, dim, _others(shape, dim)) for name, (dtype, dim, shape) in arguments.shards.items()]
    first = digests.same(team.comm, VERB, (arguments.same, shards), arguments, _difference)
    same = first.same
    wholes: dict[str, Sharded] = {}
    extents = _extents(team, first, arguments)
    for (name, (dtype, dim, shape)), along in zip(first.shards.items(), extents, strict=True):
        if dim is not None:
            shape = (*shape[:dim], _sum(along), *shape[dim + 1 :])
        try:
            check_shape(shape, dtype.itemsize)
        except local.WrongError as error:
            objects.raise_problems(VERB, {0: f"{name!r} {error}"})
        chunks = None
        if same["compression"] and shape and 0 not in shape:
            chunks = same["chunks"] or _chunk_shape(shape, dtype.itemsize)
            if len(chunks) != len(shape):
                objects.raise_problems(VERB, {0: f"chunks is {chunks}, but {name!r} has {len(shape)} dims"})
            chunks = tuple(map(min, chunks, shape))
        wholes[name] = Sharded(shape, dtype, dim, along, chunks)
    contiguous = [x for x in wholes.values() if x.chunks is None and not same["resume"]]
    nbytes = sum(prod(x.shape) * x.dtype.itemsize for x in contiguous)
    objects.broadcast(team.comm, VERB, lambda: check_target(Path(same["path"]), nbytes))  # before pieces are counted
    datasets: list[Dataset] = []
    plans: list[PiecePlan] = []
    for name, x in wholes.items():
        try:
            plan = plan_save(x, same["window"], same["writers"])
        except local.WrongError as error:
            objects.raise_problems(VERB, {0: f"{name!r} {error}"})
            raise
        filters = same["compression"] if x.chunks else {}
        datasets.append(Dataset(name, x.shape, x.dtype, plan.pieces, x.chunks, filters, attrs.get(name, {})))
        plans.append(plan)
    return datasets, plans


def _extents(team: Team, first: _Arguments, arguments: _Arguments) -> Ints:
    """For each tensor, in rank 0's order, the extents along its dim on all ranks; zeros without one. Collective."""
    from mpi4py import MPI

    shapes = [(arguments.shards[name][2], dim) for name, (_, dim, _) in first.shards.items()]
    mine = np.array([0 if dim is None else shape[dim] for shape, dim in shapes], np.int64)
    every = np.empty((team.size, len(mine)), np.int64)
    team.comm.Allgather([mine, MPI.INT64_T], [every, MPI.INT64_T])
    return np.ascontiguousarray(every.T)


def _sum(extents: Ints) -> int:
    """The sum, also where it does not fit into an int64."""
    total = int(extents.sum())
    return total if extents.sum(dtype=float) < 2**62 else sum(extents.tolist())


def _difference(first: _Arguments, other: _Arguments) -> str | None:
    """How a rank's arguments differ from those of rank 0."""
    option = objects.first_difference(first.same, other.same)
    if option is not None:
        return option
    for name in (*first.shards, *other.shards):
        if name not in other.shards:
            return f"has no tensor {name!r}, which rank 0 has"
        if name not in first.shards:
            return f"has a tensor {name!r}, which rank 0 does not have"
    for name, (dtype, dim, shape) in first.shards.items():
        dtype_here, dim_here, shape_here = other.shards[name]
        if dtype_here != dtype:
            return f"{name!r}: dtype is {dtype_here}, where rank 0 has {dtype}"
        if len(shape_here) != len(shape) or _others(shape_here, dim) != _others(shape, dim):
            return f"{name!r}: shape is {shape_here}, which does not fit {shape} of rank 0 along dim {dim}"
        if dim_here != dim:
            return f"{name!r}: dim is {dim_here}, where rank 0 has {dim}"
    return None


def _others(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    return shape if dim is None else (*shape[:dim], *shape[dim + 1 :])


def _chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The shape of a chunk of rows of about a MiB."""
    return next(layout.boxes(layout.whole(shape), max(1, _CHUNK // itemsize))).shape
