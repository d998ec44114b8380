"""Loader: batches of a shuffled epoch on every rank, made ahead of the step where that takes time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from hpcdist import activity
from hpcdist.comm.team import Team
from hpcdist.comm.worker import Worker
from hpcdist.control import objects
from hpcdist.data.dataset import Dataset, take
from hpcdist.data.sampler import Epoch, Order, Sampler
from hpcdist.data.segments import ALIGNMENT, Column, Places, Segment, merged
from hpcdist.errors import RankError, coded, described, refusal
from hpcdist.process import abort
from hpcdist.runtime import world
from hpcdist.runtime.background import Handle, check_threads, prepare, submit
from hpcdist.staging.arguments import agreed, positive
from hpcdist.validation.collective import Call, agree, exchange
from hpcdist.validation.local import ArgumentError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdist.layout.box import Ints

VERB = "data.Loader"
WINDOW = 2**30  # bytes
_RAGGED = ("list", "nested", "padded")


class Loader:
    """Shuffled batches of the samples of a :class:`Dataset`, on every rank: an iterable, as torch's DataLoader.

    Collective over the ranks of `data`, as is each batch: all ranks make the same loop, and have as many batches as
    each other. The order of all samples depends on the data, `seed` and the epoch, not on the number of ranks or nodes:
    of each batch of all ranks, rank 0 gets the first samples. With `keep` "node" and "job" it is one permutation. With
    "file" the blocks of the files come in random order, and the samples of consecutive blocks are shuffled, `window`
    bytes of them. Each block is read once an epoch, while the samples before it are used.

    Batches are made ahead, one at a time, unless all that takes is a copy in the memory of this node. Each node has the
    data once ("node"), its share of them ("job"), or its share of two windows ("file"); and each rank two batches.

    Iterating gives the next epoch each time. :meth:`epoch` gives one by number.

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
        own: dict[str, Any] = {"split_batches": split_batches, "shuffle": shuffle, "drop_last": drop_last, "even": even}
        same = {"batch_size": batch_size, "seed": seed, **own, "ragged": ragged, "window": window}
        if data.team.freed:
            raise refusal(ValueError, "HD419", "the world in which data were opened has ended")

        def check() -> Sampler:
            if ragged not in _RAGGED:
                raise ArgumentError("HD419", f"ragged is {ragged!r}, expected one of {', '.join(_RAGGED)}")
            positive("window", window)
            self._device = torch.device("cpu" if device is None else device)
            return Sampler(data, batch_size, seed, **own, group=data.group)

        with agreed(data.team, VERB, check) as self.sampler:
            objects.same(data.team.comm, VERB, same, same, objects.first_difference)
            self._comm = data.team.comm.Dup()
            self._team = world.team_of(self._comm)
            self.dataset, self.batch_size = data, batch_size
            self._ragged, self._transform = ragged, transform
            self._files = None
            if data.keep == "file":
                self._files = _Files(self._team, data, window)
                self.sampler.blocks(data.cuts, self._files.window)
        self._whole = len(Places.of(self._team, data.keep != "node").nodes) == 1
        lengthy = transform is not None or data.transform is not None or self._device.type != "cpu"
        self._ahead = self._files is not None or not self._whole or lengthy
        self._left: Future[None] | None = None  # the message that this rank has left the loop
        self._running, self._in_loop = 0, False
        self._header: bytes | None = None  # of a batch that is not the first of an epoch
        self._end = weakref.finalize(self, _end, self._comm, self._team, self._files)
        self._end.atexit = False
        if self._team.size > 1:
            check_threads()
            prepare(self._team)
            world.leaving.add(self)

    @property
    def next_epoch(self) -> int:
        """The epoch with which to go on."""
        return self.sampler.next_epoch

    def __len__(self) -> int:
        """The number of batches of a whole epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self._check_open()
        return self._batches(None)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, unless load_state_dict() has left one of which samples are left."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return a few integers, the same on all ranks: how far the batches go that this loader has given."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken: its epoch then gives the samples that are left, to any number of ranks.

        Raises:
            ValueError: the state is of other data, or these are shuffled in another way.
        """
        self.leave()
        self._running += 1
        self.sampler.load_state_dict(state)

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
        sampler, team = self.sampler, self._team
        if self._in_loop and team.size > 1:
            text = f"has left the loop over epoch {sampler.now} after {sampler.given:,} samples of all ranks"

            def tell() -> None:
                with suppress(RankError):  # which all have
                    exchange(team, Call(VERB, problem=coded("HD301", text)))

            self._left = team.background.worker.submit(tell)
        self._in_loop = False

    def _wait_left(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            left.result()

    def _batches(self, chosen: int | None) -> Iterator[Any]:
        self.leave()
        sampler, team, self._running = self.sampler, self._team, self._running + 1
        epoch = sampler.begin(sampler.next_epoch if chosen is None else chosen)
        number, given = self._running, sampler.given
        options: tuple[tuple[str, object], ...] = tuple(sampler.state_dict().items())
        ready: Handle[Any] | None = None
        self._in_loop = given < epoch.end
        try:
            while given < epoch.end:
                self._check_open()
                if number != self._running:
                    text = "this loader has begun another epoch, or loaded a state: its batches before end there"
                    raise refusal(RuntimeError, "HD419", text)
                error: Exception | None = None
                with activity.InCall(VERB, team), abort.InStep(VERB, team.size):
                    self._wait_left()
                    try:
                        if self._ahead:
                            batch = (ready or self._submit(epoch, given)).wait()
                        else:
                            batch = self._make(team, epoch, given)
                    except RankError:  # on all ranks
                        raise
                    except Exception as caught:
                        error = caught
                    problem = None if error is None else described(error, "HD309")
                    self._in_loop = False  # if it is refused, all ranks have left
                    try:
                        self._agree(Call(VERB, options=options, problem=problem) if options or problem else None)
                    except RankError as refused:
                        raise refused from error
                options, ready = (), None
                given = sampler.gave(epoch, given)
                self._in_loop = given < epoch.end
                if self._in_loop and self._ahead:
                    ready = self._submit(epoch, given)
                yield batch
                batch = None
        finally:
            if number == self._running:
                self.leave()

    def _agree(self, call: Call | None) -> None:
        """Wait until all ranks take a batch: a RankError if one does not. Collective; None repeats the call before."""
        team = self._team
        if call is None and self._header is not None:
            if agree(team, self._header, ()) is None:
                exchange(team, Call(VERB), exchanged=True)
            return
        exchange(team, call or Call(VERB))
        self._header = None if call else team.headers.own

    def _submit(self, epoch: Epoch, given: int) -> Handle[Any]:
        return submit(self._team, VERB, partial(self._make, epoch=epoch, given=given))

    def _make(self, team: Team, epoch: Epoch, given: int) -> Any:
        """Make the batch that begins after `given` samples. Collective, if it is not in this node's memory."""
        if self._whole and self.dataset.segment is not None:
            columns = self.dataset.segment.columns(epoch.mine(given)[1])
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
        stop = min(given + epoch.batch_size, epoch.end)
        parts = [] if self._whole else epoch.parts(given)
        which, inside = epoch.mine(given) if self._whole else epoch.order(np.arange(given, stop))
        own = which if self._whole else which[parts[team.rank]]
        found: list[tuple[Ints, list[Column]]] = []
        for number in epoch.order.spanned(given, stop):
            segment = self._segment(team, epoch.order, number)
            if self._whole:
                columns = segment.columns(inside[own == number])
            else:
                with abort.InTransfer(VERB, team.size):
                    columns = segment.exchange(team, inside, [part[which[part] == number] for part in parts])
            found.append((np.flatnonzero(own == number), columns))
        return merged(found)

    def _segment(self, team: Team, order: Order, number: int) -> Segment:
        if self._files is not None:
            return self._files.get(team, order, number)
        assert self.dataset.segment is not None
        return self.dataset.segment


def _end(comm: MPI.Intracomm, team: Team, files: _Files | None) -> None:
    """Free what a loader has. Nothing is communicated, and a rank that still has to tell others something keeps it."""
    if not team.freed and team.background.worker.idle:
        if files is not None:
            files.close()
        comm.Free()


class _Files:
    """Two windows of memory, into which the ranks read the segments of an epoch, one ahead of the one in use."""

    def __init__(self, team: Team, data: Dataset, window: int) -> None:
        self._data, self._places = data, Places.of(team, spread=True)
        sizes = np.array([np.diff(field.rows(data.cuts)) * field.row for field in data.described]).sum(0)
        largest = max(1, int(sizes.max(initial=0)))
        self.window = max(1, window // largest)  # in blocks
        start, stop = self._places.ends[self._places.node : self._places.node + 2]
        most = min(self.window, len(sizes))  # blocks of a segment
        share = min(most, -(-most * (stop - start) // team.size))
        nbytes = share * largest + ALIGNMENT * len(data.described)
        self._windows = [take(team, nbytes) for _ in range(2)]
        self._memory = [window.tensor((nbytes,), torch.uint8) for window in self._windows]
        self._worker = Worker("hpcdist-data")
        self._order: Order | None = None
        self._segments: dict[int, tuple[Segment, Future[None]]] = {}
        self._read: set[int] = set()

    def get(self, team: Team, order: Order, number: int) -> Segment:
        """Return a segment that all ranks have read; then begin to read the next one. Collective, in order."""
        if order is not self._order:  # another epoch: its first segment
            self._worker.stop()  # what the one before was reading
            objects.run_on_all(team.comm, VERB, lambda: None)
            self._order, self._segments = order, {}
            self._read.clear()
        if number not in self._read:
            self._begin(number)
            objects.run_on_all(team.comm, VERB, self._segments[number][1].result)
            self._read.add(number)
            self._segments.pop(number - 1, None)
            self._begin(number + 1)
        return self._segments[number][0].attach(self._memory[number % 2])

    def _begin(self, number: int) -> None:
        assert self._order is not None
        if number in self._segments or number >= len(self._order.segments):
            return
        segment = Segment(self._data.described, self._data.cuts, self._order.segments[number], self._places)
        read = partial(segment.read, self._windows[number % 2].bytes, None)
        self._segments[number] = segment, self._worker.submit(read)

    def close(self) -> None:
        self._worker.stop()
        self._windows.clear()
        self._memory.clear()


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
