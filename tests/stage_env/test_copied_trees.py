"""What is read of folders, with which links, and what is corrected in the copy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import DEADLINE

from hpcdist.errors import FileError
from hpcdist.stage_env import source as source_
from hpcdist.stage_env.source import Packer, relocation
from hpcdist.stage_env.stage import unpack

pytestmark = pytest.mark.once


def unpacked(packer: Packer, folder: Path) -> Path:
    folder.mkdir()
    unpack(packer.tar(), str(folder), bytes, "x")
    return folder


def _held(folder: Path) -> dict[str, str]:
    """What the links in a folder hold."""
    return {str(path.relative_to(folder)): os.readlink(path) for path in folder.rglob("*") if path.is_symlink()}


def test_folders_may_be_named_by_symbolic_links(tmp_path: Path) -> None:
    """The source and what comes along; links that name either of their paths stay within the copy."""
    for name in ("data", "more"):
        real = tmp_path / "real" / name
        real.mkdir(parents=True)
        (real / "file").write_text(name)
        (tmp_path / name).symlink_to(real)
    data, more = tmp_path / "data", tmp_path / "more"
    (data / "by name").symlink_to(more / "file")
    (data / "by path").symlink_to(tmp_path / "real" / "more" / "file")
    (data / "whole").symlink_to(more)
    (data / "own").symlink_to(data / "file")
    (data / "up").symlink_to("../more/file")
    (data / "conda-meta").mkdir()
    (data / "more.pth").write_text(f"{tmp_path}/real/more\n")
    packer = Packer(str(data), also=(str(more),))
    paths = {"data": (data, tmp_path / "real" / "data"), "with-0-more": (more, tmp_path / "real" / "more")}
    assert dict(packer.source.prefixes) == {str(path): name for name, both in paths.items() for path in both}
    copy = unpacked(packer, tmp_path / "local")
    (tmp_path / "real").rename(tmp_path / "away")
    for name in ("by name", "by path", "up", "whole/file"):
        assert (copy / "data" / name).read_text() == "more"
    assert (copy / "data" / "own").read_text() == "data"


def test_a_base_that_is_a_symbolic_link_comes_along(tmp_path: Path) -> None:
    base, venv = tmp_path / "python-3.13", tmp_path / "venv"
    for folder in (base / "bin", base / "lib" / "python3.13", venv / "bin"):
        folder.mkdir(parents=True)
    (base / "bin" / "python3").write_text("program")
    (tmp_path / "python").symlink_to(base.name)
    (venv / "bin" / "python").symlink_to(tmp_path / "python" / "bin" / "python3")
    (venv / "pyvenv.cfg").write_text(f"home = {tmp_path}/python/bin\n")
    copy = unpacked(Packer(str(venv), also=(str(tmp_path / "python"),)), tmp_path / "local")
    assert os.readlink(copy / "venv" / "bin" / "python") == "../../with-0-python/bin/python3"
    assert (copy / "venv" / "bin" / "python").read_text() == "program"


def test_links_lead_where_the_system_follows_them(tmp_path: Path) -> None:
    """From the real folder on, not from the name that was asked for, and through other links."""
    real = tmp_path / "real"
    for folder in (real / "data", tmp_path / "there" / "deep"):
        folder.mkdir(parents=True)
    (tmp_path / "data").symlink_to("real/data")
    (tmp_path / "other").write_text("wrong")
    (real / "other").write_text("right")
    (tmp_path / "there" / "other").write_text("far")
    (real / "data" / "up").symlink_to("../other")
    (real / "data" / "deep").symlink_to(tmp_path / "there" / "deep")
    (real / "data" / "far").symlink_to("deep/../other")
    packer = Packer(str(tmp_path / "data"))
    assert _held(unpacked(packer, tmp_path / "local")) == {
        "data/up": str(real / "other"),
        "data/deep": str(tmp_path / "there" / "deep"),
        "data/far": str(tmp_path / "there" / "other"),
    }
    loop = tmp_path / "loop"
    loop.mkdir()
    (loop / "a").symlink_to("b")
    (loop / "b").symlink_to("a")
    (loop / "none").symlink_to("b/x")
    packer = Packer(str(loop))
    assert _held(unpacked(packer, tmp_path / "copy")) == {"loop/a": "b", "loop/b": "a", "loop/none": "b/x"}


@pytest.mark.parametrize("name", ["x.cpython-313.pyc", "x.cpython-313.pyc.139", "f.py313.nbi", "f.py313.1.nbc"])
def test_what_programs_compile_does_not_count(name: str, tmp_path: Path) -> None:
    """Nor does it matter if such a file is written, or goes, while it is read."""
    source = tmp_path / "data"
    cache = source / "__pycache__"
    cache.mkdir(parents=True)
    (source / "file").touch()
    before = Packer(str(source)).source
    (cache / name).write_text("compiled")
    packer = Packer(str(source))
    assert packer.source.digest == before.digest
    copy = unpacked(packer, tmp_path / "local")
    assert (copy / "data" / "__pycache__" / name).read_text() == "compiled"
    (cache / name).write_text("compiled again")
    assert not (unpacked(packer, tmp_path / "other") / "data" / "__pycache__" / name).exists()
    (cache / name).unlink()
    assert not (unpacked(packer, tmp_path / "third") / "data" / "__pycache__" / name).exists()


def test_what_changes_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "data"
    source.mkdir()
    (source / "file").write_bytes(bytes(3000))
    packer = Packer(str(source))
    for size in (2000, 4000):
        os.truncate(source / "file", size)
        with pytest.raises(FileError, match=r"file: was changed while it was read: try again \[HD413\]"):
            b"".join(packer.tar())
    (source / "file").unlink()
    with pytest.raises(FileError, match=r"file: was changed while it was read: try again \[HD413\]"):
        b"".join(packer.tar())
    (source / "file").write_bytes(bytes(3000))
    packer, opened = Packer(str(source)), source_._opened

    def cutting(entry: source_.Entry) -> object:
        file = opened(entry)
        os.truncate(source / "file", 1000)
        return file

    monkeypatch.setattr(source_, "_AHEAD", 100)
    monkeypatch.setattr(source_, "_opened", cutting)
    with pytest.raises(FileError, match=r"file: was changed while it was read: try again \[HD413\]"):
        b"".join(packer.tar())


def _corrected(text: str, old: str, new: str) -> str:
    return relocation({old: new})(text.encode()).decode()


@pytest.mark.parametrize("folder", ["with blank", "long" * 60])
@pytest.mark.parametrize(
    "first",
    ["#!{}/bin/python3 -I", "#! {}/bin/python3.13", "#!/bin/sh\n'''exec' \"{}/bin/python3\" \"$0\" \"$@\"\n' '''"],
)
def test_scripts_start_from_any_path(first: str, folder: str, tmp_path: Path) -> None:
    """The system takes no #! line with a blank in the program's path, or one that is long."""
    new = tmp_path / folder
    (new / "bin").mkdir(parents=True)
    for name in ("python3", "python3.13"):
        (new / "bin" / name).symlink_to(sys.executable)
    script = tmp_path / "tool"
    script.write_text(
        _corrected(f"{first.format('/old')}\nimport sys; print(sys.argv[1:], sys.flags.isolated)\n", "/old", str(new))
    )
    script.chmod(0o755)
    done = subprocess.run([script, "a b", "c"], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.stdout, done.stderr) == (f"['a b', 'c'] {int('-I' in first)}\n", "")


def test_lines_that_the_system_takes_stay_as_they_are() -> None:
    assert _corrected("#!/old/bin/python -s\nx\n", "/old", "/new") == "#!/new/bin/python -s\nx\n"
    assert _corrected("#!/bin/sh\ncd /old\n", "/old", "/new env") == "#!/bin/sh\ncd /new env\n"
    assert _corrected("#!/old/bin/perl -w\nx\n", "/old", "/new env") == "#!/usr/bin/env -S perl -w\nx\n"
    assert _corrected("#!/old/bin/bash\n/old/x\n", "/old", "/new env") == "#!/usr/bin/env bash\n/new env/x\n"
    assert _corrected("#!/old/bin/bash", "/old", "/new env") == "#!/usr/bin/env bash"


def test_options_of_compilers_are_corrected() -> None:
    text = "-I/old/include -L/old/lib -Wl,-rpath,/old/lib -isystem /old/include /old-I/x x-I/older"
    assert _corrected(text, "/old", "/new") == (
        "-I/new/include -L/new/lib -Wl,-rpath,/new/lib -isystem /new/include /old-I/x x-I/older"
    )
