"""A file appears under its name when it is complete, and what killed jobs left is taken over or swept."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from pathlib import Path

import pytest

from hpcdist.errors import FileError
from hpcdist.files import commit
from hpcdist.files.commit import Commit


def test_the_name_holds_the_old_file_until_the_end(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_text("old")
    one = Commit(target)
    one.part.write_text("new")
    assert target.read_text() == "old"
    one.finish()
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["x"]
    two = Commit(target)
    two.part.write_text("newer")
    two.discard()
    assert (target.read_text(), os.listdir(tmp_path)) == ("new", ["x"])


def test_what_was_left_is_kept_if_wanted(tmp_path: Path) -> None:
    one = Commit(tmp_path / "x", keep=True)
    assert not one.resumed
    one.part.write_text("half")
    one.discard(keep=True)
    two = Commit(tmp_path / "x", keep=True)
    assert (two.resumed, two.part.read_text()) == (True, "half")
    two.discard(keep=True)
    three = Commit(tmp_path / "x")
    assert (three.resumed, three.part.read_text()) == (False, "")
    three.discard()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    one = Commit(tmp_path / "x")
    with pytest.raises(FileError, match="this process is writing it already"):
        Commit(tmp_path / "x")
    one.part.write_text("1")
    one.finish()
    Commit(tmp_path / "x").discard()
    assert (tmp_path / "x").read_text() == "1"


def test_a_lock_on_the_finished_file_is_not_taken_for_one_on_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between open and lock, the other writer finishes: the open file is the target by then, and is not to be cut."""
    one = Commit(tmp_path / "x")
    one.part.write_text("complete")
    first = [True]
    flock = fcntl.flock

    def late(fd: int, how: int) -> None:
        if first.pop() if first else False:
            one.finish()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    two = Commit(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "complete"
    two.discard()
    assert (tmp_path / "x").read_text() == "complete"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    one = Commit(tmp_path / "x")
    one.part.write_text("1")
    one.finish()
    assert (tmp_path / "x").read_text() == "1"


def test_sweep_takes_what_nobody_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stage-old", "stage-held", "stage-young", "other"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0) if name != "stage-young" else None)
    held = os.open(tmp_path / "stage-held", os.O_RDWR)
    assert commit.lock(held)
    commit.sweep(tmp_path, "stage-")
    assert sorted(os.listdir(tmp_path)) == ["other", "stage-held", "stage-young"]
    os.close(held)
    commit.sweep(tmp_path, "stage-")
    assert sorted(os.listdir(tmp_path)) == ["other", "stage-young"]


def test_the_order_of_the_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data are on the disk before the name is, and the name before it is said to be."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (steps.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("rename"), replace(a, b)))
    Commit(tmp_path / "x").finish()
    assert [step if step in ("rename", tmp_path.name) else step[:3] for step in steps] == [
        ".x.",
        "rename",
        tmp_path.name,
    ]


@pytest.mark.parametrize("kind", ["device", "FIFO", "socket"])
def test_only_a_regular_file_is_replaced(kind: str, tmp_path: Path) -> None:
    """By any path to it: a symbolic link to /dev/full would put a file in the place of the device."""
    there = tmp_path / "there"
    if kind == "device":
        if os.geteuid() == 0:  # one of its own: what this test finds must not cost the machine its /dev/full
            os.mknod(tmp_path / "own", stat.S_IFCHR | 0o666, os.makedev(1, 7))
        there.symlink_to(tmp_path / "own" if os.geteuid() == 0 else "/dev/full")
    elif kind == "FIFO":
        os.mkfifo(there)
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(there))
    (tmp_path / "x").symlink_to("there")
    before = os.stat(tmp_path / "x")
    for path in (there, tmp_path / "x"):
        with pytest.raises(FileError, match=f"is a {kind}: only a regular file is replaced"):
            Commit(path)
    assert os.path.samestat(before, os.stat(tmp_path / "x"))
    assert sorted(set(os.listdir(tmp_path)) - {"own"}) == ["there", "x"]


@pytest.mark.parametrize("end", ["/", "//", "/.", "/./"])
def test_a_name_that_ends_as_that_of_a_folder_is_refused(end: str, tmp_path: Path) -> None:
    """There is no such file, so it would not be taken for the one that it replaced."""
    (tmp_path / "there").write_text("old")
    for name in ("there", "new"):
        with pytest.raises(FileError, match=f"{name}{end}: is the name of a folder"):
            Commit(f"{tmp_path}/{name}{end}")
    assert os.listdir(tmp_path) == ["there"]
    assert (tmp_path / "there").read_text() == "old"


def test_what_appears_in_the_meantime_is_not_replaced_either(tmp_path: Path) -> None:
    one = Commit(tmp_path / "x")
    os.mkfifo(tmp_path / "x")
    with pytest.raises(FileError, match="is a FIFO"):
        one.finish()
    one.discard()
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("plant", ["symlink", "hard link", "FIFO", "folder", "another user's", "of another name"])
def test_a_part_that_somebody_has_planted_is_left_alone(
    plant: str, keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither taken over nor removed; the part that is written has a name that nobody can guess."""
    (tmp_path / "precious").write_text("precious")
    one = Commit(tmp_path / "x")
    part = tmp_path / (".x.some.part" if plant == "of another name" else one.part.name)
    one.discard()
    if plant == "symlink":
        part.symlink_to("precious")
    elif plant == "hard link":
        part.hardlink_to(tmp_path / "precious")
    elif plant == "FIFO":
        os.mkfifo(part)
    elif plant == "folder":
        part.mkdir()
    else:
        part.write_text("theirs")
        if plant == "another user's":
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    two = Commit(tmp_path / "x", keep)
    assert not two.resumed
    two.part.write_text("new")
    two.finish()
    assert (tmp_path / "precious").read_text() == "precious"
    assert "their" not in plant or part.read_text() == "theirs"
    assert sorted(os.listdir(tmp_path)) == sorted([part.name, "precious", "x"])


def test_two_writers_where_locks_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither takes the other's part for one that was left, with resume or without: the last one has the name."""
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: None)
    for keep in (False, True):
        one, two = Commit(tmp_path / "x", keep), Commit(tmp_path / "x", keep)
        one.part.write_text("one")
        two.part.write_text("two")
        one.finish()
        assert (tmp_path / "x").read_text() == "one"
        two.finish()
        assert (tmp_path / "x").read_text() == "two"
        assert os.listdir(tmp_path) == ["x"]


@pytest.mark.filterwarnings("ignore:.*may still be written by another host")
def test_whose_part_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a process that is gone is taken at once; one of another system when it has rested."""
    for system, age, dead in (("here", 0, True), ("elsewhere", 0, False), ("elsewhere", 1000, True)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 2**22 + 1)  # more than there can be
            patch.setattr(commit, "_started", lambda pid: "1" * 8)
            if system == "elsewhere":
                patch.setattr(commit, "_system", lambda: "0" * 8)
            left = Commit(tmp_path / "x", keep=True)
            left.part.write_text("half")
            os.utime(left.part, (time.time() - age,) * 2)
            left.part.with_name(f"{left.part.name}-1-2.lock").touch()  # as Open MPI's MPI-IO does
            left.discard(keep=True)
        one = Commit(tmp_path / "x", keep=True)
        assert one.resumed is dead, (system, age)
        one.discard()
        left.part.unlink(missing_ok=True)
        lock = left.part.with_name(f"{left.part.name}-1-2.lock")
        assert lock.exists() is not dead
        lock.unlink(missing_ok=True)
    assert os.listdir(tmp_path) == []


def test_the_name_is_gone_before_the_end(tmp_path: Path) -> None:
    """Somebody has removed the part: an error, and the old file stays."""
    (tmp_path / "x").write_text("old")
    one = Commit(tmp_path / "x")
    one.part.unlink()
    with pytest.raises(FileError, match="is gone: another process has taken or removed it"):
        one.finish()
    one.discard()
    assert (tmp_path / "x").read_text() == "old"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES])
def test_a_folder_that_cannot_be_synced(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no error; of a file, it is."""
    refused, fsync = [stat.S_ISDIR], os.fsync

    def refuse(fd: int) -> None:
        if any(is_kind(os.fstat(fd).st_mode) for is_kind in refused):
            raise OSError(code, os.strerror(code))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    one = Commit(tmp_path / "x")
    one.part.write_text("new")
    one.finish()
    assert (tmp_path / "x").read_text() == "new"
    refused.append(stat.S_ISREG)
    with pytest.raises(OSError, match=os.strerror(code)):
        commit.sync(tmp_path / "x")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_new_file_has_the_mode_of_the_old_one(tmp_path: Path) -> None:
    """And while it is written, nobody reads more of it than of the old one."""
    target, link = tmp_path / "x", tmp_path / "link"
    link.symlink_to("x")
    old = os.umask(0o027)
    try:
        for path in (link, target):
            for bits in (None, 0o600, 0o664, 0o640):
                if bits is None:
                    target.unlink(missing_ok=True)
                else:
                    target.chmod(bits)
                left = Commit(tmp_path / "x", keep=True)
                left.part.write_text("left by a job that was killed")
                left.part.chmod(0o666)
                left.discard(keep=True)
                one = Commit(path)
                assert mode(one.part) == (0o640 if bits is None else 0o600)
                one.finish()
                assert mode(target) == (0o640 if bits is None else bits)
    finally:
        os.umask(old)


def test_the_new_file_has_owner_group_and_attributes_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "x"
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


def test_a_read_only_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("old")
    monkeypatch.setattr(os, "access", lambda path, how: how != os.W_OK)  # root may write anything
    with pytest.raises(FileError, match="x: is there already, and read-only"):
        Commit(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]
