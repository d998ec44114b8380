"""send, recv, isend, irecv: send whole structures to a rank that needs no advance knowledge of them.

One message carries the header and all small tensors; each large tensor follows by itself, from its memory into new
memory. Messages use the library's own communicators, and carry the group and a number, so that they match no others. No
other rank of the group takes part.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any, Literal, overload

from hpcdist import activity
from hpcdist.errors import HpcdistError, refusal
from hpcdist.runtime import world
from hpcdist.runtime.background import Handle
from hpcdist.tensors.eager import recorded
from hpcdist.tensors.tree import flatten

if TYPE_CHECKING:
    from hpcdist.comm.team import Context, Group, GroupLike
    from hpcdist.p2p.transfers import Outgoing, Steps, Transport


def send(
    x: Any,
    dest: int,
    tag: int = 0,
    *,
    group: GroupLike | None = None,
    allow_pickle: bool = False,
) -> None:
    """Send a tensor, or a structure of tensors, to another rank, which receives it with :func:`recv`.

    Blocks until the memory of `x` can be reused. For large tensors this is only when the receiver calls recv, so two
    ranks that both send first wait for each other: use :func:`isend`. After the timeout of :func:`hpcdist.init` the
    job ends (:class:`HangError`).

    Args:
        x: tensors and numpy arrays of any shapes and dtypes, numbers, strings, bytes and None, in lists, tuples, dicts,
            named tuples and dataclasses. Gradients do not flow.
        dest: the rank in `group` that receives.
        tag: a number >= 0 that the receiver can match.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None means all ranks. Must be the receiver's
            group.
        allow_pickle: whether to send other objects as pickles; the receiver must allow them too.

    Raises:
        TypeError, ValueError: on this rank, if an argument is wrong, or a part cannot be sent. Nothing was sent.
        HpcdistError: on this rank, if `group` is a communicator on which no collective has been called yet.

    Example::

        >>> hd.send({"weights": [w1, w2], "step": 3}, dest=1)      # on rank 0
        >>> got = hd.recv(source=0)                                # on rank 1
    """
    ours, outgoing = _sending(x, dest, tag, group, allow_pickle)
    if outgoing.dest == outgoing.context.rank:
        raise refusal(
            ValueError, "HD204", f"dest is {dest}, this rank itself, which cannot receive while it sends: use isend"
        )
    with activity.InCall("send", ours.context.team, outgoing.dest, tensors=x, route="mpi"):
        ours.send(outgoing)


def isend(
    x: Any,
    dest: int,
    tag: int = 0,
    *,
    group: GroupLike | None = None,
    allow_pickle: bool = False,
) -> Handle[None]:
    """Send in the background, as :func:`send`, and return a handle at once.

    Args:
        x: tensors and numpy arrays of any shapes and dtypes, numbers, strings, bytes and None, in lists, tuples, dicts,
            named tuples and dataclasses. Do not change them before the handle is done.
        dest: the rank in `group` that receives; may be this rank.
        tag: a number >= 0 that the receiver can match.
        group: a torch ProcessGroup, 1-d DeviceMesh or mpi4py communicator; None means all ranks. Must be the receiver's
            group.
        allow_pickle: whether to send other objects as pickles; the receiver must allow them too.

    Returns:
        A :class:`Handle`, whose wait() returns None when the memory of `x` can be reused.

    Raises:
        TypeError, ValueError: on this rank, if an argument is wrong, or a part cannot be sent. Nothing was sent.
        HpcdistError: on this rank, if `group` is a communicator on which no collective has been called yet, or MPI does
            not support threads.
    """
    ours, outgoing = _sending(x, dest, tag, group, allow_pickle)
    return ours.isend(outgoing)


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
    """Receive a structure from another rank, without advance knowledge of it.

    Blocks until a message arrives; after the timeout of :func:`hpcdist.init` the job ends (:class:`HangError`).
    ``irecv(...).wait(timeout)`` has its own timeout. A message too large for the memory of this rank aborts the job,
    because the sender waits for this rank.

    Args:
        source: the rank in `group` that sends; None means any. Messages of one rank with one tag arrive in order.
        tag: the tag of the message; None means any.
        group: the same as the sender's. Other ranks of the group take no part.
        allow_pickle: whether to load pickles, which can run any code: only from trusted senders.
        with_source: whether to return (structure, source).

    Returns:
        The structure. Tensors from a GPU are on this rank's own GPU, or on the CPU if it has none; others are on the
        CPU.

    Raises:
        TypeError: if a class in it is unknown here, or it contains a pickle that is not allowed. The message is lost.
        TypeError, ValueError: if an argument is wrong.
        HpcdistError: if the message is damaged.
    """
    ours, peer, steps = _receiving(source, tag, group, allow_pickle, with_source)
    with activity.InCall("recv", ours.context.team, peer, ours.behind(peer), route="mpi"):
        return ours.recv(steps)


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
    """Receive in the background, as :func:`recv`, and return a handle at once.

    Args:
        source: the rank in `group` that sends; None means any. Messages of one rank with one tag arrive in order.
        tag: the tag of the message; None means any.
        group: the same as the sender's. Other ranks of the group take no part.
        allow_pickle: whether to load pickles, which can run any code: only from trusted senders.
        with_source: whether wait() returns (structure, source).

    Returns:
        A :class:`Handle`, whose wait() returns the structure, or raises what recv would raise.

    Raises:
        TypeError, ValueError: if an argument is wrong.
        HpcdistError: if MPI does not support threads.
    """
    ours, peer, steps = _receiving(source, tag, group, allow_pickle, with_source)
    return ours.irecv(steps, peer)


def _sending(x: Any, dest: int, tag: int, group: Any, allow_pickle: bool) -> tuple[Transport, Outgoing]:
    """Validate the arguments; return the transport, and the message to send."""
    from hpcdist.p2p.transfers import Outgoing, transport

    context, ranks = _checked(group, tag, "dest", dest)
    return transport(context), Outgoing.of(context, ranks, dest, tag, flatten(x, allow_pickle))


def _receiving(
    source: int | None, tag: int | None, group: Any, allow_pickle: bool, with_source: bool
) -> tuple[Transport, int, Steps[Any]]:
    from hpcdist.p2p.transfers import RecvTurn, receive, transport

    context, ranks = _checked(group, tag, "source", source)
    peer = None if source is None else ranks.peers[source]
    turn = RecvTurn(context, ranks, peer, tag)
    steps = receive(context, ranks, turn, allow_pickle, with_source)
    return transport(context), activity.ANYBODY if peer is None else peer, steps


def _checked(group: Any, tag: Any, name: str, rank: Any) -> tuple[Context, Group]:
    """Validate the arguments, of which a receive may leave out two; return the context and the group."""
    if (problem := recorded()) is not None:
        raise HpcdistError("HD219", problem)
    context = world.context()
    ranks, most = context.group_of(group), context.most_tag
    for what, value, last, why in (
        (name, rank, ranks.size - 1, f" in a group of {ranks.size} ranks"),
        ("tag", tag, most, ", the maximum of this MPI"),
    ):
        if isinstance(value, bool):
            raise refusal(TypeError, "HD201", f"{what} must be an int, got {value}")
        if (value is not None or name == "dest") and not 0 <= index(value) <= last:
            raise refusal(ValueError, "HD204", f"{what} is {value}, expected 0 to {last}{why}")
    return context, ranks
