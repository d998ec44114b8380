"""send, recv, isend, irecv: structures from rank to rank, their order, any source, and what goes wrong."""

import linecache
import signal
import struct
import sys
import time

import pytest
import torch
from collective import assert_on_all_ranks, goes_on, several_ranks
from mpi4py import MPI

import hpcdist as hd
from hpcdist.comm import messages
from hpcdist.errors import HpcdistError
from hpcdist.p2p import transfers
from hpcdist.p2p.transfers import RecvTurn
from hpcdist.runtime.world import context


def _peers(world):
    """The next rank of the ring, and the one before."""
    return (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size


@several_ranks
def test_isend_and_send_keep_their_order(rank):
    """What is begun in the background first comes first, whatever thread posts it."""
    for turn in range(50):
        if rank == 0:
            handle = hd.isend(("first", turn, torch.zeros(100)), 1)
            hd.send(("second", turn), 1)
            handle.wait(30)
        elif rank == 1:
            found = hd.recv(0)[:2], hd.recv(0)
            assert found == (("first", turn), ("second", turn))
    goes_on()


def test_many_in_flight(findings, world):
    """Receives that were asked for first get what comes first, also before one that waits in the foreground. A timeout
    does not end one."""
    (after, before) = _peers(world)
    receives = [hd.irecv(before) for _ in range(20)]
    with pytest.raises(TimeoutError, match="it continues"):
        receives[0].wait(0.01)
    findings.check(not receives[0].done(), "done before anything was sent")
    world.comm.Barrier()
    sends = [hd.isend((turn, torch.full((turn * 3000,), turn)), after) for turn in range(21)]
    last = hd.recv(before)
    for turn, handle in enumerate(receives):
        number, x = handle.wait(30)
        findings.check(number == turn and x.numel() == 3000 * turn and bool((x == turn).all()), (turn, number))
        findings.check(x.untyped_storage().nbytes() == x.nbytes, "memory of its own")
        findings.check(handle.done() and handle.wait()[0] == turn, "a second wait")
    findings.check(last[0] == 20, last[0])
    findings.check([handle.wait(30) for handle in sends] == [None] * 21, "isend gives None")


def test_in_a_group_and_beside_the_users_messages(findings, world):
    """Ranks are those of the group; what the user sends over the same communicator is not touched."""
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


def test_one_header_message_at_most(findings, world, monkeypatch):
    """A thousand small tensors are one message; each large one is one more, straight from its memory."""
    sent = []

    class Spy:
        def __init__(self, comm, name):
            self.comm, self.name = comm, name

        def Isend(self, message, *args):  # noqa: N802
            sent.append(self.name)
            return self.comm.Isend(message, *args)

        def __getattr__(self, name):
            return getattr(self.comm, name)

    engine, (after, before) = context(), _peers(world)
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


def test_wrong_arguments_are_told_here(world, size):
    """Nothing was sent, and nobody else is concerned."""
    wrong = [
        (TypeError, "x is a builtins.object, which is not sent", lambda: hd.send(object(), 0)),
        (ValueError, "dest is -1, expected 0 to", lambda: hd.send(1, -1)),
        (ValueError, "dest is", lambda: hd.isend(1, size)),
        (TypeError, "integer", lambda: hd.send(1, "0")),
        (TypeError, "HD201", lambda: hd.send(1, True)),
        (TypeError, "HD201", lambda: hd.irecv(0, False)),
        (ValueError, "tag is -1", lambda: hd.isend(1, 0, -1)),
        (ValueError, "tag is", lambda: hd.recv(tag=2**40)),
        (ValueError, "source is", lambda: hd.irecv(size)),
        (TypeError, "route", lambda: hd.send(1, 0, route="mpi")),
        (ValueError, "this rank itself", lambda: hd.send(1, world.rank)),
    ]
    for kind, told, step in wrong:
        with pytest.raises(kind, match=told):
            step()


class _Unreadable:
    def __reduce__(self):
        return _refuse, ("not here",)


def _refuse(why):
    raise LookupError(why)


def test_pickles(world, rank, size):
    """Both sides must allow them. One that cannot be read is an error where it is read; the job goes on."""
    (after, before), unreadable = _peers(world), [_Unreadable()] * size
    handles = [hd.isend(x, after, allow_pickle=True) for x in ({rank}, {rank}, _Unreadable())]
    with pytest.raises(TypeError, match="loads only with allow_pickle=True"):
        hd.recv(before)
    got = hd.recv(before, allow_pickle=True)
    assert_on_all_ranks(got == {before}, got)
    for what in (
        lambda: hd.recv(before, allow_pickle=True),
        lambda: hd.concat(unreadable, allow_pickle=True),
        lambda: hd.split(unreadable if rank == 0 else None, allow_pickle=True),
    ):
        with pytest.raises(HpcdistError, match="cannot be loaded: LookupError: not here"):
            what()
    for handle in handles:
        handle.wait(30)
    goes_on()


def test_interrupted_before_each_line(findings, world):
    """A handler that raises anywhere while a message is looked for costs nothing: the next receive gets it, once."""
    after, before = _peers(world)
    interruptions = 0
    for line in range(80):
        handle = hd.isend(line, after, 3)
        turn = RecvTurn(context(), context().everyone, before, 3)
        world.comm.Barrier()
        interruptions += _interrupted(turn.wait, line)
        turn.give_back()
        got = hd.recv(before, 3)
        findings.check(got == line, f"line {line}: {got}")
        handle.wait(30)
    findings.check(interruptions > 25, f"{interruptions} lines")
    world.comm.Barrier()
    late = hd.irecv(before, 3)
    with pytest.raises(TimeoutError):  # no message came twice
        late.wait(0.5)
    world.comm.Barrier()
    handle = hd.isend("last", after, 3)
    findings.check(late.wait(30) == "last", "another message than the last one")
    handle.wait(30)


def test_interrupted_behind_another_receive(findings, world):
    """What is received behind a receive in the background can be interrupted, too: the next one gets the message."""
    after, before = _peers(world)
    other = hd.irecv(before, tag=9)

    def raising(*_):
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, raising)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            hd.recv(before, tag=1)
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


def _interrupted(step, after):
    """Whether an exception came before line `after` of those that `step` runs in the modules that receive."""
    left, files = after, (messages.__file__, transfers.__file__)

    def trace(frame, event, argument):
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


@several_ranks
def test_what_a_freed_communicator_has_not_received(findings, world):
    """It is for nobody: the next communicator of the same ranks does not get it."""
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


@pytest.mark.parametrize("envelope", ["right", "short", "longer than it is", "of a number that none has"])
def test_damaged_messages(world, envelope):
    """Whatever comes: an error, and no memory is taken for what it says."""
    after, before = _peers(world)
    for text in (b"", b"\xff" * 8, (2**40).to_bytes(8, "little"), (5).to_bytes(8, "little") + b"{'a':"):
        number, length = (-2 if envelope.startswith("of") else 2), len(text) + envelope.startswith("longer")
        sent = struct.pack("<qqqq", 0, 0, number, length) + text
        request = context().header_comm.Isend([sent[:20] if envelope == "short" else sent, MPI.BYTE], after, 0)
        with pytest.raises(HpcdistError, match="damaged"):
            hd.recv(before)
        request.Wait()
        handle = hd.isend(1, after)
        assert_on_all_ranks(hd.recv(before) == 1, "the next message")
        handle.wait(30)


@several_ranks
def test_a_world_that_ends_with_receives_open(world):
    """They can never be answered, and say so; tests/runtime/test_background.py has the rest of the ending."""
    comm = world.comm.Split(world.rank)
    hd.concat([], group=comm)
    handle = hd.irecv(group=comm)
    assert not handle.done()
    comm.Free()  # collective: its team goes with it
    with pytest.raises(HpcdistError, match="ended before this message"):
        handle.wait(30)


@several_ranks
@pytest.mark.parametrize("way", ["recv", "async_op"])
def test_a_rank_that_waits_uses_less_than_half_a_core(world, rank, way):
    """As docs/fail/faq.md says; MPI's own waiting uses all of it."""
    world.comm.Barrier()
    seconds = 0.0
    if rank == 1:
        time.sleep(0.5)
    used = time.process_time()
    if way == "async_op":
        handle = hd.concat([rank], async_op=True)
        seconds = time.monotonic()
        handle.wait(30)
    elif rank == 0:
        seconds = time.monotonic()
        hd.recv(source=1)
    elif rank == 1:
        hd.send(1, dest=0)
    used, seconds = time.process_time() - used, time.monotonic() - seconds
    assert_on_all_ranks(rank > 0 or (seconds > 0.4 and used < seconds / 2), (used, seconds))
