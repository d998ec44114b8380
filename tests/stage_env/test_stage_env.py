"""One process, one node: what is packed, how it is unpacked and corrected, whose the copies are, and the command."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from launch import DEADLINE, mpirun, run

from hpcdist.comm.launcher import without_launcher
from hpcdist.errors import FileError, InputError, RankError
from hpcdist.stage_env import archive, copies, environment, packer, stage, trees, unpack
from hpcdist.stage_env.archive import Request
from hpcdist.stage_env.copies import Store
from hpcdist.stage_env.environment import Relocation
from hpcdist.stage_env.stage import Options, Staged
from hpcdist.stage_env.unpack import Unpacker

pytestmark = pytest.mark.once

NOTHING = Relocation({}, None, "x")
LARGE = bytes(range(256)) * 5000  # bytes: more than what is held in memory to be corrected


def _nothing(*_: object) -> None:
    return None


def staged(source: Path, to: Path, job: str = "1", **asked: object) -> Staged:
    """Stage on this node, as a job of one rank."""
    from mpi4py import MPI

    to.mkdir(exist_ok=True)
    verify = bool(asked.pop("verify", True))
    request = Request(str(source), **asked)  # type: ignore[arg-type]
    options = Options(str(to), job, verify=verify)
    return stage.stage(MPI.COMM_SELF, request, options, _nothing, lambda _: _nothing)


def output(*command: str | Path) -> str:
    environ = {**without_launcher(os.environ), "PYTHONPATH": ""}
    done = subprocess.run(list(map(str, command)), env=environ, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A venv with a script, an editable install inside and one outside of it, links of all kinds, and odd names."""
    made = tmp_path / "shared" / "my venv"
    output(sys.executable, "-m", "venv", "--without-pip", made)
    packages = next((made / "lib").glob("python3*/site-packages"))
    script = made / "bin" / "tool"
    script.write_text(f"#!/bin/sh\n'''exec' \"{made}/bin/python\" \"$0\" \"$@\"\n' '''\nimport inside, outside\n"
                      "print(inside.__file__, outside.__file__)\n")  # fmt: skip
    script.chmod(0o750)
    for name, folder in (("inside", made / "src"), ("outside", tmp_path / "shared" / "project")):
        folder.mkdir()
        (folder / f"{name}.py").write_text(f"# of {made}\n")
        (packages / f"__editable__.{name}.pth").write_text(f"{folder}\n")
    data = made / "data"
    (data / "empty").mkdir(parents=True)
    (data / "large").write_bytes(LARGE)
    (data / "binary").write_bytes(b"\0" + os.fsencode(made))
    (data / "other").write_text(f"{made}2 {made}-2 x{made}")
    os.link(data / "large", data / "large too")
    (data / "absolute").symlink_to(data / "large")
    (data / "relative").symlink_to("../bin/tool")
    (data / "away").symlink_to(f"../../project/{'outside.py'}")
    (data / "broken").symlink_to("nowhere")
    (data / os.fsdecode(b"new\nline \xff")).write_text("odd")
    os.mkfifo(data / "fifo")
    for path in (data / "large", data):
        os.utime(path, (1e9, 1e9))
    return made


def test_a_venv_runs_from_its_copy(venv: Path, tmp_path: Path) -> None:
    done = staged(venv, tmp_path / "local")
    copy = Path(done.path)
    assert copy.parent.parent == tmp_path / "local" / f"hpcdist-{os.getuid()}" / "stage_env"
    assert stat.S_IMODE(copy.parent.parent.stat().st_mode) == 0o700
    asked = "import sys; print(sys.prefix, sys.base_prefix, sep='|')"
    assert output(copy / "bin" / "python", "-c", asked) == f"{copy}|{sys.base_prefix}"
    project = tmp_path / "shared" / "project"
    assert output(copy / "bin" / "tool") == f"{copy}/src/inside.py {project}/outside.py"
    assert output("bash", "-c", f"source '{copy}/bin/activate'; echo $VIRTUAL_ENV") == str(copy)
    assert set(done.source.outside) == {sys.base_prefix, str(project), f"{project}/outside.py"}
    old, new = venv / "data", copy / "data"
    assert sorted(os.listdir(old)) == sorted([*os.listdir(new), "fifo"])
    for name in ("large", "binary", "other"):
        assert (new / name).read_bytes() == (old / name).read_bytes()
    assert (new / "large").stat().st_ino == (new / "large too").stat().st_ino
    assert (new / "large").stat().st_mtime == new.stat().st_mtime == 1e9
    links = {name: os.readlink(new / name) for name in ("absolute", "relative", "away", "broken")}
    assert links == {
        "absolute": "large",
        "relative": "../bin/tool",
        "away": f"{project}/outside.py",
        "broken": "nowhere",
    }
    assert stat.S_IMODE((copy / "bin" / "tool").stat().st_mode) == 0o750
    assert (copy / "src" / "inside.py").read_text() == f"# of {copy}\n"


def test_what_is_outside_comes_along_when_asked_for(venv: Path, tmp_path: Path) -> None:
    project = tmp_path / "shared" / "project"
    done = staged(venv, tmp_path / "local", with_base=True, also=(str(project),), verify=False)
    copy = Path(done.path)
    assert done.source.outside == ()
    assert output(copy / "bin" / "python", "-c", "import json, sys; print(sys.base_prefix)") == str(
        copy.parent / "base"
    )
    assert output(copy / "bin" / "tool").endswith(f"{copy.parent}/with-0-project/outside.py")
    assert os.readlink(copy / "data" / "away") == "../../with-0-project/outside.py"
    with pytest.raises(RankError, match=r"--with-base: it is no venv"):
        staged(project, tmp_path / "local", with_base=True)


def test_a_conda_environment_and_a_folder(tmp_path: Path) -> None:
    """The texts of the first are corrected, not what is compiled; a folder of data stays as it is."""
    made = tmp_path / "conda"
    (made / "conda-meta").mkdir(parents=True)
    (made / "tool").write_text(f"#!{made}/bin/python\n")
    (made / "library").write_bytes(os.fsencode(made) + bytes(20))
    copy = Path(staged(made, tmp_path / "local").path)
    assert (copy / "tool").read_text() == f"#!{copy}/bin/python\n"
    assert (copy / "library").read_bytes() == (made / "library").read_bytes()
    (made / "conda-meta").rmdir()
    copy = Path(staged(made, tmp_path / "local").path)
    assert (copy / "tool").read_text() == f"#!{made}/bin/python\n"


def test_it_is_packed_again_when_it_was_changed_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, local = tmp_path / "data", tmp_path / "local"
    (source / "__pycache__").mkdir(parents=True)
    (source / "file").write_text("one")
    (source / "file").chmod(0o600)
    first = staged(source, local)
    assert (first.source.packed is not None, first.sent) == (True, 1)
    tar = tmp_path / "data.stage_env.tar"
    assert stat.S_IMODE(tar.stat().st_mode) == 0o600  # not for those who cannot read the file
    (source / "__pycache__" / "x.pyc").touch()
    again = staged(source, local)
    assert (again.source.packed, again.sent, again.path) == (None, 0, first.path)
    (source / "file").chmod(0o644)
    assert staged(source, local).source.packed is not None
    (source / "file").write_text("three")
    assert staged(source, local, scan=False).source.packed is None
    third = staged(source, local)
    assert third.path != first.path and Path(third.path, "file").read_text() == "three"
    damaged = bytearray(tar.read_bytes())
    damaged[600] ^= 1
    times = tar.stat()
    tar.write_bytes(damaged)
    os.utime(tar, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(RankError, match="damaged at byte 0: remove it"):
        staged(source, tmp_path / "other")
    tar.unlink()
    with pytest.raises(RankError, match="there is no archive"):
        staged(source, local, scan=False)
    assert staged(source, tmp_path / "other").path.startswith(str(tmp_path / "other"))

    def changing(*args: object) -> object:
        (source / "file").write_text("changed meanwhile")
        return packed(*args)  # type: ignore[arg-type]

    packed = archive.Packed
    monkeypatch.setattr(archive, "Packed", changing)
    (source / "new").touch()
    with pytest.raises(RankError, match="was changed while it was packed"):
        staged(source, local)
    monkeypatch.undo()
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(RankError, match="cannot lie in a folder that is packed"):
        staged(source, local, archive=str(source / "x.tar"))


def test_a_file_is_sent_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tmp_path / ("image" * 30 + ".sif")  # a name that takes several blocks of the tar
    image.write_bytes(LARGE + b"odd")
    image.chmod(0o755)
    monkeypatch.setattr(archive, "WINDOW", 1 << 16)
    done = staged(image, tmp_path / "local")
    assert Path(done.path).read_bytes() == LARGE + b"odd"
    assert stat.S_IMODE(os.stat(done.path).st_mode) == 0o755
    assert sorted(os.listdir(tmp_path)) == sorted([image.name, "local"])  # nothing was packed
    image.write_bytes(b"")
    assert Path(staged(image, tmp_path / "local").path).read_bytes() == b""


class Cut:
    """A tar of which only so much arrives before the process is killed."""

    def __init__(self, data: bytes, begin: int, end: int) -> None:
        self._file = io.BytesIO(data)
        self._file.seek(begin)
        self._end = end if end < len(data) else sys.maxsize
        self.tell, self.seek = self._file.tell, self._file.seek

    def read(self, size: int) -> bytes:
        if self.tell() + size > self._end:
            raise KeyboardInterrupt
        return self._file.read(size)


def _tree(folder: Path) -> dict[str, object]:
    """Mode, contents and time of all that is in a folder."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        if path.is_symlink():
            found[str(path.relative_to(folder))] = os.readlink(path)
        else:
            content = path.read_bytes() if path.is_file() else None
            found[str(path.relative_to(folder))] = status.st_mode, int(status.st_mtime), content
    return found


def test_unpacking_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever that was: between files, within one, or within a header."""
    monkeypatch.setattr(unpack, "_CHUNK", 4096)
    source, tar = tmp_path / "data", tmp_path / "data.tar"
    (source / "folder").mkdir(parents=True)
    for number in range(4):
        (source / "folder" / f"{number}").write_bytes(LARGE[: 40000 * number + number])
    (source / "link").symlink_to("folder/2")
    tree = trees.Tree(str(source), "data")
    packer.Packed(tar, [tree], trees.scan([tree]), environment.described(str(source)), _nothing)
    data = tar.read_bytes()
    manifests = set()
    for cut in (len(data), *range(700, 20000, 1777), *range(20001, len(data), 33333)):
        folder = tmp_path / f"cut-{cut}"
        (folder / "notes").mkdir(parents=True)
        for end in range(cut, len(data) + cut, cut):
            unpacker = Unpacker(folder, folder / "notes", NOTHING, 4096)
            begin = unpacker.journal.offset
            assert begin >= end - cut - 3 * 4096, cut  # it does not begin again
            with suppress(KeyboardInterrupt):
                unpacker.run(Cut(data, begin, end))
        assert unpack.changed(folder, folder / "notes", True, _nothing) is None
        assert _tree(folder / "data") == _tree(source), cut
        manifests.add((folder / "notes" / "manifest").read_text())
    assert len(manifests) == 1


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


UNSAFE = {
    "above": [_member("../out")],
    "absolute": [_member("/tmp/out")],
    "through a link": [_member("a", tarfile.SYMTYPE, ".."), _member("a/out")],
    "through a link, a folder": [_member("a", tarfile.SYMTYPE, ".."), _member("a", tarfile.DIRTYPE)],
    "hard link": [_member("a", tarfile.LNKTYPE, "../secret")],
    "hard link through a link": [_member("a", tarfile.SYMTYPE, ".."), _member("b", tarfile.LNKTYPE, "a/secret")],
    "device": [_member("a", tarfile.CHRTYPE)],
}


@pytest.mark.parametrize("what", UNSAFE)
def test_an_archive_cannot_write_elsewhere(what: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secret").chmod(0o600)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in UNSAFE[what]:
            tar.addfile(member)
    root = tmp_path / "root"
    (root / "notes").mkdir(parents=True)
    before = _tree(tmp_path).keys()
    with pytest.raises(FileError, match="the archive holds"):
        Unpacker(root, root / "notes", NOTHING, 1).run(Cut(buffer.getvalue(), 0, 10**6))
    assert {name for name in _tree(tmp_path).keys() - before if not name.startswith("root/")} == set()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    source = tmp_path / "small"
    source.mkdir()
    (source / "program").write_bytes(Path("/bin/sleep").read_bytes())
    (source / "program").chmod(0o755)
    return source


def test_the_last_job_removes_the_copy(small: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    path = staged(small, local, job="1").path
    assert staged(small, local, job="2").sent == 0
    assert copies.cleanup(path, "1") == ["job 2"]
    with subprocess.Popen([f"{path}/program", "600"]) as running:
        try:
            _until(lambda: os.readlink(f"/proc/{running.pid}/exe") == f"{path}/program")
            assert copies.cleanup(path, "2") == [f"process {running.pid}"]
        finally:
            running.kill()
    assert copies.cleanup(path, "2") == []
    assert os.listdir(Path(path).parent.parent) == [".lock"]
    assert copies.cleanup(path, "2") == []  # it is gone already


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_copy_that_was_changed_is_replaced_unless_others_use_it(small: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    program = Path(staged(small, local, job="1").path, "program")
    program.unlink()
    with pytest.raises(RankError, match=r"small/program was changed since it was copied, and job 1 may use it"):
        staged(small, local, job="2")
    assert staged(small, local, job="1").sent == 1
    found = program.stat()
    program.write_bytes(bytes(found.st_size))
    os.utime(program, (found.st_mtime, found.st_mtime))
    assert staged(small, local, job="1", verify=False).sent == 0  # size and time are as they were
    with pytest.raises(RankError, match="small/program is not what was sent: the copy is removed"):
        staged(small, local, job="1")
    assert staged(small, local, job="1").sent == 1


def test_what_killed_jobs_have_left_is_used_or_removed(small: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    old = Path(staged(small, local, job="killed").path).parent
    store = Store(str(local))
    digest = "0123456789abcdef" * 2
    left = store.begin(digest)
    (left.folder / "half").touch()
    assert store.begin(digest).folder != left.folder  # a process has it
    left.close(remove=False)
    assert (store.begin(digest).folder / "half").exists()
    (small / "more").touch()
    held = store.begin("another digest, being unpacked")
    new = Path(staged(small, local, job="3").path).parent
    assert old.exists()  # its claim is young
    for claim in (old / ".stage_env" / "jobs").iterdir():
        os.utime(claim, (1e9, 1e9))
    (small / "even more").touch()
    newest = Path(staged(small, local, job="3").path).parent
    kept = {path.name for path in store.folder.iterdir() if not path.name.startswith(f".part-{digest[:16]}")}
    assert kept == {".lock", new.name, newest.name, held.folder.name}


def test_only_what_was_made_here_is_removed(small: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    path = Path(staged(small, local).path)
    for wrong in (small, path.parent, path / "program", path.parent / "another", local):
        with pytest.raises(InputError, match="not a copy that hpcdist"):
            copies.cleanup(str(wrong), "1")
    with pytest.raises(InputError, match="another user's"):
        copies.cleanup(str(path).replace(f"hpcdist-{os.getuid()}", "hpcdist-12345"), "1")
    (path.parent / ".stage_env" / "record").unlink()
    with pytest.raises(InputError, match="not a copy that hpcdist"):
        copies.cleanup(str(path), "1")
    assert (path / "program").exists()


def test_a_folder_that_others_can_write_in_is_not_trusted(small: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    private = local / f"hpcdist-{os.getuid()}"
    private.mkdir(parents=True)
    private.chmod(0o777)
    with pytest.raises(RankError, match="is not this user's alone"):
        staged(small, local)
    assert os.listdir(private) == []
    private.chmod(0o700)
    local.chmod(0o777)
    with pytest.raises(RankError, match="no sticky bit"):
        staged(small, local)
    local.chmod(0o1777)
    assert staged(small, local).sent == 1


def test_the_destination_is_checked_before_anything_is_packed(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, can be written to, and has the space; what old copies take may be given back."""
    to, packed = tmp_path / "to", tmp_path / "packed.tar"
    monkeypatch.setattr(stage.Store, "available", lambda store: 100)
    with pytest.raises(RankError, match=r"stage_env on .*: no space for the copy: .* needed, 100 B free"):
        staged(small, to, archive=str(packed))
    monkeypatch.undo()
    job = mpirun(0, "-m", "hpcdist.stage_env", str(small), "--to", f"{to}/none", "--archive", str(packed))
    assert job.status == 2
    assert f"{to}/none: no such folder on" in job.err
    assert list(tmp_path.glob("*packed*")) == []
    assert Store(str(to)).available() < shutil.disk_usage(to).total
    staged(small, to, archive=str(packed))
    assert packed.exists()
    assert Store(str(to)).available() == shutil.disk_usage(to).total


def test_the_command(small: Path, tmp_path: Path) -> None:
    """It imports neither torch nor numpy; its path alone is on standard output; errors are one line with status 2."""
    (tmp_path / "local").mkdir()
    command = ["-m", "hpcdist.stage_env"]
    ask = [*command, "small", "--to", "local"]
    timed = run([sys.executable, "-X", "importtime", *ask], cwd=tmp_path, env={"SLURM_JOB_ID": "7"})
    assert timed.status == 0, timed.err
    imported = {line.rpartition("|")[2].strip() for line in timed.err.splitlines() if line.startswith("import time:")}
    assert {"hpcdist.stage_env.transfer", "mpi4py"} <= imported
    assert not imported & {"torch", "numpy", "h5py", "tqdm", "hpcdist.versions"}
    path = timed.out.removesuffix("\n")
    assert Path(path, "program").exists()
    assert os.listdir(Path(path).parent / ".stage_env" / "jobs") == ["7"]
    job = mpirun(2, *ask, "--verify", cwd=tmp_path, quick=False)
    assert (job.status, job.out) == (0, timed.out), job.err
    assert "1 node had it already" in job.err
    missing = mpirun(2, *command, "nothing", cwd=tmp_path, quick=False)
    assert (missing.status, missing.out) == (2, "")
    told = "error: nothing: No such file or directory [HD402] (see python -m hpcdist.explain HD402)"
    assert f"hpcdist.stage_env: {told}\n" in missing.err and missing.err.count("stage_env: error") == 1, missing.err
    for words, told in ((["--cleanup", ""], "expected a name"), ([], "expected SOURCE, or --cleanup PATH"),
                        (["--cleanup", "/tmp"], "not a copy that")):  # fmt: skip
        wrong = run([sys.executable, *command, *words], cwd=tmp_path)
        assert wrong.status == 2 and told in wrong.err and wrong.err.count("\n") == 1, wrong.err
    # Of the claims, one is job 7's, which has not cleaned up, and one of the job without a number.
    for name in (None, "7"):
        cleaned = run([sys.executable, *command, "--cleanup", path, *(["--job", name] if name else [])], cwd=tmp_path)
        assert (cleaned.status, cleaned.out) == (0, ""), cleaned.err
        assert ("stays on" in cleaned.err) == (name is None), cleaned.err
    assert not Path(path).exists()
    assert json.loads((tmp_path / "small.stage_env.json").read_text())["name"] == "small"
