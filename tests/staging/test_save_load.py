"""save() and load(): every shape, dim, dtype and writer, against plain indexing, and h5py as the reader of the file."""

import json
import random

import h5py
import numpy as np
import pytest
import torch
from cases import DTYPES, EXTENTS, STRIDES, copy_of, extents_of, part, same_bits, strides_for, whole_of
from collective import assert_on_all_ranks
from conftest import WRITERS, same
from safetensors.torch import load_file, save_file

from hpcdist import layout, staging
from hpcdist.formats import plain
from hpcdist.formats.known import describe
from hpcdist.formats.safetensors import SAFETENSORS
from hpcdist.staging import pieces

SMALL = 100  # bytes: a window that divides nothing evenly, so that everything is done in many pieces


def by_h5py(path, name, dtype):
    """A tensor of the file, as h5py alone reads it."""
    with h5py.File(path, locking=False) as file:
        array = np.asarray(file[name][()])
    return torch.from_numpy(np.atleast_1d(array)).view(dtype).view(array.shape)


@pytest.mark.parametrize("writer", [*WRITERS, "safetensors"])
@pytest.mark.parametrize("case", EXTENTS)
def test_every_extent_dim_and_dtype(case, writer, world, rank, findings, folder):
    """The format's own library reads what is written; of safetensors it also writes what is read."""
    extents, dtypes, path, options = extents_of(case, world.world_size), DTYPES, folder / "x.h5", {"writer": writer}
    if writer == "safetensors":
        path, dtypes, options = folder / "x.safetensors", SAFETENSORS.dtypes, {}
    for dim in (0, 1, 2):
        shape = [2, 3, 4]
        shape[dim] = sum(extents)
        wholes = {str(dtype): whole_of(tuple(shape), dtype) for dtype in dtypes}
        shards = {name: part(whole, dim, extents, rank) for name, whole in sorted(wholes.items())}
        staging.save(path, shards, dim, window=SMALL, **options)
        if options:
            theirs = {name: by_h5py(path, name, whole.dtype) for name, whole in wholes.items()}
        else:
            theirs = load_file(path)
            length, content = int.from_bytes(path.read_bytes()[:8], "little"), path.read_bytes()[8:]
            entries = json.loads(content[:length])
            begins = {name: 8 + length + entries[name]["data_offsets"][0] for name in wholes}
            findings.check(all(at % wholes[name].itemsize == 0 for name, at in begins.items()), begins)
            world.comm.Barrier()
            if rank == 0:
                save_file(theirs, path)
            world.comm.Barrier()
        loaded = staging.load(path, dim=dim, counts=extents, window=SMALL)
        findings.check(theirs.keys() == loaded.keys() == wholes.keys(), theirs.keys())
        for name, whole in wholes.items():
            findings.same(theirs[name], whole, f"{name} {dim} by its library")
            findings.same(loaded[name], shards[name], f"{name} {dim} by load")
        world.comm.Barrier()


@pytest.mark.parametrize("writer", WRITERS)
def test_names_scalars_whole_tensors_and_attributes(writer, rank, size, findings, folder):
    """Nested names, a dim for each, tensors that all ranks hold whole, and 0-d ones of both kinds; and many, which the
    ranks but the first name in another order."""
    path = folder / "x.h5"
    bias, step = torch.arange(3.0), torch.tensor(7)
    tensors = {"m": {"l/weight": torch.full((2, rank), rank), "l/bias": bias, "step": step}, "loss": torch.tensor(rank)}
    dims = {"m/l/weight": 1, "m/l/bias": None, "m/step": None, "loss": 0}
    many = {f"many/{i}": torch.full((rank, 2), i) for i in range(300)}
    attrs = {"": {"title": "a run"}, "m/l/weight": {"scale": [1.5, 2.5]}}
    given = dict(reversed((tensors | many).items())) if rank else tensors | many
    staging.save(path, given, dims | dict.fromkeys(many, 0), attrs=attrs, writer=writer)
    with h5py.File(path, locking=False) as file:
        found = file.attrs["title"], file["m/l/weight"].attrs["scale"].tolist(), file["m/step"][()]
        findings.check(found == (b"a run", [1.5, 2.5], 7), found)
    got = staging.load(path, dim=None)
    expected = {"weight": torch.cat([torch.full((2, r), r) for r in range(size)], 1), "bias": bias}
    findings.check(got["m"]["l"].keys() == expected.keys() == staging.load(path, "m/l", dim=None).keys(), "a group")
    for name, x in expected.items():
        findings.same(got["m"]["l"][name], x, name)
    findings.same(got["loss"], torch.arange(size), "0-d shards are stacked")
    for i, x in got["many"].items():
        findings.same(x, torch.full((sum(range(size)), 2), int(i)), i)
    findings.same(staging.load(path, "m/step"), step, "0-d is given to all")


def test_the_table_of_pieces(world, findings, folder, monkeypatch):
    """It names the pieces, no longer than asked, and the ranks that wrote."""
    monkeypatch.setattr(pieces, "PIECE", 64)
    extents = extents_of("ragged", world.world_size)
    whole = whole_of((sum(extents), 3), torch.int64)
    staging.save(folder / "x.h5", part(whole, 0, extents, world.rank), window=400)
    findings.same(by_h5py(folder / "x.h5", "data", torch.int64), whole, "contents")
    table = describe(str(folder / "x.h5")).tensors["data"].table
    sizes = table["shape"].prod(1)
    findings.check(sizes.max() <= 8 and sizes.sum() == whole.numel(), sizes)
    findings.check({*table["rank"].tolist()} == {r for r, extent in enumerate(extents) if extent}, table["rank"])


_NAMES = (
    *("plain", "chunked", "compressed", "big endian", "big endian, compressed", "fill", "fill in part", "compact"),
)


def _foreign(path, whole):
    """What other tools write: chunked, compressed, big-endian, of another order, with fill values, compact."""
    with h5py.File(path, "w", libver="latest") as file:

        def create(name, dtype, shape, data=None, compact=False):
            how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            how.set_layout(h5py.h5d.COMPACT if compact else h5py.h5d.CONTIGUOUS)
            made = h5py.h5d.create(file.id, name.encode(), dtype, h5py.h5s.create_simple(shape), how)
            if data is not None:
                made.write(h5py.h5s.ALL, h5py.h5s.ALL, data)

        file["plain"] = whole
        file.create_dataset("chunked", data=whole, chunks=(3, 2))
        file.create_dataset("compressed", data=whole, chunks=(2, 5), compression="gzip", shuffle=True, fletcher32=True)
        file.create_dataset("big endian", data=whole.astype(">i4"))
        file.create_dataset("big endian, compressed", data=whole.astype(">i4"), chunks=(4, 4), compression="lzf")
        file.create_dataset("fill", whole.shape, "i4", fillvalue=-7)  # never written
        file.create_dataset("fill in part", whole.shape, "i4", chunks=(2, 2), fillvalue=-7)[:3] = whole[:3]
        create("compact", h5py.h5t.STD_I32LE, whole.shape, whole, compact=True)
        file["text"] = "not a tensor"
        file["link"] = h5py.SoftLink("/compressed")  # left out
        file["compound"] = np.zeros(2, [("a", "i4"), ("b", "f8")])
        bits, bytes_ = h5py.h5t.STD_I16LE.copy(), h5py.h5t.STD_I32LE.copy()
        bits.set_precision(12)
        bytes_.set_size(3)
        create("12 bits", bits, (3,), np.array([-1, 2, -3], "i2"))
        create("24 bits", bytes_, (3,))
        brain = h5py.h5t.IEEE_F32LE.copy()  # bfloat16 as HDF5 itself would have it: h5py reads float32
        brain.set_fields(15, 7, 8, 0, 7)
        brain.set_size(2)
        brain.set_ebias(127)
        create("bf16", brain, (3,), np.array([1.5, 2, -3], "f4"))
        file["plain"].attrs["torch_dtype"] = "float32"  # not ours: not obeyed
        file["chunked"].attrs["torch_dtype"] = [1, 2]


@pytest.mark.parametrize("dim", [0, 1, None])
def test_files_of_other_tools(dim, comm, world, rank, size, findings, folder):
    whole = np.arange(110, dtype="i4").reshape(11, 10)
    if rank == 0:
        _foreign(folder / "x.h5", whole)
    world.comm.Barrier()
    wholes = {name: torch.from_numpy(whole.copy()) for name in _NAMES}
    wholes["fill"][:] = wholes["fill in part"][3:] = -7
    wholes |= {"12 bits": torch.tensor([-1, 2, -3], dtype=torch.int16), "bf16": torch.tensor([1.5, 2, -3])}
    dims = dim if dim is None else dict.fromkeys(_NAMES, dim)
    for window in (SMALL, 4096):
        loaded = staging.load(folder / "x.h5", dim=dims, window=window, verify=True, group=comm)
        findings.check(set(loaded) == {*wholes}, f"tensors: {list(loaded)}")
        for name, expected in wholes.items():
            if dim is not None:
                along = min(dim, expected.dim() - 1)
                expected = part(expected, along, tuple(layout.block(expected.shape[along], size)), rank)
            findings.same(loaded[name], expected, f"{name} {window}")


def test_random_draws(comm, world, rank, size, findings, folder, monkeypatch):
    """Shapes, dims, strides, windows, and what is loaded, drawn at random, the same on all ranks."""
    draw = random.Random(17)
    for turn in range(10 if size > 3 else 40):
        shape = [draw.randrange(1, 9) for _ in range(draw.randrange(1, 5))]
        dim = draw.randrange(len(shape))
        extents = tuple(draw.choice((0, 1, 2, 5)) for _ in range(size))
        shape[dim] = sum(extents)
        dtype, shape = draw.choice(list(DTYPES)), tuple(shape)
        whole = STRIDES[draw.choice(list(strides_for(dtype)))](whole_of(shape, dtype, salt=turn))
        window, x = draw.choice((16, 64, 333, 5000)), part(whole, dim, extents, rank)
        before = copy_of(x)
        how = {"window": window, "writer": draw.choice(WRITERS), "group": comm}
        staging.save(folder / "x.h5", {"a": {"b": x}}, dim, **how)
        findings.check(same_bits(x, before), f"turn {turn}: the input has changed")
        for near in (0, 16, 4096):
            monkeypatch.setattr(plain, "NEAR", near)
            along = draw.randrange(-len(shape), len(shape))
            extent = shape[along]
            counts = draw.choice(("block", "chunk", tuple(extent * (r == size - 1) for r in range(size))))
            cut = tuple(layout.counts_of(counts, extent, size))
            box = [(at := draw.randrange(n + 1), draw.randrange(n - at + 1)) for n in shape]
            where, expected = draw.choice([
                ({"dim": along, "counts": counts}, part(whole, along % len(shape), cut, rank)),
                ({"dim": None}, whole),
                ({"box": tuple(zip(*box, strict=True))}, whole[tuple(slice(at, at + n) for at, n in box)]),
            ])  # fmt: skip
            how = where | {"verify": draw.choice((None, True, False)), "window": draw.choice((16, 100, 5000))}
            out = STRIDES[draw.choice(("transposed", "stepped"))](whole_of(tuple(expected.shape), dtype, 5))
            how |= {"out": draw.choice((None, out)), "group": comm}
            got = staging.load(folder / "x.h5", "a/b", **how)
            findings.check(how["out"] is None or got is how["out"], "out is returned")
            findings.same(got, expected, f"turn {turn}: {shape} {dim} {extents} {dtype} {window} {where}")
        world.comm.Barrier()


def test_a_part_of_the_ranks(world, rank, folder):
    """A communicator of every second rank saves and loads while the others do so in a file of their own."""
    half = world.comm.Split(rank % 2, -rank)
    path = folder / f"x{rank % 2}.h5"
    staging.save(path, torch.full((half.rank + 1,), rank), group=half)
    expected = torch.cat([torch.full((r + 1,), s) for r, s in enumerate(half.allgather(rank))])
    same(staging.load(path, dim=None, group=half), expected)
    half.Free()


@pytest.mark.parametrize("writer", ["auto", *WRITERS])
def test_long_paths(writer, world, folder):
    """Open MPI's MPI-IO would end the process: a file with a longer path is written without it. Large tensors begin at
    whole MiB."""
    x = {"a": torch.zeros(3, dtype=torch.int8), "b": torch.ones(140_000, dtype=torch.int64)}
    for deep in (folder, folder / "/".join(["d" * 50] * 4)):
        if world.rank == 0:
            deep.mkdir(parents=True, exist_ok=True)
        world.comm.Barrier()
        path = deep / f"{'x' * 50}.h5"
        staging.save(path, x, writer=writer)
        same(staging.load(path, "b"), x["b"], path)
        with h5py.File(path, locking=False) as file:
            assert_on_all_ranks(file["b"].id.get_offset() % 2**20 == 0)
