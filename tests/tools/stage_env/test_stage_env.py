"""One process, one node: what is packed, how it is unpacked and corrected, whose the copies are, and the command."""

import io
import os
import re
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch import DEADLINE, commands, run

from hpcdist.errors import FileError, InputError, RankError
from hpcdist.launch.launcher import without_launcher
from hpcdist.tools.stage_env import stage
from hpcdist.tools.stage_env.stage import Request, cleanup, unpack

LARGE = bytes(range(256)) * 5000  # bytes: more than what is held in memory to be corrected


def staged(path, to, **asked):
    """Stage on this node, as a job of one rank."""
    from mpi4py import MPI

    to.mkdir(exist_ok=True)
    request = Request(str(path), str(to), **asked)
    return stage.stage(MPI.COMM_SELF, request)


def output(*command):
    environ = {**without_launcher(os.environ), "PYTHONPATH": ""}
    done = subprocess.run(list(map(str, command)), env=environ, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def venv(tmp_path):
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


def test_a_venv_runs_from_its_copy(venv, tmp_path):
    done = staged(venv, tmp_path / "local")
    copy = Path(done.path)
    assert copy.parent.parent == tmp_path / "local" / f"hpcdist-{os.getuid()}" / "stage_env"
    assert stat.S_IMODE(copy.parent.parent.stat().st_mode) == 0o700
    asked = "import sys; print(sys.prefix, sys.base_prefix, sep='|')"
    assert output(copy / "bin" / "python", "-c", asked) == f"{copy}|{sys.base_prefix}"
    project = tmp_path / "shared" / "project"
    assert output(copy / "bin" / "tool") == f"{copy}/src/inside.py {project}/outside.py"
    assert output("bash", "-c", f"source '{copy}/bin/activate'; echo $VIRTUAL_ENV") == str(copy)
    old, new = venv / "data", copy / "data"
    assert sorted(os.listdir(old)) == sorted([*os.listdir(new), "fifo"])
    for name in ("large", "binary", "other"):
        assert (new / name).read_bytes() == (old / name).read_bytes()
    assert (new / "large too").read_bytes() == LARGE
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


def test_what_is_outside_comes_along_when_asked_for(venv, tmp_path):
    """An editable install, and the interpreter that the venv was made with."""
    project, base = tmp_path / "shared" / "project", tmp_path / "shared" / "python"
    (base / "bin").mkdir(parents=True)
    (venv / "bin" / "python").unlink()
    for link, target in {
        base / "bin" / "python3": os.path.realpath(sys.executable),
        base / "lib": f"{sys.base_prefix}/lib",
        venv / "bin" / "python": base / "bin" / "python3",
    }.items():
        link.symlink_to(target)
    config = venv / "pyvenv.cfg"
    config.write_text(re.sub(r"home = .*", f"home = {base}/bin", config.read_text()))
    copy = Path(staged(venv, tmp_path / "local", also=(str(project), str(base))).path)
    assert f"home = {copy.parent}/with-1-python/bin\n" in (copy / "pyvenv.cfg").read_text()
    assert os.readlink(copy / "bin" / "python") == "../../with-1-python/bin/python3"
    assert output(copy / "bin" / "tool").endswith(f"{copy.parent}/with-0-project/outside.py")
    assert os.readlink(copy / "data" / "away") == "../../with-0-project/outside.py"


def test_a_conda_environment_and_a_folder(tmp_path):
    """The texts of the first are corrected, not what is compiled; a folder of data stays as it is."""
    made = tmp_path / "conda"
    (made / "conda-meta").mkdir(parents=True)
    (made / "tool").write_text(f"#!{made}/bin/python\n")
    (made / "library").write_bytes(os.fsencode(made) + bytes(20))
    copy = Path(staged(made, tmp_path / "local").path)
    assert (copy / "tool").read_text() == f"#!{copy}/bin/python\n"
    assert (copy / "library").read_bytes() == (made / "library").read_bytes()
    (made / "conda-meta").rmdir()
    assert Path(staged(made, tmp_path / "local").path, "tool").read_text() == f"#!{made}/bin/python\n"


def test_it_is_sent_again_when_it_was_changed_and_only_then(tmp_path):
    """Neither what is compiled nor what programs write into the copy counts; what the copy has lost does."""
    data, local = tmp_path / "data", tmp_path / "local"
    (data / "__pycache__").mkdir(parents=True)
    (data / "file").write_text("one")
    (data / "file").chmod(0o600)
    copy, sent = staged(data, local).path, 0
    for change in (
        (data / "__pycache__" / "x.pyc").touch,
        Path(copy, "added").touch,
        Path(copy, "file").unlink,
        lambda: os.truncate(Path(copy, "file"), 1),
        Path(copy).with_name(stage.MANIFEST).unlink,
    ):
        change()
        again = staged(data, local)
        sent += again.sent
        assert (again.path, Path(copy, "file").read_text()) == (copy, "one")
    assert (sent, os.listdir(Path(copy).parent.parent)) == (3, [Path(copy).parent.name])
    for change in (lambda: (data / "file").chmod(0o644), lambda: (data / "file").write_text("three")):
        change()
        other = staged(data, local)
        assert other.sent == 1 and other.path != copy
    assert Path(other.path, "file").read_text() == "three" and Path(copy, "file").read_text() == "one"
    assert sorted(os.listdir(tmp_path)) == ["data", "local"]  # nothing is left beside the source


def test_a_file_is_sent_as_it_is(tmp_path, monkeypatch):
    image = tmp_path / ("image" * 30 + ".sif")  # a name that takes several blocks of the tar
    image.write_bytes(LARGE + b"odd")
    image.chmod(0o755)
    monkeypatch.setattr(stage, "PIECE", 1 << 16)
    done = staged(image, tmp_path / "local")
    assert Path(done.path).read_bytes() == LARGE + b"odd"
    assert stat.S_IMODE(os.stat(done.path).st_mode) == 0o755
    assert sorted(os.listdir(tmp_path)) == sorted([image.name, "local"])
    image.write_bytes(b"")
    assert Path(staged(image, tmp_path / "local").path).read_bytes() == b""


def test_only_the_user_may_write_and_nothing_is_setuid(tmp_path):
    (tmp_path / "data").mkdir()
    for mode in (0o664, 0o6775, 0o444):
        (tmp_path / "data" / f"{mode:o}").touch()
        (tmp_path / "data" / f"{mode:o}").chmod(mode)
    (tmp_path / "data").chmod(0o3577)
    copy = Path(staged(tmp_path / "data", tmp_path / "local").path)
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in (copy, *copy.iterdir())}
    assert modes == {"data": "0o755", "664": "0o644", "6775": "0o755", "444": "0o444"}


def _member(name, kind=tarfile.REGTYPE, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


UNSAFE = {
    "above": [_member("../out")],
    "through a link": [_member("a", tarfile.SYMTYPE, ".."), _member("a/out")],
    "through a link, deeper": [_member("a", tarfile.SYMTYPE, ".."), _member("a/b/out")],
    "into a link": [_member("a", tarfile.SYMTYPE, "../out"), _member("a")],
    "by a second name": [_member("a", tarfile.LNKTYPE, "../secret"), _member("a")],
    "a device": [_member("a", tarfile.CHRTYPE)],
    "absolute": [_member("/absolute")],
}


@pytest.mark.parametrize("what", UNSAFE)
def test_an_archive_cannot_write_elsewhere(what, tmp_path):
    (tmp_path / "secret").write_text("secret")
    buffer, root = io.BytesIO(), tmp_path / "root"
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in UNSAFE[what]:
            tar.addfile(member)
    root.mkdir()
    with pytest.raises(FileError) as found:
        unpack(iter([buffer.getvalue()]), str(root), bytes, "x")
    assert found.value.codes == ["HD404"]
    assert sorted(os.listdir(tmp_path)) == ["root", "secret"]
    assert (tmp_path / "secret").read_text() == "secret" and not Path("/absolute").exists()


@pytest.fixture
def small(tmp_path):
    source = tmp_path / "small"
    source.mkdir()
    (source / "program").write_bytes(Path("/bin/sleep").read_bytes())
    (source / "program").chmod(0o755)
    return source


def test_jobs_have_copies_of_their_own(small, tmp_path):
    """What one removes is not another's. Those of one name, and those without a name, share one."""
    local = tmp_path / "local"
    paths = [staged(small, local, job=job).path for job in ("1", "2", "")]
    assert len(set(paths)) == 3
    assert [staged(small, local, job=job).sent for job in ("1", "2", "")] == [0, 0, 0]
    for path in paths:
        assert Path(path, "program").exists()
        cleanup(path)
        cleanup(path)  # it is gone already
        assert not Path(path).parent.exists()
    assert os.listdir(Path(paths[0]).parent.parent) == []


def test_only_what_was_made_here_is_removed(small, tmp_path):
    local = tmp_path / "local"
    path = Path(staged(small, local).path)
    other = str(path).replace(f"hpcdist-{os.getuid()}", "hpcdist-12345")
    for wrong in (small, path.parent, path / "program", path.parent / "another", local, other, path):
        if wrong is path:
            (path.parent / stage.MANIFEST).unlink()
        with pytest.raises(InputError, match="not a copy that hpcdist"):
            cleanup(str(wrong))
    assert (path / "program").exists()


def test_a_folder_that_others_can_write_in_is_not_trusted(small, tmp_path):
    local = tmp_path / "local"
    private = local / f"hpcdist-{os.getuid()}"
    private.mkdir(parents=True)
    for folder, text in ((private, "is not this user's alone"), (local, "no sticky bit")):
        folder.chmod(0o777)
        with pytest.raises(RankError, match=text):
            staged(small, local)
        assert os.listdir(private) == []
        folder.chmod(0o700 if folder == private else 0o1777)
    assert staged(small, local).sent == 1


def test_the_destination_is_checked_before_anything_is_read(small, tmp_path, monkeypatch):
    """Whether it has the space; what an old copy of the source takes is given back first."""
    monkeypatch.setattr(stage.Packer, "tar", None)
    monkeypatch.setattr(stage.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(RankError, match=r"stage_env on .*: no space for the copy: .* needed, 100 B free \[HD410\]"):
        staged(small, tmp_path / "to")
    assert os.listdir(tmp_path / "to" / f"hpcdist-{os.getuid()}" / "stage_env") == []


def test_the_command(small, tmp_path):
    """It imports neither torch nor numpy; its path alone is on standard output; errors are one line with status 2."""
    (tmp_path / "local").mkdir()
    command, env = ["-m", "hpcdist", "stage-env"], {"SLURM_JOB_ID": "7"}
    ask = [*command, "small", "--to", "local"]
    timed = run([sys.executable, "-X", "importtime", *ask], cwd=tmp_path, env=env)
    assert timed.status == 0, timed.err
    imported = {line.rpartition("|")[2].strip() for line in timed.err.splitlines() if line.startswith("import time:")}
    assert {"hpcdist.tools.stage_env.stage", "mpi4py"} <= imported
    assert not imported & {"torch", "numpy", "h5py", "tqdm", "psutil"}
    path = Path(timed.out.removesuffix("\n"))
    assert (path / "program").exists() and path.parent.name.endswith("_7")
    again, nothing = ([*command[1:], *words] for words in (ask[3:], ["nothing"]))
    job, missing = commands(2, again, nothing, cwd=tmp_path, env=env)
    assert (job.status, job.out, "1 node had it already" in job.err) == (0, timed.out, True), job
    told = "error: nothing: No such file or directory [HD402] (see python -m hpcdist explain HD402)"
    assert (missing.status, missing.out, missing.err.count("stage-env: error")) == (2, "", 1), missing
    assert f"hpcdist stage-env: {told}\n" in missing.err, missing
    for words, told in ((["--cleanup", ""], "expected a name"), ([], "expected SOURCE, or --cleanup PATH"),
                        (["--cleanup", "/tmp"], "not a copy that"),
                        (["small", "--to", "local/none"], "local/none: no such folder on")):  # fmt: skip
        wrong = run([sys.executable, *command, *words], cwd=tmp_path)
        assert wrong.status == 2 and told in wrong.err and wrong.err.count("\n") == 1, wrong.err
    cleaned = run([sys.executable, *command, "--cleanup", str(path)], cwd=tmp_path)
    assert (cleaned.status, cleaned.out, cleaned.err) == (0, "", "")
    assert not path.exists()
