"""What is packed of folders, with which links and for whom, how it is unpacked, and what is corrected in it."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import DEADLINE

from hpcdist.errors import FileError, InputError
from hpcdist.stage_env import archive, packer, trees, unpack
from hpcdist.stage_env.archive import Request, Source
from hpcdist.stage_env.environment import Relocation
from hpcdist.stage_env.trees import Tree
from hpcdist.stage_env.unpack import Journal, Unpacker

pytestmark = pytest.mark.once

NOTHING = Relocation({}, None, "x")
NOBODY = 65534


def _nothing(*_: object) -> None:
    return None


def prepared(source: Path, **asked: object) -> Source:
    return archive.prepare(Request(str(source), **asked), _nothing, _nothing)  # type: ignore[arg-type]


def unpacked(source: Source, folder: Path) -> Path:
    (folder / "notes").mkdir(parents=True)
    with open(source.path, "rb") as tar:
        Unpacker(folder, folder / "notes", NOTHING, 1 << 20).run(tar)
    return folder


def _held(*all_: Tree) -> dict[str, str]:
    """What the links hold in the copy."""
    return {name: link.target for name, link in trees.links(all_, trees.scan(all_)).items()}


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everybody can enter; for the test, this process has the rights of an ordinary user."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        old = os.umask(0o022)
        try:
            yield folder
        finally:
            os.umask(old)
            os.seteuid(os.getuid())


def _ordinary() -> None:
    if os.getuid() == 0:
        os.seteuid(NOBODY)


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
    source = prepared(data, also=(str(more),))
    assert source.outside == ()
    paths = {"data": (data, tmp_path / "real" / "data"), "with-0-more": (more, tmp_path / "real" / "more")}
    assert dict(source.prefixes) == {str(path): name for name, both in paths.items() for path in both}
    copy = unpacked(source, tmp_path / "local")
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
    source = prepared(venv, with_base=True)
    assert source.outside == ()
    copy = unpacked(source, tmp_path / "local")
    assert os.readlink(copy / "venv" / "bin" / "python") == "../../base/bin/python3"
    assert (copy / "venv" / "bin" / "python").read_text() == "program"
    assert prepared(venv).outside == (f"{tmp_path}/python",)


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
    held = _held(Tree(str(tmp_path / "data"), "data"), Tree(str(tmp_path), "all", lambda name: name == "other"))
    assert held == {
        "data/up": str(real / "other"),
        "data/deep": str(tmp_path / "there" / "deep"),
        "data/far": str(tmp_path / "there" / "other"),
    }
    loop = tmp_path / "loop"
    loop.mkdir()
    (loop / "a").symlink_to("b")
    (loop / "b").symlink_to("a")
    (loop / "none").symlink_to("b/x")
    assert _held(Tree(str(loop), "loop")) == {"loop/a": "b", "loop/b": "a", "loop/none": "b/x"}


@pytest.mark.parametrize("name", ["x.cpython-313.pyc", "x.cpython-313.pyc.139", "f.py313.nbi", "f.py313.1.nbc"])
def test_what_programs_compile_does_not_count(name: str, tmp_path: Path) -> None:
    source = tmp_path / "data"
    cache = source / "__pycache__"
    cache.mkdir(parents=True)
    (source / "file").touch()
    state = prepared(source).state
    (cache / name).write_text("compiled")
    again = prepared(source)
    assert (again.state, again.packed) == (state, None)
    (tmp_path / "data.stage_env.tar").unlink()
    copy = unpacked(prepared(source), tmp_path / "local")
    (copy / "data" / "__pycache__" / name).unlink()
    assert unpack.changed(copy, copy / "notes", True, _nothing) is None


def test_an_archive_is_for_those_who_can_read_all_of_it(public: Path) -> None:
    """The folders above count, those of the real path; and a file's group, where it is not the archive's."""
    gid = os.stat(public).st_gid
    above, source = public / "above", public / "above" / "data"
    source.mkdir(parents=True)
    (source / "file").touch()

    def mode(path: Path = source, group: int = gid) -> int:
        tree = Tree(str(path), "data")
        return packer._mode([tree], trees.scan([tree]), group)

    assert mode() == mode(group=gid + 1) == 0o644
    (public / "link").symlink_to(source)
    for path, changed, own, other in (
        (above, 0o710, 0o640, 0o600),
        (above, 0o711, 0o644, 0o644),
        (above, 0o700, 0o600, 0o600),
        (source, 0o750, 0o640, 0o600),
        (source, 0o711, 0o600, 0o600),
        (source / "file", 0o640, 0o640, 0o600),
        (source / "file", 0o604, 0o604, 0o600),
    ):
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(changed)
        assert (mode(), mode(public / "link"), mode(group=gid + 1)) == (own, own, other), (path, oct(changed))
        path.chmod(before)
    above.chmod(0o700)
    tar = public / "tar"
    tar.touch()
    tar.chmod(0o666)
    prepared(source, archive=str(tar))
    assert stat.S_IMODE(tar.stat().st_mode) == 0o600


def test_a_colleagues_archive_is_renewed(public: Path) -> None:
    """In a folder that several share, where neither its lock can be written nor its mode be changed."""
    source = public / "data"
    source.mkdir()
    (source / "file").write_text("one")
    prepared(source)
    for name in ("data.stage_env.tar", "data.stage_env.json"):
        (public / name).chmod(0o666)
    (public / ".data.stage_env.tar.lock").chmod(0o644)
    (source / "file").write_text("other")
    _ordinary()
    again = prepared(source)
    assert again.packed is not None
    found = os.stat(again.path)
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o644)


def test_unpacking_goes_on_in_a_file_that_is_read_only_already(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last bytes and its mode were written after the last note of the journal."""
    data = bytes(range(256)) * 100
    monkeypatch.chdir(public)
    Path("file").write_bytes(data)
    with tarfile.open("tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add("file", "data/file")
    Path("copy/data").mkdir(parents=True)
    Path("copy/notes").mkdir()
    Path("copy/data/file").write_bytes(data)
    Path("copy/data/file").chmod(0o444)
    for path in (Path("copy"), *Path("copy").rglob("*")):
        os.chown(path, *((NOBODY, NOBODY) if os.getuid() == 0 else (-1, -1)))
    done = 512
    journal = Journal(512 + done, 0, "data/file", 0o444, 10**9, len(data), len(data) - done)
    _ordinary()
    journal.write(Path("copy/notes"))
    with open("tar", "rb") as stream:
        stream.seek(journal.offset)
        Unpacker(Path("copy"), Path("copy/notes"), NOTHING, 1 << 20).run(stream)
    copied = Path("copy/data/file")
    assert copied.read_bytes() == data and stat.S_IMODE(copied.stat().st_mode) == 0o444


def test_an_archive_that_is_taken_as_it_is_holds_what_is_asked_for(tmp_path: Path) -> None:
    for name in ("data", "more", "other"):
        (tmp_path / name).mkdir()
    data, more, other, tar = tmp_path / "data", str(tmp_path / "more"), str(tmp_path / "other"), str(tmp_path / "tar")
    (tmp_path / "link").symlink_to("data")
    made = prepared(data, archive=tar, also=(more, other))

    def taken(source: Path = data, **asked: object) -> Source:
        return prepared(source, archive=tar, scan=False, **asked)

    for source, also in ((data, ()), (data, (more,)), (data, (more, other)), (tmp_path / "link", ())):
        assert taken(source, also=also).digest == made.digest
    for source, asked, expected in (
        (tmp_path / "more", {}, f"it holds {data}, not {more}"),
        (data, {"with_base": True}, "it holds no base interpreter"),
        (data, {"also": (other,)}, f"--with {other}: it holds {more}, {other}"),
        (data, {"also": (more, other, str(data))}, f"it holds {more}, {other}"),
    ):
        with pytest.raises(InputError, match=re.escape(f"{expected}: without --no-scan it is packed again")) as found:
            taken(source, **asked)
        assert found.value.codes == ["HD505"]


def test_a_description_that_cannot_be_written_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> int:
        path.write_bytes(text[:10].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "data").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(FileError, match=r"data.stage_env.json: cannot be written: No space left on device"):
            prepared(tmp_path / "data")
    left = sorted(os.listdir(tmp_path))
    assert left == [".data.stage_env.tar.lock", "data", "data.stage_env.tar"]
    assert prepared(tmp_path / "data").packed is not None


def _corrected(text: str, old: str, new: str) -> str:
    relocation = Relocation({old: new}, None, "env")
    return relocation.corrected("env/bin/tool", text.encode()).decode()


@pytest.mark.parametrize("folder", ["with blank", "long" * 60])
@pytest.mark.parametrize(
    "first", ["#!{}/bin/python3 -I", "#! {}/bin/python3.13", "#!/bin/sh\n'''exec' {}/bin/python3 \"$0\" \"$@\"\n' '''"]
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
