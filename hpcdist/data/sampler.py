"""Which sample comes when, and which rank gets it: from integers alone, the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from functools import lru_cache
from itertools import pairwise
from operator import index
from typing import Any, Literal

import numpy as np
import torch

from hpcdist.comm.team import GroupLike
from hpcdist.errors import refusal
from hpcdist.layout.box import Ints, summed
from hpcdist.layout.permutation import Permutation
from hpcdist.runtime import world

_AT_ONCE = 2**14  # positions that are computed at once


def integer(name: str, value: Any) -> int:
    """An argument as an integer."""
    try:
        return index(value)
    except TypeError:
        raise refusal(TypeError, "HD419", f"{name} is {value!r}, expected an integer") from None


class Order:
    """The order of the samples in an epoch.

    Blocks of samples come in random order; the samples of `window` consecutive ones, a segment, are shuffled.

    Args:
        cuts: the first sample of each block, and the end.
        window: blocks of a segment; None for all, in their own order.
        key: seed and epoch; None for no shuffling.
    """

    def __init__(self, cuts: Ints, window: int | None, key: tuple[int, int] | None) -> None:
        count = len(cuts) - 1
        self._blocks = np.arange(count)
        if key is not None and window is not None:
            self._blocks = Permutation(count, (*key, -1))(self._blocks)
        starts = range(0, count, window or count)
        self.segments = [self._blocks[i : i + (window or count)] for i in starts]
        self._cuts, self._begins = cuts, summed(np.diff(cuts)[self._blocks])  # positions, before they are shuffled
        self._first = first = self._begins[[*starts, count]]
        self._shuffle = None  # of a segment; those of a batch are kept
        if key is not None:
            self._shuffle = lru_cache(2)(lambda n: Permutation(int(first[n + 1] - first[n]), (*key, n)))

    def __call__(self, positions: Ints) -> Ints:
        """Return the samples at these positions of the epoch."""
        if self._shuffle is not None:
            segment, given = self._first.searchsorted(positions, "right") - 1, positions
            positions = np.empty_like(given)
            for number in np.unique(segment).tolist():
                here, first = segment == number, self._first[number]
                positions[here] = first + self._shuffle(number)(given[here] - first)
        block = self._begins.searchsorted(positions, "right") - 1
        samples: Ints = self._cuts[self._blocks[block]] + positions - self._begins[block]
        return samples

    def spanned(self, start: int, stop: int) -> range:
        """Return the segments of these positions."""
        first, last = self._first.searchsorted([start, stop - 1], "right") - 1
        return range(int(first), int(last) + 1)


class Epoch:
    """The batches of one epoch, from the sample after `begun` others on.

    Args:
        whole: samples of a batch of all ranks.
        pad: see `even` of :class:`Sampler`.

    Attributes:
        end: the samples of all ranks' batches, and those before.
    """

    def __init__(self, order: Order, rank: int, size: int, whole: int, begun: int, end: int, pad: bool) -> None:
        self.order, self.end, self._begun, self._pad = order, end, begun, pad
        self._rank, self._size, self._whole = rank, size, whole
        self._own = whole * rank // size, whole * (rank + 1) // size
        self._rows = max(1, _AT_ONCE * size // whole)
        self._several = lru_cache(1)(self._compute)

    def parts(self, given: int) -> list[Ints]:
        """Return for each rank which samples it gets of those of the batch that begins after `given` ones."""
        count = min(self._whole, self.end - given)
        ends = (self._whole if self._pad else count) * np.arange(self._size + 1) // self._size
        return [np.arange(a, b) % count for a, b in pairwise(ends.tolist())]

    def mine(self, given: int) -> Ints:
        """Return this rank's samples of a batch."""
        if given + self._whole > self.end:
            return self.order(given + self.parts(given)[self._rank])
        number, row = divmod((given - self._begun) // self._whole, self._rows)
        samples: Ints = self._several(number)[row]
        return samples

    def _compute(self, number: int) -> Ints:
        """The samples of several batches of this rank at once, a row for each."""
        begin, step = self._begun + self._whole * self._rows * number, self._whole
        first = np.arange(begin, min(begin + step * self._rows, self.end), step)[:, None]
        return self.order(np.minimum(first + np.arange(*self._own), self.end - 1))


class Sampler(torch.utils.data.Sampler[list[int]]):
    """Batches of indices for this rank, of one shuffle of all ranks: the ``batch_sampler=`` of torch's DataLoader.

    Nothing is communicated. Every rank has the same number of batches, and the order of all samples depends on `seed`
    and the epoch alone, not on the number of ranks. An epoch that is iterated is followed by the next one, unless
    :meth:`set_epoch` chooses another.

    Attributes:
        batch_size: samples of a batch of this rank; `whole`: of all ranks.
        next_epoch: the epoch with which to go on.

    Args:
        data: a data set with a length, or the number of samples.
        batch_size: samples of a batch: of each rank, or with `split_batches` of all ranks.
        seed: integer that chooses the shuffle.
        split_batches: whether `batch_size` is that of all ranks, which share it by the block rule.
        shuffle: whether to shuffle.
        drop_last: whether to leave out the samples after the last full batch of all ranks.
        even: without `drop_last`, what the ranks get of the last batch: "pad": full batches, in which samples of that
            batch occur again; "short": its samples once, by the block rule, so that a rank may get none.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None for all ranks.

    Raises:
        TypeError, ValueError: an argument is wrong.

    Example, on 2 ranks::

        >>> sampler = hd.data.Sampler(5, batch_size=1, shuffle=False)
        >>> list(sampler)
        [[0], [2], [4]]                              # on rank 0; [[1], [3], [4]] on rank 1
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int,
        seed: int = 0,
        *,
        split_batches: bool = False,
        shuffle: bool = True,
        drop_last: bool = False,
        even: Literal["pad", "short"] = "pad",
        group: GroupLike | None = None,
    ) -> None:
        team = world.team_of(group)
        self.rank, self.size = team.rank, team.size
        self.samples = len(data) if hasattr(data, "__len__") else integer("data", data)
        self.seed, self.shuffle, self.drop_last, self.even = integer("seed", seed), bool(shuffle), drop_last, even
        size = integer("batch_size", batch_size) * (1 if split_batches else self.size)
        if size < 1 or self.samples < 0 or (split_batches and size < self.size):
            what = f"batch_size is {batch_size} for {self.samples:,} samples on {self.size} ranks"
            raise refusal(ValueError, "HD419", f"{what}, expected at least one sample a rank")
        if even not in ("pad", "short"):
            raise refusal(ValueError, "HD419", f"even is {even!r}, expected 'pad' or 'short'")
        self.whole = size
        self.batch_size = size * (self.rank + 1) // self.size - size * self.rank // self.size
        self.window: int | None = None  # blocks: see Order
        self.cuts = np.array([0, self.samples])
        self.next_epoch = self.now = self.given = 0
        self._loaded = False  # and no epoch begun since
        self._rest: dict[int, int] = {}  # by epoch, the samples given before load_state_dict()

    def __len__(self) -> int:
        """The number of batches of a whole epoch, on each rank."""
        return (self.samples if self.drop_last else self.samples + self.whole - 1) // self.whole

    def begin(self, epoch: int) -> Epoch:
        """Begin an epoch: from its first sample, or after load_state_dict() from the next one."""
        self.now, self.next_epoch, self._loaded = epoch, epoch + 1, False
        self.given = self._rest.get(epoch, 0)
        order = Order(self.cuts, self.window, (self.seed, epoch) if self.shuffle else None)
        end = self.samples - (self.samples - self.given) % self.whole if self.drop_last else self.samples
        return Epoch(order, self.rank, self.size, self.whole, self.given, end, self.even == "pad")

    def gave(self, epoch: Epoch, given: int) -> int:
        """Note that the batch after these samples is given; return the samples that are given now."""
        given = min(given + self.whole, epoch.end)
        self.given = given if given < epoch.end else self.samples  # also what drop_last leaves out
        if given == epoch.end:
            self._rest.pop(self.now, None)
        return given

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, unless load_state_dict() has left one of which samples are left.

        Lightning calls this with the number after an epoch that `max_steps` has cut.
        """
        if not self._loaded:
            self.next_epoch = index(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return integers by which another job, also of another number of ranks, goes on after this batch."""
        window = self.window or 0
        return {
            "seed": self.seed, "epoch": self.now, "given": self.given, "samples": self.samples,
            "shuffle": int(self.shuffle), "window": window, "blocks": len(self.cuts) - 1 if window else 0,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken: its epoch then gives the samples that are left.

        Raises:
            ValueError: the state is of other data, or these are shuffled in another way.
        """
        own, free = self.state_dict(), ("seed", "epoch", "given")
        odd = next((n for n in own if state.get(n) is None or (n not in free and state[n] != own[n])), None)
        if odd is not None:
            what = f"the state has {odd} {state.get(odd)!r}, where this loader has {own[odd]!r}"
            more = "; give keep= and window= as when it was taken" if odd in ("window", "blocks") else ""
            raise refusal(ValueError, "HD419", what + more)
        if not 0 <= index(state["given"]) <= self.samples:
            raise refusal(ValueError, "HD419", f"the state has given {state['given']}, of {self.samples:,} samples")
        self.seed, self.now, self.given = (index(state[name]) for name in free)
        self._rest, self._loaded = {self.now: self.given}, self.given < self.samples
        self.next_epoch = self.now + (self.given >= self.samples)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, given = self.begin(self.next_epoch), self.given
        while given < epoch.end:
            samples = epoch.mine(given)
            given = self.gave(epoch, given)
            yield samples.tolist()
