"""send, recv, isend, irecv: whole structures from one rank to another, which knows nothing of them beforehand.

One message has the header and all small tensors; each large one follows by itself, from its memory into new memory.
They go over communicators of the library's own, and carry a number of the sender's, so that nothing else meets them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist import abort, layout, world
from hpcdist.buffers import as_bytes, row_major
from hpcdist.eager import recorded
from hpcdist.errors import FileError, HpcdistError, reason
from hpcdist.handle import Handle
from hpcdist.packing import Contents, Header, Messages, bounded, encode, opened
from hpcdist.team import Team, team_of
from hpcdist.tree import Tree, finished, flatten, rebuild
from hpcdist.watch import record

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdist.post import Post, Steps
    from hpcdist.routes.hdf5 import Stage

__all__ = ["irecv", "isend", "recv", "send"]

ROUTES = ("auto", "mpi", "hdf5")
PIECE = 2**30  # bytes a message at most, from host memory
CHUNK = 2**26  # bytes a message at most, from a GPU: it passes through pinned memory of that size
_ANSWER = 1024  # bytes at most, of what went wrong while a file was read


def send(
    x: Any,
    dest: int,
    tag: int = 0,
    *,
    group: dist.ProcessGroup | MPI.Comm | None = None,
    route: str = "auto",
    allow_pickle: bool = False,
) -> None:
    """Send a tensor, or a structure of tensors, to another rank, which receives it with :func:`recv`.

    Returns once the memory of `x` may be used again, which may be only when it is being received.

    Args:
        x: tensors and numpy arrays of any shapes and dtypes, numbers, strings, bytes and None, in lists, tuples, dicts,
            named tuples and dataclasses. No gradient flows.
        dest: the rank in `group` that receives.
        tag: a number >= 0 by which the receiver may choose among messages.
        group: a torch ProcessGroup or an mpi4py communicator; None for all ranks. The same as the receiver's.
        route: "mpi" (which "auto" stands for), or "hdf5": through a file in the staging folder, for very large tensors.
            The receiver need not be told.
        allow_pickle: send other objects as pickles; the receiver must allow them too.

    Raises:
        TypeError, ValueError: on this rank, for a wrong argument, or parts that cannot be sent. Nothing was sent.
        FileError: with route "hdf5", on both ranks: the file cannot be written, or is not seen by the other one.

    Example::

        >>> hd.send({"weights": [w1, w2], "step": 3}, dest=1)      # on rank 0
        >>> got = hd.recv(source=0)                                # on rank 1
    """
    team, post, steps = _sending(x, dest, tag, group, route, allow_pickle)
    if dest == team.rank:
        raise ValueError(f"dest is {dest}, this rank itself, which cannot receive while it sends: use isend")
    with record.InCall("send", team, dest):
        post.run(steps, receives=False)


def isend(
    x: Any,
    dest: int,
    tag: int = 0,
    *,
    group: dist.ProcessGroup | MPI.Comm | None = None,
    route: str = "auto",
    allow_pickle: bool = False,
) -> Handle[None]:
    """As :func:`send`, in the background: returns a handle at once. Until it is done, `x` must not be changed."""
    _, post, steps = _sending(x, dest, tag, group, route, allow_pickle)
    return post.submit("isend", steps, dest, receives=False)


def recv(
    source: int | None = None,
    tag: int | None = None,
    *,
    group: dist.ProcessGroup | MPI.Comm | None = None,
    allow_pickle: bool = False,
    with_source: bool = False,
) -> Any:
    """Receive what another rank has sent; nothing has to be known of it.

    Waits until something comes, up to the deadline of all calls; ``irecv(...).wait(timeout)`` waits as long as told.
    A message for which there is no memory here ends the job, since its sender depends on this rank.

    Args:
        source: the rank in `group` that sends; None for any. What one rank sends with one tag comes in that order.
        tag: only what was sent with this tag; None for any.
        group: as the sender's.
        allow_pickle: read pickles, which can run any code; only from a sender that is trusted.
        with_source: return (structure, source).

    Returns:
        The structure. A tensor that was on a GPU is on this rank's own GPU, or on the CPU if it has none; the others
        are on the CPU.

    Raises:
        TypeError: a class in it is not known here, or there is a pickle that is not allowed. The message is used up.
        TypeError, ValueError: for a wrong argument.
        FileError: as for :func:`send`.
        HpcdistError: the message is damaged.
    """
    team, post, steps = _receiving(source, tag, group, allow_pickle)
    with record.InCall("recv", team, record.ANYBODY if source is None else source):
        got: tuple[Any, int] = post.run(steps, receives=True)
    return got if with_source else got[0]


def irecv(
    source: int | None = None,
    tag: int | None = None,
    *,
    group: dist.ProcessGroup | MPI.Comm | None = None,
    allow_pickle: bool = False,
    with_source: bool = False,
) -> Handle[Any]:
    """As :func:`recv`, in the background: returns a handle at once, whose wait() returns the structure."""
    _, post, steps = _receiving(source, tag, group, allow_pickle)

    def received() -> Steps[Any]:
        got = yield from steps
        return got if with_source else got[0]

    return post.submit("irecv", received(), record.ANYBODY if source is None else source, receives=True)


def _sending(x: Any, dest: int, tag: int, group: Any, route: str, allow_pickle: bool) -> tuple[Team, Post, Steps[None]]:
    """Check what is to be sent, and the steps of sending it."""
    from hpcdist.post import post_of

    _runs()
    team = team_of(group, world.current())
    _check("dest", dest, team.size)
    _check_tag(team, tag)
    if route not in ROUTES:
        raise ValueError(f"route is {route!r}, expected one of {', '.join(ROUTES)}")
    tree, post = flatten(x, allow_pickle), post_of(team)
    if any(tensor.is_cuda for tensor in tree.tensors):
        torch.cuda.current_stream().synchronize()  # the background has streams of its own
    contents, number = Contents.of(tree.tensors), post.number(_most_tag(team))
    way = _by_file if route == "hdf5" and contents.large else _by_mpi
    return team, post, way(team, tree, contents, dest, tag, number)


def _receiving(
    source: int | None, tag: int | None, group: Any, allow_pickle: bool
) -> tuple[Team, Post, Steps[tuple[Any, int]]]:
    from mpi4py import MPI

    from hpcdist.post import post_of

    _runs()
    team = team_of(group, world.current())
    if source is not None:
        _check("source", source, team.size)
    if tag is not None:
        _check_tag(team, tag)
    from_, with_ = MPI.ANY_SOURCE if source is None else source, MPI.ANY_TAG if tag is None else tag
    return team, post_of(team), _receive(team, from_, with_, allow_pickle)


def _runs() -> None:
    if (untraceable := recorded()) is not None:
        raise HpcdistError(untraceable)


def _check(name: str, rank: int, size: int) -> None:
    if not 0 <= index(rank) < size:
        raise ValueError(f"{name} is {rank}, expected 0 to {size - 1} in a group of {size} ranks")


def _check_tag(team: Team, tag: int) -> None:
    if not 0 <= index(tag) <= _most_tag(team):
        raise ValueError(f"tag is {tag}, expected 0 to {_most_tag(team)}, which this MPI allows")


def _most_tag(team: Team) -> int:
    from mpi4py import MPI

    return int(team.mail.Get_attr(MPI.TAG_UB) or 32767)


def _by_mpi(team: Team, tree: Tree, contents: Contents, dest: int, tag: int, number: int) -> Steps[None]:
    """The header with the small tensors, and each large one behind it."""
    from mpi4py import MPI

    from hpcdist.post import Requests

    messages = Messages(tree.tensors, contents, encode(tree.spec, contents, number=number))
    large = [*messages.rest, *(as_bytes(row_major(tree.tensors[i])) for i in contents.large)]
    longest = max((x.numel() for x in large if x.is_cuda), default=0)
    room = torch.empty(min(CHUNK, longest), dtype=torch.uint8, pin_memory=longest > 0, device="cpu")
    # From here on nothing takes memory: who has got the header depends on what follows.
    requests = [team.mail.Isend([_memory(messages.first), MPI.BYTE], dest, tag)]
    for x in large:
        if x.is_cuda:
            for start, length in layout.pieces(x.numel(), CHUNK):
                room[:length].copy_(x[start : start + length])
                yield Requests([team.parcels.Isend([_memory(room[:length]), MPI.BYTE], dest, number)])
        else:
            requests += _isend(team, x, dest, number)
    yield Requests(requests)


def _isend(team: Team, x: Tensor, dest: int, number: int) -> list[MPI.Request]:
    """Begin to send bytes in host memory, in pieces."""
    from mpi4py import MPI

    pieces = layout.pieces(x.numel(), PIECE)
    return [team.parcels.Isend([_memory(x[at : at + length]), MPI.BYTE], dest, number) for at, length in pieces]


def _by_file(team: Team, tree: Tree, contents: Contents, dest: int, tag: int, number: int) -> Steps[None]:
    """The header with the small tensors; the large ones are in a file by then, which goes when they have been read."""
    from mpi4py import MPI

    from hpcdist.post import Requests

    sizes = [contents.nbytes[i] for i in contents.large]
    with _staged(team, sum(sizes)) as stage:
        large = [as_bytes(row_major(tree.tensors[i].cpu())) for i in contents.large]
        stage.write(list(zip(layout.displs(sizes), large, strict=True)))
        messages = Messages(
            tree.tensors, contents, encode(tree.spec, contents, number=number, file=stage.ticket(team.world.one_system))
        )
        answer = bytearray(_ANSWER)
        requests = [team.mail.Isend([_memory(messages.first), MPI.BYTE], dest, tag)]
        for rest in messages.rest:
            requests += _isend(team, rest, dest, number)
        requests.append(team.parcels.Irecv([answer, MPI.BYTE], dest, number + 1))
        yield Requests(requests)
    problem = answer.rstrip(b"\0").decode(errors="replace")
    if problem:
        raise FileError(f"send(): rank {dest}: {problem}")


@contextmanager
def _staged(team: Team, nbytes: int) -> Iterator[Stage]:
    from hpcdist.routes.hdf5 import Stage

    stage = Stage(team.world.staging, nbytes)
    try:
        yield stage
    finally:
        stage.remove()


def _receive(team: Team, source: int, tag: int, allow_pickle: bool) -> Steps[tuple[Any, int]]:
    from mpi4py import MPI

    from hpcdist.post import Arrival, Requests

    arrival = Arrival(team.mail, source, tag)
    yield arrival
    message = torch.empty(arrival.nbytes, dtype=torch.uint8, device="cpu")
    yield Requests([arrival.message.Irecv([_memory(message), MPI.BYTE])])
    giver, device = arrival.source, team.world.device
    header, packed = opened(message)
    number = header.more.get("number")
    if not isinstance(number, int) or not 0 <= number < _most_tag(team):
        raise HpcdistError(f"a message of rank {giver} is damaged: it has the number {number!r}")
    with abort.Transfer("recv", team.size if header.large or packed is None else 1):
        bounded(sum(header.nbytes))
        if packed is None:
            packed = torch.empty(header.packed, dtype=torch.uint8, device="cpu")
            yield from _from_mpi(team, giver, number, [(packed, False)])
        places = header.unpack(packed, device)
        places.update({i: header.room(i, device) for i in header.large})
    if "file" in header.more:
        yield from _from_file(team, giver, number, header, places)
    else:
        yield from _from_mpi(team, giver, number, [(as_bytes(places[i]), header.metas[i].cuda) for i in header.large])
    return rebuild(header.spec, lambda kind, i: finished(kind, places[i], allow_pickle)), giver


def _from_mpi(team: Team, giver: int, number: int, large: list[tuple[Tensor, bool]]) -> Steps[None]:
    """Receive the large tensors; those that come from a GPU in chunks."""
    from mpi4py import MPI

    from hpcdist.post import Requests

    requests = []
    for x, from_gpu in large:
        for start, length in layout.pieces(x.numel(), CHUNK if from_gpu else PIECE):
            place = x[start : start + length]
            room = torch.empty(length, dtype=torch.uint8, pin_memory=True, device="cpu") if x.is_cuda else place
            request = team.parcels.Irecv([_memory(room), MPI.BYTE], giver, number)
            if x.is_cuda:
                yield Requests([request])
                place.copy_(room)
            else:
                requests.append(request)
    yield Requests(requests)


def _from_file(team: Team, giver: int, number: int, header: Header, places: dict[int, Tensor]) -> Steps[None]:
    """Read the large tensors, and tell the sender, which keeps the file until then."""
    from mpi4py import MPI

    from hpcdist.post import Requests
    from hpcdist.routes.hdf5 import fetch

    problem = ""
    starts = layout.displs([header.nbytes[i] for i in header.large])
    try:
        for start, i in zip(starts, header.large, strict=True):
            host = places[i] if places[i].is_cpu else torch.empty(places[i].shape, dtype=places[i].dtype, device="cpu")
            fetch(header.more["file"], [(start, as_bytes(host))])
            places[i] = host.to(places[i].device)
    except Exception as error:  # whatever it is: the sender waits for an answer
        problem = reason(error)
    answer = bytearray(problem.encode()[:_ANSWER])
    yield Requests([team.parcels.Isend([answer, MPI.BYTE], giver, number + 1)])
    if problem:
        raise FileError(f"recv(): {problem}")


def _memory(x: Tensor) -> Any:
    """The bytes of a tensor in host memory, as mpi4py takes them."""
    from mpi4py import MPI

    return MPI.buffer.fromaddress(x.data_ptr(), x.numel())
