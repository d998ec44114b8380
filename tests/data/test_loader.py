"""Loaders on several ranks: each sample once, the same order for every number of ranks, resume, ends."""

import gc
import os
import threading
import time

import h5py
import numpy as np
import pytest
import torch
from cases import DTYPES, whole_of
from collective import assert_on_all_ranks, goes_on, raises_on_all_ranks, refused, several_ranks
from samples import FIELDS, SAMPLES

import hpcdist as hd
from hpcdist import staging
from hpcdist.layout.permutation import Permutation

KEEPS = ("node", "job", "file")
# Of 65 samples, seed 5, epoch 0: for every number of ranks and nodes.
ORDERS = {
    "memory": [
        55,
        6,
        18,
        26,
        56,
        28,
        32,
        27,
        12,
        58,
        41,
        49,
        61,
        5,
        20,
        22,
        17,
        31,
        54,
        43,
        1,
        39,
        24,
        11,
        53,
        36,
        50,
        62,
        29,
        34,
        60,
        45,
        23,
        52,
        30,
        25,
        8,
        47,
        38,
        42,
        3,
        64,
        63,
        57,
        44,
        14,
        10,
        35,
        13,
        51,
        2,
        48,
        40,
        33,
        16,
        15,
        7,
        4,
        21,
        19,
        59,
        0,
        9,
        37,
        46,
    ],
    "file": [
        44,
        43,
        39,
        31,
        56,
        55,
        30,
        57,
        38,
        32,
        47,
        46,
        24,
        10,
        11,
        23,
        54,
        12,
        53,
        45,
        15,
        51,
        35,
        52,
        17,
        50,
        9,
        36,
        37,
        16,
        8,
        3,
        25,
        4,
        14,
        0,
        27,
        13,
        1,
        26,
        2,
        7,
        33,
        6,
        18,
        20,
        34,
        21,
        5,
        19,
        22,
        59,
        48,
        49,
        41,
        64,
        58,
        42,
        40,
        63,
        28,
        61,
        62,
        29,
        60,
    ],
}


def joined(batches):
    return [number for batch in batches for number in batch]


def opened(files, comm, keep, fields=FIELDS, **options):
    return hd.data.open(f"{files}/*.h5", fields, keep, group=comm, **options)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("end", ["drop_last", "pad", "short"])
def test_each_sample_once(keep, end, comm, files, batches, findings, size):
    data = opened(files, comm, keep)
    how = {"drop_last": True} if end == "drop_last" else {"even": end}
    for options in ({}, {"split_batches": True}, {"shuffle": False}):
        batch = 7 if "split_batches" in options else 3
        whole = batch if "split_batches" in options else batch * size
        loader = batches(data, batch, 5, window=1000, **how, **options)
        for epoch in (0, 1):
            given = batches.numbers(loader, epoch)
            told = f"{options} epoch {epoch}: {given}"
            findings.check(len(given) == len(loader), told)
            findings.check(all(len(numbers) == whole for numbers in given[:-1]), told)
            numbers = joined(given)
            findings.check(len(given[-1]) == (SAMPLES % whole or whole if end == "short" else whole), told)
            if end == "drop_last":
                findings.check(len(set(numbers)) == len(numbers) == SAMPLES // whole * whole, told)
            else:
                last = SAMPLES % whole or whole
                once = joined(given[:-1]) + given[-1][:last]
                findings.check(sorted(once) == list(range(SAMPLES)), told)
                findings.check(set(given[-1]) == set(given[-1][:last]), told)
            if "shuffle" in options:
                findings.check(once == list(range(SAMPLES)) if end != "drop_last" else numbers == sorted(numbers), told)


@pytest.mark.parametrize("keep", KEEPS)
def test_the_order_is_the_same_for_every_number_of_ranks(keep, comm, files, batches):
    """Of one, two, three, five, on one node and on two: that which is written here."""
    loader = batches(opened(files, comm, keep), 2, 5, even="short", window=1000)
    numbers = joined(batches.numbers(loader))
    assert_on_all_ranks(numbers == ORDERS["file" if keep == "file" else "memory"], numbers)


@pytest.mark.parametrize("keep", KEEPS)
def test_it_goes_on_after_every_batch(keep, comm, files, batches, findings):
    """With the same number of ranks, in a new loader; with the next epoch after the last batch."""
    data = opened(files, comm, keep)
    whole = batches(data, 4, 1, even="short", window=1000)
    expected = batches.numbers(whole, 2)
    for most in range(1, len(whole) + 1):
        first = batches(data, 4, 1, even="short", window=1000)
        given = batches.numbers(first, 2, most)
        state = first.state_dict()
        findings.check(all(type(value) is int for value in state.values()), state)
        second = batches(data, 4, 1, even="short", window=1000)
        second.load_state_dict(state)
        findings.check(second.next_epoch == (3 if most == len(whole) else 2), second.next_epoch)
        findings.check(given + batches.numbers(second, 2) == expected, most)
        for of in (first, second):
            of.close()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("keep", KEEPS)
def test_fewer_ranks_go_on(keep, comm, files, world, rank, findings):
    """Two of three, with other batches: the samples that are left."""
    two = world.comm.Split(0 if rank < 2 else 1, rank)
    for most in (1, 2, 3):
        loader = hd.data.Loader(opened(files, comm, keep), 3, 1, even="short", window=1000)
        given = [y for _, (_, y, *_) in zip(range(most), loader.epoch(4), strict=False)]
        state, before = loader.state_dict(), hd.concat(torch.cat(given), group=comm)
        loader.close()
        rest = hd.data.Loader(opened(files, two, keep), 5, 1, even="short", window=1000)
        rest.load_state_dict(state)
        after = hd.concat(torch.cat([y for _, y, *_ in rest.epoch(rest.next_epoch)]), group=two)
        rest.close()
        numbers = before.tolist() + after.tolist()
        findings.check(sorted(numbers) == list(range(SAMPLES)), (most, numbers))
    two.Free()


@pytest.mark.parametrize("keep", KEEPS)
def test_every_dtype(keep, comm, folder, batches, findings):
    """Of hpcdist's own file, whose pieces are compared with their checksums."""
    tensors = {str(dtype).removeprefix("torch."): whole_of((23, 3), dtype) for dtype in DTYPES}
    if keep == "file":  # pieces of some rows
        with staging.open(
            folder / "x.h5", "w", {k: (x.shape, x.dtype) for k, x in tensors.items()}, group=comm
        ) as file:
            for k, x in tensors.items():
                for row in range(comm.rank, 23, comm.size):
                    file.write(k, x[row : row + 1], (row, 0))
    else:
        staging.save(folder / "x.h5", tensors, dim=None, group=comm)
    data = hd.data.open(folder / "x.h5", keep=keep, group=comm)
    loader = batches(data, 5, even="short", shuffle=False, window=300)
    given = [hd.concat(list(parts), group=comm) for parts in zip(*loader.epoch(0), strict=True)]
    for name, parts in zip(data.fields, given, strict=True):
        order = sorted(range(len(parts)), key=lambda i: (i % (len(parts) // comm.size), i // (len(parts) // comm.size)))
        bits = torch.cat([parts[i].contiguous().view(torch.uint8).flatten() for i in order])
        findings.check(torch.equal(bits, tensors[name].contiguous().view(torch.uint8).flatten()), name)


def test_forms_of_samples_that_differ_in_length(comm, files, batches, findings):
    data = opened(files, comm, "node", ["y", ("values", "offsets")])
    for ragged in ("list", "nested", "padded"):
        for y, values in batches(data, 4, even="short", ragged=ragged).epoch(0):
            samples = values.unbind() if ragged == "nested" else values
            findings.check(ragged != "nested" or values.layout == torch.jagged or not len(y), values)
            for n, rows in zip(y.tolist(), samples, strict=True):
                known = rows[: n * 7 % 5]
                findings.check(torch.equal(known, torch.tensor([[n, 2 * n]], dtype=torch.int16).expand_as(known)), rows)
                findings.check(len(known) == n * 7 % 5 and not rows[len(known) :].any(), rows)


def test_transforms(comm, files, batches, findings):
    """Of each sample, then of the batch; of one field by its name."""
    data = opened(files, comm, "node", "y", transform=lambda y: {"n": y, "twice": 2 * y})
    loader = batches(data, 4, transform=lambda batch: (batch["n"], batch["twice"] + 1))
    for n, twice in loader.epoch(0):
        findings.check(torch.equal(2 * n + 1, twice) and n.dtype == torch.int64, (n, twice))
    findings.check(data[3]["twice"] == 6 and data[[3, 4]]["twice"].tolist() == [6, 8], data[3])
    for y in batches(opened(files, comm, "job", "y"), 4).epoch(0):
        findings.check(isinstance(y, torch.Tensor) and y.shape == (4,), y)


def test_memory_and_bytes_read(comm, folder, rank, size, world, batches, findings, monkeypatch):
    """The data once a node, or once a job, or two windows; each byte is read once, by one of the ranks that need it."""
    if rank == 0:
        with h5py.File(folder / "x.h5", "w") as file:
            file["x"] = np.arange(4000 * 32, dtype=np.int64).reshape(4000, 32)  # 256 bytes a sample
    world.comm.Barrier()
    nbytes, read, real = 4000 * 256, [], os.preadv
    nodes = len(set(world.settings.node_of))

    def count(fd, buffers, at):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("x.h5"):
            read.append(sum(map(len, buffers)))
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", count)
    monkeypatch.setattr(hd.data.dataset, "BLOCK", 4096)
    for keep, copies in (("node", nodes), ("job", 1), ("file", 1)):
        del read[:]
        data = hd.data.open(folder / "x.h5", "x", keep, group=comm)
        loader = batches(data, 10, window=2**14)
        given = [x[:, 0] // 32 for x in loader.epoch(0)]
        everything = hd.concat(torch.cat(given), group=comm)
        findings.check(everything.unique().tolist() == list(range(4000)), keep)
        of_all = comm.allreduce(sum(read))
        findings.check(of_all == copies * nbytes, f"{keep}: {of_all:,} bytes of {nbytes:,}")
        ranks = world.settings.node_of.count(world.settings.node_of[world.rank])
        here = nbytes if keep == "node" or nodes == 1 else nbytes * ranks // size + 2**12
        most = 2 * (2**14 + 2**13) if keep == "file" else here + 2**12
        windows = data._windows[-1:] if keep != "file" else loader._files._windows
        held = sum(window.bytes.numel() for window in windows)
        findings.check(held <= most * 17 // 16 + 2**13, f"{keep}: {held:,} bytes, expected {most:,}")


@several_ranks
@pytest.mark.parametrize("keep", KEEPS)
def test_a_rank_that_leaves_its_loop_is_named(keep, comm, files, batches, last):
    """By the others' next batch; it does not wait, and both go on."""
    loader = batches(opened(files, comm, keep), 2, window=1000)
    for most in (1, 2):
        it = loader.epoch(most)
        for _ in range(most):
            next(it)
        if comm.rank == last:
            del it
            time.sleep(0.1)
            assert_on_all_ranks(True)
        else:
            try:
                next(it)
                text = "no error"
            except hd.RankError as error:
                text = str(error)
            named = f"rank {last}: has left the loop over epoch {most} after {2 * most * comm.size} samples"
            assert_on_all_ranks(named in text, text)
    assert_on_all_ranks(len(batches.numbers(loader, 3)) == len(loader))
    goes_on()


@several_ranks
@pytest.mark.parametrize("ahead", [True, False])
def test_what_one_rank_raises(ahead, comm, files, batches, last):
    def fail(batch):
        if comm.rank == last and 11 in batch[1].tolist():
            raise KeyError("eleven")
        return batch

    data = opened(files, comm, "node")
    if ahead:
        loader = batches(data, 2, transform=fail)
    else:
        loader = batches(data, 2)
        batch = data.batch
        data.batch = lambda columns, ragged: fail(batch(columns, ragged))
    found = None
    for epoch in range(50):  # until the sample is that rank's
        try:
            list(loader.epoch(epoch))
        except hd.RankError as error:
            found = error
            break
    assert_on_all_ranks(found is not None and "KeyError: 'eleven' [HD309]" in str(found), found)
    assert_on_all_ranks(list(found.problems) == [last], found)
    assert_on_all_ranks(comm.rank != last or isinstance(found.__cause__, KeyError), repr(found.__cause__))
    goes_on()


@several_ranks
def test_ranks_that_differ(comm, files, batches, last):
    data = opened(files, comm, "node")
    own = comm.rank == last
    refused("seed is ", batches, data, 2, own, ranks=[last])
    refused("batch_size is ", batches, data, 2 + own, ranks=[last])
    refused("ragged is 'odd'", batches, data, 2, ragged="odd" if own else "list", ranks=[last])
    refused("expected at least one sample a rank", batches, data, 2 * (not own), ranks=[last])
    loader = batches(data, 2)
    refused("epoch is ", next, loader.epoch(int(own)), ranks=[last])
    refused("keep is ", opened, files, comm, "job" if comm.rank == last else "node", ranks=[last])
    refused("fields is ", opened, files, comm, "node", ["x", "y"][: 1 + (comm.rank == last)], ranks=[last])
    loader = batches(data, 2)
    assert_on_all_ranks(len(batches.numbers(loader)) == len(loader))


@pytest.mark.parametrize("how", ["vanishes", "shrinks", "is damaged", "is replaced"])
def test_a_file_that(how, comm, folder, rank, batches):
    """After it was opened, while an epoch reads it: the same error on all ranks, and the job goes on."""
    x = torch.arange(4000 * 4).view(4000, 4)
    with staging.open(folder / "x.h5", "w", {"x": (x.shape, x.dtype)}, group=comm) as file:
        for row in range(3990 - comm.rank * 10, -1, -comm.size * 10):  # pieces of 10 rows
            file.write("x", x[row : row + 10], (row, 0))
    staging.save(folder / "new.h5", {"x": x + 1}, dim=None, group=comm)
    data = hd.data.open(folder / "x.h5", "x", "file", group=comm)
    loader = batches(data, 4, window=5000)
    it = loader.epoch(0)
    next(it)
    comm.Barrier()
    if comm.rank == 0:
        path = folder / "x.h5"
        if how == "vanishes":
            path.unlink()
        elif how == "shrinks":
            os.truncate(path, 40_000)
        elif how == "is replaced":
            os.replace(folder / "new.h5", path)
        else:
            with path.open("r+b") as file:
                file.seek(60_000)
                file.write(b"\xff" * 400)
    comm.Barrier()
    text = {"vanishes": "HD401", "shrinks": "HD4", "is damaged": "is damaged", "is replaced": "HD413"}[how]
    error = raises_on_all_ranks(hd.RankError, lambda: list(it))
    assert_on_all_ranks(text in str(error) and "x.h5" in str(error), error)
    goes_on()


def test_two_at_once_and_a_stop(comm, world, files, batches, findings):
    """Their batches alternate; all ranks leave one at the same batch, whose epoch then begins anew."""
    data = opened(files, comm, "node")
    train, valid = batches(data, 2, 1), batches(data, 3, 2, shuffle=False)
    expected = batches.numbers(train, 0)
    got = []
    for step, (_, y, *_) in enumerate(train.epoch(0)):
        got.append(hd.concat(y, group=comm).tolist())
        findings.check(batches.numbers(valid, 0, most=2)[1][0] == 3 * comm.size, "the other")
        if world.should_stop() or step == 3:
            break
    findings.check(got == expected[: len(got)], got)
    findings.check(batches.numbers(train, 0) == expected, "again")
    numbers = [[y.tolist() for _, y, *_ in train] for _ in range(3)]
    findings.check(train.next_epoch == 4 and numbers[0] != numbers[1], train.next_epoch)
    first, unused, second = iter(valid), iter(valid), iter(valid)
    next(first)
    next(second)
    del unused
    with pytest.raises(RuntimeError, match="has begun another epoch"):
        next(first)
    findings.check(len(list(second)) == len(valid) - 1, "the later one")
    train.set_epoch(1)
    findings.check([y.tolist() for _, y, *_ in train] == numbers[0], "set_epoch")


def test_a_state_of_something_else(comm, files, batches):
    data = opened(files, comm, "node")
    loader, other = batches(data, 2), batches(opened(files, comm, "file"), 2, window=1000)
    for state, text in (
        (other.state_dict(), "window 4"),
        ({**loader.state_dict(), "samples": 7}, "samples 7"),
        ({}, "seed None"),
    ):
        with pytest.raises(ValueError, match=f"the state has {text}"):
            loader.load_state_dict(state)


def test_a_sampler_of_ones_own_data(world, size, findings):
    """The same samples as a Loader gives, by torch's DataLoader."""
    own = [torch.tensor(i) for i in range(50)]
    sampler = hd.data.Sampler(own, batch_size=4, seed=3)
    loader = torch.utils.data.DataLoader(own, batch_sampler=sampler)
    for epoch in range(2):
        got = [hd.concat(batch).tolist() for batch in loader]
        order = Permutation(50, (3, epoch, 0))(np.arange(50)).tolist()
        whole = 4 * size
        findings.check(joined(got[:-1]) == order[: whole * (len(got) - 1)], (epoch, got))
        findings.check(len(got) == len(sampler) == -(-50 // whole), (epoch, got))
    sampler.set_epoch(0)
    first = [batch.tolist() for batch in loader]
    half = hd.data.Sampler(50, batch_size=4, seed=3)
    state = None
    for k, _ in enumerate(half):
        if k == 1:
            state = half.state_dict()
            break
    again = hd.data.Sampler(50, batch_size=4, seed=3)
    again.load_state_dict(state)
    again.set_epoch(1)  # as Lightning does
    findings.check(list(again) == first[2:], "resumed")
    again.set_epoch(0)
    findings.check(list(again) == first, "set_epoch")


def test_a_batch_of_all(world, size, findings):
    """A batch may be larger than the data, and a number of samples be of any kind."""
    for end in ({"even": "short"}, {"drop_last": True}):
        sampler = hd.data.Sampler(np.int64(50), 2**50, **end)
        given = list(sampler)
        findings.check(len(given) == len(sampler) == ("even" in end), given)
        numbers = world.comm.allreduce(joined(given))
        findings.check(sorted(numbers) == list(range(50 * len(sampler))), numbers)


def test_what_a_peek_leaves(comm, files, batches, findings):
    """A batch that is looked at, by another iterator, takes none of those that a loaded state has left."""
    data = opened(files, comm, "node")
    first = batches(data, 2, even="short")
    given = batches.numbers(first, 1, most=2)
    second = batches(data, 2, even="short")
    second.load_state_dict(first.state_dict())
    next(iter(second))
    rest = batches.numbers(second, 1)
    findings.check(sorted(joined(given + rest)) == list(range(SAMPLES)), rest)
    findings.check(second.state_dict()["given"] == SAMPLES and second.next_epoch == 2, second.state_dict())
    dropping = batches(data, 2, drop_last=True)
    batches.numbers(dropping, 0)
    third = batches(data, 3, drop_last=True)
    third.load_state_dict(dropping.state_dict())
    findings.check(third.next_epoch == 1 and not batches.numbers(third, 0), "the end")


@several_ranks
def test_a_loader_that_is_dropped_in_a_loop(comm, files, batches, findings):
    """The next one frees its communicators, of which MPI has some thousands."""
    data = opened(files, comm, "node")
    loader = hd.data.Loader(data, 2)
    team = loader._team
    for _ in loader:
        break
    del loader
    while not team.background.worker.idle:
        time.sleep(0.01)
    batches(data, 2)
    findings.check(team.freed, "the dropped one")


def test_loaders_that_end(comm, files, batches, findings):
    """Closed, or dropped, they keep nothing; a state loaded in a loop ends the loop."""
    data = opened(files, comm, "file")
    for end in (hd.data.Loader.close, lambda loader: None):
        kept = []
        for _ in range(3):
            loader = hd.data.Loader(data, 2, window=1000)
            for _ in loader.epoch(0):
                pass
            end(loader)
            del loader
            gc.collect()  # what earlier tests have left goes in the first round
            comm.Barrier()
            kept.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
        findings.check(kept[1] == kept[2], kept)
    loader = batches(data, 2, window=1000)
    it = iter(loader)
    next(it)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="or loaded a state"):
        next(it)
    loader.close()
    with pytest.raises(ValueError, match="is closed"):
        loader.epoch(0)
