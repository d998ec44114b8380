"""A file appears under its name when it is complete, and what killed jobs left is taken over or swept."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from hpcdist import commit
from hpcdist.commit import Commit
from hpcdist.errors import FileError


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
    with pytest.raises(FileError, match="another process is writing it"):
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
    assert steps == [".x.part", "rename", tmp_path.name]
