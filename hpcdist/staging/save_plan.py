"""What a save writes: the options of all ranks, agreed on, and the pieces of each tensor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.comm.team import Team
from hpcdist.control import digests, objects
from hpcdist.errors import coded
from hpcdist.files import safetensors
from hpcdist.files.commit import check_target
from hpcdist.files.h5 import Dataset
from hpcdist.files.raw import Ints
from hpcdist.staging import drivers
from hpcdist.staging.arguments import count, hdf5_path, positive
from hpcdist.staging.names import check_attrs, check_safetensors, flatten
from hpcdist.staging.pieces import PiecePlan, Sharded, check_shape, plan_save
from hpcdist.staging.sharded_files import shard_size
from hpcdist.staging.target import SaveOptions
from hpcdist.validation import local

__all__ = ["VERB", "SaveArguments", "SaveCall", "check", "plan"]

VERB = "staging.save"
_CHUNK = 2**20  # bytes of a chunk, where the caller does not give its shape


@dataclass(frozen=True)
class SaveArguments:
    """What one rank wants to save.

    Attributes:
        shards: by name: dtype, dim, and the shape.
        same: options that must be the same on all ranks, by name.
    """

    shards: dict[str, tuple[torch.dtype, int | None, tuple[int, ...]]]
    same: dict[str, Any]


@dataclass(frozen=True)
class SaveCall:
    """A call of save(), checked on this rank.

    Attributes:
        tensors: by name, this rank's shards.
        attrs: HDF5 attributes, by name of the tensor.
    """

    arguments: SaveArguments
    options: SaveOptions
    tensors: Mapping[str, Tensor]
    attrs: Mapping[str, Mapping[str, Any]]


def check(
    team: Team,
    *,
    path: Any,
    tensors: Any,
    dim: Any,
    attrs: Any,
    compression: Any,
    chunks: Any,
    window: Any,
    writer: Any,
    writers: Any,
    align: Any,
    hints: Any,
    resume: Any,
    max_shard_size: Any,
    progress: Any,
) -> SaveCall:
    """Check the arguments of save() on this rank."""
    shards, flat, given = {}, {}, flatten(tensors)
    for name, along in _dims(dim, given).items():
        shard, at = local.tensor(given[name], along or 0, name)
        flat[name] = shard.view(given[name].shape) if along is None else shard
        shards[name] = (shard.dtype, None if along is None else at, tuple(flat[name].shape))
    filters, chunk = _filters(compression, chunks)
    check_attrs(attrs, given)
    same: dict[str, Any] = {
        "path": hdf5_path(path), "compression": filters, "chunks": chunk,
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
    return SaveCall(SaveArguments(shards, same), options, flat, attrs or {})


def _dims(dim: Any, given: Mapping[str, Any]) -> dict[str, int | None]:
    """The dim of each tensor, in their order; None where every rank holds the whole."""
    if not isinstance(dim, Mapping):
        return dict.fromkeys(given, dim)
    dims = flatten(dim)
    odd = sorted(set(dims) ^ set(given))
    if odd:
        raise local.WrongError("HD419", f"dim and tensors have different names: {odd[0]!r} is in one of them only")
    return {name: dims[name] for name in given}


def _driver_of(writer: Any, filters: Mapping[str, Any], hints: Any) -> str:
    if writer not in drivers.NAMES:
        raise local.WrongError("HD421", f"writer is {writer!r}, expected one of {', '.join(drivers.NAMES)}")
    reason = drivers.missing(writer)
    if reason is not None:
        raise local.WrongError("HD421", f"writer {writer} cannot be used: {reason}")
    if hints and drivers.active(writer)[0] != "mpio":
        raise local.WrongError("HD421", f"hints are for MPI-IO, and the writer is posix ({drivers.active(writer)[1]})")
    return drivers.for_filters(writer, filters)


def _filters(compression: Any, chunks: Any) -> tuple[dict[str, Any], tuple[int, ...] | None]:
    """h5py's arguments for the filters of chunks, which are empty without compression."""
    if compression is None:
        if chunks is not None:
            raise local.WrongError("HD419", "chunks is given without compression: tensors are contiguous then")
        return {}, None
    if isinstance(compression, Mapping):
        filters = dict(compression)
    elif compression == "gzip" or (isinstance(compression, int) and 0 <= compression <= 9):
        filters = {"compression": "gzip", "compression_opts": 4 if compression == "gzip" else compression}
    else:
        raise local.WrongError("HD419", f"compression is {compression!r}, expected 'gzip', 0 to 9, or h5py's arguments")
    if "scaleoffset" in filters:
        raise local.WrongError(
            "HD419", "compression with scaleoffset is lossy: what is loaded would not be what was saved"
        )
    if chunks is not None and (not chunks or min(index(c) for c in chunks) < 1):
        raise local.WrongError("HD419", f"chunks is {chunks}, expected an extent >= 1 for each dim")
    return filters, None if chunks is None else tuple(index(c) for c in chunks)


def plan(
    team: Team, arguments: SaveArguments, attrs: Mapping[str, Mapping[str, Any]]
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
            objects.raise_problems(VERB, {0: coded("HD418", f"{name!r} {error}")})
        chunks = None
        if same["compression"] and shape and 0 not in shape:
            chunks = same["chunks"] or _chunk_shape(shape, dtype.itemsize)
            if len(chunks) != len(shape):
                objects.raise_problems(
                    VERB, {0: coded("HD419", f"chunks is {chunks}, but {name!r} has {len(shape)} dims")}
                )
            chunks = tuple(map(min, chunks, shape))
        wholes[name] = Sharded(shape, dtype, dim, along, chunks)
    contiguous = [x for x in wholes.values() if x.chunks is None and not same["resume"]]
    nbytes = sum(prod(x.shape) * x.dtype.itemsize for x in contiguous)
    objects.broadcast(team.comm, VERB, lambda: check_target(same["path"], nbytes))  # before pieces are counted
    datasets: list[Dataset] = []
    plans: list[PiecePlan] = []
    for name, x in wholes.items():
        try:
            plan = plan_save(x, same["window"], same["writers"])
        except local.WrongError as error:
            objects.raise_problems(VERB, {0: coded("HD418", f"{name!r} {error}")})
            raise
        filters = same["compression"] if x.chunks else {}
        datasets.append(Dataset(name, x.shape, x.dtype, plan.pieces, x.chunks, filters, attrs.get(name, {})))
        plans.append(plan)
    return datasets, plans


def _extents(team: Team, first: SaveArguments, arguments: SaveArguments) -> Ints:
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


def _difference(first: SaveArguments, other: SaveArguments) -> str | None:
    """How a rank's arguments differ from those of rank 0."""
    option = objects.first_difference(first.same, other.same)
    if option is not None:
        return option
    for name in (*first.shards, *other.shards):
        if name not in other.shards:
            return coded("HD308", f"has no tensor {name!r}, which rank 0 has")
        if name not in first.shards:
            return coded("HD308", f"has a tensor {name!r}, which rank 0 does not have")
    for name, (dtype, dim, shape) in first.shards.items():
        dtype_here, dim_here, shape_here = other.shards[name]
        if dtype_here != dtype:
            return coded("HD303", f"{name!r}: dtype is {dtype_here}, where rank 0 has {dtype}")
        if len(shape_here) != len(shape) or _others(shape_here, dim) != _others(shape, dim):
            return coded(
                "HD303", f"{name!r}: shape is {shape_here}, which does not fit {shape} of rank 0 along dim {dim}"
            )
        if dim_here != dim:
            return coded("HD304", f"{name!r}: dim is {dim_here}, where rank 0 has {dim}")
    return None


def _others(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    return shape if dim is None else (*shape[:dim], *shape[dim + 1 :])


def _chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The shape of a chunk of rows of about a MiB."""
    return next(layout.boxes(layout.whole(shape), max(1, _CHUNK // itemsize))).shape
