"""send, recv, isend, irecv: structures from rank to rank, their order, any source, and what goes wrong."""

from __future__ import annotations

import linecache
import signal
import struct
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import DTYPES, same_bits, whole_of
from collective import Findings, assert_on_all_ranks
from mpi4py import MPI
from torch import Tensor

import hpcdist as hd
from hpcdist.comm import matching
from hpcdist.errors import HpcdistError
from hpcdist.layout import limits as sizes
from hpcdist.p2p import transfers
from hpcdist.p2p.transfers import RecvTurn
from hpcdist.tensors import message as packing, tree

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:ComplexHalf")]


class Parts(NamedTuple):
    a: Any
    b: Any


def _tree(salt: int) -> dict[str, Any]:
    """Many tensors of different shapes and dtypes, small and large."""
    return {
        "each": [whole_of((k, 3), dtype, salt=salt + k) for k, dtype in enumerate(DTYPES)],
        "large": Parts(whole_of((300, 301), torch.float32, salt), whole_of((2, 40_000), torch.bfloat16, salt).t()),
        "array": np.arange(salt, salt + 5),
        "many": [torch.full((7,), salt, dtype=torch.int64)] * 100,
        "name": f"from {salt}",
        "empty": (torch.empty(0, 4), b"", None, salt),
    }


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor):
        return isinstance(y, Tensor) and same_bits(x, y)
    if isinstance(x, np.ndarray):
        return isinstance(y, np.ndarray) and x.dtype == y.dtype and x.tolist() == y.tolist()
    if isinstance(x, dict):
        return type(y) is dict and list(x) == list(y) and all(_same(x[key], y[key]) for key in x)
    if isinstance(x, (list, tuple)):
        return type(x) is type(y) and len(x) == len(y) and all(map(_same, x, y))
    return type(x) is type(y) and bool(x == y)


def _peers(world: hd.World) -> tuple[int, int]:
    """The next rank of the ring, and the one before."""
    return (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size


@pytest.fixture(params=["as they are", "low"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes from which tensors go in other ways, as they are, or below those of the tests."""
    if request.param == "low":
        monkeypatch.setattr(packing, "SMALL", 64)
        monkeypatch.setattr(sizes, "PIECE", 1000)
        monkeypatch.setattr(matching, "INLINE", 100)


@pytest.mark.usefixtures("limits")
def test_round_the_ring(world: hd.World) -> None:
    findings = Findings(world.comm)
    after, before = _peers(world)
    sent = _tree(world.rank)
    handle = hd.isend(sent, after)
    got = hd.recv(before)
    handle.wait(30)
    findings.check(_same(got, _tree(before)), f"from {before}")
    findings.check(_same(sent, _tree(world.rank)), "what was sent has changed")
    tensors = tree.flatten(got).tensors
    findings.check(all(x.untyped_storage().nbytes() == x.nbytes for x in tensors), "memory of its own")
    findings.settle()


@pytest.mark.mpi(min_size=2)
def test_send_and_recv(world: hd.World) -> None:
    """From rank 0 to all others, one after the other."""
    findings = Findings(world.comm)
    for turn, value in enumerate([_tree(3), torch.tensor(1.5), [1, 2], "text", None]):
        if world.rank == 0:
            for dest in range(1, world.world_size):
                hd.send(value, dest)
        got = hd.recv(0) if world.rank else value
        findings.check(_same(got, value), turn)
    findings.settle()


def test_order_and_tags(world: hd.World) -> None:
    """What one rank sends with one tag comes in its order; a tag may be asked for out of order."""
    findings = Findings(world.comm)
    after, before = _peers(world)
    big = torch.zeros(50_000)
    handles = [hd.isend((tag, turn, big + turn), after, tag) for turn in range(3) for tag in (0, 7)]
    for tag in (7, 0):
        for turn in range(3):
            got = hd.recv(before, tag)
            findings.check(got[:2] == (tag, turn) and bool((got[2] == turn).all()), got)
    for handle in handles:
        handle.wait(30)
    findings.settle()


@pytest.mark.mpi(min_size=2)
def test_isend_and_send_keep_their_order(world: hd.World) -> None:
    """What is begun in the background first comes first, whatever thread posts it."""
    findings = Findings(world.comm)
    for turn in range(50):
        if world.rank == 0:
            handle = hd.isend(("first", turn, torch.zeros(100)), 1)
            hd.send(("second", turn), 1)
            handle.wait(30)
        elif world.rank == 1:
            found = hd.recv(0)[:2], hd.recv(0)
            findings.check(found == (("first", turn), ("second", turn)), found)
    findings.check(hd.concat([world.rank]) == list(range(world.world_size)), "the next call")
    findings.settle()


def test_any_source_and_any_tag(world: hd.World) -> None:
    findings, size = Findings(world.comm), world.world_size
    handles = [hd.isend([world.rank] * 3, dest, tag=world.rank) for dest in range(size)]
    got = sorted(hd.recv(with_source=True) for _ in range(size))
    findings.check(got == [([rank] * 3, rank) for rank in range(size)], got)
    for handle in handles:
        handle.wait(30)
    findings.settle()


def test_many_in_flight(world: hd.World) -> None:
    """Receives that were asked for first get what comes first, also before one that waits in the foreground."""
    findings = Findings(world.comm)
    after, before = _peers(world)
    receives = [hd.irecv(before) for _ in range(20)]
    findings.check(not receives[0].done(), "done before anything was sent")
    world.comm.Barrier()
    sends = [hd.isend((turn, torch.full((turn * 3000,), turn)), after) for turn in range(21)]
    last = hd.recv(before)
    for turn, handle in enumerate(receives):
        number, x = handle.wait(30)
        findings.check(number == turn and x.numel() == 3000 * turn and bool((x == turn).all()), (turn, number))
        findings.check(handle.done() and handle.wait()[0] == turn, "a second wait")
    findings.check(last[0] == 20, last[0])
    for handle in sends:
        findings.check(handle.wait(30) is None, "isend gives None")
    findings.settle()


def test_a_timeout_does_not_end_it(world: hd.World) -> None:
    findings = Findings(world.comm)
    after, before = _peers(world)
    handle = hd.irecv(before, with_source=True)
    try:
        handle.wait(0.01)
        findings.check(False, "no timeout")
    except TimeoutError as error:
        findings.check("it continues" in str(error), error)
    world.comm.Barrier()
    hd.isend("late", after).wait(30)
    findings.check(handle.wait(30) == ("late", before), "after the timeout")
    findings.settle()


def test_in_a_group_and_beside_the_users_messages(world: hd.World) -> None:
    """Ranks are those of the group; what the user sends over the same communicator is not touched."""
    findings = Findings(world.comm)
    comm = world.comm.Split(0, -world.rank)
    hd.concat([], group=comm)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    theirs = comm.isend("the user's", after, tag=0)
    ours = hd.isend(comm.rank, after, group=comm)
    findings.check(hd.recv(before, group=comm) == before, "ours")
    findings.check(comm.recv(source=before, tag=MPI.ANY_TAG) == "the user's", "the user's")
    theirs.wait()
    ours.wait(30)
    comm.Free()
    findings.settle()


def test_one_header_message_at_most(world: hd.World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand small tensors are one message; each large one is one more, straight from its memory."""
    findings = Findings(world.comm)
    sent: list[str] = []

    class Spy:
        def __init__(self, comm: MPI.Comm, name: str) -> None:
            self.comm, self.name = comm, name

        def Isend(self, message: Any, *args: Any) -> MPI.Request:  # noqa: N802
            sent.append(self.name)
            return self.comm.Isend(message, *args)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.comm, name)

    engine, (after, before) = world._context, _peers(world)
    monkeypatch.setattr(engine, "header_comm", Spy(engine.header_comm, "header"))
    monkeypatch.setattr(engine, "data_comm", Spy(engine.data_comm, "data"))
    handle = hd.isend([torch.full((k % 7,), k) for k in range(1000)], after)
    got = hd.recv(before)
    handle.wait(30)
    findings.check(len(got) == 1000 and sent == ["header"], sent)
    sent.clear()
    handle = hd.isend([torch.zeros(100_000), torch.zeros(5), torch.zeros(200_000)], after)
    hd.recv(before)
    handle.wait(30)
    findings.check(sent == ["header", "data", "data"], sent)
    monkeypatch.undo()
    findings.settle()


def test_wrong_arguments_are_told_here(world: hd.World) -> None:
    """Nothing was sent, and nobody else is concerned."""
    findings = Findings(world.comm)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "x is a builtins.object, which is not sent", lambda: hd.send(object(), 0)),
        (ValueError, "dest is -1, expected 0 to", lambda: hd.send(1, -1)),
        (ValueError, "dest is", lambda: hd.isend(1, world.world_size)),
        (TypeError, "", lambda: hd.send(1, "0")),  # type: ignore[arg-type]
        (ValueError, "tag is -1", lambda: hd.isend(1, 0, -1)),
        (ValueError, "tag is", lambda: hd.recv(tag=2**40)),
        (ValueError, "source is", lambda: hd.irecv(world.world_size)),
        (TypeError, "route", lambda: hd.send(1, 0, route="mpi")),  # type: ignore[call-arg]
        (ValueError, "this rank itself", lambda: hd.send(1, world.rank)),
    ]
    for kind, told, step in wrong:
        try:
            step()
            findings.check(False, f"no error: {told}")
        except kind as error:
            findings.check(told in str(error), error)
    findings.settle()


def test_pickles_need_both_sides(world: hd.World) -> None:
    findings = Findings(world.comm)
    after, before = _peers(world)
    for allowed in (False, True):
        handle = hd.isend({world.rank}, after, allow_pickle=True)
        try:
            got = hd.recv(before, allow_pickle=allowed)
            findings.check(allowed and got == {before}, got)
        except TypeError as error:
            findings.check(not allowed and "loads only with allow_pickle=True" in str(error), error)
        handle.wait(30)
    findings.settle()


class _Unreadable:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _refuse, ("not here",)


def _refuse(why: str) -> None:
    raise LookupError(why)


def test_a_pickle_that_cannot_be_read(world: hd.World) -> None:
    """An error where it is read; the job goes on."""
    findings = Findings(world.comm)
    after, before = _peers(world)
    handle = hd.isend(_Unreadable(), after, allow_pickle=True)
    for what in (
        lambda: hd.recv(before, allow_pickle=True),
        lambda: hd.concat([_Unreadable()], allow_pickle=True),
        lambda: hd.split([_Unreadable()] * world.world_size if world.rank == 0 else None, allow_pickle=True),
    ):
        try:
            findings.check(False, what())
        except HpcdistError as error:
            findings.check("cannot be loaded: LookupError: not here" in str(error), error)
    handle.wait(30)
    findings.check(hd.concat([1]) == [1] * world.world_size, "the next call")
    findings.settle()


def test_interrupted_before_each_line(world: hd.World) -> None:
    """A handler that raises anywhere while a message is looked for costs nothing: the next receive gets it, once."""
    findings = Findings(world.comm)
    after, before = _peers(world)
    interruptions = 0
    for line in range(80):
        handle = hd.isend(line, after, 3)
        turn = RecvTurn(world._context, world._context.everyone, before, 3)
        world.comm.Barrier()
        interruptions += _interrupted(turn.wait, line)
        turn.give_back()
        got = hd.recv(before, 3)
        findings.check(got == line, f"line {line}: {got}")
        handle.wait(30)
    findings.check(interruptions > 25, f"{interruptions} lines")
    world.comm.Barrier()
    findings.check(world._context.unexpected._of_key.get(0, []) == [], "a message came twice")
    findings.settle()


def test_interrupted_behind_another_receive(world: hd.World) -> None:
    """What is received behind a receive in the background can be interrupted, too: the next one gets the message."""
    findings = Findings(world.comm)
    after, before = _peers(world)
    other = hd.irecv(before, tag=9)

    def raising(*_: object) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, raising)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        hd.recv(before, tag=1)
        findings.check(False, "not interrupted")
    except KeyboardInterrupt:
        findings.check(True, "interrupted")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    world.comm.Barrier()
    handle = hd.isend("late", after, tag=1)
    findings.check(hd.recv(before, tag=1) == "late", "the message")
    handle.wait(30)
    last_one = hd.isend("other", after, tag=9)
    findings.check(other.wait(30) == "other", "what was begun before")
    last_one.wait(30)
    findings.settle()


def _interrupted(step: Callable[[], object], after: int) -> bool:
    """Whether an exception came before line `after` of those that `step` runs in the modules that receive."""
    left, files = after, (matching.__file__, transfers.__file__)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not line.startswith("with "):  # at its end no handler runs before the lock is released
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.mpi(min_size=2)
def test_what_a_freed_communicator_has_not_received(world: hd.World) -> None:
    """It is for nobody: the next communicator of the same ranks does not get it."""
    findings = Findings(world.comm)
    after, before = _peers(world)
    for turn in range(2):
        comm = world.comm.Dup()
        hd.concat([], group=comm)
        hd.isend(f"first of {turn}", after, group=comm).wait(30)
        hd.isend(f"second of {turn}", after, group=comm).wait(30)
        got = hd.recv(before, group=comm)
        findings.check(got == f"first of {turn}", got)
        world.comm.Barrier()  # the second one has been sent
        comm.Free()
    findings.settle()


@pytest.mark.parametrize("envelope", ["right", "short", "longer than it is", "of a number that none has"])
@pytest.mark.parametrize(
    "text", [b"", b"\xff" * 8, (2**40).to_bytes(8, "little"), (5).to_bytes(8, "little") + b"{'a':"]
)
def test_damaged_messages(world: hd.World, text: bytes, envelope: str) -> None:
    """Whatever comes: an error, and no memory is taken for what it says."""
    findings = Findings(world.comm)
    after, before = _peers(world)
    number, length = (-2 if envelope.startswith("of") else 2), len(text) + envelope.startswith("longer")
    sent = struct.pack("<qqqq", 0, 0, number, length) + text
    request = world._context.header_comm.Isend([sent[:20] if envelope == "short" else sent, MPI.BYTE], after, 0)
    try:
        hd.recv(before)
        findings.check(False, "no error")
    except HpcdistError as error:
        findings.check("damaged" in str(error), error)
    request.Wait()
    handle = hd.isend(1, after)
    findings.check(hd.recv(before) == 1, "the next message")
    handle.wait(30)
    findings.settle()


@pytest.mark.mpi(min_size=2)
def test_a_world_that_ends_with_receives_open(world: hd.World) -> None:
    """They can never be answered, and say so; tests/runtime/test_background.py has the rest of the ending."""
    comm = world.comm.Split(world.rank)
    hd.concat([], group=comm)
    handle = hd.irecv(group=comm)
    assert not handle.done()
    comm.Free()  # collective: its team goes with it
    caught = ""
    try:
        handle.wait(30)
    except HpcdistError as error:
        caught = str(error)
    assert_on_all_ranks(world.comm, "ended before this message" in caught, caught)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["recv", "async_op"])
def test_a_rank_that_waits_uses_less_than_half_a_core(world: hd.World, way: str) -> None:
    """As docs/fail/faq.md says; MPI's own waiting uses all of it."""
    world.comm.Barrier()
    seconds = 0.0
    if world.rank == 1:
        time.sleep(0.5)
    used = time.process_time()
    if way == "async_op":
        handle = hd.concat([world.rank], async_op=True)
        seconds = time.monotonic()
        handle.wait(30)
    elif world.rank == 0:
        seconds = time.monotonic()
        hd.recv(source=1)
    elif world.rank == 1:
        hd.send(1, dest=0)
    used, seconds = time.process_time() - used, time.monotonic() - seconds
    assert_on_all_ranks(world.comm, world.rank > 0 or (seconds > 0.4 and used < seconds / 2), (used, seconds))
