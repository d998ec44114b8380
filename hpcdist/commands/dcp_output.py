"""A folder of torch.distributed.checkpoint (DCP): a file of each rank, and ``.metadata``, which comes last."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hpcdist.comm.team import Team
from hpcdist.commands.dcp_metadata import NAME
from hpcdist.control import objects
from hpcdist.errors import FileError, InputError, coded, reason
from hpcdist.files.commit import Commit, check_folder, patiently, sync
from hpcdist.files.h5 import Dataset
from hpcdist.files.raw import Ints

__all__ = ["Folder", "check_output"]

_VERSION = "1.0.0"  # of the format, as torch 2.9 and later write it
_PART = f".{NAME}."  # how the name of the metadata begins until the folder is complete


def check_output(path: str, nbytes: int) -> None:
    """Check that a folder can be made, or is empty, or holds what a job of this command left when it was killed.

    Raises:
        FileError: it cannot, or there is something else in it.
    """
    folder = Path(path)
    if not folder.exists():
        check_folder(Path(os.path.realpath(folder)).parent, nbytes, path)
        return
    if not folder.is_dir():
        raise FileError("HD411", f"{path}: is not a folder")
    names = os.listdir(folder)
    if NAME in names:
        raise FileError("HD512", f"{path}: holds a checkpoint already, which is not replaced")
    if names and not any(name.startswith(_PART) for name in names):
        raise FileError("HD512", f"{path}: is not empty: it holds {min(names)}")
    check_folder(folder, nbytes, path)


class Folder:
    """A folder that the ranks of a team write together, for a ``with`` block. Making one and finish() are collective.

    Until finish(), there is no ``.metadata``, and what is there is no checkpoint. After an exception, the data are
    removed, and the folder, if it was made here.

    Raises:
        RankError: on every rank, if the folder cannot be made.
    """

    def __init__(self, team: Team, verb: str, path: str) -> None:
        self._team, self._verb, self._path = team, verb, Path(path)
        self._commit: Commit | None = None
        self._made = False
        self._file: IO[bytes] | None = None
        self._index: list[tuple[int, int, int, int]] = []  # tensor, piece, first byte, and length
        self._problem: str | None = None
        objects.broadcast(team.comm, verb, self._make)

    def _make(self) -> None:
        try:
            self._made = not self._path.exists()
            self._path.mkdir(exist_ok=True)
            self._commit = Commit(self._path / NAME)
            for left in self._path.glob("__*.distcp"):
                left.unlink()
        except OSError as error:
            raise FileError("HD410", f"{self._path}: cannot be written: {reason(error)}") from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """What this rank writes; a failure is kept until finish(), which reports it to every rank."""
        try:
            yield
            if self._file is not None:
                self._file.close()
                sync(Path(self._file.name))
        except (InputError, FileError) as error:
            self._problem = str(error)
        except Exception as error:  # torch's own
            self._problem = coded("HD410", f"{self._path}: writing failed: {reason(error)}")

    def put(self, i: int, row: int, x: Tensor) -> None:
        """Write a piece of tensor i: a CPU tensor with a storage of its own."""
        if self._file is None:
            if patiently(lambda: None if self._path.is_dir() else "no") is not None:
                raise FileError("HD413", f"{self._path}: not seen by this rank: the folder is not shared by all nodes")
            self._file = (self._path / _name(self._team.rank)).open("wb")
        start = self._file.tell()
        torch.save(x, self._file)
        self._index.append((i, row, start, self._file.tell() - start))

    def finish(self, datasets: Sequence[Dataset]) -> list[str]:
        """Make the folder a checkpoint, complete and on the disk; return its files. Collective.

        Raises:
            RankError: on every rank, if anything failed on one.
        """
        problems = enumerate(objects.all_gather_object(self._team.comm, self._problem))
        objects.raise_problems(self._verb, {rank: text for rank, text in problems if text is not None})
        mine = np.array(self._index, np.int64).reshape(-1, 4)
        found = objects.all_gather_object(self._team.comm, mine, self._verb)
        objects.broadcast(self._team.comm, self._verb, lambda: self._complete(datasets, found))
        return [str(self._path / _name(rank)) for rank, index in enumerate(found) if len(index)]

    def _complete(self, datasets: Sequence[Dataset], found: Sequence[Ints]) -> None:
        assert self._commit is not None
        for rank, index in enumerate(found):
            if len(index):
                size = int(index[-1, 2] + index[-1, 3])
                problem = patiently(lambda: _unseen(self._path / _name(rank), size))  # noqa: B023
                if problem is not None:
                    raise FileError("HD413", f"{self._path}: {problem}: the folder is not shared by all nodes")
        with self._commit.part.open("r+b") as file:
            pickle.dump(_metadata(self._path, datasets, found), file)
        sync(self._path)
        self._commit.finish()
        self._commit = None

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._file is not None:
            self._file.close()
            if error is not None:
                with suppress(OSError):
                    os.unlink(self._file.name)
        if self._commit is not None:
            self._commit.discard()
            for left in self._path.glob("__*.distcp"):
                left.unlink(missing_ok=True)
            if self._made:
                with suppress(OSError):  # something else is in it by now
                    self._path.rmdir()


def _name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _unseen(path: Path, size: int) -> str | None:
    try:
        return None if path.stat().st_size == size else f"{path.name} is not as its rank has written it"
    except FileNotFoundError:
        return f"{path.name} is not seen by rank 0"


def _metadata(path: Path, datasets: Sequence[Dataset], found: Sequence[Ints]) -> Metadata:
    """What torch's FileSystemWriter would write for these tensors, of a state without nesting."""
    entries = {
        d.name: TensorStorageMetadata(TensorProperties(dtype=d.dtype), torch.Size(d.shape), []) for d in datasets
    }
    places: dict[MetadataIndex, _StorageInfo] = {}
    for rank, index in enumerate(found):
        for i, row, start, nbytes in index.tolist():
            name, box = datasets[i].name, datasets[i].pieces[row]
            offset, chunks = torch.Size(box.offset), entries[name].chunks
            places[MetadataIndex(name, offset, len(chunks))] = _StorageInfo(_name(rank), start, nbytes)
            chunks.append(ChunkStorageMetadata(offset, torch.Size(box.shape)))
    paths = {d.name: (d.name,) for d in datasets}
    made = Metadata(dict(entries), paths, places, StorageMeta(checkpoint_id=str(path)))
    if hasattr(made, "version"):
        made.version = _VERSION
    return made
