"""The same file, open on all ranks of a team."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from hpcdist.comm.team import Team
from hpcdist.control import objects
from hpcdist.errors import FileError, listed
from hpcdist.files import raw
from hpcdist.files.regular import open_regular
from hpcdist.staging.catalog import Catalog, describe
from hpcdist.staging.wants import Arguments

__all__ = ["opened_by_all"]

_NAPS = (0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # seconds between attempts to see the same file on all ranks


def _describe(path: str, name: str | None) -> Catalog:
    """List the tensors of a file that `name` refers to."""
    catalog = describe(path, name=name)
    catalog.require(name or "")
    if name is None:
        return catalog
    chosen = {key: s for key, s in catalog.datasets.items() if key == name or key.startswith(f"{name}/")}
    if not chosen:
        raise FileError(f"{path}: holds no tensor {name!r}; it has: {listed(catalog.datasets)}")
    return replace(catalog, datasets=chosen)


@contextmanager
def opened_by_all(
    team: Team, verb: str, own: Arguments, path: str, name: str | None
) -> Iterator[tuple[Catalog, int, list[Arguments]]]:
    """What the file holds, the same file open on every rank, and the box and memory that each rank has given, which
    travel with the answer to whether it is the same; a RankError everywhere if a rank cannot open it.

    A file may be replaced meanwhile, and caches of names may be some seconds out of date: it is opened again then.
    """
    for nap in (*_NAPS, None):
        with ExitStack() as stack:
            fds: list[int] = []
            catalog = objects.broadcast(team.comm, verb, lambda: _describe(path, name))
            see = partial(_is_same, stack, catalog, fds, nap is None)
            answers = objects.all_gather(team.comm, verb, lambda: (see(), own.box, own.out, own.direct))  # noqa: B023
            found = [right for right, *_ in answers]
            if all(found):
                yield catalog, fds[0], [Arguments(box=box, out=out, direct=direct) for _, box, out, direct in answers]
                return
        if nap is not None:
            time.sleep(nap)
    text = f"{path}: is another file here than on rank 0: replaced while it was read, or not shared"
    objects.raise_problems(verb, {rank: text for rank, right in enumerate(found) if not right})


def _is_same(stack: ExitStack, catalog: Catalog, fds: list[int], last: bool) -> bool:
    """Open the file on this rank, and check that it is the one that rank 0 has described."""
    try:
        fds.append(stack.enter_context(open_regular(catalog.path)))
        if catalog.is_in(fds[0]):
            return True
        raw.forget(fds[0])  # the cache may be out of date
        return catalog.is_in(fds[0])
    except FileError:
        if last:
            raise
        return False
