"""Loads that read once: values, bytes read and sent, one copy a node, damage, and what explain tells of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from cases import DTYPES, whole_of
from collective import Findings, assert_on_all_ranks, change_settings, raises_on_all_ranks
from mpi4py import MPI

import hpcdist as hd
from hpcdist import staging
from hpcdist.files import raw
from hpcdist.routes import mpi
from hpcdist.staging import once

pytestmark = pytest.mark.mpi

WAYS = [("auto", False), ("rank", False), ("node", False), ("job", False), ("node", True), ("job", True)]


@pytest.fixture(params=[1, 2], ids=["one node", "two nodes"])
def comm(request: pytest.FixtureRequest, world: hd.World, monkeypatch: pytest.MonkeyPatch) -> Iterator[MPI.Intracomm]:
    """All ranks, as if they were on one node or on two; of three ranks, the first and the last on the same."""
    change_settings(monkeypatch, world, node_of=tuple(rank % request.param for rank in range(world.world_size)))
    comm = world.comm.Dup()
    yield comm
    comm.Free()


def some_tensors() -> dict[str, Any]:
    """Nested; of every dtype, 0-d, empty, and one of several blocks."""
    small = {f"{dtype}".removeprefix("torch."): whole_of((5, 3), dtype) for dtype in list(DTYPES)[::3]}
    large = whole_of((60, 1000), torch.int64)
    return {
        "small": small,
        "a": {"b": large, "none": large[:0], "step": torch.tensor(7)},
        "c": whole_of((20_000,), torch.float32),
    }


def flat(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {name: x for key, value in tree.items() for name, x in flat(value, f"{prefix}/{key}").items()}


def same_everywhere(findings: Findings, got: Any, expected: Any, what: object) -> None:
    mine, wanted = flat(got), flat(expected)
    findings.check(mine.keys() == wanted.keys(), (what, list(mine)))
    for name, x in wanted.items():
        findings.same(mine.get(name), x, (what, name))


@pytest.mark.parametrize("verify", [None, True, False])
def test_values(verify: bool | None, comm: MPI.Intracomm, world: hd.World, folder: Path) -> None:
    """Whatever is read once, by how many, and however small the window."""
    findings, tensors = Findings(world.comm), some_tensors()
    staging.save(folder / "x.h5", tensors, None, window=100_000)
    staging.save(folder / "z.h5", tensors, None, compression="gzip")
    for name, (once_per, shared), window in itertools.product("xz", WAYS, (100_000, 2**28)):
        if name == "z" and window < 2**28:
            continue  # each piece is decompressed again and again
        for readers in (None, 1) if window == 2**28 else (None,):
            options = {"once_per": once_per, "shared": shared, "window": window, "readers": readers, "verify": verify}
            got = staging.load(folder / f"{name}.h5", dim=None, group=comm, **options)
            same_everywhere(findings, got, tensors, (name, options))
    findings.settle()


def test_other_memory(comm: MPI.Intracomm, world: hd.World, folder: Path) -> None:
    """Into `out` with strides on one rank, and in place on the others; a group of tensors; dims by name."""
    findings, tensors, rank = Findings(world.comm), some_tensors(), world.rank
    staging.save(folder / "x.h5", tensors, None)
    large = tensors["a"]["b"]
    for once_per in ("rank", "node", "job"):
        out = (
            torch.empty((1000, 120), dtype=torch.int64).t()[::2]
            if rank == 0
            else torch.empty(60, 1000, dtype=torch.int64)
        )
        got = staging.load(folder / "x.h5", "a/b", dim=None, out=out, once_per=once_per, group=comm)
        findings.check(got is out, "out")
        findings.same(out, large, once_per)
    dims = {"a/b": 1, "a/step": None, "a/none": None}
    for shared in (False, True):
        got = staging.load(folder / "x.h5", "a", dim=dims, once_per="job", shared=shared, group=comm)
        cols = hd.layout.block_range(1000, world.world_size, rank)
        same_everywhere(findings, got, {**tensors["a"], "b": large[:, cols.start : cols.stop]}, "dims")
    findings.settle()


def test_files_of_other_tools(comm: MPI.Intracomm, world: hd.World, folder: Path) -> None:
    findings = Findings(world.comm)
    x = np.arange(60_000).reshape(100, 600)
    if world.rank == 0:
        with h5py.File(folder / "x.h5", "w") as file:
            file.create_dataset("chunked", data=x, chunks=(7, 600))
            file.create_dataset("zip", data=x, chunks=(30, 30), compression="gzip")
            file.create_dataset("big", data=x.astype(">i4"))
            file.create_dataset("plain", data=x)
    world.comm.Barrier()
    for (once_per, shared), verify in itertools.product(WAYS, (None, True)):
        got = staging.load(folder / "x.h5", dim=None, once_per=once_per, shared=shared, verify=verify, group=comm)
        for name, y in got.items():
            findings.same(y, torch.from_numpy(x).to(y.dtype), (name, once_per, shared))
    findings.settle()


def test_equal_boxes(comm: MPI.Intracomm, world: hd.World, folder: Path) -> None:
    """Ranks 0 and 2 want the same box, rank 1 another one; each is read once."""
    findings, rank, size = Findings(world.comm), world.rank, world.world_size
    whole = whole_of((400, 300), torch.int64)
    staging.save(folder / "x.h5", {"a": whole, "b": whole + 1}, None, window=100_000)
    staging.save(folder / "z.h5", {"a": whole, "b": whole + 1}, None, compression=1)
    offset, shape = (100 * (rank % 2), 0), (200 + rank % 2, 300)
    wanted = whole[hd.Box(offset, shape).slices()]
    for name, once_per, verify in itertools.product("xz", ("auto", "rank", "node", "job"), (None, True)):
        got = staging.load(folder / f"{name}.h5", box=(offset, shape), once_per=once_per, verify=verify, group=comm)
        findings.same(got["a"], wanted, (name, once_per))
        findings.same(got["b"], wanted + 1, (name, once_per))
    said = hd.explain(staging.load, folder / "x.h5", "a", box=(offset, shape), once_per="job", verify=False, group=comm)
    boxes = [200 * 300 * 8, 201 * 300 * 8][: min(size, 2)]
    findings.check(said.read_by_all == sum(boxes), said)
    findings.settle()


class Counts:
    """Bytes of data that this rank reads from files, and sends in messages."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.read = self.sent = 0
        read_at, views, exchange = raw.read_at, mpi.Mpi.exchange_views, mpi.Mpi.exchange

        def counted_read(fd: int, offset: int, into: memoryview, digest: Any = None) -> None:
            self.read += len(into)
            read_at(fd, offset, into, digest)

        def counted_views(route: Any, team: Any, sends: Any, recvs: Any, meanwhile: Any) -> None:
            self.sent += sum(view.nbytes for _, view in sends)
            views(route, team, sends, recvs, meanwhile)

        def counted(route: Any, team: Any, sends: Any, recvs: Any, longest: int) -> None:
            self.sent += sum(block.nbytes for _, block in sends)
            exchange(route, team, sends, recvs, longest)

        patch.setattr(raw, "read_at", counted_read)
        patch.setattr(mpi.Mpi, "exchange_views", counted_views)
        patch.setattr(mpi.Mpi, "exchange", counted)

    def all(self, comm: MPI.Intracomm) -> tuple[int, int]:
        found = comm.allreduce(self.read), comm.allreduce(self.sent)
        self.read = self.sent = 0
        return found


def test_bytes_read_and_sent(
    comm: MPI.Intracomm, world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where they are read and sent, and as explain tells before the call."""
    findings, size = Findings(world.comm), world.world_size
    nodes = len(set(world.settings.node_of))
    tensors = {"a": whole_of((3, 50_000), torch.int64), "b": whole_of((4000,), torch.int32), "c": torch.tensor(3)}
    staging.save(folder / "x.h5", tensors, None, window=300_000)
    nbytes = sum(x.nbytes for x in tensors.values())
    counts = Counts(monkeypatch)
    expected = {  # bytes read; sent
        ("rank", False): (size * nbytes, 0),
        ("node", False): (nodes * nbytes, (size - nodes) * nbytes),
        ("job", False): (nbytes, (size - 1) * nbytes),
        ("node", True): (nodes * nbytes, 0),
        ("job", True): (nbytes, (nodes - 1) * nbytes),
        ("auto", False): (size * nbytes, 0) if nodes == 1 else (nbytes, (size - 1) * nbytes),
        ("auto", True): (nbytes, (nodes - 1) * nbytes),
    }
    for (once_per, shared), (read, sent) in expected.items():
        options = {"once_per": once_per, "shared": shared, "group": comm}
        said = hd.explain(staging.load, folder / "x.h5", dim=None, **options)
        findings.check(counts.all(comm) == (0, 0), "explain reads and sends nothing")
        got = staging.load(folder / "x.h5", dim=None, **options)
        mine = counts.read, counts.sent
        findings.check((said.read, said.sent) == mine, (options, said, mine))
        done = counts.all(comm)
        findings.check((said.read_by_all, said.sent_by_all) == done, (options, said, done))
        padding = 64 * size * size  # between small tensors in one message
        findings.check(done[0] == read and 0 <= done[1] - sent <= padding, (options, done, read, sent))
        findings.check(said.result == ("shared" if shared else "structure"), said)
        findings.check(f"{read:,}" in str(said), said)
        others = world.comm.allgather((said.read_by_all, said.sent_by_all, said.methods, said.reasons, said.route))
        findings.check(len(set(others)) == 1, others)
        same_everywhere(findings, got, tensors, options)
    findings.settle()


@pytest.mark.parametrize(
    "options",
    [
        {"dim": 0},
        {"dim": 1},
        {"dim": 1, "verify": True},
        {"dim": 1, "verify": True, "window": 1000},
        {"dim": 0, "verify": True},
        {"dim": None, "verify": True, "once_per": "job"},
        {"dim": None, "readers": 1, "once_per": "rank"},
        {"dim": None, "readers": 1, "once_per": "job"},
        {"box": ((0, 5), (40, 7))},
        {"box": ((1, 0), (40, 500)), "verify": True, "once_per": "job"},
    ],
    ids=str,
)
def test_explain_is_right(
    options: dict[str, Any], world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = whole_of((200, 500), torch.int32)
    staging.save(folder / "x.h5", whole, None, window=30_000)
    counts = Counts(monkeypatch)
    said = hd.explain(staging.load, folder / "x.h5", **options)
    staging.load(folder / "x.h5", **options)
    received = world.comm.allreduce(said.received)
    assert_on_all_ranks(world.comm, (said.read, said.sent) == (counts.read, counts.sent), (said, vars(counts)))
    done = counts.all(world.comm)
    assert_on_all_ranks(world.comm, (said.read_by_all, said.sent_by_all) == done == (done[0], received), (said, done))


def test_one_copy_a_node(comm: MPI.Intracomm, world: hd.World, folder: Path) -> None:
    """What a rank writes it alone sees; the memory is used again; below 64 KiB each rank has its own."""
    findings, rank = Findings(world.comm), world.rank
    whole = whole_of((300, 1000), torch.int64)
    staging.save(folder / "x.h5", {"a": whole, "b": whole + 1, "small": torch.arange(3)}, None)
    team = world.context.team_of(comm)
    for _ in range(3):
        got = staging.load(folder / "x.h5", dim=None, shared=True, group=comm)
        findings.check(team.unshared is None, team.unshared)
        findings.check(2 * whole.nbytes <= team.windows.nbytes() <= 2.2 * whole.nbytes, team.windows.nbytes())
        got["a"][rank] = -1
        comm.Barrier()
        expected = whole.clone()
        expected[rank] = -1
        findings.same(got["a"], expected, "after a write")
        findings.same(got["b"], whole + 1, "b")
        del got
        comm.Barrier()
    small = staging.load(folder / "x.h5", "small", dim=None, shared=True, group=comm)
    findings.same(small, torch.arange(3), "small")
    findings.check("fewer than" in str(team.unshared), team.unshared)
    said = hd.explain(staging.load, folder / "x.h5", "small", dim=None, shared=True, group=comm)
    findings.check(said.result == "new" and "fewer than" in str(said), said)
    findings.settle()


def test_without_windows(world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = whole_of((300, 1000), torch.int64)
    staging.save(folder / "x.h5", whole, None)
    monkeypatch.setattr(world.team.windows, "problem", "none today")
    findings = Findings(world.comm)
    findings.same(staging.load(folder / "x.h5", dim=None, shared=True), whole, "private")
    findings.check(world.team.unshared == "none today", world.team.unshared)
    findings.settle()


def flip(path: Path, name: str, at: int) -> None:
    with h5py.File(path, "r") as file:
        place = file[name].id.get_offset() + at
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("once_per", "shared"), WAYS)
def test_damage_is_one_error(
    once_per: str,
    shared: bool,
    large: bool,
    comm: MPI.Intracomm,
    world: hd.World,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever rank reads the piece, in one block or in several; and the next load is right."""
    monkeypatch.setattr(once, "BATCH", 2**12)
    rows = 200 if large else 2
    whole = whole_of((rows, 100), torch.int64)
    staging.save(folder / "x.h5", {"a": whole, "b": whole}, None, window=80_000)
    for name, at in (("a", 8 * 100), ("b", 8 * (100 * rows - 1))):
        if world.rank == 0:
            flip(folder / "x.h5", name, at)
        world.comm.Barrier()
        call: Callable[[], Any] = lambda: staging.load(  # noqa: E731
            folder / "x.h5", dim=None, once_per=once_per, shared=shared, verify=True, group=comm
        )
        error = raises_on_all_ranks(world.comm, hd.RankError, call)
        assert_on_all_ranks(world.comm, f"{name}: piece" in str(error) and "is damaged" in str(error), error)
        world.comm.Barrier()
        if world.rank == 0:
            flip(folder / "x.h5", name, at)
        world.comm.Barrier()
    findings = Findings(world.comm)
    same_everywhere(findings, call(), {"a": whole, "b": whole}, "repaired")
    findings.settle()


@pytest.mark.parametrize("shared", [False, True])
def test_a_stale_cache_is_read_again(
    shared: bool, comm: MPI.Intracomm, world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong bytes have been sent then; the right ones follow."""
    monkeypatch.setattr(once, "BATCH", 2**12)
    whole = whole_of((200, 100), torch.int64)
    staging.save(folder / "x.h5", {"a": whole, "b": whole + 1}, None, window=80_000)
    forgotten = []
    read_at, forget = raw.read_at, raw.forget

    def stale(fd: int, offset: int, into: memoryview, digest: Any = None) -> None:
        read_at(fd, offset, into)
        if not forgotten and world.rank == world.world_size - 1:
            into[:] = bytes(len(into))
        if digest is not None:
            digest.update(into)

    monkeypatch.setattr(raw, "read_at", stale)
    monkeypatch.setattr(raw, "forget", lambda fd: forgotten.append(fd) or forget(fd))
    got = staging.load(folder / "x.h5", dim=None, once_per="job", shared=shared, group=comm)
    findings = Findings(world.comm)
    same_everywhere(findings, got, {"a": whole, "b": whole + 1}, "read again")
    findings.check(forgotten, "it was read again")
    findings.settle()


def test_a_rank_that_cannot_read(world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on with it to the end; the callback's own error as well."""
    monkeypatch.setattr(once, "BATCH", 2**16)
    whole = whole_of((300, 1000), torch.int64)
    staging.save(folder / "x.h5", whole, None, window=100_000)
    last = world.world_size - 1

    def fail(*args: Any) -> None:
        raise OSError(5, os.strerror(5))

    with monkeypatch.context() as patch:
        if world.rank == last:
            patch.setattr(raw, "read_at", fail)
        call = lambda: staging.load(folder / "x.h5", dim=None, once_per="job", verify=False)  # noqa: E731
        error = raises_on_all_ranks(world.comm, hd.RankError, call)
        assert_on_all_ranks(world.comm, list(error.problems) == [last] and "Input/output" in str(error), error)

    def progress(nbytes: int) -> None:
        if world.rank == last:
            raise KeyError("mine")

    call = lambda: staging.load(folder / "x.h5", dim=None, once_per="job", progress=progress)  # noqa: E731
    error = raises_on_all_ranks(world.comm, hd.RankError, call)
    assert_on_all_ranks(world.comm, list(error.problems) == [last] and "mine" in str(error), error)
    findings = Findings(world.comm)
    findings.same(staging.load(folder / "x.h5", dim=None, once_per="job"), whole, "afterwards")
    findings.settle()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"once_per": "week"}, "once_per is 'week', expected one of auto, rank, node, job"),
        ({"shared": True, "dim": 0}, "shared=True is for tensors that every rank wants whole"),
        ({"shared": True, "once_per": "rank"}, "with shared=True no rank has a copy of its own"),
        ({"shared": True, "out": torch.empty(3)}, "out is given, but shared=True returns memory"),
        ({"shared": True, "device": "cuda"}, "device is cuda, but shared=True is for host memory"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], text: str, world: hd.World, folder: Path) -> None:
    staging.save(folder / "x.h5", torch.arange(3), None)
    kwargs = {"dim": None, **(wrong if world.rank == world.world_size - 1 else {})}
    for verb in (staging.load, lambda path, **kw: hd.explain(staging.load, path, **kw)):
        error = raises_on_all_ranks(world.comm, hd.RankError, lambda: verb(folder / "x.h5", **kwargs))  # noqa: B023
        assert_on_all_ranks(world.comm, text in str(error), error)
    if world.world_size > 1:
        shared = world.rank == 0
        call = lambda: staging.load(folder / "x.h5", dim=None, shared=shared)  # noqa: E731
        error = raises_on_all_ranks(world.comm, hd.RankError, call)
        assert_on_all_ranks(world.comm, "shared is False, where rank 0 has True" in str(error), error)
