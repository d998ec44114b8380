"""Several ranks, each acting for a node of its own: who reads, who is sent what, and failures that all ranks see."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from collective import assert_on_all_ranks, raises_on_all_ranks
from launch import mpirun

from hpcdist import World
from hpcdist.errors import RankError
from hpcdist.stage_env import archive, packer, stage, transfer, unpack
from hpcdist.stage_env.archive import Request
from hpcdist.stage_env.stage import Options, Staged
from hpcdist.stage_env.watchdog import Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

WINDOW = 1 << 16
FILES = 40
BYTES = bytes(range(251)) * 400


def _nothing(*_: object) -> None:
    return None


def staged(comm: MPI.Intracomm, shared: Path, to: Path, **asked: Any) -> Staged:
    """Stage "data" of a shared folder, each rank into a folder of its own. Rank 0's result, on all ranks."""
    options = Options(str(to), "1", verify=True, **asked)
    with Watchdog(60) as dog:
        steps = stage._Steps(comm, options, _nothing, lambda _: _nothing, dog)
        done: Staged = comm.bcast(steps.run(Request(str(shared / "data"))))
    return done


@pytest.fixture
def shared(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with "data", of several windows; some files are larger than one."""
    monkeypatch.setattr(packer, "WINDOW", WINDOW)
    monkeypatch.setattr(archive, "WINDOW", WINDOW)
    if world.rank == 0:
        (folder / "data").mkdir()
        for number in range(FILES):
            (folder / "data" / f"{number}").write_bytes(BYTES[number : number * 2500])
    world.comm.Barrier()
    return folder


@pytest.fixture
def to(world: World, folder: Path) -> Path:
    """This rank's own disk."""
    made = folder / f"local{world.rank}"
    made.mkdir()
    return made


def _holds(done: Staged, to: Path) -> bool:
    copy = to / f"hpcdist-{os.getuid()}" / "stage_env" / Path(done.path).parent.name / "data"
    return all((copy / f"{n}").read_bytes() == BYTES[n : n * 2500] for n in range(FILES))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("readers", [1, 2, 100])
def test_every_node_gets_a_copy_and_none_twice(world: World, shared: Path, to: Path, readers: int) -> None:
    comm = world.comm
    first = staged(comm, shared, to, readers=readers)
    assert_on_all_ranks(comm, _holds(first, to))
    assert_on_all_ranks(comm, first.sent == comm.size and len(first.source.sums) > 10)
    again = staged(comm, shared, to, readers=readers)
    assert_on_all_ranks(comm, (again.sent, again.source.packed) == (0, None))
    if world.rank == comm.size - 1:  # the others read for it, and unpack nothing
        to = to / "new"
        to.mkdir()
    third = staged(comm, shared, to, readers=readers)
    assert_on_all_ranks(comm, third.sent == 1 and _holds(third, to))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("windows", [0, 9])
def test_a_full_disk_is_the_same_error_everywhere_and_leaves_nothing(
    world: World, shared: Path, to: Path, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm, written, write = world.comm, [0], unpack._write

    def limited(fd: int, data: memoryview) -> None:
        written[0] += len(data)
        if comm.rank == 1 and written[0] > windows * WINDOW:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(unpack, "_write", limited)
        error = raises_on_all_ranks(comm, RankError, lambda: staged(comm, shared, to))
    assert_on_all_ranks(comm, "No space left on device [HD410]" in str(error), error)
    left = os.listdir(to / f"hpcdist-{os.getuid()}" / "stage_env")
    assert_on_all_ranks(comm, left == [".lock"], left)
    assert_on_all_ranks(comm, _holds(staged(comm, shared, to), to))


@pytest.mark.mpi(min_size=2)
def test_what_cannot_be_read_is_the_same_error_everywhere(world: World, shared: Path, to: Path) -> None:
    """In the middle of the archive, or a folder that one node lacks. The copies that were there stay."""
    comm, new = world.comm, to / "new"
    done = staged(comm, shared, to)
    error = raises_on_all_ranks(comm, RankError, lambda: staged(comm, shared, to if comm.rank else new))
    assert_on_all_ranks(comm, f"{new.parent.with_name('local0')}/new: no such folder" in str(error), error)
    assert_on_all_ranks(comm, list(error.problems) == [0])
    tar = shared / "data.stage_env.tar"
    if comm.rank == 0:
        found = tar.stat()
        with open(tar, "r+b") as file:
            file.seek(5 * WINDOW)
            file.write(b"something else")
        os.utime(tar, ns=(found.st_atime_ns, found.st_mtime_ns))
    new.mkdir()
    comm.Barrier()
    error = raises_on_all_ranks(comm, RankError, lambda: staged(comm, shared, new if comm.rank else to))
    assert_on_all_ranks(comm, f"{tar}: damaged at byte {5 * WINDOW}" in str(error), error)
    assert_on_all_ranks(comm, _holds(done, to))


@pytest.mark.mpi(min_size=2)
def test_what_is_damaged_on_its_way_is_not_unpacked(
    world: World, shared: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm, put = world.comm, transfer._Unpacking.put

    def damaging(self: transfer._Unpacking, window: bytearray, nbytes: int) -> None:
        window[1000] ^= comm.rank == 1
        put(self, window, nbytes)

    monkeypatch.setattr(transfer._Unpacking, "put", damaging)
    error = raises_on_all_ranks(comm, RankError, lambda: staged(comm, shared, to))
    assert_on_all_ranks(comm, "the archive was damaged on its way, at byte 0" in str(error), error)


@pytest.mark.mpi(min_size=2)
def test_the_options_of_rank_0_count(world: World, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    class Noting(Watchdog):
        def __init__(self, seconds: float) -> None:
            seen.append(seconds)
            super().__init__(seconds)

    monkeypatch.setattr(stage, "Watchdog", Noting)
    options = Options(str(shared) if world.rank == 0 else "nowhere", "1", timeout=60 + world.rank)
    done = stage.stage(world.comm, Request(str(shared / "data")), options, _nothing, lambda _: _nothing)
    assert_on_all_ranks(world.comm, seen == [60] and done.path.startswith(f"{shared}/hpcdist-"), (seen, done.path))


@pytest.mark.once
def test_a_disk_that_hangs_ends_the_job(tmp_path: Path) -> None:
    """After the time that rank 0 was given; what the others were does not matter."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_bytes(BYTES)
    code = """
        import os, sys, time
        from mpi4py import MPI
        from hpcdist.stage_env import unpack
        from hpcdist.stage_env.__main__ import main
        if MPI.COMM_WORLD.rank: os.environ["HPCDIST_TIMEOUT"] = "soon"
        unpack._write = lambda fd, data: time.sleep(600)
        sys.exit(main(["data", "--to", "."]))
    """
    start = time.monotonic()
    job = mpirun(2, code=code, cwd=tmp_path, env={"HPCDIST_TIMEOUT": "1"})
    assert job.status != 0 and "has made no progress for 1 s" in job.err, job
    assert time.monotonic() - start < 30
