"""A file appears under its name when it is complete, and what killed jobs left is taken over or swept."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcdist.errors import FileError
from hpcdist.formats import paths
from hpcdist.formats.paths import Commit


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_name_holds_the_old_file_until_the_end() -> None:
    """There is one writer at a time; what it has left is kept if that is wanted."""
    target = Path("x")
    target.write_text("old")
    for left in (None, b"half"):
        one = Commit("x", keep=True)
        assert one.part.read_text() == ""
        assert (None if one.left is None else os.pread(one.left, 9, 0)) == left
        one.part.write_text("half")
        if left:
            assert one.adopt([])
        with pytest.raises(FileError, match="this process is writing it already"):
            Commit(target)
        one.discard(keep=True)
        assert target.read_text() == "old"
    new = Commit("x")
    assert (new.left, new.part.read_text()) == (None, "")
    new.part.write_text("new")
    new.finish()
    assert (target.read_text(), os.listdir()) == ("new", ["x"])
    again = Commit("x")
    again.part.write_text("newer")
    again.discard()
    assert (target.read_text(), os.listdir()) == ("new", ["x"])


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("left", ["LEFT-data-LEFT-more-LEFT and on", "LEFT-da", ""])
def test_what_was_left_is_adopted(left: str, gone: bool) -> None:
    """Its data alone: the rest, and the size, are the new part's. If another process has taken it, nothing is."""
    before = Commit("x", keep=True)
    before.part.write_text(left)
    before.discard(keep=True)
    one = Commit("x", keep=True)
    assert (one.left is None) == (not left)
    one.part.write_text("new .... new .... new")
    if gone:
        before.part.unlink(missing_ok=True)
    if left:
        assert one.adopt([(15, 15), (13, 17), (4, 8)]) is not gone
    kept = (left[4:8].ljust(4, "\0"), left[13:17].ljust(4, "\0")) if left and not gone else ("....", "....")
    one.finish()
    assert (Path("x").read_text(), os.listdir()) == (f"new {kept[0]} new {kept[1]} new", ["x"])


def test_a_lock_on_the_finished_file_is_not_taken_for_one_on_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between open and lock, the other writer finishes: the open file is the target by then, and is not to be cut."""
    one = Commit("x")
    one.part.write_text("complete")
    first = [True]
    flock = fcntl.flock

    def late(fd: int, how: int) -> None:
        if first.pop() if first else False:
            one.finish()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    two = Commit("x")
    assert Path("x").read_text() == "complete"
    two.discard()
    assert Path("x").read_text() == "complete"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    one = Commit("x")
    one.part.write_text("1")
    one.finish()
    assert Path("x").read_text() == "1"


def test_sweep_takes_what_nobody_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stage-old", "stage-held", "stage-young", "other"):
        Path(name).touch()
        os.utime(name, (0, 0) if name != "stage-young" else None)
    held = os.open("stage-held", os.O_RDWR)
    assert paths.lock(held)
    paths.sweep(Path(), "stage-")
    assert sorted(os.listdir()) == ["other", "stage-held", "stage-young"]
    os.close(held)
    paths.sweep(Path(), "stage-")
    assert sorted(os.listdir()) == ["other", "stage-young"]


def test_a_child_that_lives_on_does_not_keep_the_lock() -> None:
    """Such as a worker of a DataLoader: HDF5 reads no file that is locked."""
    one = Commit("x")
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    one.finish()
    fd = os.open("x", os.O_RDWR)
    assert paths.lock(fd)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(fd)


def test_the_order_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data are on the disk before the name is, and the name before it is said to be."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (steps.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("rename"), replace(a, b)))
    Commit("x").finish()
    assert [step[:3] for step in steps] == [".x.", "ren", os.path.basename(os.getcwd())[:3]]


@pytest.mark.parametrize("kind", ["device", "FIFO", "socket"])
def test_only_a_regular_file_is_replaced(kind: str) -> None:
    """By any path to it: a symbolic link to /dev/full would put a file in the place of the device."""
    if kind == "FIFO":
        os.mkfifo("there")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("there")
    elif os.geteuid() == 0:  # one of its own: what this test finds must not cost the machine its /dev/full
        os.mknod("there", stat.S_IFCHR | 0o666, os.makedev(1, 7))
    else:
        os.symlink("/dev/full", "there")
    Path("x").symlink_to("there")
    before = os.stat("x")
    for path in ("there", "x"):
        with pytest.raises(FileError, match=f"is a {kind}: only a regular file is replaced"):
            Commit(path)
    assert os.path.samestat(before, os.stat("x"))
    assert sorted(os.listdir()) == ["there", "x"]


PLANTS: dict[str, Callable[[Path], object]] = {
    "symlink": lambda part: part.symlink_to("precious"),
    "hard link": lambda part: part.hardlink_to("precious"),
    "FIFO": os.mkfifo,
    "folder": os.mkdir,
    "another user's": lambda part: part.write_text("theirs"),
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("plant", [*PLANTS, "of another name"])
def test_a_part_that_somebody_has_planted_is_left_alone(
    plant: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_two_writers_where_locks_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither takes the other's part for one that was left, with resume or without: the last one has the name."""
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: None)
    for keep in (False, True):
        one, two = Commit("x", keep), Commit("x", keep)
        one.part.write_text("one")
        two.part.write_text("two")
        one.finish()
        assert Path("x").read_text() == "one"
        two.finish()
        assert Path("x").read_text() == "two"
        assert os.listdir() == ["x"]


@pytest.mark.filterwarnings("ignore:.*may still be written by another host")
def test_whose_part_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a process that is gone is taken at once; one of another system when it has rested."""
    for system, age, dead in (("here", 0, True), ("elsewhere", 0, False), ("elsewhere", 1000, True)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 2**22 + 1)  # more than there can be
            patch.setattr(paths, "_started", lambda pid: "1" * 8)
            if system == "elsewhere":
                patch.setattr(paths, "_system", lambda: "0" * 8)
            left = Commit("x", keep=True)
            left.part.write_text("half")
            os.utime(left.part, (time.time() - age,) * 2)
            left.part.with_name(f"{left.part.name}-1-2.lock").touch()  # as Open MPI's MPI-IO does
            left.discard(keep=True)
        one = Commit("x", keep=True)
        assert (one.left is not None) is dead, (system, age)
        one.discard()
        left.part.unlink(missing_ok=True)
        lock = left.part.with_name(f"{left.part.name}-1-2.lock")
        assert lock.exists() is not dead
        lock.unlink(missing_ok=True)
    assert os.listdir() == []


def test_what_happens_in_the_meantime() -> None:
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


def fifo(one: Commit) -> None:
    one.target.unlink()
    os.mkfifo("x")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES])
def test_a_folder_that_cannot_be_synced(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no error; of a file, it is."""
    fsync = os.fsync

    def refuse(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) or Path("x").exists():
            raise OSError(code, os.strerror(code))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    Commit("x").finish()
    with pytest.raises(OSError, match=os.strerror(code)):
        paths.sync(Path("x"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_new_file_has_the_mode_of_the_old_one() -> None:
    """And while it is written, nobody reads more of it than of the old one."""
    target, link = Path("x"), Path("link")
    link.symlink_to("x")
    old = os.umask(0o027)
    try:
        for path in (link, target):
            for bits in (None, 0o600, 0o664, 0o640):
                if bits is None:
                    target.unlink(missing_ok=True)
                else:
                    target.chmod(bits)
                left = Commit("x", keep=True)
                left.part.write_text("left by a job that was killed")
                left.part.chmod(0o666)
                left.discard(keep=True)
                one = Commit(path)
                assert mode(one.part) == (0o640 if bits is None else 0o600)
                one.finish()
                assert mode(target) == (0o640 if bits is None else bits)
    finally:
        os.umask(old)


def test_the_new_file_has_owner_group_and_attributes_of_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Path("x")
    target.write_text("old")
    target.chmod(0o664)
    os.setxattr(target, "user.note", b"kept")
    if os.geteuid() == 0:
        os.chown(target, 1234, 5678)
    Commit(target).finish()
    found = target.stat()
    assert os.geteuid() or (found.st_uid, found.st_gid) == (1234, 5678)
    assert (mode(target), os.getxattr(target, "user.note"), target.read_text()) == (0o664, b"kept", "")

    def refuse(*args: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if os.geteuid() == 0:  # as for a user who may not give files away: another group may do no more than everybody
        monkeypatch.setattr(os, "fchown", refuse)
        Commit(target).finish()
        assert (mode(target), target.stat().st_gid) == (0o644, os.getegid())


def test_a_read_only_file_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("x").write_text("old")
    monkeypatch.setattr(os, "access", lambda path, how: how != os.W_OK)  # root may write anything
    with pytest.raises(FileError, match="x: is there already, and read-only"):
        Commit("x")
    assert os.listdir() == ["x"]
