"""save(): every rank's shards become the tensors of one file, HDF5 or safetensors; now, or in the background."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.files.h5 import Dataset
from hpcdist.files.safetensors import SUFFIX
from hpcdist.runtime import world
from hpcdist.runtime.background import Handle, background
from hpcdist.staging import drivers
from hpcdist.staging.arguments import agreed
from hpcdist.staging.exchange import collect
from hpcdist.staging.host import outgoing
from hpcdist.staging.in_flight import Flight, buffer_of, wait_for
from hpcdist.staging.pieces import PiecePlan
from hpcdist.staging.replaced import remove_old_form, withdraw_index
from hpcdist.staging.save_plan import VERB, SaveCall, check, plan
from hpcdist.staging.saving import Saving
from hpcdist.staging.sharded_files import divide, write_index
from hpcdist.staging.target import WINDOW, SaveOptions
from hpcdist.tensors.pinned import Scratch
from hpcdist.validation import local

if TYPE_CHECKING:
    from hpcdist.comm.signatures import GroupLike

__all__ = ["save"]

# Seconds in which the call returns: Python gives a thread that plans a file 5 ms (sys.getswitchinterval) before the
# caller's may go on.
_HEAD_START = 1e-3


@overload
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
    buffer: int | None = None,
    async_op: Literal[False] = False,
    group: GroupLike | None = None,
) -> None: ...
@overload
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
    buffer: int | None = None,
    async_op: Literal[True],
    group: GroupLike | None = None,
) -> Handle[None]: ...
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
    buffer: int | None = None,
    async_op: bool = False,
    group: GroupLike | None = None,
) -> Handle[None] | None:
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
            load by their index. They get their names when all are complete, one after the other, the index last; an
            old index is removed before files that it names are replaced. Of a file `path` and an index, the older one
            is removed after a save, since readers would differ in which they take. Must agree.
        progress: called on each rank, from time to time, with the number of bytes just done; with `async_op`, in
            another thread.
        buffer: bytes of host memory that this rank may use for the copies of `async_op`, those of earlier saves that
            are still in flight included; by default half of the free memory, divided among the ranks of the node. For
            what does not fit, the call waits: for earlier saves, and then until the rest has been written.
        async_op: whether to return a Handle at once, when the values may be changed: copied to memory from the pool,
            pinned memory for GPU tensors. The file is written by a thread, and gets its name when all ranks have
            written; `writer` "auto" is "posix" then. Saves of a group run in the order of the calls. Another save, or a
            load, of the same name waits for those in flight; so do finalize() and the end of the program, and none of
            them raises their errors, which wait() does, on every rank; if nobody waits, they are printed at the end.
            Must agree.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None for all ranks.

    Returns:
        None; with `async_op`, a Handle whose wait() returns None once the file has its name.

    Raises:
        RankError: on every rank, with `async_op` from wait(), if an argument is wrong on one or they do not agree, if
            the folder is missing, not writable, full or not shared, if `path` is not a regular file, or read-only, or a
            write fails. The old file is as it was, and the job can go on.
        HpcdistError: on this rank, with `async_op`, if MPI does not support threads.

    Example, on 3 ranks::

        >>> hd.staging.save("x.h5", torch.full((rank, 2), rank))
        >>> h5py.File("x.h5")["data"][:, 0]
        array([1, 2, 2])
    """
    team = world.current().context.team_of(group)
    given: dict[str, Any] = {
        "path": path, "tensors": tensors, "dim": dim, "attrs": attrs, "compression": compression, "chunks": chunks,
        "window": window, "writer": writer, "writers": writers, "align": align, "hints": hints, "resume": resume,
        "max_shard_size": max_shard_size, "progress": progress,
    }  # fmt: skip
    if async_op:
        return _save_later(team, given, buffer)
    wait_for(path, _by_mpio(writer))
    _save(team, lambda: check(team, **given))
    return None


def _save_later(team: Team, given: dict[str, Any], buffer: Any) -> Handle[None]:
    """Copy what is to be saved, and save it in the background of the team."""
    behind = background(team)
    if given["writer"] == "auto" and not given["hints"]:
        given["writer"] = "posix"  # see wait_for(): the program may open files with h5py
    mpio = _by_mpio(given["writer"])
    flight = Flight(team, given["path"], mpio)
    wait_for(given["path"], mpio, after=team)
    call, problem = None, None
    try:
        local.runs()
        call = check(team, **given | {"attrs": deepcopy(given["attrs"])})
        flight.copy(call.tensors, buffer_of(team, buffer))
        call = replace(call, tensors=flight.tensors)
    except Exception as error:  # raised by wait() on every rank
        problem = error

    def checked() -> SaveCall:
        if problem is not None:
            raise problem
        assert call is not None
        return call

    def step(team: Team) -> None:
        try:
            time.sleep(_HEAD_START)
            _save(team, checked, flight.written)
        finally:
            flight.end()

    def submit() -> Handle[None]:
        team.calls[True] += 1
        return behind.submit(VERB, step)

    return flight.start(submit)


def _by_mpio(writer: Any) -> bool:
    return writer in drivers.NAMES and drivers.active(writer)[0] == "mpio"


def _save(team: Team, check: Callable[[], SaveCall], written: Callable[[str], None] | None = None) -> None:
    """Save. Collective.

    Args:
        check: returns this rank's call, or raises what is wrong with it.
        written: called with the name of each tensor when this rank's memory of it is not needed any more.
    """
    with agreed(team, VERB, check) as call:
        path, limit = call.arguments.same["path"], call.arguments.same["max_shard_size"]
        datasets, plans = plan(team, call.arguments, call.attrs)
        files = divide(path, datasets, limit)
        with ExitStack() as stack:
            savings = []
            for name, rows in files:
                held, planned = [datasets[i] for i in rows], [plans[i] for i in rows]
                savings.append(stack.enter_context(_saving(team, name, held, planned, call.options)))
                savings[-1].prove([of.rows(team.rank) for of in planned])
                for i, of in enumerate(planned):
                    _write(savings[-1], i, of, call.tensors[held[i].name])
                    if written is not None:
                        written(held[i].name)
            if len(savings) > 1:
                _settle(team, savings)
                objects.broadcast(team.comm, VERB, lambda: withdraw_index(path, [name for name, _ in files]))
        if len(files) > 1:
            objects.broadcast(team.comm, VERB, lambda: write_index(path, datasets, files))
        if path.endswith(SUFFIX):
            objects.broadcast(team.comm, VERB, lambda: remove_old_form(path, [name for name, _ in files]))


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
