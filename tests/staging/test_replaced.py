"""What an earlier save has left is removed, and the index is written, or the error says why not."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from hpcdist.errors import FileError
from hpcdist.staging.replaced import remove_old_form, withdraw_index
from hpcdist.staging.sharded_files import index_of, write_index

pytestmark = pytest.mark.once


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES])
def test_a_save_goes_on_where_a_folder_cannot_be_synced(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuse(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    path = str(tmp_path / "x.safetensors")
    files = [str(tmp_path / f"x-{number}") for number in range(2)]
    for old in (path, *files):
        Path(old).touch()
    write_index(path, [], [])
    withdraw_index(path, files)
    assert not os.path.exists(index_of(path))
    write_index(path, [], [])
    remove_old_form(path, files)
    assert sorted(os.listdir(tmp_path)) == ["x-0", "x-1", "x.safetensors.index.json"]


def test_an_index_that_cannot_be_written_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> int:
        path.write_bytes(text[:10].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(FileError, match=r"x.safetensors.index.json: cannot be written: No space left on device"):
        write_index(str(tmp_path / "x.safetensors"), [], [])
    assert os.listdir(tmp_path) == []
