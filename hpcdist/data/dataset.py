"""open(): samples of files, in the memory of the nodes or in the files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.activity.procstat import address, opened
from hpcdist.comm.node_memory import SharedBlock, Window
from hpcdist.comm.team import GroupLike, Team
from hpcdist.control import objects
from hpcdist.data.fields import Column, Field, cuts, describe_file, joined, names_of, nbytes, paths_of
from hpcdist.data.segments import Segment
from hpcdist.errors import RankError, coded, refusal
from hpcdist.layout.box import Ints, summed
from hpcdist.process import machine
from hpcdist.runtime import world
from hpcdist.runtime.cli import meter, say
from hpcdist.staging.arguments import agreed
from hpcdist.staging.save import wait_for
from hpcdist.validation.local import ArgumentError

VERB = "data.open"
BLOCK = 2**22  # bytes of a file that are read at once with keep="file"
_COARSEST = 2**24  # bytes of a piece with a checksum at which such a block ends
_KEEPS = ("node", "job", "file")
_SHARE = 0.5  # of a node's free memory, which the data take by default


def open(
    files: Any,
    fields: str | Sequence[str | tuple[str, str]] | None = None,
    keep: str | None = None,
    *,
    transform: Callable[[Any], Any] | None = None,
    group: GroupLike | None = None,
) -> Dataset:
    """Open the samples of files, for a :class:`Loader`, or for torch's own DataLoader.

    Collective over `group`. Waits for saves in flight to these files. One rank opens and describes each file. With
    `keep` "node" or "job" the ranks then read all data, each a share, and compare the checksums of hpcdist's files.
    Data that are read with "file" are compared only where a piece with a checksum has at most 16 MiB.

    Args:
        files: a file of any format that :func:`hpcdist.staging.load` reads, a pattern such as "train-*.h5", a folder
            of files, or a list of these. Their samples follow each other in this order. Must agree.
        fields: names of tensors whose rows are the samples, by default all of the first file. A field whose samples
            differ in length is a pair of names: of the rows of all samples, and of their offsets, from 0 to the number
            of rows, one more than there are samples. Or it is a dataset of HDF5's variable length, which each node
            reads twice. Fields must have as many samples as each other in each file, and in all files the same dtype
            and shape of a row.
            Must agree.
        keep: where the data are. "node": a copy in the shared memory of each node; "job": one copy, in that of all
            nodes; "file": in the files, of which a Loader keeps two windows in memory. By default the first that takes
            no more than half of the free memory of any node; rank 0 prints which. Must agree.
        transform: called with each sample, in a thread of the Loader; returns what takes its place. It must not call
            hpcdist. Of no samples, as `even` "short" may give to a rank, the batch is an empty list.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None for all ranks.

    Returns:
        A :class:`Dataset`. Its samples are tuples of tensors in the order of `fields`, or tensors, if `fields` is one
        name.

    Raises:
        RankError: on every rank, if a file or a field does not exist, is damaged or has another number of samples,
            dtype or shape, or the data do not fit in memory. The job can continue.

    Example::

        >>> data = hd.data.open("train-*.h5", fields=["x", "y"])
        >>> x, y = data[0]
        >>> x, y = data[[3, 5]]                      # x has one dimension more, of extent 2
    """
    team = world.team_of(group)

    def check() -> dict[str, Any]:
        given = [os.fsdecode(file) for file in ([files] if isinstance(files, (str, os.PathLike)) else files)]
        if keep not in (None, *_KEEPS):
            raise ArgumentError("HD419", f"keep is {keep!r}, expected one of {', '.join(_KEEPS)}")
        return {"files": given, "fields": names_of(fields), "keep": keep, "single": isinstance(fields, str)}

    with agreed(team, VERB, check, dict.items) as mine:
        found = _described(team, mine["files"], mine["fields"])
        single = mine["single"] or [field.name for field in found] == [""]
        return Dataset(team, group, found, keep, single, transform)


def _described(team: Team, files: Sequence[str], names: Any) -> list[Field]:
    """The fields of all files, each of which one rank has described. Collective."""
    comm = team.comm
    paths = objects.run_on_root(comm, VERB, lambda: paths_of(files))
    for path in paths:
        wait_for(path)
    if names is None:
        _, first = objects.run_on_root(comm, VERB, lambda: describe_file(paths[0], None))
        names = [(part.values.name, None) for part in first]
    shares = objects.run_on_all(comm, VERB, lambda: [describe_file(p, names) for p in paths[team.rank :: team.size]])
    described = [shares[i % team.size][i // team.size] for i in range(len(paths))]
    return objects.run_on_root(comm, VERB, lambda: joined(described))


def take(team: Team, nbytes: int) -> Window:
    """Take memory that the ranks of this node share. Collective; a RankError without."""
    if (window := team.windows.take(nbytes)) is None:
        text = coded("HD310", f"no memory of {nbytes:,} bytes that a node's ranks share: {team.windows.reason}")
        raise RankError(VERB, dict.fromkeys(range(team.size), text))
    return window


class Dataset(torch.utils.data.Dataset[Any]):
    """The samples of files. Made by :func:`open`.

    ``data[i]`` is a sample, ``data[[i, j]]`` and ``data[i:j]`` several: in each field one tensor, or a list of tensors
    that differ in length. Nothing is communicated, so that processes of torch's DataLoader may take samples, forked or
    spawned. With `keep` "file" they read them from the file.

    Attributes:
        keep: where the data are: "node", "job" or "file".
        fields: names of its fields.
        dropped: what loaders have that were dropped in a loop.
    """

    def __init__(
        self,
        team: Team,
        group: GroupLike | None,
        fields: list[Field],
        keep: str | None,
        single: bool,
        transform: Callable[[Any], Any] | None,
    ) -> None:
        self.team: Team | None = team
        self.group, self.described, self.single, self.transform = group, fields, single, transform
        self.fields = [field.name for field in fields]
        self._n = int(fields[0].begins[-1])
        self.segment: Segment | None = None
        self._windows: list[Any] = [self._offsets(team)]
        self.dropped: list[Any] = []
        total = int(nbytes(fields, fields[0].begins[-1:])[0])
        self.keep = keep or self._fitting(team, total)
        if self.keep == "file":
            self.cuts = cuts(fields, max(1, -(-total // BLOCK)), _COARSEST)
            return
        ranks = team.size if self.keep == "job" else len(team.topology.local_ranks)
        self.cuts = cuts(fields, ranks, np.inf)
        self.segment = segment = Segment(team, fields, self.cuts, np.arange(len(self.cuts) - 1), self.keep == "job")
        window = take(team, segment.nbytes)
        with meter(world.current(), "reading", total // ranks) as bar:
            objects.run_on_all(team.comm, VERB, lambda: segment.read(window.bytes, True, bar.update))
        window.block.map_pages()
        segment.attach(window.tensor((segment.nbytes,), torch.uint8))
        self._windows.append(window)

    def _offsets(self, team: Team) -> Window | None:
        """Give fields whose samples differ in length their offsets, one copy per node. Collective."""
        ragged = [field for field in self.described if field.ragged]
        if not ragged:
            return None
        window, here = take(team, 8 * (self._n + 1) * len(ragged)), team.topology
        written = window.target((len(ragged), self._n + 1), torch.int64).numpy()

        def read() -> None:
            for field, lengths in zip(ragged, written, strict=True):
                lengths[0] = 0
                field.read_lengths(lengths, here.local_rank, len(here.local_ranks))

        objects.run_on_all(team.comm, VERB, read)
        if here.local_rank == 0:
            np.cumsum(written, axis=1, out=written)
        here.comm.Barrier()
        self._attach(window.tensor((written.size,), torch.int64))
        return window

    def _attach(self, offsets: Tensor) -> None:
        ragged = [field for field in self.described if field.ragged]
        for field, own in zip(
            ragged, offsets[: len(ragged) * (self._n + 1)].view(len(ragged), -1).numpy(), strict=True
        ):
            field.offsets = own

    def _fitting(self, team: Team, nbytes: int) -> str:
        """Choose where the data are, by the memory of all nodes. Collective."""
        free = min(objects.all_gather_object(team.comm, machine.available(), VERB))
        nodes = len(team.topology.nodes)
        keep = next((k for k, n in (("node", nbytes), ("job", -(-nbytes // nodes))) if n <= _SHARE * free), "file")
        files = len(self.described[0].files)
        where = f"in {files:,} file{'s' * (files > 1)}: keep={keep!r}"
        say(team.rank, f"data.open: {self._n:,} samples, {nbytes:,} bytes {where}")
        return keep

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return self[range(*which.indices(self._n))]
        given = np.asarray(which)
        if given.ndim > 1 or (given.size and given.dtype.kind not in "iu"):
            raise refusal(TypeError, "HD419", f"samples are chosen by integers, got {given.ndim}-d {given.dtype}")
        wanted = np.atleast_1d(given).astype(np.int64)
        if ((wanted < -self._n) | (wanted >= self._n)).any():  # the end, where Python's own iteration looks for it
            raise refusal(IndexError, "HD419", f"sample {which} of {self._n:,}")
        columns = self._columns(wanted % max(1, self._n))
        return self.batch(columns, "list") if given.ndim else self.samples(columns)[0]

    def _columns(self, wanted: Ints) -> list[Column]:
        if self.segment is not None:
            if not self.segment.whole:
                text = "with keep='job' on several nodes samples are not on all of them: use a Loader, or keep='node'"
                raise refusal(ValueError, "HD419", text)
            return self.segment.columns(wanted)
        found = []
        for field in self.described:
            sizes = (field.counts(wanted) * field.row).tolist()
            data = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
            for i, part in zip(wanted.tolist(), torch.split_with_sizes(data, sizes), strict=True):
                field.read(i, i + 1, part, None)
            found.append(field.column(data, wanted))
        return found

    def samples(self, columns: Sequence[Column]) -> list[Any]:
        """Return these samples one by one, each transformed."""
        given = list(columns[0] if self.single else zip(*columns, strict=True))
        return given if self.transform is None else list(map(self.transform, given))

    def batch(self, columns: Sequence[Column], ragged: str) -> Any:
        """Return these samples as one batch."""
        if self.transform is not None:
            samples = self.samples(columns)
            return torch.utils.data.default_collate(samples) if samples else []
        parts = zip(self.described, columns, strict=True)
        tensors = tuple(x if isinstance(x, Tensor) else _together(field, x, ragged) for field, x in parts)
        return tensors[0] if self.single else tensors

    def __getstate__(self) -> dict[str, Any]:
        """For a process that this rank has spawned, which opens the same memory."""
        windows = [window and (window.block.nbytes, address(window.block.fd)) for window in self._windows]
        return {**self.__dict__, "team": None, "group": None, "_windows": windows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        offsets, *memory = (given and SharedBlock(given[0], opened(given[1])).shared() for given in self._windows)
        if offsets is not None:
            self._attach(offsets.view(torch.int64))
        if self.segment is not None:
            self.segment.attach(*memory)


def _together(field: Field, samples: list[Tensor], ragged: str) -> Any:
    if ragged == "list":
        return samples
    if ragged == "padded" and samples:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    rows = torch.cat([torch.empty(0, *field.shape, dtype=field.dtype, device="cpu"), *samples])
    if ragged == "padded":
        return rows
    return torch.nested.nested_tensor_from_jagged(rows, torch.from_numpy(summed(list(map(len, samples)))))
