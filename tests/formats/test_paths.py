"""A file appears under its name when it is complete, and what killed jobs left is taken over or swept."""

import errno
import fcntl
import itertools
import os
import signal
import stat
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from hpcdist.errors import FileError
from hpcdist.formats import paths
from hpcdist.formats.paths import Commit

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("left", ["LEFT-data-LEFT-more-LEFT and on", "LEFT-da", ""])
def test_what_was_left_is_adopted(left, gone):
    """Its data alone: the rest, and the size, are the new part's. If another process has taken it, nothing is."""
    before = Commit("x", keep=True)
    before.part.write_text(left)
    before.discard(keep=True)
    one = Commit("x", keep=True)
    assert (one.left is None) == (not left)
    one.part.write_text("new .... new .... new")
    if gone:
        before.part.unlink(missing_ok=True)
    kept = ["...."] * 2
    if left:
        assert one.adopt([(15, 15), (13, 17), (4, 8)]) is not gone
        kept = kept if gone else [left[at : at + 4].ljust(4, "\0") for at in (4, 13)]
    one.finish()
    assert (Path("x").read_text(), os.listdir()) == ("new {} new {} new".format(*kept), ["x"])


def test_a_lock_on_the_finished_file_is_not_taken_for_one_on_the_part(monkeypatch):
    """Between open and lock, the other writer finishes: the open file is the target by then, and is not to be cut."""
    one, flock = Commit("x"), fcntl.flock
    one.part.write_text("complete")

    def late(fd, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        one.finish()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    two = Commit("x")
    assert Path("x").read_text() == "complete"
    two.discard()
    assert Path("x").read_text() == "complete"


def test_sweep_takes_what_nobody_holds():
    for name in ("stage-old", "stage-held", "stage-young", "other"):
        Path(name).touch()
        os.utime(name, (0, 0) if name != "stage-young" else None)
    with open("stage-held", "r+b") as held:
        assert paths.lock(held.fileno())
        paths.sweep(Path(), "stage-")
        assert sorted(os.listdir()) == ["other", "stage-held", "stage-young"]
    paths.sweep(Path(), "stage-")
    assert sorted(os.listdir()) == ["other", "stage-young"]


def test_a_child_that_lives_on_does_not_keep_the_lock():
    """Such as a worker of a DataLoader: HDF5 reads no file that is locked."""
    one = Commit("x")
    if not (child := os.fork()):
        time.sleep(60)
        os._exit(0)
    one.finish()
    with open("x", "r+b") as file:
        assert paths.lock(file.fileno())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_order_of_the_last_steps(monkeypatch):
    """The data are on the disk before the name is, and the name before it is said to be."""
    steps = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (steps.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("rename"), replace(a, b)))
    Commit("x").finish()
    assert [step[:3] for step in steps] == [".x.", "ren", os.path.basename(os.getcwd())[:3]]


def test_only_a_regular_file_is_replaced():
    """By any path to it: a symbolic link to /dev/full would put a file in the place of the device."""
    if os.geteuid() == 0:  # one of its own: what this test finds must not cost the machine its /dev/full
        os.mknod("there", stat.S_IFCHR | 0o666, os.makedev(1, 7))
    else:
        os.symlink("/dev/full", "there")
    Path("x").symlink_to("there")
    before = os.stat("x")
    for path in ("there", "x"):
        with pytest.raises(FileError, match="is a device: only a regular file is replaced"):
            Commit(path)
    assert os.path.samestat(before, os.stat("x"))
    assert sorted(os.listdir()) == ["there", "x"]


PLANTS = {
    "symlink": lambda part: part.symlink_to("precious"),
    "hard link": lambda part: part.hardlink_to("precious"),
    "FIFO": os.mkfifo,
    "folder": os.mkdir,
    "another user's": lambda part: part.write_text("theirs"),
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("plant", [*PLANTS, "of another name"])
def test_a_part_that_somebody_has_planted_is_left_alone(plant, keep, monkeypatch):
    """Neither taken over nor removed; the part that is written has a name that nobody can guess."""
    Path("precious").write_text("precious")
    one = Commit("x")
    one.discard()
    part = one.part if plant in PLANTS else Path(".x.some.part")
    PLANTS.get(plant, Path.touch)(part)
    if plant == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    two = Commit("x", keep)
    assert two.left is None
    two.part.write_text("new")
    two.finish()
    assert Path("precious").read_text() == "precious"
    assert plant != "another user's" or part.read_text() == "theirs"
    assert sorted(os.listdir()) == sorted([part.name, "precious", "x"])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("code", [None, errno.ENOLCK, errno.EOPNOTSUPP])
def test_two_writers_where_locks_do_nothing(code, keep, monkeypatch):
    """Neither takes the other's part for one that was left, with resume or without: the last one has the name."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=code and OSError(code, os.strerror(code))))
    both = [Commit("x", keep) for _ in range(2)]
    for i, one in enumerate(both):
        one.part.write_text(f"{i}")
    for i, one in enumerate(both):
        one.finish()
        assert Path("x").read_text() == f"{i}"
    assert os.listdir() == ["x"]


@pytest.mark.filterwarnings("ignore:.*may still be written by another host")
def test_whose_part_it_is(monkeypatch):
    """One of a process that is gone is taken at once; one of another system when it has rested."""
    for system, age, dead in ((paths.own_system(), 0, True), ("0" * 8, 0, False), ("0" * 8, 1000, True)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 2**22 + 1)  # more than there can be
            patch.setattr(paths, "start_of", lambda pid: "1" * 8)
            patch.setattr(paths, "own_system", lambda: system)  # noqa: B023
            left = Commit("x", keep=True)
            left.part.write_text("half")
            os.utime(left.part, (time.time() - age,) * 2)
            lock = Path(f"{left.part}-1-2.lock")  # as Open MPI's MPI-IO makes one
            lock.touch()
            left.discard(keep=True)
        one = Commit("x", keep=True)
        assert (one.left is not None, lock.exists()) == (dead, not dead), (system, age)
        one.discard()
        for path in (left.part, lock):
            path.unlink(missing_ok=True)
    assert os.listdir() == []


def test_what_happens_in_the_meantime():
    """Somebody has removed the part, or put a FIFO in the place of the target: an error, and what is there stays."""
    for meanwhile, message in ((lambda one: one.part.unlink(), "another process has taken"), (fifo, "x: is a FIFO")):
        Path("x").write_text("old")
        one = Commit("x")
        meanwhile(one)
        with pytest.raises(FileError, match=message):
            one.finish()
        one.discard()
        assert os.listdir() == ["x"]
        assert Path("x").is_fifo() or Path("x").read_text() == "old"


def fifo(one):
    one.target.unlink()
    os.mkfifo("x")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES])
def test_a_folder_that_cannot_be_synced(code, monkeypatch):
    """That is no error; of a file, it is."""
    Path("x").touch()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(code, os.strerror(code))))
    paths.sync(Path())
    with pytest.raises(OSError, match=os.strerror(code)):
        paths.sync(Path("x"))


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_new_file_has_the_mode_of_the_old_one():
    """And while it is written, nobody reads more of it than of the old one."""
    target = Path("x")
    Path("link").symlink_to("x")
    old = os.umask(0o027)
    try:
        for path, bits in itertools.product(("link", "x"), (0, 0o600, 0o664, 0o640)):
            target.chmod(bits) if bits else target.unlink(missing_ok=True)
            left = Commit("x", keep=True)
            left.part.write_text("left by a job that was killed")
            left.part.chmod(0o666)
            left.discard(keep=True)
            one = Commit(path)
            assert mode(one.part) == (0o600 if bits else 0o640)
            one.finish()
            assert mode(target) == (bits or 0o640)
    finally:
        os.umask(old)


def test_the_new_file_has_owner_group_and_attributes_of_the_old_one(monkeypatch):
    target, root = Path("x"), os.geteuid() == 0
    target.write_text("old")
    target.chmod(0o664)
    os.setxattr(target, "user.note", b"kept")
    if root:
        os.chown(target, 1234, 5678)
    Commit(target).finish()
    found = target.stat()
    assert not root or (found.st_uid, found.st_gid) == (1234, 5678)
    assert (mode(target), os.getxattr(target, "user.note"), target.read_text()) == (0o664, b"kept", "")
    if root:  # as for a user who may not give files away: another group may do no more than everybody
        monkeypatch.setattr(os, "fchown", Mock(side_effect=PermissionError))
        Commit(target).finish()
        assert (mode(target), target.stat().st_gid) == (0o644, os.getegid())


def test_a_read_only_file_is_not_replaced(monkeypatch):
    Path("x").write_text("old")
    monkeypatch.setattr(os, "access", lambda path, how: how != os.W_OK)  # root may write anything
    with pytest.raises(FileError, match="x: is there already, and read-only"):
        Commit("x")
    assert os.listdir() == ["x"]
