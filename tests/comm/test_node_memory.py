"""Memory that the ranks of a node share: where there is none, when a process dies, and in a child process."""

import resource
import time
from pathlib import Path

import pytest
import torch
from collective import windows_of
from launch import mpirun
from mpi4py import MPI

import hpcdist as hd
from hpcdist.activity import procstat
from hpcdist.comm import node_memory
from hpcdist.process import machine
from hpcdist.runtime.world import team_of

SIZE = 50_000


@pytest.fixture
def group(world):
    comm = world.comm.Dup()
    yield comm
    comm.Free()


def _concat(world, group, findings, expected):
    """A shared concat of the group, of which `expected` says why it is not shared."""
    whole = hd.concat(torch.full((SIZE,), float(world.rank)), shared=True, group=group)
    good = torch.equal(whole, torch.arange(world.world_size, dtype=torch.float32).repeat_interleave(SIZE))
    findings.check(good, "wrong values")
    reason = str(team_of(group).unshared)
    findings.check(expected in reason, f"{reason!r}, expected {expected!r}")
    return whole


def test_without_room_results_are_private_and_say_why(world, last, group, findings):
    """On one rank, at the first use; then there is room again."""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == last:
            patch.setattr(machine, "available", lambda: 1000)
        _concat(world, group, findings, f"rank {last}: ")
        _concat(world, group, findings, "bytes of free memory")
    _concat(world, group, findings, "None")


def test_room_for_one_result_is_enough(world, group, findings):
    """Though the ranks take their parts of it one after the other."""
    room = int(1.2 * 4 * SIZE * world.world_size)

    def available():
        time.sleep(0.2 * world.rank)
        return room - sum(windows_of(group))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "available", available)
        whole = _concat(world, group, findings, "None")
        world.comm.Barrier()
        _concat(world, group, findings, "bytes of free memory")  # beside the first
    del whole


def test_what_nobody_holds_is_given_back(world, group, findings):
    """By empty_cache(); and beyond a bound after a while, not only when another window is made."""

    def taken():
        own = sum(windows_of(group))
        world.comm.Barrier()
        return own

    whole, other = _concat(world, group, findings, "None"), _concat(world, group, findings, "None")
    nbytes = whole.nbytes
    hd.memory.empty_cache()
    findings.check(taken() >= 2 * nbytes, "windows that are held were freed")
    stats = hd.memory.memory_stats()["window_bytes"]
    findings.check(isinstance(stats, int) and stats >= 2 * nbytes, stats)
    del whole
    world.comm.Barrier()
    hd.memory.empty_cache()
    world.comm.Barrier()
    findings.check(nbytes <= taken() < 1.5 * nbytes, "one is held")
    whole = _concat(world, group, findings, "None")
    expected = torch.arange(world.world_size, dtype=torch.float32).repeat_interleave(SIZE)
    findings.check(torch.equal(other, expected), "the one that was held changed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_memory, "KEPT", int(1.5 * nbytes))
        del whole, other
        end = time.monotonic() + 60
        while time.monotonic() < end and world.comm.allreduce(taken(), op=MPI.MAX) >= 1.5 * nbytes:
            time.sleep(0.1)
        findings.check(nbytes <= taken() < 1.5 * nbytes, "one is kept")
    _concat(world, group, findings, "None")


def test_the_systems_own_refusal_is_no_signal(world, group, findings):
    """A limit of the size of files holds for memory without a name, too."""
    _concat(world, group, findings, "None")  # which is kept, and used again below the limit
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, hard))
    try:
        kept = _concat(world, group, findings, "None")
        _concat(world, group, findings, "too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    _concat(world, group, findings, "None")
    del kept


def test_the_number_of_windows_is_bounded(world, group, findings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_memory, "SLOTS", 3)
        held = [_concat(world, group, findings, "None") for _ in range(3)]
        _concat(world, group, findings, "windows are held already")
        held.pop()
        world.comm.Barrier()
        _concat(world, group, findings, "None")
        patch.setattr(node_memory, "KEPT", 0)
        held.clear()
        world.comm.Barrier()
        other = hd.concat(torch.ones(2 * SIZE), shared=True, group=group)
        kept = team_of(group).windows.nbytes()
        findings.check(kept < 1.05 * other.nbytes, f"{kept} bytes are kept beside {other.nbytes}")


def test_few_windows_that_nobody_holds_are_kept(world, group, findings):
    """Each takes descriptors, however small it is: results of many sizes, held and then dropped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_memory, "SPARE", 2)
        for count in (6, 7):
            held = [
                hd.concat(torch.ones(SIZE * (10 + count) * (i + 2)), shared=True, group=group) for i in range(count)
            ]
            held.clear()
            world.comm.Barrier()
        hd.concat(torch.ones(SIZE), shared=True, group=group)
        slots = len(windows_of(group))
        findings.check(slots == 3, f"{slots} windows are kept, expected the one in use and 2")


@pytest.mark.mpi(min_size=2)
def test_processes_that_cannot_open_each_others_memory_have_their_own(world, group, findings):
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(procstat, "address", lambda fd: [0, 0, 0, 0])
        for _ in range(2):
            _concat(world, group, findings, "cannot open each other's memory")


ENDS = """
    import os, signal, torch, hpcdist as hd
    from hpcdist.runtime.world import team_of
    world = hd.init()
    whole = hd.concat(torch.full((100_000,), float(world.rank)), shared=True)
    mine, yours = os.pipe()
    expected = torch.arange(2.).repeat_interleave(100_000)
    child = os.fork()
    if not child:
        os.read(mine, 1)
        good = torch.equal(whole, expected)
        del whole
        os._exit(0 if good else 1)
    del whole
    for i in range(3):
        world.comm.Barrier()
        again = hd.concat(torch.full((100_000,), 7. + i), shared=True)
        assert again.unique().tolist() == [7. + i] and team_of().unshared is None
        del again
    assert team_of().windows.nbytes() < 800_000 + 2**17, team_of().windows.nbytes()
    os.write(yours, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child saw a later result"
    world.comm.Barrier()
    whole = hd.concat(torch.ones(1 << 20), shared=True)
    os.write(1, f"pid {os.getpid()}\\n".encode())
    world.comm.Barrier()
    if world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    hd.concat(torch.ones(1 << 20), shared=True)
"""


@pytest.mark.both
def test_a_child_keeps_the_result_that_it_was_forked_with_and_nothing_is_left_after_kill_9():
    before = set(Path("/dev/shm").iterdir())
    job = mpirun(2, code=ENDS)
    assert job.status != 0
    pids = [line.split()[1] for line in job.out.splitlines() if line.startswith("pid")]
    assert len(pids) == 2, job
    end = time.monotonic() + 60  # mpirun may end a moment before the other rank does
    while any(Path(f"/proc/{pid}/fd").exists() for pid in pids):
        assert time.monotonic() < end, pids
        time.sleep(0.05)
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "hpcdist" in path.name]
