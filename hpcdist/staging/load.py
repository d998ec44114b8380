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

from hpcdist import activity
from hpcdist.comm.team import Team
from hpcdist.control import digests, objects
from hpcdist.errors import FileError, listed, reason
from hpcdist.files import raw
from hpcdist.layout import Box
from hpcdist.process import abort
from hpcdist.runtime import world
from hpcdist.staging.boxes import BoxSequence
from hpcdist.staging.contents import Contents, describe
from hpcdist.staging.names import SINGLE, nest
from hpcdist.staging.pieces import deliver
from hpcdist.staging.reader import Reader, opened
from hpcdist.staging.saving import WINDOW
from hpcdist.staging.wants import Ask, find_wants, plan_load, read_apart
from hpcdist.tensors.pinned import Scratch
from hpcdist.tensors.storage import written
from hpcdist.validation import collective, local
from hpcdist.validation.call import Call

if TYPE_CHECKING:
    from hpcdist.comm.signatures import GroupLike

__all__ = ["load"]

VERB = "staging.load"
_NAPS = (0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # seconds between looks at a file that is not the same on all ranks


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
    """Read each rank's part of the tensors of an HDF5 file, with any number of ranks, whoever wrote it.

    Collective over `group`. Along dim 0 every rank reads straight into its result; where parts are so narrow that
    reading them alone would read everything many times, the ranks share the reading and send each other what they
    want, a window at a time.

    Args:
        path: of the file, seen by all ranks.
        name: of a tensor, or of a group of them; None for all that the file holds. Must agree.
        dim: the dimension along which tensors are split; None for the whole on every rank; or a dict of these by full
            name, 0 for those that are not in it. Must agree. 0-d tensors are given whole to every rank.
        counts: the extent along `dim` for each rank, or a rule, as in :func:`hpcdist.split`: "block" by default. Must
            agree.
        box: this rank's part as (offset, shape), each with an entry for every dim; instead of `dim` and `counts`, on
            all ranks or on none. Each rank is free in its box; boxes may overlap.
        out: memory for this rank's part of the one tensor that is read, of its shape and dtype, any strides, any
            device. Each rank is free to give it. If the call fails, its contents are not defined.
        device: where the result is to be, without `out`; the CPU by default.
        window: bytes of host memory that a rank may use besides the result. Must agree.
        readers: how many ranks read from the file; by default all. Must agree.
        verify: True: check every piece of which something is read against its checksum; None: those that are read
            whole; False: none. Files of other tools have no checksums. Must agree.
        progress: called on each rank, now and then, with the number of bytes it has just read.
        group: a torch ProcessGroup or an mpi4py communicator; None for all ranks.

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
    call = Call(VERB)
    ask = Ask()
    try:
        local.runs()
        ask = _ask(path, name, dim, counts, box, out, window, readers, verify, team.size)
        target = torch.device("cpu" if device is None else device)
    except Exception as error:  # the other ranks are to hear of it
        call.problem = local.problem_of(error)
    with activity.InCall(VERB, team), abort.InStep(VERB, team.size):
        collective.exchange(team, call)
        same = digests.same(team.comm, VERB, ask.same, ask.same, objects.first_difference)
        own = objects.all_gather_object(team.comm, (ask.box, ask.out))
        asks = [Ask(same, *each) for each in own]
        place, results = str(same["path"]), {}
        problems: list[str] = []
        with _opened_by_all(team, place, same["name"]) as (contents, fd):
            wants, wrong = find_wants(contents.datasets, asks)
            objects.raise_problems(VERB, wrong)
            mine = {key: (wants[key][team.rank], stored.dtype) for key, stored in contents.datasets.items()}
            step = lambda: results.update({key: _memory(out, *what, target) for key, what in mine.items()})  # noqa: E731
            objects.all_gather(team.comm, VERB, step)
            written(out, None)
            for key, stored in contents.datasets.items():
                # A copy: what is worked out of its table goes with it.
                reader = Reader(place, fd, replace(stored), window, verify, progress)
                _read(team, reader, wants[key], results[key].view(mine[key][0].shape), readers, problems)
        told = enumerate(objects.all_gather_object(team.comm, problems[:1]))
        objects.raise_problems(VERB, {rank: texts[0] for rank, texts in told if texts})
        if out is not None:
            return out
        return nest(results, ask.same["name"] or (SINGLE if list(results) == [SINGLE] else ""))


def _ask(
    path: Any, name: Any, dim: Any, counts: Any, box: Any, out: Any, window: Any, readers: Any, verify: Any, size: int
) -> Ask:
    if name is not None and not isinstance(name, str):
        raise local.WrongError(f"name must be a string or None, got {name!r}")
    if index(window) < 1:
        raise local.WrongError(f"window is {window}, expected a number of bytes >= 1")
    if readers is not None and not 1 <= index(readers) <= size:
        raise local.WrongError(f"readers is {readers}, expected 1 to {size} in a group of {size} ranks")
    if box is not None and (dim != 0 or counts is not None):
        raise local.WrongError("box is given, and so is dim or counts: a box says it all")
    if counts is not None and not isinstance(counts, str):
        counts = tuple(index(c) for c in counts)
    same = {
        "path": os.fsdecode(path),
        "name": None if name is None else name.strip("/"),
        "dim": {str(k): _dim(v) for k, v in dim.items()} if isinstance(dim, Mapping) else _dim(dim),
        "counts": counts,
        "window": index(window),
        "readers": readers,
        "verify": verify,
        "box": "given" if box is not None else "not given",
    }
    mine = None
    if box is not None:
        offset, shape = box
        mine = Box(tuple(index(o) for o in offset), tuple(index(n) for n in shape))
    kept = None
    if out is not None:
        local.tensor(out, 0, "out")
        kept = (out.dtype, tuple(out.shape))
    return Ask(same, mine, kept)


def _dim(dim: Any) -> int | None:
    return None if dim is None else index(dim)


def _describe(path: str, name: str | None) -> Contents:
    """The tensors of a file that are meant."""
    contents = describe(path, name=name)
    contents.require(name or "")
    if name is None:
        return contents
    chosen = {key: s for key, s in contents.datasets.items() if key == name or key.startswith(f"{name}/")}
    if not chosen:
        raise FileError(f"{path}: holds no tensor {name!r}; it has: {listed(contents.datasets)}")
    return replace(contents, datasets=chosen)


def _memory(out: Tensor | None, want: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(want.shape, dtype=dtype, device=device) if out is None else out.detach()


@contextmanager
def _opened_by_all(team: Team, path: str, name: str | None) -> Iterator[tuple[Contents, int]]:
    """What the file holds, and the same file open on every rank; a RankError everywhere if one cannot have it.

    A file may be replaced meanwhile, and caches of names may be some seconds behind: it is looked at again.
    """
    for nap in (*_NAPS, None):
        with ExitStack() as stack:
            fds: list[int] = []
            contents = objects.broadcast(team.comm, VERB, lambda: _describe(path, name))
            found = objects.all_gather(team.comm, VERB, partial(_is_same, stack, contents, fds, nap is None))
            if all(found):
                yield contents, fds[0]
                return
        if nap is not None:
            time.sleep(nap)
    text = f"{path}: is another file here than on rank 0: replaced while it was read, or not shared"
    objects.raise_problems(VERB, {rank: text for rank, right in enumerate(found) if not right})


def _is_same(stack: ExitStack, contents: Contents, fds: list[int], last: bool) -> bool:
    """Open the file on this rank: whether it is the one that rank 0 has described."""
    try:
        fds.append(stack.enter_context(opened(contents.path)))
        if contents.is_in(fds[0]):
            return True
        raw.forget(fds[0])  # it may be the cache that is behind
        return contents.is_in(fds[0])
    except FileError:
        if last:
            raise
        return False


def _read(
    team: Team, reader: Reader, wants: BoxSequence, out: Tensor, readers: int | None, problems: list[str]
) -> None:
    """Read this rank's box; what goes wrong is added to `problems`. Collective."""
    stored = reader.stored
    if stored.raw is None or (readers is None and read_apart(stored, wants, reader.verify)):
        with _kept(problems):
            reader.read(wants[team.rank], out)
        return
    plan, rows = plan_load(stored, wants, reader.window, readers or team.size, reader.verify)
    if reader.verify and rows is None:  # pieces too large for the window: checked on their own
        with _kept(problems):
            for number in range(team.rank, len(stored.boxes), team.size):
                reader.check(number)
    scratch = Scratch(pinned=out.is_cuda)
    for round_ in plan.rounds:
        scratch.reset()
        piece = None
        row = round_.get(team.rank)
        if row is not None:
            box = plan.pieces[row]
            piece = scratch.take(box.shape, stored.dtype)
            in_table = None if rows is None or reader.verify is False else int(rows[row])
            if (reader.verify and rows is not None) or len(wants.intersecting(box)):
                with _kept(problems):
                    reader.fill(box, in_table, piece)
        deliver(team, plan, piece, out, round_, scratch)


@contextmanager
def _kept(problems: list[str]) -> Iterator[None]:
    """Keep what goes wrong on this rank, so that it goes on with the others, who are told at the end."""
    try:
        yield
    except Exception as error:
        problems.append(reason(error))
