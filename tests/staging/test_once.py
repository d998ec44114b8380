"""What all ranks want whole: right data on one node and on two, bytes read and sent, damage, refusals."""

import itertools
import os
from functools import partial
from unittest.mock import Mock

import h5py
import pytest
import torch
from cases import whole_of
from collective import refused

import hpcdist as hd
from hpcdist import staging
from hpcdist.formats import plain
from hpcdist.routes import mpi, node_copy
from hpcdist.runtime.world import team_of
from hpcdist.staging.reader import TensorReader
from hpcdist.tensors.storage import Scratch

LARGE = whole_of((200, 500), torch.int32)


def test_other_memory(comm, findings, world, rank, folder, monkeypatch):
    """Into `out` with strides on one rank, and in place on the others, within the window; dims by name."""
    path, scratches, made = folder / "x.h5", [], Scratch.__init__
    tensors = {"a": LARGE, "b": LARGE + 1, "step": torch.tensor(7)}
    staging.save(path, tensors, None, window=30_000)
    monkeypatch.setattr(Scratch, "__init__", lambda self, **how: (scratches.append(self), made(self, **how))[0])
    step = 1 if rank else 2
    for size, verify in itertools.product((5_000, 70_000, 2**20), (None, True)):
        out = torch.empty((500, 200 * step), dtype=LARGE.dtype).t()[::step]
        options = {"window": size, "verify": verify, "group": comm}
        findings.check(staging.load(path, "a", dim=None, out=out, **options) is out, "out")
        findings.same(out, LARGE, options)
        held = [sum(x.numel() for x in scratch.held) for scratch in scratches]
        findings.check(held and max(held) <= size, (options, held))
        scratches.clear()
    tensors["a"] = LARGE.tensor_split(world.world_size, 1)[rank]
    got = staging.load(path, dim={"a": 1, "b": None, "step": None}, group=comm)
    for name, expected in tensors.items():
        findings.same(got[name], expected, name)


@pytest.mark.parametrize(
    "options",
    [
        *({"dim": None, "verify": verify} for verify in (None, True)),
        *({"dim": dim, "verify": verify, "window": 2**20} for dim in (0, 1) for verify in (None, True)),
        {"dim": 1, "verify": True, "window": 1000},
        {"box": ((0, 5), (40, 7))},
        {"box": ((1, 0), (40, 500)), "verify": True},
    ],
    ids=str,
)
def test_bytes_read_and_sent(options, comm, findings, world, size, folder, monkeypatch):
    """Counted where they are read and sent, and as explain tells before the call; what is compressed is read once."""
    moved = [0, 0]
    team, nodes = team_of(comm), len(set(world.settings.node_of))
    staging.save(folder / "x.h5", LARGE, None, window=30_000)
    if world.rank == 0:
        with h5py.File(folder / "z.h5", "w") as file:
            file.create_dataset("data", data=LARGE.numpy(), compression="gzip")
    world.comm.Barrier()

    def count(place, name, of, nbytes):
        inner = getattr(place, name)

        def counted(*args):
            found = inner(*args)
            moved[of] += nbytes(found, *args)
            return found

        monkeypatch.setattr(place, name, counted)

    count(plain, "read_at", 0, lambda found, fd, offset, into, *_: len(into))
    count(TensorReader, "by_library", 0, lambda found, *_: found.nbytes)
    count(mpi.Mpi, "exchange", 1, lambda found, route, team, sends, *_: sum(x.nbytes for _, x in sends))
    whole = options.get("dim", 0) is None
    for name in ("x.h5", "z.h5")[: 1 + whole]:
        said = hd.plan(staging.load, folder / name, group=comm, **options)
        findings.check(moved == [0, 0], "explain reads and sends nothing")
        staging.load(folder / name, group=comm, **options)
        more = options.get("verify") or "box" in options  # is read: the rest of pieces, and what is between short runs
        findings.check(said.file_bytes <= moved[0] if more else said.file_bytes == moved[0], (name, said, moved))
        findings.check(node_copy.helps(team) or said.sent == moved[1], (name, said, moved))
        read, sent, received = map(comm.allreduce, (said.file_bytes, said.sent, said.received))
        findings.check((said.file_bytes_of_all, said.sent_by_all, sent) == (read, received, received), (name, said))
        if whole:
            once = nodes > 1 or name == "z.h5"
            findings.check(read == (1 if once else size) * LARGE.nbytes, (name, said))
            findings.check(sent == (size - 1 if once else 0) * LARGE.nbytes, (name, said))
        moved[:] = 0, 0


def test_damage_is_one_error(comm, findings, world, rank, folder, monkeypatch):
    """Whichever rank reads the piece, small or large; a cache that is out of date is read again, and is no error."""
    forgotten, path, tensors = [], folder / "x.h5", {"small": LARGE[:2], "large": LARGE}
    is_last = rank == world.world_size - 1
    staging.save(path, tensors, None, window=80_000)
    load = partial(staging.load, path, dim=None, group=comm)
    for name, at in (("small", 8), ("large", LARGE.nbytes - 1)):
        with h5py.File(path, locking=False) as file:
            at += file[name].id.get_offset()
        for damaged in (True, False):
            world.comm.Barrier()
            if rank == 0:
                with path.open("r+b") as file:
                    os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, at)[0] ^ 1]), at)
            world.comm.Barrier()
            if damaged:
                error = refused(f"{name}: piece", load)
                findings.check("is damaged" in str(error), error)
    read_at, forget = plain.read_at, plain.forget

    def stale(fd, offset, into, digest=None):
        read_at(fd, offset, into)
        if not forgotten and is_last:
            into[:] = bytes(len(into))
        if digest is not None:
            digest.update(into)

    monkeypatch.setattr(plain, "read_at", stale)
    monkeypatch.setattr(plain, "forget", lambda fd: (forgotten.append(fd), forget(fd)))
    got = load()
    for name, x in tensors.items():
        findings.same(got[name], x, name)
    findings.check(bool(forgotten) == is_last, "read again")


def test_a_rank_that_cannot_read(comm, findings, rank, last, folder, monkeypatch):
    """The others go on with it to the end; the callback's own error as well."""
    staging.save(folder / "x.h5", LARGE, None, window=30_000)
    load = partial(staging.load, folder / "x.h5", dim=None, verify=False, group=comm)
    fail = Mock(side_effect=OSError(5, "mine") if rank == last else None)
    refused("mine", load, progress=fail, ranks=[last])
    findings.same(load(), LARGE, "afterwards")
    if rank == last:
        monkeypatch.setattr(plain, "read_at", fail)
    refused("mine", load, ranks=[last])
