"""open(): samples of files, in the memory of the nodes or in the files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.activity.procstat import address, opened
from hpcdist.comm.node_memory import SharedBlock, Window
from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.data.fields import Field, cuts, describe_file, joined, names_of, paths_of
from hpcdist.data.segments import Column, Places, Segment
from hpcdist.errors import coded, refusal
from hpcdist.layout.box import Ints
from hpcdist.process import machine
from hpcdist.runtime import world
from hpcdist.runtime.cli import meter, say
from hpcdist.staging.arguments import agreed
from hpcdist.staging.save import wait_for
from hpcdist.validation.local import ArgumentError

if TYPE_CHECKING:
    from hpcdist.comm.team import GroupLike

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

    with agreed(team, VERB, check) as mine:
        objects.same(team.comm, VERB, mine, mine, objects.first_difference)
        found = _described(team, mine["files"], mine["fields"])
        offsets = _offsets(team, found)
        single = mine["single"] or [field.name for field in found] == [""]
        return Dataset(team, group, found, offsets, keep, single, transform)


def _described(team: Team, files: Sequence[str], names: Any) -> list[Field]:
    """The fields of all files, each of which one rank has described. Collective."""
    paths = objects.run_on_root(team.comm, VERB, lambda: paths_of(files))
    for path in paths:
        wait_for(path)
    if names is None:
        _, first = objects.run_on_root(team.comm, VERB, lambda: describe_file(paths[0], None))
        names = [(part.values.name, None) for part in first]
    mine = range(team.rank, len(paths), team.size)
    shares = objects.run_on_all(team.comm, VERB, lambda: [describe_file(paths[i], names) for i in mine])
    described = [shares[i % team.size][i // team.size] for i in range(len(paths))]
    fields: list[list[Field]] = []
    objects.run_on_all(team.comm, VERB, lambda: fields.append(joined(described)))
    return fields[0]


def take(team: Team, nbytes: int) -> Window:
    """Take memory that the ranks of this node share. Collective; a RankError without."""
    window = team.windows.take(nbytes)
    if window is None:
        text = coded("HD310", f"no memory of {nbytes:,} bytes that a node's ranks share: {team.windows.reason}")
        objects.raise_problems(VERB, dict.fromkeys(range(team.size), text))
    assert window is not None
    return window


def _offsets(team: Team, fields: Sequence[Field]) -> Window | None:
    """Give fields whose samples differ in length their offsets, one copy per node. Collective."""
    ragged, n = [field for field in fields if field.ragged], int(fields[0].begins[-1])
    if not ragged:
        return None
    window, places = take(team, 8 * (n + 1) * len(ragged)), Places.of(team, spread=False)
    written = window.target((len(ragged), n + 1), torch.int64).numpy()

    def read() -> None:
        for field, lengths in zip(ragged, written, strict=True):
            lengths[0] = 0
            field.read_lengths(lengths, places.rank, len(places.nodes[0]))

    objects.run_on_all(team.comm, VERB, read)
    if places.rank == 0:
        np.cumsum(written, axis=1, out=written)
    objects.run_on_all(team.comm, VERB, lambda: None)
    for field, offsets in zip(ragged, window.tensor((len(ragged), n + 1), torch.int64).numpy(), strict=True):
        field.offsets = offsets
    return window


class Dataset(torch.utils.data.Dataset[Any]):
    """The samples of files. Made by :func:`open`.

    ``data[i]`` is a sample, ``data[[i, j]]`` and ``data[i:j]`` several: in each field one tensor, or a list of tensors
    that differ in length. Nothing is communicated, so that processes of torch's DataLoader may take samples, forked or
    spawned. With `keep` "file" they read them from the file.

    Attributes:
        keep: where the data are: "node", "job" or "file".
        fields: names of its fields.
    """

    def __init__(
        self,
        team: Team,
        group: GroupLike | None,
        fields: list[Field],
        offsets: Window | None,
        keep: str | None,
        single: bool,
        transform: Callable[[Any], Any] | None,
    ) -> None:
        self.team, self.group, self.described = team, group, fields
        self.single, self.transform = single, transform
        self.fields = [field.name for field in fields]
        self._n = int(fields[0].begins[-1])
        nbytes = int(sum(field.rows(np.array([self._n]))[0] * field.row for field in fields))
        self.keep = keep or self._fitting(nbytes)
        self.segment: Segment | None = None
        self._windows = [offsets]
        if self.keep == "file":
            self.cuts = cuts(fields, max(1, -(-nbytes // BLOCK)), _COARSEST)
            return
        places = Places.of(team, spread=self.keep == "job")
        self.cuts = cuts(fields, places.ends[-1], np.inf)
        segment = Segment(fields, self.cuts, np.arange(len(self.cuts) - 1), places)
        window = take(team, segment.nbytes)
        with meter(world.current(), "reading", nbytes // places.ends[-1]) as bar:
            objects.run_on_all(team.comm, VERB, lambda: segment.read(window.bytes, True, bar.update))
        window.block.map_pages()
        self.segment = segment.attach(window.tensor((segment.nbytes,), torch.uint8))
        self._windows.append(window)

    def _fitting(self, nbytes: int) -> str:
        """Choose where the data are, by the memory of all nodes. Collective."""
        free = min(objects.all_gather_object(self.team.comm, machine.available(), VERB))
        nodes = len(self.team.topology.nodes)
        keep = next((k for k, n in (("node", nbytes), ("job", -(-nbytes // nodes))) if n <= _SHARE * free), "file")
        files = len(self.described[0].files)
        say(
            self.team.rank,
            f"data.open: {self._n:,} samples, {nbytes:,} bytes in {files:,} file{'s' * (files > 1)}: keep={keep!r}",
        )
        return keep

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return self[range(*which.indices(self._n))]
        several = isinstance(which, (list, tuple, range, np.ndarray)) or (isinstance(which, Tensor) and which.dim())
        given = np.asarray(which if several else [index(which)])
        if given.size and given.dtype.kind not in "iu":
            raise refusal(TypeError, "HD419", f"samples are chosen by integers, got {given.dtype}")
        wanted = given.astype(np.int64)
        if ((wanted < -self._n) | (wanted >= self._n)).any():  # the end, where Python's own iteration looks for it
            raise refusal(IndexError, "HD419", f"sample {which} of {self._n:,}")
        columns = self._columns(wanted % max(1, self._n))
        return self.batch(columns, "list") if several else self.samples(columns)[0]

    def _columns(self, wanted: Ints) -> list[Column]:
        if self.segment is not None and self.segment.whole:
            return self.segment.columns(wanted)
        if self.segment is not None:
            text = "with keep='job' on several nodes samples are not on all of them: use a Loader, or keep='node'"
            raise refusal(ValueError, "HD419", text)
        found = []
        for field in self.described:
            bounds = [field.rows(np.array([i, i + 1])).tolist() for i in wanted.tolist()]
            rows = torch.empty(sum(b - a for a, b in bounds), field.row, dtype=torch.uint8, device="cpu")
            at = 0
            for i, (a, b) in zip(wanted.tolist(), bounds, strict=True):
                field.read(i, i + 1, rows[at : at + b - a].view(-1), None)
                at += b - a
            found.append(Column(field, rows, np.array([b - a for a, b in bounds]) if field.ragged else None))
        return found

    def samples(self, columns: Sequence[Column]) -> list[Any]:
        """Return these samples one by one, each transformed."""
        found = list(zip(*(column.samples() for column in columns), strict=True))
        given = [sample[0] for sample in found] if self.single else found
        return given if self.transform is None else list(map(self.transform, given))

    def batch(self, columns: Sequence[Column], ragged: str) -> Any:
        """Return these samples as one batch."""
        if self.transform is not None:
            samples = self.samples(columns)
            return torch.utils.data.default_collate(samples) if samples else []
        tensors = tuple(_together(column, ragged) for column in columns)
        return tensors[0] if self.single else tensors

    def __getstate__(self) -> dict[str, Any]:
        """For a process that this rank has spawned, which opens the same memory."""
        windows = [window and (window.block.nbytes, address(window.block.fd)) for window in self._windows]
        fields = [(field.name, field.files, field.begins) for field in self.described]
        own = {name: getattr(self, name) for name in ("fields", "single", "transform", "keep", "cuts", "_n")}
        return own | {"described": fields, "windows": windows, "whole": self.segment is None or self.segment.whole}

    def __setstate__(self, state: dict[str, Any]) -> None:
        blocks = [given and SharedBlock(given[0], opened(given[1])) for given in state.pop("windows")]
        self.described = [Field(*given) for given in state.pop("described")]
        whole = state.pop("whole")
        self.__dict__.update(state, team=None, segment=None, _windows=blocks)
        if blocks[0]:
            ragged = [field for field in self.described if field.ragged]
            held = blocks[0].shared()[: 8 * len(ragged) * (self._n + 1)].view(torch.int64).view(len(ragged), -1)
            for field, offsets in zip(ragged, held.numpy(), strict=True):
                field.offsets = offsets
        if len(blocks) > 1 and whole:
            places = Places([range(len(self.cuts) - 1)], 0, 0)
            self.segment = Segment(self.described, self.cuts, np.arange(len(self.cuts) - 1), places)
            self.segment.attach(blocks[1].shared())


def _together(column: Column, ragged: str) -> Any:
    if column.lengths is None:
        return column.tensor()
    if ragged == "list":
        return column.samples()
    if ragged == "padded":
        samples = column.samples()
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True) if samples else column.tensor()
    ends = torch.from_numpy(np.concatenate([[0], np.cumsum(column.lengths)]))
    return torch.nested.nested_tensor_from_jagged(column.tensor(), ends)
