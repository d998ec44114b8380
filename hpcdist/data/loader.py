"""Loader: batches of a shuffled epoch on every rank, made ahead of the step where that takes time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from operator import index
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hpcdist import activity
from hpcdist.comm.team import Team
from hpcdist.comm.worker import Worker
from hpcdist.control import objects
from hpcdist.data.dataset import Dataset, take
from hpcdist.data.fields import Column, nbytes
from hpcdist.data.sampler import Epoch, Order, Sampler
from hpcdist.data.segments import ALIGNMENT, Segment, merged
from hpcdist.errors import RankError, coded, described, refusal
from hpcdist.process import abort
from hpcdist.runtime import world
from hpcdist.runtime.background import Handle, check_threads, prepare, submit
from hpcdist.staging.arguments import agreed, window_bytes
from hpcdist.validation.collective import Call, exchange
from hpcdist.validation.local import ArgumentError

VERB = "data.Loader"
WINDOW = 2**30  # bytes
_RAGGED = ("list", "nested", "padded")


class Loader(Sampler):
    """Shuffled batches of the samples of a :class:`Dataset`, on every rank: an iterable, as torch's DataLoader.

    Collective over the ranks of `data`, as is each batch: all ranks make the same loop, and have as many batches as
    each other. The order of all samples depends on the data, `seed` and the epoch, not on the number of ranks or nodes:
    of each batch of all ranks, rank 0 gets the first samples. With `keep` "node" and "job" it is one permutation. With
    "file" the blocks of the files come in random order, and the samples of consecutive blocks are shuffled, `window`
    bytes of them. Each block is read once an epoch, while the samples before it are used.

    Batches are made ahead, one at a time, unless all that takes is a copy in the memory of this node. Each node has the
    data once ("node"), its share of them ("job"), or its share of two windows ("file"); and each rank two batches.

    Iterating gives the next epoch each time. :meth:`epoch` gives one by number. The other methods, and `next_epoch`,
    are those of :class:`Sampler`.

    Args:
        data: what :func:`open` returns.
        batch_size: samples of a batch: of each rank, or with `split_batches` of all ranks.
        seed: integer that chooses the shuffle. Must agree, as all others.
        split_batches, shuffle, drop_last, even: as those of :class:`Sampler`.
        ragged: the form of samples that differ in length: a "list" of tensors, a "nested" tensor of torch's jagged
            layout, or one tensor "padded" with zeros.
        transform: called with each batch, in a thread beside the step; returns what takes its place. It must not call
            hpcdist, and its random numbers should come from a generator of its own.
        device: where batches go, such as ``world.device``: a GPU gets them by pinned memory before the step needs them.
        window: with `keep` "file", bytes of the samples that are shuffled together, 1 GiB by default.

    Raises:
        RankError: on every rank, if an argument is wrong on one rank or they differ. From the next batch, if a
            `transform` has raised on one rank, a file has gone or changed, or a rank has left the loop. The job can
            continue.
        TypeError: on this rank, if `data` is something else.

    Example::

        >>> loader = hd.data.Loader(data, batch_size=64)
        >>> for epoch in range(loader.next_epoch, 10):
        ...     for x, y in loader.epoch(epoch):
        ...         ...
        >>> state = loader.state_dict()              # also in the middle of an epoch
    """

    def __init__(
        self,
        data: Dataset,
        batch_size: int,
        seed: int = 0,
        *,
        split_batches: bool = False,
        shuffle: bool = True,
        drop_last: bool = False,
        even: Literal["pad", "short"] = "pad",
        ragged: Literal["list", "nested", "padded"] = "list",
        transform: Callable[[Any], Any] | None = None,
        device: torch.device | str | None = None,
        window: int = WINDOW,
    ) -> None:
        if not isinstance(data, Dataset) or data.team is None:
            raise refusal(TypeError, "HD419", f"data is a {type(data).__name__}, expected what data.open() returns")
        if data.team.freed:
            raise refusal(ValueError, "HD419", "the world in which data were opened has ended")
        dropped, data.dropped[:] = data.dropped[:], []
        for comm, team in dropped:
            _end(comm, team, None, data.dropped)
        own: dict[str, Any] = {"split_batches": split_batches, "shuffle": shuffle, "drop_last": drop_last, "even": even}

        def check() -> dict[str, Any]:
            if ragged not in _RAGGED:
                raise ArgumentError("HD419", f"ragged is {ragged!r}, expected one of {', '.join(_RAGGED)}")
            window_bytes(window)
            Sampler.__init__(self, data, batch_size, seed, **own, group=data.group)
            self._device = torch.device("cpu" if device is None else device)
            return {"batch_size": batch_size, "seed": seed, **own, "ragged": ragged, "window": window}

        with agreed(data.team, VERB, check, dict.items):
            self._comm = data.team.comm.Dup()
            self._team = team = world.team_of(self._comm)
            self.dataset, self._ragged, self._transform = data, ragged, transform
            self._files = None
            if data.keep == "file":
                self._files = _Files(team, data, window)
                self.cuts, self.window = data.cuts, self._files.window
        self._whole = data.keep == "node" or len(team.topology.nodes) == 1
        lengthy = transform is not None or data.transform is not None or self._device.type != "cpu"
        self._ahead = self._files is not None or not self._whole or lengthy
        self._word: Future[Any] | None = None  # the message that this rank has left the loop
        self._epoch: Epoch | None = None
        self._in_loop = False
        self._end = weakref.finalize(self, _end, self._comm, team, self._files, data.dropped)
        self._end.atexit = False
        if team.size > 1:
            check_threads()
            prepare(team)
            world.leaving.add(self)

    def __getstate__(self) -> Any:
        raise refusal(TypeError, "HD419", "a Loader cannot be pickled: save its state_dict()")

    def __iter__(self) -> Iterator[Any]:
        return self._batches(None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.leave()
        self._epoch = None
        super().load_state_dict(state)

    def epoch(self, epoch: int) -> Iterator[Any]:
        """Return the batches of an epoch; after load_state_dict() what is left of the one that was interrupted.

        The epoch begins when the first batch is taken, and ends the one before.
        """
        self._check_open()
        return self._batches(index(epoch))

    def _check_open(self) -> None:
        if self._team.freed:
            raise refusal(ValueError, "HD419", "the loader is closed, or its world has ended")

    def close(self) -> None:
        """Free what the loader has besides its data, which its end would do, too. A second call does nothing."""
        self.leave()
        self._wait_left()
        if not self._team.freed:
            self._team.background.worker.stop()
        self._end()

    def leave(self) -> None:
        """Let the other ranks know that this rank has left its loop, if it has; without waiting for them."""
        if self._in_loop and self._team.size > 1:
            text = f"has left the loop over epoch {self.now} after {self.given:,} samples of all ranks"
            call = Call(VERB, problem=coded("HD301", text))
            self._word = self._team.background.worker.submit(partial(exchange, self._team, call))
        self._in_loop = False

    def _wait_left(self) -> None:
        word, self._word = self._word, None
        with suppress(RankError):  # which all have
            if word is not None:
                word.result()

    def _batches(self, chosen: int | None) -> Iterator[Any]:
        self.leave()
        self._epoch = epoch = self.begin(self.next_epoch if chosen is None else chosen)
        given, options = self.given, tuple(self.state_dict().items())
        ready: Handle[Any] | None = None
        self._in_loop = given < epoch.end
        try:
            while given < epoch.end:
                self._check_open()
                if self._epoch is not epoch:
                    text = "this loader has begun another epoch, or loaded a state: its batches before end there"
                    raise refusal(RuntimeError, "HD419", text)
                batch = self._agreed(epoch, given, ready, options)
                options, ready = (), None
                given = self.gave(epoch, given)
                self._in_loop = given < epoch.end
                if self._in_loop and self._ahead:
                    ready = self._submit(epoch, given)
                yield batch
                batch = None
        finally:
            if self._epoch is epoch:
                self.leave()

    def _agreed(self, epoch: Epoch, given: int, ready: Handle[Any] | None, options: Any) -> Any:
        """Return the next batch once all ranks have theirs: a RankError if one does not take it. Collective."""
        error: Exception | None = None
        with activity.InCall(VERB, self._team), abort.InStep(VERB, self._team.size):
            self._wait_left()
            try:
                if self._ahead:
                    batch = (ready or self._submit(epoch, given)).wait()
                else:
                    batch = self._make(self._team, epoch, given)
            except RankError:  # on all ranks
                raise
            except Exception as caught:
                error = caught
            problem = None if error is None else described(error, "HD309")
            self._in_loop = False  # if it is refused, all ranks have left
            try:
                exchange(self._team, Call(VERB, options=options, problem=problem))
            except RankError as refused:
                raise refused from error
        return batch

    def _submit(self, epoch: Epoch, given: int) -> Handle[Any]:
        return submit(self._team, VERB, partial(self._make, epoch=epoch, given=given))

    def _make(self, team: Team, epoch: Epoch, given: int) -> Any:
        """Make the batch that begins after `given` samples. Collective, if it is not in this node's memory."""
        segment = self.dataset.segment
        if self._whole and segment is not None:
            columns = segment.columns(epoch.mine(given))
        else:
            columns = self._columns(team, epoch, given)
        batch = self.dataset.batch(columns, self._ragged)
        if self._transform is not None:
            batch = self._transform(batch)
        if self._device.type != "cpu":
            batch = _on(self._device, batch)
            torch.accelerator.current_stream(self._device).synchronize()
        return batch

    def _columns(self, team: Team, epoch: Epoch, given: int) -> list[Column]:
        stop = min(given + self.whole, epoch.end)
        of_all = None if self._whole else epoch.order(np.arange(given, stop))
        wanted = [] if of_all is None else [of_all[part] for part in epoch.parts(given)]
        mine = wanted[team.rank] if wanted else epoch.mine(given)
        found: list[Any] = []
        for number in epoch.order.spanned(given, stop):
            segment = self.dataset.segment if self._files is None else self._files.get(team, epoch.order, number)
            assert segment is not None
            found += segment.exchange(team, mine, wanted)
        return merged(found)


def _end(comm: Any, team: Team, files: _Files | None, dropped: list[Any]) -> None:
    """Free what a loader has. Nothing is communicated, and a rank that still has to tell others something keeps it,
    in `dropped`, for the next loader."""
    if team.freed:
        return
    if not team.background.worker.idle:
        dropped.append((comm, team))
        return
    if files is not None:
        files.close()
    comm.Free()


class _Files:
    """Memory for two segments of an epoch, into which the ranks read one while the other is in use."""

    def __init__(self, team: Team, data: Dataset, window: int) -> None:
        sizes = np.diff(nbytes(data.described, data.cuts))
        largest = max(1, int(sizes.max()))
        self.window = max(1, window // largest)  # in blocks
        share = -(-min(self.window, len(sizes)) * len(team.topology.local_ranks) // team.size)
        self._bytes = share * largest + ALIGNMENT * len(data.described)
        self._windows = [take(team, self._bytes) for _ in range(2)]
        self._data, self._worker = data, Worker("hpcdist-data")
        self._order: Order | None = None
        self._segments: dict[int, tuple[Segment, Future[None]]] = {}  # the one in use, and the next

    def get(self, team: Team, order: Order, number: int) -> Segment:
        """Return a segment that all ranks have read; then begin to read the next one. Collective, in order."""
        if order is not self._order:  # another epoch: its first segment
            self._worker.stop()  # what the one before was reading
            team.comm.Barrier()
            self._order, self._segments = order, {}
        if number + 1 not in self._segments:
            self._begin(team, number)
            objects.run_on_all(team.comm, VERB, self._segments[number][1].result)
            self._segments.pop(number - 1, None)
            self._begin(team, number + 1)
        return self._segments[number][0]

    def _begin(self, team: Team, number: int) -> None:
        assert self._order is not None
        if number in self._segments:
            return
        blocks = self._order.segments[number] if number < len(self._order.segments) else np.arange(0)
        segment, window = Segment(team, self._data.described, self._data.cuts, blocks, True), self._windows[number % 2]
        segment.attach(window.tensor((self._bytes,), torch.uint8))
        self._segments[number] = segment, self._worker.submit(partial(segment.read, window.bytes, None))

    def close(self) -> None:
        self._worker.stop()
        self._windows.clear()
        self._segments.clear()


def _on(device: torch.device, batch: Any) -> Any:
    """Copy the tensors of a batch to a GPU."""
    if isinstance(batch, Tensor):
        return batch.pin_memory().to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _on(device, value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [_on(device, value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
