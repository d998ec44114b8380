"""A file that all ranks write a box at a time."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from functools import partial
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist import activity, layout
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import FileError, listed
from hpcdist.files import h5
from hpcdist.files.commit import check_target
from hpcdist.files.h5 import Dataset
from hpcdist.files.raw import Ints, forget, memory, read_at
from hpcdist.layout import Box
from hpcdist.process import abort
from hpcdist.staging.names import check_attrs, flatten
from hpcdist.staging.pieces import PIECE, check_pieces, check_shape
from hpcdist.staging.reader import checksum_of
from hpcdist.staging.readfile import inside
from hpcdist.staging.saving import Options, Saving
from hpcdist.staging.written import Written, joined, starts_of
from hpcdist.tensors.storage import DTYPES, row_major
from hpcdist.validation import collective, local
from hpcdist.validation.call import Call

__all__ = ["WriteFile"]

VERB = "staging.open"
_SHARE = 2**16  # bytes: how the edges of what is written are shared out


class WriteFile:
    """A new file that ranks write a box at a time. Made by :func:`open`; used in a ``with`` block.

    At the end of the block, which is collective, the file appears under its name: if every element was written once,
    and no rank has failed. An exception on one rank ends the job, and the name holds what it held.
    """

    def __init__(self, team: Team, path: Any, tensors: Any, attrs: Any, window: Any) -> None:
        call = Call(VERB)
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        given: dict[str, dict[str, Any]] = {}
        try:
            target, limit = os.fsdecode(path), index(window)
            if limit < 1:
                raise local.WrongError(f"window is {window}, expected a number of bytes >= 1")
            specs = {name: _spec(name, spec, limit) for name, spec in flatten(tensors or {}).items()}
            check_attrs(attrs, specs)
            given = {name: dict(values) for name, values in (attrs or {}).items()}
        except Exception as error:  # the other ranks are to hear of it
            call.problem = local.problem_of(error)
        with activity.InCall(VERB, team), abort.InStep(VERB, team.size):
            collective.exchange(team, call)
            asks = objects.all_gather_object(team.comm, (target, limit, specs))
            odd = {rank: f"path, window or tensors differ from those of rank 0: {ask}" for rank, ask in enumerate(asks)}
            objects.raise_problems(VERB, {rank: text for rank, text in odd.items() if asks[rank] != asks[0]})
            nbytes = sum(layout.whole(shape).size() * dtype.itemsize for shape, dtype in asks[0][2].values())
            objects.broadcast(
                team.comm, VERB, lambda: check_target(Path(target), nbytes)
            )  # before the pieces are listed
            datasets = []
            for name, (shape, dtype) in asks[0][2].items():  # in the order of rank 0, which lays out the file
                pieces = list(layout.boxes(layout.whole(shape), max(1, min(PIECE, limit) // dtype.itemsize)))
                datasets.append(Dataset(name, shape, dtype, pieces, attrs=given.get(name, {})))
            self._team = team
            self._wrote = [Written(dataset) for dataset in datasets]
            # MPI-IO and system calls are not to be mixed in one file: boxes of any shape go by system calls.
            options = Options("posix", limit, attrs=given.get("", {}))
            sizes = [dataset.dtype.itemsize for dataset in datasets]
            owner = lambda i, elements: elements * sizes[i] // _SHARE % team.size  # noqa: E731
            self._saving = Saving(team, VERB, target, datasets, owner, options)
            self._index = {dataset.name: i for i, dataset in enumerate(datasets)}
            self._window = limit
            self._open = True

    def write(self, name: str, x: Tensor, offset: Sequence[int]) -> None:
        """Write a box of a tensor. On this rank alone; boxes must not overlap, on this rank or between ranks.

        Args:
            name: of the tensor.
            x: the box: any strides, on the CPU or a GPU, of the tensor's dtype and number of dims.
            offset: where it begins in the whole, an entry for every dim.

        Raises:
            FileError: no such tensor; OSError: it cannot be written; ValueError: it does not fit, the file is closed.
        """
        if not self._open:
            raise ValueError("the file is closed")
        if name not in self._index:
            raise FileError(f"{self._saving.layout.path}: has no tensor {name!r}; it has: {listed(self._index)}")
        i = self._index[name]
        dataset = self._saving.datasets[i]
        box = Box(tuple(index(o) for o in offset), tuple(x.shape))
        inside(box, dataset.shape)
        if x.dtype != dataset.dtype:
            raise ValueError(f"x has dtype {x.dtype}, expected {dataset.dtype}, that of {name!r}")
        held = row_major(local.tensor(x, 0, "x")[0].cpu()).view(x.shape)
        starts, length = starts_of(box, dataset.shape)
        data = memory(held)
        self._saving.write_runs(i, starts, length * x.itemsize, data)
        self._wrote[i].add(box, starts, length, data)

    def __enter__(self) -> WriteFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # the others may be anywhere: nothing collective can be done here
            self._open = False
            self._saving.drop()
            return
        with activity.InCall("staging.close", self._team), abort.InStep("staging.close", self._team.size):
            self._finish()

    def _finish(self) -> None:
        try:
            collective.exchange(self._team, Call("staging.close"))
        except BaseException:
            self._saving.drop()
            raise
        else:
            self._check_all_is_written()
            self._saving.verb = "staging.close"
            self._saving.settle()
            if not any(objects.all_gather_object(self._team.comm, self._saving.problem is not None)):
                self._checksums()
            self._saving.finish()
        finally:
            self._open = False

    def _check_all_is_written(self) -> None:
        """Every element once: each rank looks at its share of the elements. Collective."""
        for dataset, wrote in zip(self._saving.datasets, self._wrote, strict=True):
            n = layout.whole(dataset.shape).size()
            share = layout.block_range(n, self._team.size, self._team.rank)
            runs = joined(_shared_out(self._team, wrote.runs(), n))
            ends, starts = [share.start, *runs[:, 1].tolist()], [*runs[:, 0].tolist(), share.stop]
            for end, start in zip(ends, starts, strict=True):
                if end != start:
                    what = "were not written" if end < start else "were written twice"
                    first, last = sorted((end, start))
                    self._saving.fail(ValueError(f"{dataset.name}: elements {first}:{last} {what}"))
                    break

    def _checksums(self) -> None:
        """Those of pieces that one rank has written in order are known; others are read again, from the disk if the
        system can, where every rank compares what it has written. Collective."""
        known: list[list[list[int]]] = objects.all_gather_object(
            self._team.comm, [sorted(w.checksums) for w in self._wrote]
        )
        path = Path(self._saving.layout.path)
        for i, (dataset, wrote) in enumerate(zip(self._saving.datasets, self._wrote, strict=True)):
            for row, checksum in wrote.checksums.items():
                self._saving.record(i, row, checksum)
            left = sorted(set(range(len(dataset.pieces))).difference(*(rank[i] for rank in known)))
            if not left:
                continue
            try:
                with open(path, "rb", buffering=0) as file:
                    forget(file.fileno())
                    self._compare(file.fileno(), i, [dataset.pieces[row] for row in left])
                    for row in left[self._team.rank :: self._team.size]:
                        self._saving.record(
                            i, row, checksum_of(file.fileno(), self._saving.raw(i), dataset.pieces[row])
                        )
            except Exception as error:  # told to all in finish()
                self._saving.fail(error)

    def _compare(self, fd: int, i: int, pieces: Sequence[Box]) -> None:
        """Whether what this rank has written of these pieces is in the file."""
        where, window = self._saving.raw(i), self._window
        for box, expected in self._wrote[i].boxes():
            if not any(box.intersect(piece).size() for piece in pieces):
                continue
            digest = h5.digest()
            for part in layout.boxes(box, max(1, window // where.dtype.itemsize)):
                got = torch.empty(part.shape, dtype=where.dtype, device="cpu")
                where.read(partial(read_at, fd), part, got, window)
                digest.update(memory(got))
            if digest.intdigest() != expected:
                raise FileError(f"{self._saving.datasets[i].name}: what was written at {box.offset} is not in the file")


def _shared_out(team: Team, runs: Ints, elements: int) -> Ints:
    """What all ranks have of this rank's share of the elements. Collective."""
    from mpi4py import MPI

    shares = [layout.block_range(elements, team.size, rank) for rank in range(team.size)]
    parts = []
    for share in shares:
        first = np.searchsorted(runs[:, 1], share.start, "right")
        end = np.searchsorted(runs[:, 0], share.stop, "left")
        parts.append(np.clip(runs[first:end], share.start, share.stop).ravel())
    counts = array("q", [len(part) for part in parts])
    coming = array("q", bytes(8 * team.size))
    team.comm.Alltoall([counts, MPI.INT64_T], [coming, MPI.INT64_T])
    got = np.empty(sum(coming), np.int64)
    sends, recvs = np.concatenate(parts), (list(coming), layout.displs(coming))
    team.comm.Alltoallv([sends, (list(counts), layout.displs(counts)), MPI.INT64_T], [got, recvs, MPI.INT64_T])
    return got.reshape(-1, 2)


def _spec(name: str, spec: Any, window: int) -> tuple[tuple[int, ...], torch.dtype]:
    try:
        shape, dtype = spec
        extents = tuple(index(n) for n in shape)
    except (TypeError, ValueError):
        raise local.WrongError(f"{name!r} is {spec!r}, expected (shape, dtype)") from None
    if dtype not in DTYPES:
        raise local.WrongError(f"{name!r} has dtype {dtype}, which cannot be stored")
    if min(extents, default=0) < 0 or any(isinstance(n, bool) for n in shape):
        raise local.WrongError(f"{name!r} has shape {tuple(shape)}, expected extents >= 0")
    try:
        check_shape(extents, dtype.itemsize)
        check_pieces(extents, dtype.itemsize, max(1, min(PIECE, window) // dtype.itemsize))
    except local.WrongError as error:
        raise local.WrongError(f"{name!r} {error}") from None
    return extents, dtype
