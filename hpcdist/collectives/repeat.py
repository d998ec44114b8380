"""Small calls that are repeated: results that depend on the arguments alone are computed once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from hpcdist import activity
from hpcdist.collectives import autograd, run
from hpcdist.collectives.run import Plannable
from hpcdist.comm.team import HEADER, Team
from hpcdist.process import abort
from hpcdist.tensors.eager import recorded
from hpcdist.tensors.storage import is_plain, written
from hpcdist.validation import collective

__all__ = ["Repeatable", "call"]

_MOST = 256  # calls that a team remembers
_HEADERS = 2**16  # headers that it remembers with them: fewer calls in a large team

Key = tuple[Any, ...]


class Repeatable(Plannable):
    """An operation whose data may come with the headers, and which can be kept for the next similar call."""

    @abstractmethod
    def keep(self, team: Team) -> int | None:
        """Drop the tensors of this call, so that it can be kept for again().

        Returns:
            How many bytes behind this rank's header are the same in every such call; after them comes `x`. None if
            the call cannot be repeated so.
        """

    @abstractmethod
    def again(self, team: Team, out: Tensor | None) -> Any:
        """Return the result of a call that is repeated, in `out` or new memory: its data have come with the headers."""


class _Known(NamedTuple):
    """A call that the team has made.

    Attributes:
        op: the operation, planned.
        header: this rank's header, and the bytes after it that do not change.
        headers: headers of all ranks, which agree.
        calls: asynchronous calls that the team had made.
    """

    op: Repeatable
    header: bytes
    headers: list[tuple[bytes]]
    calls: int


def call(
    name: str,
    make: Callable[[], Repeatable],
    team: Team,
    x: Tensor | None,
    dim: Any,
    root: Any,
    route: Any,
    out: Tensor | None,
    rule: Any = None,
) -> Any:
    """Run an operation in the foreground, with less work if the team has made a similar call before.

    Args:
        name: of the operation.
        make: makes the operation.
        x, dim, root, route, out, rule: its arguments, unvalidated.
    """
    key = _key(name, x, dim, root, route, out, rule)
    known: _Known | None = None if key is None else team.repeats.get(key)
    if key is not None and known is not None and known.calls == team.calls[True]:
        return _again(known, team, x, out, make, key)
    op = make()
    result = run.run(op, team)
    if key is not None and op.inline and not op.grad:
        _remember(op, team, key)
    return result


def _key(name: str, x: Tensor | None, dim: Any, root: Any, route: Any, out: Tensor | None, rule: Any) -> Key | None:
    """Return the key of a call with these arguments; None if it cannot be repeated."""
    if not (type(dim) is int and type(root) is int and type(route) is str) or recorded() is not None:
        return None
    if rule is not None and type(rule) is not str:
        if type(rule) not in (list, tuple) or any(type(count) is not int for count in rule):
            return None
        rule = tuple(rule)
    key: Key = name, dim, root, route, rule
    if x is not None:
        if not is_plain(x):
            return None
        key += (x.dtype, x.shape)
    if out is not None:
        if not is_plain(out) or not out.dim() or out.is_inference():
            return None
        key += ("out", out.dtype, out.shape)
    return key


def _again(
    known: _Known, team: Team, x: Tensor | None, out: Tensor | None, make: Callable[[], Repeatable], key: Key
) -> Any:
    """Repeat a call, with the results that depend on its arguments alone. Collective over the team."""
    op = known.op
    team.calls[False] += 1
    with activity.InCall(op.name, team), abort.InStep(op.name, team.size):
        if collective.repeat(team, known.header, x) == known.headers:
            return written(out, op.again(team, out))
        op = make()  # another rank's call is not the same as before
        result = op.execute(team, exchanged=True)
        if op.grad:
            return autograd.attach(op, team, result)
    if op.inline:
        _remember(op, team, key)
    return written(out, result)


def _remember(op: Repeatable, team: Team, key: Key) -> None:
    buffers = team.headers
    assert buffers is not None
    if len(team.repeats) >= max(1, min(_MOST, _HEADERS // team.size)):
        team.repeats.clear()
    same = op.keep(team)
    if same is not None:
        team.repeats[key] = _Known(op, bytes(buffers.own[: HEADER + same]), buffers.last, team.calls[True])
