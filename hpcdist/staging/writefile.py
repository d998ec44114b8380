"""A file that all ranks write a box at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hpcdist import abort, agree, checks, layout
from hpcdist.buffers import DTYPES, row_major
from hpcdist.call import Call
from hpcdist.commit import check_target
from hpcdist.errors import FileError, RankError, listed
from hpcdist.layout import Box
from hpcdist.raw import Raw
from hpcdist.staging.format import Dataset
from hpcdist.staging.names import check_attrs, flatten
from hpcdist.staging.pieces import PIECE, check_pieces, check_shape
from hpcdist.staging.reader import checksum_of
from hpcdist.staging.readfile import inside
from hpcdist.staging.saving import Options, Saving
from hpcdist.team import Team
from hpcdist.watch import record

__all__ = ["WriteFile"]

VERB = "staging.open"


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
                raise checks.WrongError(f"window is {window}, expected a number of bytes >= 1")
            specs = {name: _spec(name, spec, limit) for name, spec in flatten(tensors or {}).items()}
            check_attrs(attrs, specs)
            given = {name: dict(values) for name, values in (attrs or {}).items()}
        except Exception as error:  # the other ranks are to hear of it
            call.problem = checks.problem_of(error)
        with record.InCall(VERB, team), abort.InStep(VERB, team.size):
            agree.exchange(team, call)
            asks = agree.allgather(team.comm, (target, limit, specs))
            odd = {rank: f"path, window or tensors differ from those of rank 0: {ask}" for rank, ask in enumerate(asks)}
            agree.require(VERB, {rank: text for rank, text in odd.items() if asks[rank] != asks[0]})
            nbytes = sum(layout.whole(shape).size() * dtype.itemsize for shape, dtype in asks[0][2].values())
            agree.on_root(team.comm, VERB, lambda: check_target(Path(target), nbytes))  # before the pieces are listed
            datasets = []
            for name, (shape, dtype) in asks[0][2].items():  # in the order of rank 0, which lays out the file
                pieces = list(layout.boxes(layout.whole(shape), max(1, min(PIECE, limit) // dtype.itemsize)))
                datasets.append(Dataset(name, shape, dtype, pieces, attrs=given.get(name, {})))
            self._team = team
            self._runs: list[list[tuple[int, int]]] = [[] for _ in datasets]  # first and end element of what is written
            # MPI-IO and system calls are not to be mixed in one file: boxes of any shape go by system calls.
            options = Options("posix", limit, attrs=given.get("", {}))
            self._saving = Saving(team, VERB, target, datasets, options)
            self._index = {dataset.name: i for i, dataset in enumerate(datasets)}
            self._fd = -1
            try:
                agree.on_all(team.comm, VERB, self._open)
            except RankError:
                self._saving.abandon()
                raise

    def _open(self) -> None:
        self._fd = os.open(self._saving.layout.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def write(self, name: str, x: Tensor, offset: Sequence[int]) -> None:
        """Write a box of a tensor. On this rank alone; boxes must not overlap, on this rank or between ranks.

        Args:
            name: of the tensor.
            x: the box: any strides, on the CPU or a GPU, of the tensor's dtype and number of dims.
            offset: where it begins in the whole, an entry for every dim.

        Raises:
            FileError: no such tensor; OSError: it cannot be written; ValueError: it does not fit, the file is closed.
        """
        if self._fd < 0:
            raise ValueError("the file is closed")
        if name not in self._index:
            raise FileError(f"{self._saving.layout.path}: has no tensor {name!r}; it has: {listed(self._index)}")
        i = self._index[name]
        dataset = self._saving.datasets[i]
        box = Box(tuple(index(o) for o in offset), tuple(x.shape))
        inside(box, dataset.shape)
        if x.dtype != dataset.dtype:
            raise ValueError(f"x has dtype {x.dtype}, expected {dataset.dtype}, that of {name!r}")
        self._raw(i).write(self._fd, box, row_major(checks.tensor(x, 0, "x")[0].cpu()))
        _add(self._runs[i], box, dataset.shape)

    def _raw(self, i: int) -> Raw:
        start = self._saving.layout.data[i]
        dataset = self._saving.datasets[i]
        assert start is not None or 0 in dataset.shape
        return Raw(self._saving.layout.path, start or 0, dataset.shape, dataset.dtype)

    def __enter__(self) -> WriteFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # the others may be anywhere: nothing collective can be done here
            self._close()
            self._saving.drop()
            return
        with record.InCall("staging.close", self._team), abort.InStep("staging.close", self._team.size):
            self._finish()

    def _finish(self) -> None:
        try:
            agree.exchange(self._team, Call("staging.close"))
        except BaseException:
            self._saving.drop()
            raise
        else:
            self._check_all_is_written()
            self._checksums()
            self._saving.finish()
        finally:
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _check_all_is_written(self) -> None:
        """Every element once: the runs of all ranks, in order, leave no gap and do not overlap. Collective."""
        for dataset, mine in zip(self._saving.datasets, self._runs, strict=True):
            runs = sorted(run for runs in agree.allgather(self._team.comm, mine) for run in runs)
            ends = [0, *(end for _, end in runs)]
            starts = [*(start for start, _ in runs), layout.whole(dataset.shape).size()]
            for end, start in zip(ends, starts, strict=True):
                if end != start:
                    what = "were not written" if end < start else "were written twice"
                    first, last = sorted((end, start))
                    self._saving.fail(ValueError(f"{dataset.name}: elements {first}:{last} {what}"))

    def _checksums(self) -> None:
        """Each rank takes those of its share of the pieces, whoever wrote them."""
        for i, dataset in enumerate(self._saving.datasets):
            for row in layout.share(len(dataset.pieces), self._team.size, self._team.rank):
                try:
                    self._saving.record(i, row, checksum_of(self._fd, self._raw(i), dataset.pieces[row]))
                except Exception as error:  # told to all in finish()
                    self._saving.fail(error)


def _spec(name: str, spec: Any, window: int) -> tuple[tuple[int, ...], torch.dtype]:
    try:
        shape, dtype = spec
        extents = tuple(index(n) for n in shape)
    except (TypeError, ValueError):
        raise checks.WrongError(f"{name!r} is {spec!r}, expected (shape, dtype)") from None
    if dtype not in DTYPES:
        raise checks.WrongError(f"{name!r} has dtype {dtype}, which cannot be stored")
    if min(extents, default=0) < 0 or any(isinstance(n, bool) for n in shape):
        raise checks.WrongError(f"{name!r} has shape {tuple(shape)}, expected extents >= 0")
    try:
        check_shape(extents, dtype.itemsize)
        check_pieces(extents, dtype.itemsize, max(1, min(PIECE, window) // dtype.itemsize))
    except checks.WrongError as error:
        raise checks.WrongError(f"{name!r} {error}") from None
    return extents, dtype


def _add(known: list[tuple[int, int]], box: Box, shape: Sequence[int]) -> None:
    """Add the runs of a box to those that are known; what continues the last one is joined with it."""
    length, _, starts = layout.runs(box, shape)
    for start in starts if box.size() else ():
        if known and known[-1][1] == start:
            known[-1] = (known[-1][0], start + length)
        else:
            known.append((start, start + length))
