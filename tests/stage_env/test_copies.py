"""The copies on one node: those that are damaged, jobs that sweep at once, and whose they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launch import run

from hpcdist.stage_env import __main__ as command
from hpcdist.stage_env import copies
from hpcdist.stage_env.copies import Copy, Record, Store

pytestmark = pytest.mark.once

DIGEST, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2


def made(store: Store, digest: str, job: str) -> Copy:
    """Make a copy with a program and a file, as staging does."""
    part = store.begin(digest)
    (part.folder / "env").mkdir(exist_ok=True)
    shutil.copy("/bin/sleep", part.folder / "env" / "program")
    return store.finish(part, Record(digest, "env", "/shared/env"), job)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def _kept(store: Store) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("lost", ["record", "notes", "contents of the record"])
def test_a_copy_without_its_record_is_made_again(store: Store, lost: str) -> None:
    """A cleaner of the disk has removed it, or the power has failed. Who has a claim on it keeps that."""
    copy = made(store, DIGEST, "first")
    if lost == "notes":
        shutil.rmtree(copy.notes)
    elif lost == "record":
        (copy.notes / "record").unlink()
    else:
        (copy.notes / "record").write_text("")
    assert store.find(DIGEST, "second") is None
    again = made(store, DIGEST, "second")
    assert again.folder == copy.folder and Record.read(again.folder) is not None
    assert again.users("second") == ([] if lost == "notes" else ["job first"])
    assert _kept(store) == [DIGEST[:16]]


def test_a_copy_without_its_record_is_swept_unless_it_is_used(store: Store) -> None:
    folder = made(store, DIGEST, "1").folder
    shutil.rmtree(folder / ".stage_env")
    with subprocess.Popen([folder / "env" / "program", "600"]) as running:
        try:
            store.sweep(OTHER)
            assert folder.exists()
        finally:
            running.kill()
    store.sweep(OTHER)
    assert _kept(store) == []


def test_jobs_that_sweep_at_once_do_not_fail_each_other(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one is about to remove, another has removed."""
    rmtree = shutil.rmtree

    def late(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            rmtree(path)
        rmtree(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", late)
    assert store.remove(made(store, DIGEST, "1"), "1") == []
    made(store, DIGEST, "1").release("1")
    store.begin(DIGEST).close(remove=False)
    (store.folder / ".trash-0").mkdir()
    store.sweep(OTHER)
    assert _kept(store) == []


def test_what_cannot_be_removed_is_no_error_of_the_job_that_sweeps(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = made(store, DIGEST, "1")
    copy.release("1")
    (store.begin(OTHER).folder / "file").touch()

    def stuck(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "rmtree", stuck)
    store.sweep("another digest")
    with pytest.raises(OSError, match="Input/output"):
        store.remove(made(store, DIGEST, "1"), "1")


def test_others_go_on_while_a_part_is_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of the store is for moments only."""
    part = store.begin(DIGEST)
    part.close(remove=False)
    seen: list[bool] = []

    def removing(path: Path, ignore_errors: bool = False) -> None:
        other = Store(str(store.folder.parent.parent))
        thread = threading.Thread(target=lambda: other.find(DIGEST, "2"), daemon=True)
        thread.start()
        thread.join(5)
        seen.append(not thread.is_alive())

    monkeypatch.setattr(shutil, "rmtree", removing)
    store.sweep(OTHER)
    assert seen == [True] and not part.folder.exists()


def test_a_program_is_seen_through_a_symbolic_link(tmp_path: Path) -> None:
    """The copy of a job whose folder was named by a link stays as long as it runs."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = Store(str(tmp_path / "link"))
    copy = made(store, DIGEST, "1")
    with subprocess.Popen([copy.folder / "env" / "program", "600"]) as running:
        try:
            assert copies.cleanup(str(copy.folder / "env"), "1") == [f"process {running.pid}"]
        finally:
            running.kill()
    assert copies.cleanup(str(copy.folder / "env"), "1") == []


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "none"),
        ({"SLURM_JOB_ID": "7", "LSB_JOBINDEX": "3"}, "7"),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "30"}, "7_30"),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "0"}, "7"),
        ({"JOB_ID": "7", "SGE_TASK_ID": "1"}, "7_1"),
        ({"JOB_ID": "7", "SGE_TASK_ID": "undefined"}, "7"),
        ({"JOB_ID": "7"}, "7"),
    ],
)
def test_each_task_of_an_array_has_a_claim_of_its_own(environ: dict[str, str], name: str) -> None:
    assert command._job(environ) == name


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
def test_a_path_of_any_bytes_is_printed(encoding: str, tmp_path: Path) -> None:
    source, local = tmp_path / "data", os.fsencode(tmp_path / "lo\N{LATIN SMALL LETTER C WITH CEDILLA}") + b"\xff"
    source.mkdir()
    (source / "file").write_text("one")
    os.mkdir(local)
    words = [sys.executable, "-m", "hpcdist.stage_env", str(source), "--to", os.fsdecode(local)]
    with open(tmp_path / "out", "wb") as out:
        job = run(["bash", "-c", f'exec "$@" > {out.name}', "-", *words], env={"PYTHONIOENCODING": encoding})
    assert job.status == 0, job.err
    path = Path(os.fsdecode((tmp_path / "out").read_bytes().removesuffix(b"\n")))
    assert (path / "file").read_text() == "one" and os.fsencode(path).startswith(local)
