"""The same file, or folder of files, open on all ranks of a team."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import FileError, coded, listed
from hpcdist.files import raw, safetensors
from hpcdist.files.regular import open_regular
from hpcdist.staging.catalog import Catalog, Stored, describe
from hpcdist.staging.links import not_tensors
from hpcdist.staging.sharded_files import PARTS, check_index, files_of, is_sharded
from hpcdist.staging.wants import Arguments

__all__ = ["Opened", "opened_by_all"]

_NAPS = (0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # seconds between attempts to see the same file on all ranks


@dataclass(frozen=True)
class Opened:
    """What was asked for of one file or several, open on this rank.

    Attributes:
        datasets: the tensors by name, in the order of the files.
        places: by name, path and descriptor of the file that holds the tensor.
        asks: the box and memory that each rank has given.
    """

    datasets: Mapping[str, Stored]
    places: Mapping[str, tuple[str, int]]
    asks: Sequence[Arguments]

    def forget(self) -> None:
        """Drop what this node's cache has of the files, which may be out of date."""
        for fd in {fd for _, fd in self.places.values()}:
            raw.forget(fd)


def _describe(path: str, name: str | None) -> list[Catalog]:
    """List the tensors that `name` refers to, in each file that has some."""
    if is_sharded(path):
        catalogs = _sharded(path)
    else:
        catalogs = [describe(path, name=name)]
        catalogs[0].require(name or "")
    if not any(_is_in(key, name or key) for catalog in catalogs for key in catalog.datasets):
        _check_others(path, name or "")
    if name is None:
        return catalogs
    chosen = [
        replace(catalog, datasets={key: s for key, s in catalog.datasets.items() if _is_in(key, name)})
        for catalog in catalogs
    ]
    chosen = [catalog for catalog in chosen if catalog.datasets]
    if not chosen:
        has = listed(key for catalog in catalogs for key in catalog.datasets)
        raise FileError("HD408", f"{path}: holds no tensor {name!r}; it has: {has}")
    return chosen


def _check_others(path: str, name: str) -> None:
    """Raise a FileError if an HDF5 file holds something of this name, or anything, that is no tensor."""
    others = "" if is_sharded(path) or path.endswith(safetensors.SUFFIX) else not_tensors(path, name)
    if others:
        raise FileError("HD408", f"{path}: holds no tensor{f' {name!r}' if name else ''}, but {others}")


def _is_in(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}/")


def _sharded(path: str) -> list[Catalog]:
    """List the tensors of each .safetensors file of a folder or an index."""
    if os.path.exists(os.path.join(path, ".metadata")):
        raise FileError(
            "HD511",
            f"{path}: a folder of torch's DCP, which dcp.load reads, and python -m hpcdist.gather {path} -o FILE.h5 "
            "makes one file of",
        )
    files, where = files_of(path)
    found, seen = [], dict[str, str]()
    for file in files:
        catalog = describe(file)
        if PARTS in catalog.text:
            raise FileError(
                "HD511",
                f"{file}: holds parts of tensors, of which python -m hpcdist.gather {path} -o FILE.h5 makes wholes",
            )
        mine = {key: s for key, s in catalog.datasets.items() if where is None or where.get(key) == file}
        twice = next((key for key in mine if key in seen), None)
        if twice is not None:
            raise FileError("HD510", f"{file}: {twice} is in another file of the folder, too: {seen[twice]}")
        seen |= dict.fromkeys(mine, file)
        found.append(replace(catalog, datasets=mine))
    check_index(path, where, seen)
    return found


@contextmanager
def opened_by_all(team: Team, verb: str, own: Arguments, path: str, name: str | None) -> Iterator[Opened]:
    """What a file or folder holds of `name`, the same on every rank; a RankError everywhere if a rank cannot open it.

    The box and memory that each rank has given travel with the answer to whether it sees the same. A file may be
    replaced meanwhile, and caches of names may be some seconds out of date: it is opened again then.
    """
    for nap in (*_NAPS, None):
        with ExitStack() as stack:
            fds: list[int] = []
            catalogs = objects.broadcast(team.comm, verb, lambda: _describe(path, name))
            see = partial(_are_same, stack, catalogs, fds, nap is None)
            answers = objects.all_gather(team.comm, verb, lambda: (see(), own.box, own.out, own.direct))  # noqa: B023
            found = [right for right, *_ in answers]
            if all(found):
                asks = [Arguments(box=box, out=out, direct=direct) for _, box, out, direct in answers]
                held = list(zip(catalogs, fds, strict=True))
                yield Opened(
                    {key: stored for catalog in catalogs for key, stored in catalog.datasets.items()},
                    {key: (catalog.path, fd) for catalog, fd in held for key in catalog.datasets},
                    asks,
                )
                return
        if nap is not None:
            time.sleep(nap)
    text = coded("HD413", f"{path}: is another file here than on rank 0: replaced while it was read, or not shared")
    objects.raise_problems(verb, {rank: text for rank, right in enumerate(found) if not right})


def _are_same(stack: ExitStack, catalogs: Sequence[Catalog], fds: list[int], last: bool) -> bool:
    """Open the files on this rank, and check that they are those that rank 0 has described."""
    try:
        for catalog in catalogs:
            fd = stack.enter_context(open_regular(catalog.path))
            fds.append(fd)
            if not catalog.is_in(fd):
                raw.forget(fd)  # the cache may be out of date
                if not catalog.is_in(fd):
                    return False
        return True
    except FileError:
        if last:
            raise
        return False
