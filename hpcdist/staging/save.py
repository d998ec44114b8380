"""save(): every rank's shards become the tensors of one file, HDF5 or safetensors; now, or in the background."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent import futures
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import import_module
from operator import index
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from hpcdist import activity
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import coded
from hpcdist.formats import safetensors
from hpcdist.formats.contents import Dataset
from hpcdist.process import machine
from hpcdist.runtime import world
from hpcdist.runtime.background import Handle, check_threads, join_uploads, submit
from hpcdist.staging import drivers
from hpcdist.staging.arguments import (
    agreed,
    check_attrs,
    check_safetensors,
    flatten,
    shard_size,
    target_path,
    window_bytes,
)
from hpcdist.staging.pieces import OwnPieces, PiecePlan, collect, outgoing, plan_save
from hpcdist.staging.writer import WINDOW, FileWriter, SaveOptions
from hpcdist.tensors import accelerator
from hpcdist.tensors.storage import Scratch, copyable
from hpcdist.validation import local
from hpcdist.validation.collective import Call
from hpcdist.validation.local import ArgumentError

if TYPE_CHECKING:
    from hpcdist.comm.team import GroupLike

    class _Options(TypedDict, total=False):
        attrs: Mapping[str, Mapping[str, Any]] | None
        window: int
        writer: str
        resume: bool
        max_shard_size: int | str | None
        progress: Callable[[int], None] | None
        buffer: int | None
        group: GroupLike | None


VERB = "staging.save"

flights: dict[futures.Future[None], _Flight] = {}  # saves in the background, of this process, in order of the calls


@overload
def save(
    path: str | os.PathLike[str],
    tensors: Tensor | Mapping[str, Any],
    dim: int | Mapping[str, int | None] | None = 0,
    *,
    async_op: Literal[False] = False,
    **options: Unpack[_Options],
) -> None: ...
@overload
def save(
    path: str | os.PathLike[str],
    tensors: Tensor | Mapping[str, Any],
    dim: int | Mapping[str, int | None] | None = 0,
    *,
    async_op: Literal[True],
    **options: Unpack[_Options],
) -> Handle[None]: ...
def save(
    path: str | os.PathLike[str],
    tensors: Tensor | Mapping[str, Any],
    dim: int | Mapping[str, int | None] | None = 0,
    *,
    attrs: Mapping[str, Mapping[str, Any]] | None = None,
    window: int = WINDOW,
    writer: str = "auto",
    resume: bool = False,
    max_shard_size: int | str | None = None,
    progress: Callable[[int], None] | None = None,
    buffer: int | None = None,
    async_op: bool = False,
    group: GroupLike | None = None,
) -> Handle[None] | None:
    """Write the shards of all ranks to one HDF5 file, each tensor whole, as one ordinary dataset.

    If the name ends with .safetensors, the file is a safetensors file, which has no checksums.

    Collective over `group`. The file appears under its name when it is complete and on the disk. Until then, even if
    the job dies, the name keeps the old file. The new file gets the mode, owner, group, ACL and user attributes of the
    old one, as far as the system permits. Along dim 0 every rank writes its shard directly from its memory. Along other
    dims the ranks first exchange the pieces of the file, a window at a time.

    Args:
        path: the file to write, in a folder that all ranks share. Must agree.
        tensors: this rank's shard, which gets the name "data", or a dict of shards by name; dicts may be nested, and
            names may contain slashes: ``{"model": {"w": x}}`` and ``{"model/w": x}`` are the same. Any shape, dtype
            and strides, on the CPU or a GPU. Names, dtypes and the extents besides `dim` must agree on all ranks.
        dim: the dimension along which the shards are joined, in rank order, extents of zero included; None if every
            rank holds the whole tensor; or a dict of these by name. Must agree. 0-d shards are stacked.
        attrs: HDF5 attributes: a dict of dicts, keyed by tensor name, or by "" for the file itself. Rank 0's values are
            written. A .safetensors file takes text only, under "", by default ``{"format": "pt"}``.
        window: bytes of host memory that a rank may use for data in transit, 256 MiB by default. Must agree.
        writer: "mpio" (HDF5 through MPI-IO, needs an h5py built with it), "posix" (any h5py), or "auto": see
            :func:`hpcdist.staging.writer`. The file is the same. Must agree. "posix" writes .safetensors files.
        resume: continue the unfinished file of a job that died: write only pieces that differ. If this call fails, it
            keeps its unfinished file. The number of ranks may differ. Must agree.
        max_shard_size: of a .safetensors file: bytes, or text such as "5GB". Larger data become several files,
            ``NAME-00001-of-00002.safetensors``, and ``NAME.safetensors.index.json``, which Hugging Face's libraries
            load by their index. They get their names when all are complete, one after the other, the index last. An
            old index is removed before files that it names are replaced. If there are a file `path` and an index, the
            older one is removed after a save, because readers would differ in their choice. Must agree.
        progress: called on each rank, from time to time, with the number of bytes just done; with `async_op`, in
            another thread.
        buffer: bytes of host memory that this rank may use for the copies of `async_op`, including those of earlier
            saves in flight. The default is half of the free memory, divided among the ranks of the node. If the copies
            do not fit, the call waits for earlier saves. If they are larger than the buffer, it waits until the file is
            written.
        async_op: whether to return a Handle when the values have been copied, to memory from the pool or, for GPU
            tensors, to pinned memory. You may change the tensors as soon as save() returns. A thread writes the file,
            always with writer "posix". Saves of a group run in the order of the calls. Another save, or a load, of the
            same name waits for saves in flight. So do finalize() and the end of the program. Only wait() raises the
            error of a save, on every rank. If wait() is not called, the error is printed at the end. Must agree.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None for all ranks.

    Returns:
        None; with `async_op`, a Handle whose wait() returns None once the file has its name.

    Raises:
        RankError: on every rank, with `async_op` from wait(), if an argument is wrong on one or they do not agree, or a
            write fails. Also if the folder is missing, not writable, full or not shared, or `path` is not a regular
            file, or read-only. The old file is unchanged, and the job can continue.
        HpcdistError: on this rank, with `async_op`, if MPI does not support threads.

    Example, on 3 ranks::

        >>> hd.staging.save("x.h5", torch.full((rank, 2), rank))
        >>> h5py.File("x.h5")["data"][:, 0]
        array([1, 2, 2])
    """
    given = dict(locals())
    for option in ("buffer", "async_op", "group"):
        del given[option]
    team = world.team_of(group)
    if async_op:
        return _save_later(team, given, buffer)
    wait_for(path)
    _save(team, lambda: _check(**given))
    return None


def _save_later(team: Team, given: dict[str, Any], buffer: Any) -> Handle[None]:
    """Copy the tensors, and save them in the background of the team."""
    check_threads()
    place = _place(given["path"])
    wait_for(given["path"], after=team)
    held: list[SaveCall] = []  # freed when it is written
    nbytes, copied, problem = 0, True, None
    try:
        # Not in the background: if the program ends meanwhile, h5py would not take back the converters that it gives to
        # HDF5, and these crash in MPI_Finalize.
        import_module("h5py")
        local.refuse_tracing()
        if given["writer"] == "mpio":
            raise ArgumentError("HD419", "writer mpio does not write in the background; use auto or posix")
        given |= {"attrs": deepcopy(given["attrs"]), "writer": "posix"}
        given["path"] = os.path.abspath(target_path(given["path"]))  # of this time
        call = _check(**given)
        copies = _copied(call.tensors, buffer_of(team, buffer))
        copied = copies is not call.tensors
        nbytes = copied * sum(x.nbytes for x in copies.values())
        held.append(replace(call, tensors=copies))
    except Exception as error:  # raised by wait() on every rank
        problem = error

    def checked() -> SaveCall:
        if problem is not None:
            raise problem
        return held.pop()

    team.calls[True] += 1
    flight = _Flight(team, place, nbytes, submit(team, VERB, lambda team: _save(team, checked)))
    future = flight.handle._future
    flights[future] = flight
    future.add_done_callback(flights.pop)  # no closure, which would hold the handle as long as the future lives
    if not copied:
        flight.wait()
    return flight.handle


Shards = dict[str, tuple[torch.dtype, int | None, tuple[int, ...]]]


@dataclass(frozen=True)
class SaveCall:
    """A call of save(), checked on this rank.

    Attributes:
        tensors: by name, this rank's shards.
        shards: by name: dtype, dim, and the shape of the shard.
        same: options that must be the same on all ranks, by name.
        attrs: HDF5 attributes, by name of the tensor.
        options: how the file is written.
    """

    tensors: Mapping[str, Tensor]
    shards: Shards
    same: dict[str, Any]
    attrs: Mapping[str, Mapping[str, Any]]
    options: SaveOptions


def _check(
    *,
    path: Any,
    tensors: Any,
    dim: Any,
    attrs: Any,
    window: Any,
    writer: Any,
    resume: Any,
    max_shard_size: Any,
    progress: Any,
) -> SaveCall:
    """Check the arguments of save() on this rank."""
    shards, flat, given = {}, {}, flatten(tensors)
    for name, along in _dims(dim, given).items():
        call = Call("save")
        shard = local.describe(call, given[name], along or 0, name)
        flat[name] = shard.view(given[name].shape) if along is None else shard
        shards[name] = (shard.dtype, None if along is None else call.dim, tuple(flat[name].shape))
    check_attrs(attrs, given)
    attrs = attrs or {}
    same: dict[str, Any] = {
        "path": target_path(path), "window": window_bytes(window), "writer": _driver_of(writer),
        "resume": bool(resume), "max_shard_size": shard_size(max_shard_size, os.fsdecode(path)),
    }  # fmt: skip
    if same["path"].endswith(safetensors.SUFFIX):
        if writer == "mpio":
            raise ArgumentError("HD419", f"writer mpio writes HDF5: a {safetensors.SUFFIX} file needs auto or posix")
        check_safetensors({name: x.dtype for name, x in flat.items()}, attrs)
        same["writer"] = "posix"
    own = dict(attrs.get("", {}))
    options = SaveOptions(same["writer"], same["window"], same["resume"], own, same["max_shard_size"], progress)
    return SaveCall(flat, shards, same, attrs, options)


def _dims(dim: Any, given: Mapping[str, Any]) -> dict[str, int | None]:
    """The dim of each tensor, in their order; None where every rank holds the whole."""
    if not isinstance(dim, Mapping):
        return dict.fromkeys(given, dim)
    dims = flatten(dim)
    odd = sorted(set(dims) ^ set(given))
    if odd:
        raise ArgumentError("HD419", f"dim and tensors have different names: {odd[0]!r} is in one of them only")
    return {name: dims[name] for name in given}


def _driver_of(writer: Any) -> str:
    """The driver that is used."""
    if writer not in drivers.NAMES:
        raise ArgumentError("HD419", f"writer is {writer!r}, expected one of {', '.join(drivers.NAMES)}")
    if writer == "mpio" and (reason := drivers.missing()) is not None:
        raise ArgumentError("HD419", f"writer mpio cannot be used: {reason}")
    return drivers.active()[0] if writer == "auto" else str(writer)


def _save(team: Team, check: Callable[[], SaveCall]) -> None:
    """Save. Collective.

    Args:
        check: returns this rank's call, or raises its error.
    """
    with agreed(team, VERB, check) as call:
        datasets, plans = _plan(team, call)
        with FileWriter(team, VERB, call.same["path"], datasets, call.options) as file:
            for i, plan in enumerate(plans):
                _write(file, i, plan, call.tensors[datasets[i].name])


def _plan(team: Team, call: SaveCall) -> tuple[list[Dataset], list[OwnPieces | PiecePlan]]:
    """The tensors of the file, the same on all ranks but for the attributes, and how each is written. Collective.

    If no rank's shards have changed since the team's latest save, one digest shows it, and nothing is planned.
    """
    key = call.same | {f"tensor {name!r}": _described(*shard) for name, shard in call.shards.items()}
    basis = call.same["window"], list(call.shards.items())
    again = team.saved is not None and team.saved[0] == basis
    odd = lambda first, other: objects.first_difference(first[0], other[0])  # noqa: E731
    order: Any = objects.same(team.comm, VERB, (again, key), (key, call.shards), odd)[1]
    if not (again and order is call.shards):  # which is a copy of rank 0's, unless the digests agree
        team.saved = None
        given = [(call.shards[name][2], dtype, dim) for name, (dtype, dim, _) in order.items()]
        planned, names = list[tuple[tuple[int, ...], OwnPieces | PiecePlan]](), list(order)
        try:
            planned += plan_save(team, given, call.same["window"])
        except ArgumentError as error:
            objects.raise_problems(VERB, {0: coded("HD418", f"{names[len(planned)]!r} {error}")})
        made = [
            (Dataset(name, shape, dtype, count=plan.count), plan)
            for name, (_, dtype, _), (shape, plan) in zip(names, given, planned, strict=True)
        ]
        if all(isinstance(plan, OwnPieces) for _, plan in made):
            team.saved = basis, made
    else:
        made = team.saved[1]
    return [replace(x, attrs=call.attrs.get(x.name, {})) for x, _ in made], [plan for _, plan in made]


def _described(dtype: torch.dtype, dim: int | None, shape: tuple[int, ...]) -> str:
    """What must agree of a tensor, in words."""
    extents = ["*" if d == dim else str(extent) for d, extent in enumerate(shape)]
    return f"{dtype} of shape ({', '.join(extents)}), dim {dim}"


def _write(file: FileWriter, i: int, plan: OwnPieces | PiecePlan, x: Tensor) -> None:
    """Write one tensor of a file, of which `x` is this rank's box. Collective."""
    team = file.team
    if isinstance(plan, OwnPieces):
        boxes = list(plan.pieces)
        parts = outgoing(x, [box.relative_to(plan.origin.tolist()) for box in boxes])
        for row, (box, piece) in enumerate(zip(boxes, parts, strict=True), plan.first):
            file.put(i, row, box, piece)
        return
    scratch = Scratch(pinned=not x.is_cpu)
    for round_ in plan.rounds:
        collected = collect(team, plan, x, round_, scratch)
        mine = plan.piece(team.rank, round_)
        if collected is not None and mine is not None:
            file.put(i, mine, plan.pieces[mine], collected)


@dataclass(frozen=True, eq=False)
class _Flight:
    """A save in flight.

    Attributes:
        team: the ranks that save.
        place: the file, as far as its name is known.
        nbytes: of the copies of its tensors.
    """

    team: Team
    place: str | None
    nbytes: int
    handle: Handle[None]

    def wait(self) -> None:
        """Wait for its end. An error is raised by wait() of its handle."""
        # No deadline: the save has one of its own.
        with activity.InCall(VERB, self.team, activity.NOBODY):
            futures.wait([self.handle._future])


def wait_for(path: Any, after: Team | None = None) -> None:
    """Wait for the saves in flight to the same name, so that older data do not replace newer.

    Also to the file of which `path` is the index, and to files in it, if it is a folder; and for all saves of torch's
    ``dcp.async_save``, whatever their names.

    Args:
        after: team in whose background the caller's own save will run, after these.
    """
    join_uploads()
    place = _place(path)
    for flight in list(flights.values()):
        at = flight.place
        if flight.team is not after and at and place in (at, os.path.dirname(at), safetensors.index_of(at)):
            flight.wait()


def buffer_of(team: Team, given: Any) -> int:
    """Return the bytes for copies; by default half of the free memory, divided among the ranks of this node."""
    if given is not None:
        if index(given) < 0:
            raise ArgumentError("HD419", f"buffer is {given}, expected a number of bytes >= 0")
        return index(given)
    node_of = team.settings.node_of
    ranks = node_of.count(node_of[team.peers[team.rank]])
    return machine.available() // 2 // ranks


def _place(path: Any) -> str | None:
    try:
        return os.path.realpath(os.fsdecode(path))
    except Exception:  # reported when the call is checked; the working folder may be gone
        return None


def _copied(tensors: Mapping[str, Tensor], buffer: int) -> Mapping[str, Tensor]:
    """Copy tensors to host memory, pinned for GPU tensors, when the copies of earlier saves leave room in `buffer`
    bytes. If there is no memory for copies, return the tensors themselves."""
    needed = sum(x.nbytes for x in tensors.values())
    for flight in list(flights.values()):
        if needed + sum(other.nbytes for other in list(flights.values()) if not other.handle.done()) <= buffer:
            break
        flight.wait()
    if needed > buffer:
        return tensors
    copies = {}
    try:
        for name, x in tensors.items():
            copy = accelerator.host_buffer(x.nbytes, not x.is_cpu).view(x.dtype).view(x.shape)
            copyable(copy).copy_(copyable(x), non_blocking=not x.is_cpu)
            copies[name] = copy
    except (MemoryError, RuntimeError):
        return tensors
    for device in {x.device for x in tensors.values() if not x.is_cpu}:
        accelerator.synchronize(device)
    return copies


os.register_at_fork(after_in_child=flights.clear)  # the saves are the parent's
