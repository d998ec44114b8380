"""Files with a flipped bit, or that another program has changed: read as they were written, or refused by an error that
names the difference; never other data, and never a wait for ever."""

import random
import re
import shutil
import signal
import textwrap
from functools import partial

import h5py
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import load, same_bits, seal, whole_of
from collective import raises_on_all_ranks
from launch import limit, mpirun
from torch.distributed.checkpoint.api import CheckpointException

import hpcdist as hd
from hpcdist import staging
from hpcdist.commands import listing
from hpcdist.errors import HpcdistError
from hpcdist.formats.known import describe
from hpcdist.staging.dcp import HDF5Reader, HDF5Writer

WHOLES = {
    "model/weight": whole_of((20, 30), torch.float32),
    "model/bias": whole_of((64,), torch.bfloat16, 1),
    "index": whole_of((100,), torch.int64, 2),
    "mask": whole_of((17,), torch.bool, 3),
    "wave": whole_of((5, 3), torch.complex64, 4),
    "step": torch.tensor(7),
    **{f"large/{i}": torch.tensor([i]) for i in range(9)},  # from nine links on, they are in a heap of the group
}
ATTRS = {"": {"epoch": 3}, "model/weight": {"unit": "m"}}
# What torch until 2.12 makes of any error of a reader's read_metadata().
UNNAMED = "metadata is None" if torch.__version__ < (2, 13) else "no such text"
KINDS = ("plain", "piecewise", "dcp")
ANYWHERE, DIRECTED = 45, 10  # flips of each kind of file: in all its bytes, and in each of four places


def write(kind, path):
    if kind == "dcp":
        dcp.save({**WHOLES, "epoch": 3}, storage_writer=HDF5Writer(path))
    elif kind == "piecewise":
        with staging.open(path, "w", {k: (tuple(x.shape), x.dtype) for k, x in WHOLES.items()}, attrs=ATTRS) as file:
            for i, (name, x) in enumerate(WHOLES.items()):
                if i % hd.init().world_size == hd.init().rank:
                    file.write(name, x, (0,) * x.dim())
    else:
        staging.save(path, WHOLES, dim=None, attrs=ATTRS)


def places(path):
    """Bytes of a file of which every bit is checked when it is opened, those of the tables when all is read."""
    with h5py.File(path) as file:
        parts = [file[f"_hpcdist/{name}"] for name in ("state", "plan", "pieces")]
        records = [range(part.id.get_offset(), part.id.get_offset() + part.size) for part in parts]
    names = re.finditer(rb"weight|_hpcdist|torch_dtype|bfloat16", path.read_bytes())
    heaps = [block.start() for block in re.finditer(rb"FHDB", path.read_bytes())]
    return {
        "the superblock": [*range(48)],
        "the plan and the tables": [at for part in records for at in part],
        "names": [at for name in names for at in range(*name.span())],
        "links": [at + i for at in heaps for i in range(512)],
    }


def readers(path, **group):
    """What each way to read a file returns, by name of the tensor. On this rank alone."""

    def opened():
        with staging.open(path) as file:
            attrs = {name: file.attrs(name) for name in ATTRS} if "epoch" not in file.names else {}
            assert attrs in (ATTRS, {"": {}, "model/weight": {}}), attrs
            return {name: file.read(name, verify=True) for name in file.names}

    def by_torch():
        state = {name: torch.zeros_like(x) for name, x in WHOLES.items()}
        dcp.load(state, storage_reader=HDF5Reader(path, verify=True), no_dist=True)
        return state

    return {
        "load": lambda: dict(flat(staging.load(path, dim=None, **group))),
        "open": opened,
        "dcp": by_torch,
        "command": lambda: {name: load(f"{path}:{name}") for name in describe(str(path)).tensors},
    }


def flat(tree, prefix=""):
    for name, x in tree.items():
        yield from flat(x, f"{prefix}{name}/") if isinstance(x, dict) else [(prefix + name, x)]


def verdict(read):
    """What comes of reading a file."""
    try:
        got = read()
    except (HpcdistError, CheckpointException) as error:
        named = not isinstance(error, CheckpointException) or "HD4" in str(error) or UNNAMED in str(error)
        return "error" if named else f"error: {error}"
    if set(got) != set(WHOLES):
        return f"lost: {sorted(set(WHOLES) ^ set(got))}"
    wrong = [name for name, x in WHOLES.items() if not (got[name].dtype == x.dtype and same_bits(got[name], x))]
    return f"wrong: {wrong}" if wrong else "right"


def test_flipped_bits(world, rank, findings, folder):
    """300 of them, of which each rank tries its share on a copy of its own."""
    alone = world.comm.Split(rank)
    for number, kind in enumerate(KINDS):
        good = folder / f"{kind}.h5"
        write(kind, good)
        world.comm.Barrier()
        content, path, draw = good.read_bytes(), folder / f"{rank}.h5", random.Random(number)
        flips = [("any byte", draw.randrange(len(content))) for _ in range(ANYWHERE)]
        flips += [(place, draw.choice(at)) for place, at in places(good).items() for _ in range(DIRECTED)]
        bits = [draw.randrange(8) for _ in flips]
        path.write_bytes(content)
        ways = readers(path, group=alone)
        findings.check({verdict(read) for read in ways.values()} == {"right"}, f"{kind}, whole")
        for (place, at), bit in list(zip(flips, bits, strict=True))[rank :: world.world_size]:
            damaged = bytearray(content)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            for name, read in ways.items():
                seen, allowed = verdict(read), {"error"} if place != "any byte" else {"error", "right"}
                findings.check(seen in allowed, f"{kind}, {place}: bit {bit} of byte {at}: {name}: {seen}")
        world.comm.Barrier()
    alone.Free()


def replaced(name, change, **options):
    """Put another dataset under a name, with the attributes of the old one."""

    def step(file):
        old, attrs = file[name][()], dict(file[name].attrs)
        del file[name]
        file.create_dataset(name, data=change(old), **options).attrs.update(attrs)

    return step


def in_plan(old, new):
    def step(file):
        plan = file["_hpcdist/plan"]
        plan[...] = np.frombuffer(plan[()].tobytes().replace(old, new), np.uint8)

    return step


def attribute(place, name, value):
    return lambda file: file[place].attrs.__setitem__(name, value)


CHANGES = {
    "model/weight is dtype int32, shape": replaced("model/weight", lambda x: x.view("i4")),
    "index is dtype uint64, shape": replaced("index", lambda x: x.view("u8")),
    "model/bias is dtype uint16, shape": attribute("model/bias", "torch_dtype", np.bytes_("float8_e5m2")),
    "is dtype >f4, shape": replaced("model/weight", lambda x: x.astype(">f4")),
    "shape [16, 30], chunks None, where torch.float32 of shape [20, 30]": replaced("model/weight", lambda x: x[:16]),
    "index is without a value, shape None": replaced("index", lambda x: h5py.Empty("i8")),
    "chunks (2, 3), where": replaced("model/weight", lambda x: x, chunks=(2, 3)),
    "holds no index, which its plan has": lambda file: file.move("index", "indey"),
    "its plan or values differ from their checksum": in_plan(b"index", b"indey"),
    "plan or values differ from their checksum": lambda file: file["_hpcdist"].create_dataset(
        "checkpoint", data=np.frombuffer(b"{}", np.uint8)
    ),
    "is in version 2 of the format, and this hpcdist reads 1 [HD402]": attribute("_hpcdist", "version", 2),
}


def test_a_file_is_held_against_its_plan(world, findings, folder):
    """By every reader, where HDF5 itself finds nothing wrong; unless our group is removed with what it describes."""
    path = folder / "x.h5"

    def change(*steps):
        world.comm.Barrier()
        if world.rank == 0:
            shutil.copy(folder / "good.h5", path)
            with h5py.File(path, "r+") as file:
                for step in steps:
                    step(file)
        world.comm.Barrier()

    write("plain", folder / "good.h5")
    for text, step in CHANGES.items():
        change(step)
        for read in (
            lambda: staging.load(path, "step"),
            lambda: staging.load(path, dim=None, verify=False),
            *(partial(listing.main, world, listing.parser(w).parse_args([str(path)])) for w in ("ls", "verify")),
        ):
            error = raises_on_all_ranks(HpcdistError, read)
            findings.check(text in str(error) and "[HD40" in str(error), error)
        for name, read in readers(path).items():
            if name != "load":
                with pytest.raises((HpcdistError, CheckpointException)) as caught:
                    read()
                said = str(caught.value)
                findings.check(UNNAMED in said or (text in said and "[HD40" in said), f"{name}: {said}")
    change(replaced("model/weight", lambda x: x[:16]), lambda file: file.__delitem__("_hpcdist"))
    findings.same(staging.load(path, "model/weight", dim=None), WHOLES["model/weight"][:16], "without our group")
    findings.check(not describe(str(path)).checked, "a foreign file")


# What another program may add, or another torch not know -> what is read then.
LAWFUL = {
    "a dataset": (lambda file: file.create_dataset("more", data=[1, 2]), {"more": torch.tensor([1, 2])}),
    "a second name": (lambda file: file.update(a=file["index"]), {"a": WHOLES["index"]}),
    "a second name of a group": (lambda file: file.update(a=file["model"]), {"a/weight": WHOLES["model/weight"]}),
    "an attribute that is not UTF-8": (
        lambda file: file.attrs.create("title", np.array(b"ma\xdf", h5py.string_dtype("utf-8", 3))), {}
    ),
    "a dtype of another torch": (
        lambda file: (
            in_plan(b"bfloat16", b"bfloat17")(file),
            attribute("model/bias", "torch_dtype", np.bytes_("bfloat17"))(file),
        ),
        {"model/bias": WHOLES["model/bias"].view(torch.uint16)},
    ),
}  # fmt: skip


def test_what_differs_lawfully_is_read(world, findings, folder):
    write("plain", folder / "good.h5")
    path = folder / "x.h5"
    for name, (step, more) in LAWFUL.items():
        world.comm.Barrier()
        if world.rank == 0:
            shutil.copy(folder / "good.h5", path)
            with h5py.File(path, "r+") as file:
                step(file)
            if "torch" in name:
                seal(path)
        world.comm.Barrier()
        got = dict(flat(staging.load(path, dim=None, verify=True)))
        for key, x in {**WHOLES, **more}.items():
            findings.same(got[key], x, f"{name}: {key}")
        with staging.open(path) as opened:
            findings.check(opened.attrs()["epoch"] == 3 and {*opened.names} >= {*more}, f"{name}: {opened.names}")


def test_nothing_is_in_the_global_heap(findings, folder):
    """Which has no checksums: text and names of dtypes are strings of a fixed length, and come back as text."""
    path, grid = folder / "x.h5", [["a"], ["bc"]]
    text = {"a": "mäß", "empty": "", "list": ["x", "yz"], "bytes": b"abc", "grid": np.array(grid, object)}
    staging.save(path, WHOLES["model/bias"], attrs={"": text, "data": {"unit": "m"}})
    with staging.open(path) as file:
        found, unit = file.attrs(), file.attrs("data")
    found = {key: x.tolist() if isinstance(x, np.ndarray) else x for key, x in found.items()}
    findings.check(found == {**text, "grid": grid} and unit == {"unit": "m"}, found)
    findings.check(b"GCOL" not in path.read_bytes() and b"bfloat16" in path.read_bytes(), "the bytes of the file")


HELD = """
    import sys
    import h5py
    import hpcdist as hd

    with hd.init(device="cpu") as world:
        if world.rank == 0:
            with h5py.File("x.h5", "w") as file:
                file["x"] = [1, 2, 3]
                file["x"].attrs["torch_dtype"] = "bfloat16"
            content = bytearray(open("x.h5", "rb").read())
            content[content.index(b"GCOL") + 24] ^= 1  # the size of an object: HDF5 looks for the next one for ever
            open("x.h5", "wb").write(content)
        world.comm.Barrier()
        hd.staging.load("x.h5") if sys.argv[1] == "load" else hd.staging.open("x.h5")
"""


@pytest.mark.parametrize(("np_", "how"), [(0, "open"), (2, "load")])
def test_a_file_that_holds_hdf5_for_ever_ends_at_the_deadline(np_, how, tmp_path):
    """A foreign one, on a rank without others, too, where h5py holds Python's lock; the line is printed."""
    script = tmp_path / "read.py"
    script.write_text(textwrap.dedent(HELD))
    job = mpirun(np_, str(script), how, cwd=tmp_path, env=limit(3))
    assert job.status == -signal.SIGALRM if np_ == 0 else "has waited for" in job.err, job
    assert f'read.py", line {len(script.read_text().splitlines())}' in job.err, job.err
