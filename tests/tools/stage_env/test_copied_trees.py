"""What is read of folders, with which links, and what is corrected in the copy."""

import os
from pathlib import Path

import pytest

from hpcdist.errors import FileError
from hpcdist.tools.stage_env import stage
from hpcdist.tools.stage_env.stage import Packer, relocation, unpack


def unpacked(packer, folder):
    folder.mkdir()
    unpack(packer.tar(), str(folder), bytes, "x")
    return folder


def test_folders_may_be_named_by_symbolic_links(tmp_path):
    """The source and what comes along; links that name either of their paths stay within the copy."""
    data, more = tmp_path / "data", tmp_path / "more"
    for path in (data, more):
        real = tmp_path / "real" / path.name
        real.mkdir(parents=True)
        (real / "file").write_text(path.name)
        path.symlink_to(real)
    for name, target in {
        "by name": more / "file",
        "by path": tmp_path / "real" / "more" / "file",
        "whole": more,
        "own": data / "file",
        "up": "../more/file",
    }.items():
        (data / name).symlink_to(target)
    (data / "conda-meta").mkdir()
    packer = Packer(str(data), also=(str(more),))
    paths = {"data": (data, tmp_path / "real" / "data"), "with-0-more": (more, tmp_path / "real" / "more")}
    assert dict(packer.source.prefixes) == {str(path): name for name, both in paths.items() for path in both}
    copy = unpacked(packer, tmp_path / "local")
    (tmp_path / "real").rename(tmp_path / "away")
    for name in ("by name", "by path", "up", "whole/file"):
        assert (copy / "data" / name).read_text() == "more"
    assert (copy / "data" / "own").read_text() == "data"


def test_links_lead_where_the_system_follows_them(tmp_path):
    """From the real folder on, not from the name that was asked for, and through other links."""
    real, there, data = tmp_path / "real", tmp_path / "there", tmp_path / "data"
    for folder in (real / "data", there / "deep"):
        folder.mkdir(parents=True)
    data.symlink_to("real/data")
    for folder in (tmp_path, real, there):
        (folder / "other").touch()
    links = {"up": "../other", "deep": there / "deep", "far": "deep/../other", "a": "b", "b": "a", "none": "b/x"}
    for name, target in links.items():
        (data / name).symlink_to(target)
    copy = unpacked(Packer(str(data)), tmp_path / "local") / "data"
    expected = {"up": real / "other", "deep": there / "deep", "far": there / "other", "a": "b", "b": "a", "none": "b/x"}
    assert {name: os.readlink(copy / name) for name in links} == {name: str(path) for name, path in expected.items()}


@pytest.mark.parametrize("name", ["x.cpython-313.pyc", "x.cpython-313.pyc.139", "f.py313.nbi", "f.py313.1.nbc"])
def test_what_programs_compile_does_not_count(name, tmp_path):
    """Nor does it matter if such a file is written, or goes, while it is read."""
    source, compiled = tmp_path / "data", Path("data", "__pycache__", name)
    file = tmp_path / compiled
    file.parent.mkdir(parents=True)
    before = Packer(str(source)).source
    file.write_text("compiled")
    packer = Packer(str(source))
    assert packer.source.digest == before.digest
    assert (unpacked(packer, tmp_path / "local") / compiled).read_text() == "compiled"
    for turn, change in enumerate((lambda: file.write_text("compiled again"), file.unlink)):
        change()
        assert not (unpacked(packer, tmp_path / f"{turn}") / compiled).exists()


def test_what_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    file, opened = tmp_path / "data" / "file", stage.opened
    file.parent.mkdir()
    file.write_bytes(bytes(3000))

    def cutting(entry):
        found = opened(entry)
        os.truncate(file, 1000)
        return found

    monkeypatch.setattr(stage, "AHEAD", 100)
    for change in (
        lambda: os.truncate(file, 2000),
        lambda: os.truncate(file, 4000),
        lambda: monkeypatch.setattr(stage, "opened", cutting),
        file.unlink,
    ):
        packer = Packer(str(file.parent))
        change()
        with pytest.raises(FileError, match=r"file: was changed while it was read: try again \[HD413\]"):
            b"".join(packer.tar())


def _corrected(text, old, new):
    return relocation({old: new})(text.encode()).decode()


def test_options_of_compilers_are_corrected():
    text = "-I/old/include -L/old/lib -Wl,-rpath,/old/lib -isystem /old/include /old-I/x x-I/older"
    assert _corrected(text, "/old", "/new") == (
        "-I/new/include -L/new/lib -Wl,-rpath,/new/lib -isystem /new/include /old-I/x x-I/older"
    )
