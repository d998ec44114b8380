"""The copies on one node: what killed jobs leave, jobs that work at once, and the names of jobs."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import run

from hpcdist.errors import FileError
from hpcdist.tools.stage_env import __main__ as command
from hpcdist.tools.stage_env.stage import Copy, Packer, cleanup, open_folder


@pytest.fixture
def packer(tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "file").write_text("one")
    return Packer(str(tmp_path / "env"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "local").mkdir()
    return open_folder(str(tmp_path / "local"))


def _kept(folder):
    return sorted(path.name for path in folder.iterdir())


def test_two_jobs_that_unpack_at_once_do_not_hurt_each_other(packer, folder):
    first, second = (Copy(folder, packer.source, "") for _ in range(2))
    assert not first.prepare()
    first.unpack(packer.tar())
    assert not second.prepare()  # it does not remove what the first one is about to rename
    first.finish()
    first.close()
    file = first.folder / "env" / "file"
    inode = file.stat().st_ino
    second.unpack(packer.tar())
    second.finish()
    second.close()
    assert file.stat().st_ino == inode  # the first one's: a program may run from it
    assert _kept(folder) == [first.folder.name]
    assert Copy(folder, packer.source, "").prepare()


def test_what_a_killed_job_has_left_is_removed(packer, folder):
    """By the next job, whatever it stages; a lock of a living process keeps it."""
    code = f"""
        import os
        from hpcdist.tools.stage_env.stage import Copy, Packer, open_folder
        source = Packer({str(folder.parents[2] / "env")!r}).source
        copy = Copy(open_folder({str(folder.parents[1])!r}), source, "killed")
        copy.prepare()
        (copy.part / "half").touch()
        print("done", flush=True)
        input()
        os._exit(9)
    """
    text = "\n".join(line.strip() for line in code.splitlines())
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout.readline() == b"done\n"
        copy = Copy(folder, packer.source, "")
        assert not copy.prepare()
        assert len(_kept(folder)) == 2
        job.communicate(b"\n")
    copy.close()
    assert len(_kept(folder)) == 1
    assert not copy.prepare()
    copy.close()
    assert _kept(folder) == []


def test_what_cannot_be_removed_is_the_error_of_cleanup_alone(packer, folder, monkeypatch):
    copy = Copy(folder, packer.source, "")
    copy.prepare()
    copy.unpack(packer.tar())
    copy.finish()
    copy.close()
    (folder / ".part-left").mkdir()

    def stuck(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", stuck)
        assert not Copy(folder, packer.source, "other").prepare()
        with pytest.raises(FileError, match=r"cannot be removed: Input/output error on .* \[HD410\]"):
            cleanup(str(copy.folder / "env"))
    assert not copy.folder.exists()
    assert not Copy(folder, packer.source, "").prepare()


def test_each_task_of_an_array_has_a_copy_of_its_own():
    args = argparse.Namespace(source="x", to="/tmp", job=None, also=[])
    for environ, name in (
        ({}, ""),
        ({"SLURM_JOB_ID": "7"}, "7"),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "30"}, "7_30"),
        ({"PBS_JOBID": "7[30].server"}, "7_30_.server"),
        ({"JOB_ID": "7", "SGE_TASK_ID": "1"}, "7_1"),
        ({"JOB_ID": "7", "SGE_TASK_ID": "undefined"}, "7_undefined"),
    ):
        assert command.request_of(args, environ).job == name
    args.job = "../mine"
    assert command.request_of(args, environ).job == ".._mine"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
def test_a_path_of_any_bytes_is_printed(encoding, packer, tmp_path):
    local = os.fsencode(tmp_path / "lo\N{LATIN SMALL LETTER C WITH CEDILLA}") + b"\xff"
    os.mkdir(local)
    words = [sys.executable, "-m", "hpcdist", "stage-env", str(tmp_path / "env"), "--to", os.fsdecode(local)]
    job = run(["bash", "-c", 'exec "$@" > out', "-", *words], cwd=tmp_path, env={"PYTHONIOENCODING": encoding})
    assert job.status == 0, job.err
    path = (tmp_path / "out").read_bytes().removesuffix(b"\n")
    assert path.startswith(local) and Path(os.fsdecode(path), "file").read_text() == "one"
