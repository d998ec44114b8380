"""Several ranks, each acting for a node of its own: who reads, who is sent what, and failures that all ranks see."""

import errno
import os
import tarfile
from pathlib import Path

import pytest
from collective import assert_on_all_ranks, refused, several_ranks
from launch import mpirun

from hpcdist.tools.stage_env import stage
from hpcdist.tools.stage_env.stage import Request

PIECE = 1 << 16
FILES = 40
BYTES = bytes(range(251)) * 400


def staged(comm, shared, to):
    """Stage "data" of a shared folder, each rank into a folder of its own. Rank 0's result, on all ranks."""
    request = Request(str(shared / "data"), str(to), timeout=60)
    return comm.bcast(stage.stage_on_nodes(comm, request))


@pytest.fixture
def shared(world, folder, monkeypatch):
    """A folder with "data", of several pieces; some files are larger than one."""
    monkeypatch.setattr(stage, "PIECE", PIECE)
    monkeypatch.setattr(stage, "CHUNK", 1 << 12)
    if world.rank == 0:
        (folder / "data").mkdir()
        for number in range(FILES):
            (folder / "data" / f"{number}").write_bytes(BYTES[number : number * 2500])
    world.comm.Barrier()
    return folder


@pytest.fixture
def to(world, folder):
    """This rank's own disk."""
    made = folder / f"local{world.rank}"
    made.mkdir()
    return made


def _holds(done, to):
    copy = to / f"hpcdist-{os.getuid()}" / "stage_env" / Path(done.path).parent.name / "data"
    return all((copy / f"{n}").read_bytes() == BYTES[n : n * 2500] for n in range(FILES))


def _left(to):
    return os.listdir(to / f"hpcdist-{os.getuid()}" / "stage_env")


@several_ranks
@pytest.mark.parametrize("pieces", [0, 9])
def test_a_full_disk_is_the_same_error_everywhere_and_leaves_nothing(world, shared, to, pieces, monkeypatch):
    comm, written, extract = world.comm, [0], tarfile.TarFile.extract

    def limited(tar, member, path):
        written[0] += member.size
        if comm.rank == 1 and written[0] > pieces * PIECE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        extract(tar, member, path)

    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "extract", limited)
        refused("No space left on device [HD410]", staged, comm, shared, to)
    assert_on_all_ranks(_left(to) == [], to)
    assert_on_all_ranks(_holds(staged(comm, shared, to), to))


@several_ranks
@pytest.mark.parametrize("number", ["1", "39"])
def test_what_cannot_be_read_is_the_same_error_everywhere(world, shared, to, number, monkeypatch):
    """A file in the middle or at the end, or a folder that one node lacks. The copies that were there stay."""
    comm, new, opened = world.comm, to / "new", stage.opened
    done = staged(comm, shared, to)
    text = f"{new.parent.with_name('local0')}/new: no such folder"
    refused(text, staged, comm, shared, to if comm.rank else new, ranks=[0])

    def broken(entry):
        if entry.info.name == f"data/{number}":
            raise OSError(errno.EIO, os.strerror(errno.EIO), entry.path)
        return opened(entry)

    new.mkdir()
    comm.Barrier()
    with monkeypatch.context() as patch:
        patch.setattr(stage, "opened", broken)
        text = f"{shared}/data/{number}: cannot be read: Input/output error [HD402]"
        refused(text, staged, comm, shared, new if comm.rank else to)
    assert_on_all_ranks(_holds(done, to) and (comm.rank == 0 or _left(new) == []))


@several_ranks
def test_what_is_damaged_on_its_way_gets_no_name(world, shared, to, monkeypatch):
    """In the contents of a file, which nothing else would notice."""
    comm, received = world.comm, [0]

    def damaging(part, data, size):
        piece = bytearray(broadcast(part, data, size))
        received[0] += len(piece) > 1000
        if received[0] == 2 and comm.rank == 1:
            piece[piece.index(BYTES[:50])] ^= 1
        return bytes(piece)

    broadcast = stage.broadcast
    monkeypatch.setattr(stage, "broadcast", damaging)
    refused("were damaged in transit [HD404]", staged, comm, shared, to)
    assert_on_all_ranks(_left(to) == [], to)


def test_a_disk_that_hangs_ends_the_job(tmp_path):
    """After the time that rank 0 was given; what the others were does not matter."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_bytes(BYTES)
    code = """
        import os, sys, tarfile, time
        from mpi4py import MPI
        from hpcdist.tools.stage_env.__main__ import main
        if MPI.COMM_WORLD.rank: os.environ["HPCDIST_TIMEOUT"] = "soon"
        tarfile.TarFile.extract = lambda *_: time.sleep(600)
        sys.exit(main(["data", "--to", "."]))
    """
    job = mpirun(2, code=code, cwd=tmp_path, env={"HPCDIST_TIMEOUT": "1"})
    assert job.status != 0 and "has made no progress for 1 s" in job.err, job


def test_the_options_of_rank_0_count(tmp_path):
    (tmp_path / "data").mkdir()
    code = """
        import sys
        from mpi4py import MPI
        from hpcdist.tools.stage_env.__main__ import main
        sys.exit(main(["data", "--to", "."] if MPI.COMM_WORLD.rank == 0 else ["no", "--to", "nowhere"]))
    """
    job = mpirun(2, code=code, cwd=tmp_path)
    assert job.status == 0 and Path(job.out.strip()).name == "data", job
    wrong = mpirun(2, code=code, cwd=tmp_path, env={"HPCDIST_TIMEOUT": "soon"})
    assert wrong.status == 2 and "HPCDIST_TIMEOUT is 'soon', expected seconds [HD114]" in wrong.err, wrong
