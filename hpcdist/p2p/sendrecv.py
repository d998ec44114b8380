"""send, recv, isend, irecv: whole structures from one rank to another, which knows nothing of them beforehand.

One message has the header and all small tensors; each large one follows by itself, from its memory into new memory.
They go over communicators of the library's own, and carry the group and a number of the sender's, so that nothing else
meets them. No other rank of the group takes part: a group need not have been used before.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from hpcdist import activity
from hpcdist.errors import HpcdistError
from hpcdist.runtime import world
from hpcdist.runtime.background import Handle
from hpcdist.tensors.eager import recorded
from hpcdist.tensors.message import Contents
from hpcdist.tensors.tree import flatten

if TYPE_CHECKING:
    from hpcdist.comm.context import Context
    from hpcdist.comm.signatures import GroupLike
    from hpcdist.p2p.engine import Transport
    from hpcdist.p2p.transfers import Outgoing
    from hpcdist.runtime.engine import Steps

__all__ = ["irecv", "isend", "recv", "send"]

ROUTES = ("auto", "mpi", "hdf5")


def send(
    x: Any,
    dest: int,
    tag: int = 0,
    *,
    group: GroupLike | None = None,
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
        HpcdistError: on this rank: `group` is a second communicator of the same ranks, and no collective call has told
            the two apart yet.
        FileError: with route "hdf5", on both ranks: the file cannot be written, or is not seen by the other one.

    Example::

        >>> hd.send({"weights": [w1, w2], "step": 3}, dest=1)      # on rank 0
        >>> got = hd.recv(source=0)                                # on rank 1
    """
    engine, outgoing, steps = _sending(x, dest, tag, group, route, allow_pickle)
    if outgoing.dest == outgoing.context.rank:
        raise ValueError(f"dest is {dest}, this rank itself, which cannot receive while it sends: use isend")
    with activity.InCall("send", engine.context.team, outgoing.dest):
        engine.run("send", steps, receives=False)


def isend(
    x: Any,
    dest: int,
    tag: int = 0,
    *,
    group: GroupLike | None = None,
    route: str = "auto",
    allow_pickle: bool = False,
) -> Handle[None]:
    """As :func:`send`, in the background: returns a handle at once. Until it is done, `x` must not be changed."""
    engine, outgoing, steps = _sending(x, dest, tag, group, route, allow_pickle)
    return engine.start("isend", steps, outgoing.dest, receives=False)


# fmt: off
@overload
def recv(source: int | None = None, tag: int | None = None, *, with_source: Literal[False] = False,
         group: GroupLike | None = None, allow_pickle: bool = False) -> Any: ...
@overload
def recv(source: int | None = None, tag: int | None = None, *, with_source: Literal[True],
         group: GroupLike | None = None, allow_pickle: bool = False) -> tuple[Any, int]: ...
# fmt: on
def recv(
    source: int | None = None,
    tag: int | None = None,
    *,
    group: GroupLike | None = None,
    allow_pickle: bool = False,
    with_source: bool = False,
) -> Any:
    """Receive what another rank has sent; nothing has to be known of it.

    Waits until something comes, up to the deadline of all calls; ``irecv(...).wait(timeout)`` waits as long as told.
    A message for which there is no memory here ends the job, since its sender depends on this rank.

    Args:
        source: the rank in `group` that sends; None for any. What one rank sends with one tag comes in that order.
        tag: only what was sent with this tag; None for any.
        group: as the sender's. The other ranks of the group take no part.
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
    engine, peer, steps = _receiving(source, tag, group, allow_pickle)
    with activity.InCall("recv", engine.context.team, peer):
        got: tuple[Any, int] = engine.run("recv", steps, receives=True)
    return got if with_source else got[0]


# fmt: off
@overload
def irecv(source: int | None = None, tag: int | None = None, *, with_source: Literal[False] = False,
          group: GroupLike | None = None, allow_pickle: bool = False) -> Handle[Any]: ...
@overload
def irecv(source: int | None = None, tag: int | None = None, *, with_source: Literal[True],
          group: GroupLike | None = None, allow_pickle: bool = False) -> Handle[tuple[Any, int]]: ...
# fmt: on
def irecv(
    source: int | None = None,
    tag: int | None = None,
    *,
    group: GroupLike | None = None,
    allow_pickle: bool = False,
    with_source: bool = False,
) -> Handle[Any]:
    """As :func:`recv`, in the background: returns a handle at once, whose wait() returns the structure."""
    engine, peer, steps = _receiving(source, tag, group, allow_pickle)

    def received() -> Steps[Any]:
        got = yield from steps
        return got if with_source else got[0]

    return engine.start("irecv", received(), peer, receives=True)


def _sending(
    x: Any, dest: int, tag: int, group: Any, route: str, allow_pickle: bool
) -> tuple[Transport, Outgoing, Steps[None]]:
    """Check what is to be sent, and the steps of sending it."""
    from hpcdist.p2p.engine import transport
    from hpcdist.p2p.transfers import Outgoing, by_file, by_mpi

    _runs()
    context = world.current().context
    of, engine = context.group_of(group), transport(context)
    _check("dest", dest, of.size)
    _check_tag(context, tag)
    if route not in ROUTES:
        raise ValueError(f"route is {route!r}, expected one of {', '.join(ROUTES)}")
    tree = flatten(x, allow_pickle)
    if any(tensor.is_cuda for tensor in tree.tensors):
        torch.cuda.current_stream().synchronize()  # the background has streams of its own
    contents = Contents.of(tree.tensors)
    outgoing = Outgoing(context, of.message_key(), of.peers[dest], tag, engine.number())
    way = by_file if route == "hdf5" and contents.large else by_mpi
    return engine, outgoing, way(outgoing, tree, contents)


def _receiving(
    source: int | None, tag: int | None, group: Any, allow_pickle: bool
) -> tuple[Transport, int, Steps[tuple[Any, int]]]:
    from hpcdist.p2p.engine import Arrival, transport
    from hpcdist.p2p.transfers import receive

    _runs()
    context = world.current().context
    of, engine = context.group_of(group), transport(context)
    if source is not None:
        _check("source", source, of.size)
    if tag is not None:
        _check_tag(context, tag)
    from_ = None if source is None else of.peers[source]
    arrival = Arrival(context.unexpected, of, from_, tag)
    return engine, activity.ANYBODY if from_ is None else from_, receive(context, of, arrival, allow_pickle)


def _runs() -> None:
    if (untraceable := recorded()) is not None:
        raise HpcdistError(untraceable)


def _check(name: str, rank: int, size: int) -> None:
    if not 0 <= index(rank) < size:
        raise ValueError(f"{name} is {rank}, expected 0 to {size - 1} in a group of {size} ranks")


def _check_tag(context: Context, tag: int) -> None:
    if not 0 <= index(tag) <= context.most_tag:
        raise ValueError(f"tag is {tag}, expected 0 to {context.most_tag}, which this MPI allows")
