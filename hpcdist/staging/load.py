"""load(): each rank gets its part of the datasets of one file, whatever wrote it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcdist.comm.team import Team
from hpcdist.control import digests, objects
from hpcdist.errors import FileError, listed, reason
from hpcdist.files import raw
from hpcdist.files.regular import open_regular
from hpcdist.layout import Box
from hpcdist.runtime import world
from hpcdist.staging.arguments import agreed, count, positive
from hpcdist.staging.boxes import BoxSequence
from hpcdist.staging.catalog import Catalog, describe
from hpcdist.staging.exchange import deliver
from hpcdist.staging.names import SINGLE, nest
from hpcdist.staging.reader import DatasetReader
from hpcdist.staging.target import WINDOW
from hpcdist.staging.wants import Arguments, find_wants, plan_load, reads_alone
from hpcdist.tensors import pool
from hpcdist.tensors.pinned import Scratch
from hpcdist.tensors.storage import written
from hpcdist.validation import local

if TYPE_CHECKING:
    from hpcdist.comm.signatures import GroupLike

__all__ = ["load"]

VERB = "staging.load"
_NAPS = (0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # seconds between attempts to see the same file on all ranks


def load(
    path: str | os.PathLike[str],
    name: str | None = None,
    *,
    dim: int | Mapping[str, int | None] | None = 0,
    counts: str | Sequence[int] | None = None,
    box: tuple[Sequence[int], Sequence[int]] | None = None,
    out: Tensor | None = None,
    device: torch.device | str | None = None,
    window: int = WINDOW,
    readers: int | None = None,
    verify: bool | None = None,
    progress: Callable[[int], None] | None = None,
    group: GroupLike | None = None,
) -> Any:
    """Read each rank's part of the tensors of an HDF5 file, with any number of ranks, whatever wrote it.

    Collective over `group`. Along dim 0 every rank reads straight into its result; where parts are so narrow that
    reading them alone would read everything many times, the ranks share the reading and send each other their parts, a
    window at a time.

    Args:
        path: of the file, seen by all ranks.
        name: of a tensor, or of a group of them; None for all of the file. Must agree.
        dim: the dimension along which tensors are split; None for the whole on every rank; or a dict of these by full
            name, 0 for those that are not in it. Must agree. Every rank gets the whole of 0-d tensors.
        counts: the extent along `dim` for each rank, or a rule, as in :func:`hpcdist.split`: "block" by default. Must
            agree.
        box: this rank's part as (offset, shape), each with an entry for every dim; instead of `dim` and `counts`, on
            all ranks or on none. Each rank has a box of its own; boxes may overlap.
        out: memory for this rank's part of the one tensor that is read, of its shape and dtype, any strides, any
            device. Each rank may give it or not. If the call fails, its contents are undefined.
        device: device of the result, without `out`; the CPU by default.
        window: bytes of host memory that a rank may use besides the result. Must agree.
        readers: how many ranks read from the file; by default all. Must agree.
        verify: True: check every piece of which something is read against its checksum; None: those that are read
            whole; False: none. Files of other tools have no checksums. Must agree.
        progress: called on each rank, from time to time, with the number of bytes just read.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None for all ranks.

    Returns:
        On each rank its part: a contiguous tensor that it owns (or `out`), of the dtype that was saved and of native
        byte order; a nested dict of these if there are several, or `name` is a group.

    Raises:
        RankError: on every rank: no such regular file, not HDF5, a tensor whose data are in another file, incomplete,
            truncated, damaged, no such tensor, an argument that is wrong on one rank or does not agree. The job can go
            on.

    Example, on 3 ranks::

        >>> hd.staging.load("x.h5")                    # saved from 5 rows
        tensor([[0, 1], [2, 3]])                       # on rank 0; two rows on rank 1, one on rank 2
        >>> hd.staging.load("x.h5", "data", box=((rank, 0), (1, 2)))
        tensor([[0, 1]])                               # on rank 0; row 1 on rank 1, row 2 on rank 2
    """
    team = world.current().context.team_of(group)

    def check() -> tuple[Arguments, torch.device]:
        if name is not None and not isinstance(name, str):
            raise local.WrongError(f"name must be a string or None, got {name!r}")
        if box is not None and (dim != 0 or counts is not None):
            raise local.WrongError("box is given together with dim or counts, which it replaces")
        mine = None if box is None else Box(tuple(index(o) for o in box[0]), tuple(index(n) for n in box[1]))
        if out is not None:
            local.tensor(out, 0, "out")
        same = {
            "path": os.fsdecode(path), "name": None if name is None else name.strip("/"),
            "dim": {str(k): _dim(v) for k, v in dim.items()} if isinstance(dim, Mapping) else _dim(dim),
            "counts": counts if counts is None or isinstance(counts, str) else tuple(index(c) for c in counts),
            "window": positive("window", window), "readers": count("readers", readers, team.size), "verify": verify,
            "box": "not given" if box is None else "given",
        }  # fmt: skip
        held = None if out is None else (out.dtype, tuple(out.shape))
        return Arguments(same, mine, held), torch.device("cpu" if device is None else device)

    with agreed(team, VERB, check) as (arguments, target):
        same = digests.same(team.comm, VERB, arguments.same, arguments.same, objects.first_difference)
        results: dict[str, Tensor] = {}
        problems: list[str] = []
        with _opened_by_all(team, arguments, str(same["path"]), same["name"]) as (catalog, fd, asks):
            wants, wrong = find_wants(catalog.datasets, [replace(ask, same=same) for ask in asks])
            objects.raise_problems(VERB, wrong)
            boxes = {key: wants[key][team.rank] for key in catalog.datasets}
            objects.all_gather(team.comm, VERB, lambda: results.update(_allocate(catalog, boxes, out, target)))
            written(out, None)
            for key, stored in catalog.datasets.items():
                # A copy: what is computed from its table is freed with it.
                reader = DatasetReader(catalog.path, fd, replace(stored), verify, progress)
                problems += _read(team, reader, wants[key], results[key], same)
        found = enumerate(objects.all_gather_object(team.comm, problems[:1]))
        objects.raise_problems(VERB, {rank: texts[0] for rank, texts in found if texts})
        if out is not None:
            return out
        return nest(results, same["name"] or (SINGLE if list(results) == [SINGLE] else ""))


def _allocate(
    catalog: Catalog, boxes: Mapping[str, Box], out: Tensor | None, device: torch.device
) -> dict[str, Tensor]:
    """Return memory for this rank's box of each tensor: new, or `out`."""
    if out is not None:
        return {key: out.detach().view(boxes[key].shape) for key in catalog.datasets}
    return {
        key: pool.empty(boxes[key].shape, stored.dtype, device, fixed=True) for key, stored in catalog.datasets.items()
    }


def _dim(dim: Any) -> int | None:
    return None if dim is None else index(dim)


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
def _opened_by_all(
    team: Team, own: Arguments, path: str, name: str | None
) -> Iterator[tuple[Catalog, int, list[Arguments]]]:
    """What the file holds, the same file open on every rank, and the box and memory that each rank has given, which
    travel with the answer to whether it is the same; a RankError everywhere if a rank cannot open it.

    A file may be replaced meanwhile, and caches of names may be some seconds out of date: it is opened again then.
    """
    for nap in (*_NAPS, None):
        with ExitStack() as stack:
            fds: list[int] = []
            catalog = objects.broadcast(team.comm, VERB, lambda: _describe(path, name))
            see = partial(_is_same, stack, catalog, fds, nap is None)
            answers = objects.all_gather(team.comm, VERB, lambda: (see(), own.box, own.out))  # noqa: B023
            found = [right for right, _, _ in answers]
            if all(found):
                yield catalog, fds[0], [Arguments(box=box, out=out) for _, box, out in answers]
                return
        if nap is not None:
            time.sleep(nap)
    text = f"{path}: is another file here than on rank 0: replaced while it was read, or not shared"
    objects.raise_problems(VERB, {rank: text for rank, right in enumerate(found) if not right})


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


def _read(team: Team, reader: DatasetReader, wants: BoxSequence, out: Tensor, same: Mapping[str, Any]) -> list[str]:
    """Read this rank's box; return the errors of this rank. Collective."""
    stored, window, readers = reader.stored, same["window"], same["readers"]
    problems: list[str] = []
    if stored.raw is None or (readers is None and reads_alone(stored, wants, reader.verify)):
        with _kept(problems):
            reader.read(wants[team.rank], out, window)
        return problems
    plan, rows = plan_load(stored, wants, window, readers or team.size, reader.verify)
    if reader.verify and rows is None:  # pieces too large for the window: checked on their own
        with _kept(problems):
            for number in range(team.rank, len(stored.boxes), team.size):
                reader.check(number, window)
    scratch = Scratch(pinned=out.is_cuda)
    for round_ in plan.rounds:
        scratch.reset()
        piece = None
        row = plan.piece(team.rank, round_)
        if row is not None:
            box = plan.pieces[row]
            piece = scratch.take(box.shape, stored.dtype)
            in_table = None if rows is None or reader.verify is False else int(rows[row])
            if (reader.verify and rows is not None) or len(wants.intersecting(box)):
                with _kept(problems):
                    reader.fill(box, in_table, piece, window)
        deliver(team, plan, piece, out, round_, scratch)
    return problems


@contextmanager
def _kept(problems: list[str]) -> Iterator[None]:
    """Keep an error of this rank, so that it continues with the others, which get it at the end."""
    try:
        yield
    except Exception as error:
        problems.append(reason(error))
