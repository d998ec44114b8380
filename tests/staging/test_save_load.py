"""save() and load(): every shape, dim, dtype and writer, against plain indexing, and h5py as the reader of the file."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from cases import DTYPES, EXTENTS, STRIDES, extents_of, part, strides_for, whole_of
from collective import Findings, assert_on_all_ranks
from conftest import WRITERS, same
from settings import ALL

import hpcdist as hd
from hpcdist import layout, staging
from hpcdist.formats.known import describe
from hpcdist.staging import pieces

pytestmark = pytest.mark.mpi

SMALL = 100  # bytes: a window that divides nothing evenly, so that everything is done in many pieces


def by_h5py(path: Path, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the file, as h5py alone reads it."""
    with h5py.File(path, locking=False) as file:
        array = np.asarray(file[name][()])
    return torch.from_numpy(np.atleast_1d(array)).view(dtype).view(array.shape)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("case", EXTENTS)
def test_every_extent_dim_and_dtype(case: str, writer: str, world: hd.World, findings: Findings, folder: Path) -> None:
    path = folder / "x.h5"
    extents = extents_of(case, world.world_size)
    for dim in (0, 1, 2):
        shape = [2, 3, 4]
        shape[dim] = sum(extents)
        wholes = {str(dtype): whole_of(tuple(shape), dtype) for dtype in DTYPES}
        shards = {name: part(whole, dim, extents, world.rank) for name, whole in wholes.items()}
        staging.save(path, shards, dim, writer=writer, window=SMALL)
        loaded = staging.load(path, dim=dim, counts=extents, window=SMALL)
        for name, whole in wholes.items():
            findings.same(by_h5py(path, name, whole.dtype), whole, f"{name} {dim} by h5py")
            findings.same(loaded[name], shards[name], f"{name} {dim} by load")
        world.comm.Barrier()


@pytest.mark.parametrize("dim", [0, 1])
def test_every_way_to_load(dim: int, world: hd.World, findings: Findings, folder: Path) -> None:
    """By rule, counts, box, whole; by all ranks or one; in small pieces; with and without checksums."""
    size, path = world.world_size, folder / "x.h5"
    whole = whole_of((7, 5, 6), torch.int32)
    saved = extents_of("ragged", size)
    saved = tuple(layout.block(whole.shape[dim], size)) if sum(saved) != whole.shape[dim] else saved
    staging.save(path, {"a": {"b": part(whole, dim, saved, world.rank)}}, dim, window=SMALL)
    few = size > 2 and not ALL  # more ranks than cores: each call takes long
    ways = itertools.product((1,) if few else (0, 1, -1), (None, True, False), (None, 1), (50, 4096))
    for along, verify, readers, window in ways:
        extent = whole.shape[along]
        for counts in ("block", "chunk", tuple(extent if rank == size - 1 else 0 for rank in range(size))):
            cut = tuple(layout.counts_of(counts, extent, size))
            out = staging.load(path, "a/b", dim=along, counts=counts, verify=verify, readers=readers, window=window)
            findings.same(out, part(whole, along % 3, cut, world.rank), (along, verify, readers, window, counts))
    for verify, readers in itertools.product((None, True), (None, 1)):
        for box in (None, ((world.rank % 7, 1, 2), (1, 3, 4)), ((0, 0, 0), (0, 5, 6))):
            where = {"dim": None} if box is None else {"box": box}
            got = staging.load(path, "a/b", **where, verify=verify, readers=readers)
            expected = whole if box is None else whole[layout.Box(*box).slices()]
            findings.same(got, expected, (box, verify, readers))


@pytest.mark.parametrize("writer", WRITERS)
def test_strides_on_both_sides(writer: str, world: hd.World, findings: Findings, folder: Path) -> None:
    extents = extents_of("zero in the middle", world.world_size)
    for dtype, dim in itertools.product((torch.float32, torch.bfloat16, torch.complex64), (0, 1)):
        shape = (sum(extents), 4) if dim == 0 else (4, sum(extents))
        for name in strides_for(dtype):
            mine = part(whole_of(shape, dtype), dim, extents, world.rank)
            x = STRIDES[name](mine) if mine.numel() else mine
            before = x.clone()
            staging.save(folder / "x.h5", x, dim, writer=writer, window=SMALL)
            findings.check(torch.equal(x, before) or x.isnan().any(), f"{name}: the input has changed")
            out = torch.empty((x.shape[1], 2 * x.shape[0]), dtype=dtype).t()[::2]
            got = staging.load(folder / "x.h5", dim=dim, counts=extents, out=out, window=SMALL)
            findings.check(got is out, "out is returned")
            findings.same(out, x, f"{name} {dtype} {dim}")
            world.comm.Barrier()


@pytest.mark.parametrize("writer", WRITERS)
def test_names_scalars_whole_tensors_and_attributes(
    writer: str, world: hd.World, findings: Findings, folder: Path
) -> None:
    """Nested names, a dim for each, tensors that all ranks hold whole, and 0-d ones of both kinds; and many."""
    rank, size, path = world.rank, world.world_size, folder / "x.h5"
    bias, step = torch.arange(3.0), torch.tensor(7)
    tensors = {"m": {"l/weight": torch.full((2, rank), rank), "l/bias": bias, "step": step}, "loss": torch.tensor(rank)}
    dims = {"m/l/weight": 1, "m/l/bias": None, "m/step": None, "loss": 0}
    many = {f"many/{i}": torch.full((rank, 2), i) for i in range(300)}
    attrs = {"": {"title": "a run"}, "m/l/weight": {"scale": [1.5, 2.5]}}
    staging.save(path, tensors | many, dims | dict.fromkeys(many, 0), attrs=attrs, writer=writer)
    with h5py.File(path, locking=False) as file:
        findings.check(file.attrs["title"] == b"a run", "attribute of the file")
        findings.check(file["m/l/weight"].attrs["scale"].tolist() == [1.5, 2.5], "attribute that is an array")
        findings.check(file["m/step"][()] == 7, "0-d")
        findings.check(file["loss"][()].tolist() == [*range(size)], "0-d shards are stacked")
    everything = staging.load(path, dim=None)
    weight = torch.cat([torch.full((2, r), r) for r in range(size)], 1)
    findings.same(everything["m"]["l"]["weight"], weight, "nested")
    findings.same(everything["m"]["l"]["bias"], bias, "whole on every rank")
    for i, x in everything["many"].items():
        findings.same(x, torch.full((sum(range(size)), 2), int(i)), i)
    findings.same(staging.load(path, "m/step"), step, "0-d is given to all")
    findings.check({*staging.load(path, "m/l", dim=None)} == {"weight", "bias"}, "a group")


@pytest.mark.parametrize("count", [1, 2])
def test_any_number_of_writers(
    count: int, world: hd.World, findings: Findings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's bytes are the same, and the table names the pieces, no longer than asked, and the ranks that wrote."""
    monkeypatch.setattr(pieces, "PIECE", 64)
    count = min(count, world.world_size)
    extents = extents_of("ragged", world.world_size)
    whole = whole_of((sum(extents), 3), torch.int64)
    staging.save(folder / "x.h5", part(whole, 0, extents, world.rank), writers=count, window=400)
    findings.same(by_h5py(folder / "x.h5", "data", torch.int64), whole, "contents")
    table = describe(str(folder / "x.h5")).tensors["data"].pieces
    assert table is not None
    findings.check(table["shape"].prod(1).max() <= 8, table["shape"])
    findings.check(table["shape"].prod(1).sum() == whole.numel(), "all of the tensor")
    ranks = {*table["rank"].tolist()}
    findings.check(ranks == {taker * world.world_size // count for taker in range(count)}, f"written by {ranks}")


@pytest.mark.parametrize("dim", [0, 1, None])
def test_a_plan_of_a_save(dim: int | None, world: hd.World, findings: Findings, folder: Path) -> None:
    """Nothing is written until it is called, with any values; what it says adds up."""
    size, x = world.world_size, torch.full((4, 6), world.rank if dim is not None else 0)
    plan = hd.plan(staging.save, folder / "x.h5", x, dim)
    findings.check(not (folder / "x.h5").exists(), "written")
    total = x.nbytes * (size if dim is not None else 1)
    written = world.comm.allreduce(plan.file_bytes)
    sent, received = world.comm.allreduce(plan.sent), world.comm.allreduce(plan.received)
    findings.check(plan.file_bytes_of_all == written == total, plan)
    findings.check(plan.sent_by_all == sent == received and (sent > 0) == (dim == 1 and size > 1), plan)
    findings.check((plan.route, plan.result) == ("mpi" if sent else "none", "file"), plan)
    findings.check("writes" in str(plan) and "because writer='auto' is" in str(plan), str(plan))
    world.comm.Barrier()
    plan(x + 1)
    whole = torch.cat([torch.full((4, 6), rank + 1) for rank in range(size)], dim) if dim is not None else x + 1
    load = hd.plan(staging.load, folder / "x.h5", dim=None)
    findings.same(load(), whole, "loaded")
    findings.check(load.file_bytes == whole.nbytes and load.result == "new", load)


_NAMES = (
    *("plain", "chunked", "compressed", "big endian", "big endian, compressed", "fill", "fill in part", "compact"),
)


def _foreign(path: Path, whole: np.ndarray) -> None:
    """What other tools write: chunked, compressed, big-endian, of another order, with fill values, compact."""
    with h5py.File(path, "w", libver="latest") as file:
        file["plain"] = whole
        file.create_dataset("chunked", data=whole, chunks=(3, 2))
        file.create_dataset("compressed", data=whole, chunks=(2, 5), compression="gzip", shuffle=True, fletcher32=True)
        file.create_dataset("big endian", data=whole.astype(">i4"))
        file.create_dataset("big endian, compressed", data=whole.astype(">i4"), chunks=(4, 4), compression="lzf")
        file.create_dataset("fill", whole.shape, "i4", fillvalue=-7)  # never written
        file.create_dataset("fill in part", whole.shape, "i4", chunks=(2, 2), fillvalue=-7)[:3] = whole[:3]
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        made = h5py.h5d.create(file.id, b"compact", h5py.h5t.STD_I32LE, h5py.h5s.create_simple(whole.shape), compact)
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(whole))
        file["text"] = "not a tensor"
        file["link"] = h5py.SoftLink("/compressed")  # left out
        file["compound"] = np.zeros(2, [("a", "i4"), ("b", "f8")])
        for name, bits, dtype in (("12 bits", 12, h5py.h5t.STD_I16LE), ("24 bits", 24, h5py.h5t.STD_I32LE)):
            odd = dtype.copy()
            odd.set_precision(bits) if bits == 12 else odd.set_size(3)
            made = h5py.h5d.create(file.id, name.encode(), odd, h5py.h5s.create_simple((3,)))
            if bits == 12:
                made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([-1, 2, -3], "i2"))
        brain = h5py.h5t.IEEE_F32LE.copy()  # bfloat16 as HDF5 itself would have it: h5py reads float32
        brain.set_fields(15, 7, 8, 0, 7)
        brain.set_size(2)
        brain.set_ebias(127)
        made = h5py.h5d.create(file.id, b"bf16", brain, h5py.h5s.create_simple((3,)))
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([1.5, 2, -3], "f4"))
        file["plain"].attrs["torch_dtype"] = "float32"  # not ours: not obeyed
        file["chunked"].attrs["torch_dtype"] = [1, 2]


@pytest.mark.parametrize("dim", [0, 1, None])
def test_files_of_other_tools(dim: int | None, world: hd.World, findings: Findings, folder: Path) -> None:
    whole = np.arange(110, dtype="i4").reshape(11, 10)
    if world.rank == 0:
        _foreign(folder / "x.h5", whole)
    world.comm.Barrier()
    size = world.world_size
    wholes = {name: torch.from_numpy(whole.copy()) for name in _NAMES}
    wholes["fill"][:] = wholes["fill in part"][3:] = -7
    wholes |= {"12 bits": torch.tensor([-1, 2, -3], dtype=torch.int16), "bf16": torch.tensor([1.5, 2, -3])}
    dims = dim if dim is None else dict.fromkeys(_NAMES, dim)
    for window in (SMALL, 4096):
        loaded = staging.load(folder / "x.h5", dim=dims, window=window, verify=True)
        findings.check(set(loaded) == {*wholes}, f"tensors: {list(loaded)}")
        for name, expected in wholes.items():
            if dim is not None:
                along = min(dim, expected.dim() - 1)
                expected = part(expected, along, tuple(layout.block(expected.shape[along], size)), world.rank)
            findings.same(loaded[name], expected, f"{name} {window}")


def test_random_draws(world: hd.World, findings: Findings, folder: Path) -> None:
    """Shapes, dims, windows, writers and readers drawn at random, the same on all ranks."""
    draw, size = random.Random(17), world.world_size
    for turn in range(10 if size > 3 else 40):
        shape = [draw.randrange(1, 9) for _ in range(draw.randrange(1, 5))]
        dim = draw.randrange(len(shape))
        extents = tuple(draw.choice((0, 1, 2, 5)) for _ in range(size))
        shape[dim] = sum(extents)
        dtype = draw.choice(list(DTYPES))
        whole = whole_of(tuple(shape), dtype, salt=turn)
        window, count = draw.choice((16, 64, 333, 5000)), draw.randrange(1, size + 1)
        x = part(whole, dim, extents, world.rank)
        staging.save(folder / "x.h5", x, dim, window=window, writers=count, writer=draw.choice(WRITERS))
        along = draw.randrange(len(shape))
        readers, verify = draw.choice((None, 1, size)), draw.choice((None, True, False))
        got = staging.load(
            folder / "x.h5", dim=along, window=draw.choice((16, 100, 5000)), readers=readers, verify=verify
        )
        expected = part(whole, along, tuple(layout.block(shape[along], size)), world.rank)
        findings.same(got, expected, f"turn {turn}: {shape} {dim} {extents} {dtype} {window} {count} {along} {readers}")
        world.comm.Barrier()


def test_a_part_of_the_ranks(world: hd.World, folder: Path) -> None:
    """A communicator of every second rank saves and loads while the others do so in a file of their own."""
    half = world.comm.Split(world.rank % 2, -world.rank)
    path = folder / f"x{world.rank % 2}.h5"
    staging.save(path, torch.full((half.rank + 1,), world.rank), group=half)
    expected = torch.cat([torch.full((r + 1,), s) for r, s in enumerate(half.allgather(world.rank))])
    same(world, staging.load(path, dim=None, group=half), expected)
    half.Free()


def test_what_writes_can_be_asked(world: hd.World) -> None:
    name, why = staging.writer()
    assert_on_all_ranks(world.comm, (name == "mpio") == bool(h5py.get_config().mpi), name)
    assert_on_all_ranks(world.comm, ("parallel HDF5" if name == "mpio" else "built without MPI") in why, why)
    assert_on_all_ranks(world.comm, staging.writer("posix")[0] == "posix")


def test_progress_counts_every_byte_once(world: hd.World, folder: Path) -> None:
    done: list[int] = []
    x = torch.zeros(100, 3, dtype=torch.int64)
    for dim in (0, 1):
        for call in (
            lambda d=dim: staging.save(folder / "x.h5", x, d, progress=done.append, window=SMALL),
            lambda d=dim: staging.load(folder / "x.h5", dim=d, progress=done.append),
        ):
            done.clear()
            call()
            assert_on_all_ranks(world.comm, sum(world.comm.allgather(sum(done))) == x.nbytes * world.world_size, done)


@pytest.mark.parametrize("writer", ["auto", *WRITERS])
def test_long_paths(writer: str, world: hd.World, folder: Path) -> None:
    """Open MPI's MPI-IO would end the process: a file with a longer path is written without it. Large tensors begin at
    whole MiB."""
    x = {"a": torch.zeros(3, dtype=torch.int8), "b": torch.ones(140_000, dtype=torch.int64)}
    for length in (50, 230):
        deep = folder.joinpath(*["d" * 50] * (length // 50))
        if world.rank == 0:
            deep.mkdir(parents=True, exist_ok=True)
        world.comm.Barrier()
        path = deep / ("x" * (length % 50 + 20) + ".h5")
        staging.save(path, x, writer=writer)
        same(world, staging.load(path, "b"), x["b"], length)
        with h5py.File(path, locking=False) as file:
            assert_on_all_ranks(world.comm, file["b"].id.get_offset() % 2**20 == 0)
