"""One process without mpirun, and jobs: refusals, indexing, torch's DataLoader, orders, ends."""

import gc
import pickle
import re
import threading
import time
import weakref
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from launch import limit, mpirun
from safetensors.torch import save_file
from samples import FIELDS, SAMPLES, right, write

import hpcdist as hd
from hpcdist.data import dataset, fields
from hpcdist.data.sampler import Order
from hpcdist.layout.permutation import Permutation


@pytest.fixture
def files(alone, here):
    write(here)
    return here


@pytest.mark.parametrize("keep", ["node", "job", "file"])
def test_indexing(keep, files):
    data = hd.data.open(files, FIELDS, keep)
    assert len(data) == SAMPLES and data.fields == ["x", "y", "values", "variable"]
    for i in (0, 19, 20, 23, SAMPLES - 1, -1):
        assert right(data[i]) and int(data[i][1]) == i % SAMPLES
    for several in (
        [3, 40, 3],
        range(5, 9),
        np.array([7]),
        torch.tensor([1, -1]),
        slice(60, None),
        slice(3, 0, -1),
        [],
    ):
        x, y, values, variable = data[several]
        expected = np.arange(SAMPLES)[several if isinstance(several, slice) else np.array(list(several), int)]
        assert y.tolist() == expected.tolist(), several
        assert all(map(right, zip(x, y, values, variable, strict=True)))
    assert [int(y) for _, y, *_ in data] == list(range(SAMPLES))  # by Python's own iteration
    for odd in (torch.tensor([True, False]), [True, False], [0.5], [[1, 2], [3, 4]]):
        with pytest.raises(TypeError, match="by integers"):
            data[odd]
    for odd in (SAMPLES, -SAMPLES - 1, [0, SAMPLES]):
        with pytest.raises(IndexError):
            data[odd]


def test_a_sample_is_its_own_memory(files):
    data = hd.data.open(files, ["x", ("values", "offsets")], "node")
    for which in (4, [4]):
        for part in data[which]:
            for x in part if isinstance(part, list) else [part]:
                x.zero_()
    assert data[4][0].any() and data[4][1].any()


def test_a_loader_that_is_dropped_ends_at_once(files):
    """And not when Python next collects garbage: it has two windows of memory."""
    loader = hd.data.Loader(hd.data.open(files, "y", "file"), 7)
    assert len(list(loader)) == 10
    left = weakref.ref(loader)
    gc.disable()
    del loader
    gc.enable()
    assert left() is None


def test_a_loader_that_is_dropped_while_a_batch_is_made(files, capfd):
    """Its own thread drops it, and frees it without an error."""
    gate, calls = threading.Event(), []

    def second_waits(batch):
        calls.append(batch)
        return batch if len(calls) == 1 or gate.wait(60) else None

    loader = hd.data.Loader(hd.data.open(files, "y", "node"), 7, transform=second_waits)
    team = loader._team
    for _ in loader:
        break
    left = weakref.ref(loader)
    del loader
    assert left() is not None and not team.freed
    gate.set()
    while left() is not None:
        time.sleep(0.01)
    for _ in range(6000):
        if team.freed or "Error" in capfd.readouterr().err:
            break
        time.sleep(0.01)
    assert team.freed


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("keep", ["node", "file"])
def test_workers_of_torchs_loader(start, keep, files):
    """They read shared memory, or the files: never by MPI."""
    data = hd.data.open(files, ["x", "y"], keep)
    loader = torch.utils.data.DataLoader(data, batch_size=9, num_workers=2, multiprocessing_context=start)
    got = [(x, y) for x, y in loader]
    assert torch.cat([y for _, y in got]).tolist() == list(range(SAMPLES))
    assert all(torch.equal(x[:, 0, 0], 100.0 * y) for x, y in got)


@pytest.mark.parametrize("keep", ["node", "file"])
def test_what_a_spawned_process_gets(keep, files):
    data = hd.data.open(files, FIELDS, keep)
    assert len(pickle.dumps(data)) < 20_000  # not the samples
    copy = pickle.loads(pickle.dumps(data))
    assert all(map(right, copy)) and len(copy) == SAMPLES


def test_formats_patterns_and_lists(alone, here, monkeypatch):
    x = torch.arange(12.0).view(6, 2)
    save_file({"x": x}, here / "a.safetensors")
    np.save(here / "b.npy", x.numpy())
    np.savez(here / "c.npz", x=x.numpy())
    torch.save({"x": x}, here / "d.pt")
    with h5py.File(here / "e.h5", "w") as file:
        file.create_dataset("x", data=x.numpy(), chunks=(2, 2), compression="gzip")
    for files in ("a.safetensors", "b.npy", "c.npz", "d.pt", "e.h5", "[a].safetensors", here / "e.h5"):
        for keep in ("node", "file"):
            data = hd.data.open(files, keep=keep)
            got = data[list(range(6))]
            assert torch.equal(got if files == "b.npy" else got[0], x), files
    data = hd.data.open(iter(["e.h5", Path("a.safetensors"), "e.h5"]), "x", "file")
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    assert torch.equal(data[list(range(18))], torch.cat([x, x, x]))


def refused(text, *args, **options):
    with pytest.raises(hd.RankError, match=re.escape(text)):
        hd.data.open(*args, **options)


def test_what_is_refused(alone, here):
    write(here)
    with h5py.File("99.h5", "w") as file:
        file["x"], file["y"] = np.zeros((2, 6), np.float32), np.arange(3)
        file["offsets"], file["values"] = [0, 2, 1], np.zeros((4, 2), np.int16)
        file["text"], file["one"] = "a text", 1.5
    refused("99.h5: 'y' has 3 samples, where 'x' has 2", "99.h5", ["x", "y"])
    refused("99.h5: 'x' is torch.float32, rows of shape [6], where", "*.h5", "x")
    refused("offsets 'offsets' must rise from 0 to 4, the rows of 'values'", "99.h5", [("values", "offsets")])
    refused("offsets 'x' is torch.float32 of shape [2, 6]", "99.h5", [("values", "x")])
    refused("99.h5: 'one' has no rows", "99.h5", "one")
    refused("holds no tensor 'z'", "99.h5", "z")
    refused("none.h5: no such file", "none.h5", "x")
    refused("none-*.h5: no such file", "none-*.h5", "x")
    refused("keep is 'memory', expected one of node, job, file", "00.h5", keep="memory")
    refused("fields has ('x', 'y', 'z')", "00.h5", [("x", "y", "z")])
    refused("fields is empty", "00.h5", [])
    data = hd.data.open("00.h5", "x")
    for options in ({"batch_size": 0}, {"even": "odd"}, {"window": 0}, {"ragged": "odd"}, {"seed": 0.5}):
        with pytest.raises(hd.RankError):
            hd.data.Loader(data, **{"batch_size": 1, **options})
    with pytest.raises(hd.RankError, match=re.escape("batch_size is 1.5, expected an integer")):
        hd.data.Loader(data, 1.5)
    with pytest.raises(TypeError, match="expected what data"):
        hd.data.Loader([1, 2], 1)
    with pytest.raises(TypeError, match="a Loader cannot be pickled"):
        pickle.dumps(hd.data.Loader(data, 1))


def test_where_the_data_are_by_default(files, monkeypatch, capfd):
    """The first that takes half of the free memory; said once."""
    monkeypatch.setattr(dataset.machine, "available", lambda: 10_000)
    assert hd.data.open(files, ["x", "y"]).keep == "node"
    assert "data.open: 65 samples, 2,080 bytes in 5 files: keep='node'" in capfd.readouterr().err
    monkeypatch.setattr(dataset.machine, "available", lambda: 4_000)
    assert hd.data.open(files, ["x", "y"]).keep == "file"


def test_a_permutation_is_one_and_any_of_them():
    for n in (1, 2, 3, 5, 64, 65, 1000):
        for key in ((0, 0), (1, 0), (0, 1)):
            assert sorted(Permutation(n, key)(np.arange(n)).tolist()) == list(range(n))
    large = Permutation(10**12, (3, 1))(np.arange(10**12 - 1000, 10**12))
    assert len(set(large.tolist())) == 1000 and large.min() >= 0 and large.max() < 10**12
    counts = np.zeros((4, 4))
    for seed in range(2000):
        counts[np.arange(4), Permutation(4, (seed,))(np.arange(4))] += 1
    assert abs(counts - 500).max() < 120  # 5.7 standard deviations
    found = Counter(tuple(Permutation(5, (seed,))(np.arange(5)).tolist()) for seed in range(12_000))
    assert len(found) == 120 and min(found.values()) > 50 and max(found.values()) < 160


def test_how_far_neighbours_are():
    """Of W blocks a window: (1 - 1/W) of a true permutation's n/3."""
    n, blocks = 200_000, 1000
    cuts = np.linspace(0, n, blocks + 1).astype(int)
    for window in (4, 20, None):
        order = Order(cuts, window, (1, 0))
        samples = order(np.arange(n))
        assert sorted(samples.tolist()) == list(range(n))
        mean = abs(np.diff(samples)).mean() / (n / 3)
        assert mean == pytest.approx(1 - 1 / (window or n), abs=0.03), window


def test_cuts_are_where_chunks_end(alone, here):
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((1000, 16)), chunks=(64, 16), compression="gzip")
    contents = fields.describe_file("x.h5", [("x", None)])
    cuts = fields.cuts(fields.joined([contents]), 9, 2**24).tolist()
    assert cuts[0] == 0 and cuts[-1] == 1000 and cuts == sorted(cuts) and not any(cut % 64 for cut in cuts[:-1]), cuts


_LOOP = """
import os, signal, sys, time
import hpcdist as hd
world = hd.init()
data = hd.data.open(sys.argv[1], ["x", "y"], sys.argv[2])
loader = hd.data.Loader(data, 2)
for epoch in range(1000):
    for step, (x, y) in enumerate(loader.epoch(epoch)):
        if world.rank == 1 and epoch == 1 and step == 2:
            {}
print("the end", flush=True)
"""


@pytest.mark.both
@pytest.mark.parametrize("keep", ["node", "file"])
def test_a_rank_that_is_killed_ends_the_job(keep, tmp_path):
    write(tmp_path)
    code = _LOOP.format("os.kill(os.getpid(), signal.SIGKILL)")
    job = mpirun(2, "-c", code, str(tmp_path), keep, cwd=tmp_path)
    assert job.status and "the end" not in job.out, job


@pytest.mark.parametrize("keep", ["node", "file"])
def test_a_rank_that_ends_its_program_is_named(keep, tmp_path):
    """In the middle of a loop of all ranks, whose batches it still holds."""
    write(tmp_path)
    code = """
import sys
import hpcdist as hd
world = hd.init()
loader = hd.data.Loader(hd.data.open(sys.argv[1], ["x", "y"], sys.argv[2]), 2)
batches = iter(loader)
next(batches)
if world.rank == 0:
    next(batches)
"""
    job = mpirun(2, "-c", code, str(tmp_path), keep, cwd=tmp_path, env=limit(30))
    assert job.status and "rank 1: has left the loop over epoch 0 after 4 samples of all ranks [HD301]" in job.err, job
