"""Programs for torchrun, as docs/clients shows them, end as under torchrun: the same parameters, the same values.

They are equal, not just close: with two ranks each sum has two terms, in either order.
"""

import shutil
from itertools import cycle
from pathlib import Path

import h5py
import numpy as np
import pytest
from clients import DATA, MPIS, PROGRAMS, by_torchrun, difference, ended, mpirun_of, programs
from pages import parse
from settings import ROOT

RUN = ("-m", "hpcdist.run")
STOP = (ROOT / "docs" / "do" / "stop-in-time.md").read_text()
STOPS = {name: text for name, text in parse("", STOP).programs.items() if name.endswith("_stop.py")}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "mpi"), zip(PROGRAMS, cycle(MPIS), strict=False))
def test_a_program_ends_as_under_torchrun(name, mpi, tmp_path):
    """By gloo, for which it asks; with workers that are spawned, where torchrun's are forked. Under one MPI or the
    other, of which a program sees nothing."""
    spawn = ["--spawn"] if "--spawn" in PROGRAMS[name] else []
    words = [*RUN, str(programs() / name), str(tmp_path), *spawn]
    ended(lambda: mpirun_of(mpi, *words, cwd=tmp_path, imports=mpi == "mpich"))
    assert difference(tmp_path, by_torchrun(name, 2)) == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_goes_on_from_torchruns_checkpoint(name, tmp_path):
    """The library's own, by MPI."""
    ours = tmp_path / "ours"
    shutil.copytree(by_torchrun(name, 2), ours)
    (ours / "end.pt").unlink()
    ended(lambda: mpirun_of("mpich", *RUN, "--mpi", str(programs() / name), str(ours), "--resume", cwd=tmp_path))
    assert difference(ours, by_torchrun(name, 2, resume=True)) == 0


@pytest.mark.parametrize("name", ["accelerate_train.py", "lightning_train.py"])  # which handles errors itself
def test_a_rank_that_raises_ends_the_job(name, tmp_path):
    """At once: the others, which wait for it in a collective, do not reach the deadline."""
    raising = Path(__file__).with_name("raising.py")
    job = mpirun_of("openmpi", *RUN, str(raising), str(programs() / name), str(tmp_path), cwd=tmp_path)
    assert job.status == 1, job
    assert job.err.count("RuntimeError: rank 1 has no second step") == 1, job.err
    assert "HangError" not in job.err
    assert not (tmp_path / "end.pt").exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", STOPS)
def test_a_program_stops_and_goes_on(name, tmp_path):
    """All ranks at the step at which one has had a signal. Lightning's own handler would wait for the other ranks."""
    (tmp_path / name).write_text(STOPS[name])
    job = mpirun_of("mpich", name, "signal", cwd=tmp_path)
    assert job.status == 75 and "step 10: rank 1 received SIGTERM" in job.out, job
    job = mpirun_of("mpich", name, cwd=tmp_path)
    assert job.status == 0 and "step 24: done" in job.out, job


def seen(program, steps, folder):
    """Run a program that trains so many steps; return the samples of each step of all ranks."""
    for file in folder.glob("seen-*"):
        file.unlink()
    recording = Path(__file__).with_name("recording.py")
    ended(lambda: mpirun_of("mpich", str(recording), program, str(steps), cwd=folder))
    ranks = [(folder / f"seen-{rank}.txt").read_text().splitlines() for rank in range(2)]
    return [[int(n) for n in " ".join(step).split()] for step in zip(*ranks, strict=True)]


@pytest.fixture
def train_h5(tmp_path):
    """40 samples: 5 steps of 4 on each of 2 ranks."""
    numbers = np.arange(40, dtype=np.float32)
    with h5py.File(tmp_path / "train.h5", "w") as file:
        file["x"], file["y"] = np.stack([numbers, numbers / 40], 1), numbers[:, None] / 40
    return tmp_path


def assert_each_sample_once_an_epoch(steps):
    assert [len(step) for step in steps] == [8] * 10
    epochs = [[n for step in steps[i : i + 5] for n in step] for i in (0, 5)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(40))] * 2
    assert epochs[0] != epochs[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", DATA)
def test_no_library_shards_the_batches_of_a_loader(name, train_h5):
    """Nor of an epoch that was interrupted: the second run gets the samples that were left."""
    (train_h5 / name).write_text(DATA[name])
    first = seen(name, 3, train_h5)
    assert len(first) == 3
    rest = seen(name, 7 if name == "accelerate_data.py" else 10, train_h5)  # of this run, or in all
    assert_each_sample_once_an_epoch(first + rest)


@pytest.mark.timeout(300)
def test_lightnings_epochs_differ(train_h5):
    """It makes an iterator of a loader only to see whether that works."""
    (train_h5 / "lightning_data.py").write_text(DATA["lightning_data.py"])
    assert_each_sample_once_an_epoch(seen("lightning_data.py", 10, train_h5))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", DATA)
def test_nor_those_of_torchs_dataloader(name, train_h5):
    """With a Sampler, and workers."""
    loader = "torch.utils.data.DataLoader(data, batch_sampler=hd.data.Sampler(data, 4, seed=0), num_workers=1"
    text = DATA[name].replace("hd.data.Loader(data, batch_size=4, seed=0", loader)
    text = text.replace("accelerator.register_for_checkpointing(loader)\n", "").replace("loader.next_epoch", "0")
    text = text.replace("loader.epoch(epoch)", "loader").replace("loader.state_dict()", "{}")
    assert text.count("hd.data.Sampler") == 1
    (train_h5 / name).write_text(text)
    assert_each_sample_once_an_epoch(seen(name, 10, train_h5))
