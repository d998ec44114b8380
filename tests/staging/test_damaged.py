"""Files with a flipped bit, or that another program has changed: read as they were written, or refused by an error that
names the difference; never other data, and never a wait for ever."""

from __future__ import annotations

import random
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import load, same_bits, seal, whole_of
from collective import Findings, assert_on_all_ranks, raises_on_all_ranks
from launch import mpirun
from torch import Tensor
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


def write(kind: str, path: Path) -> None:
    if kind == "dcp":
        dcp.save({**WHOLES, "epoch": 3}, storage_writer=HDF5Writer(path))
    elif kind == "piecewise":
        with staging.open(path, "w", {k: (tuple(x.shape), x.dtype) for k, x in WHOLES.items()}, attrs=ATTRS) as file:
            for i, (name, x) in enumerate(WHOLES.items()):
                if i % hd.init().world_size == hd.init().rank:
                    file.write(name, x, (0,) * x.dim())
    else:
        staging.save(path, WHOLES, dim=None, attrs=ATTRS)


def places(path: Path) -> dict[str, list[int]]:
    """Bytes of a file of which every bit is checked when it is opened."""
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


def readers(path: Path, team: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    """What each way to read a file returns, by name of the tensor. On this rank alone."""

    def opened() -> dict[str, Any]:
        with staging.open(path) as file:
            attrs = {name: file.attrs(name) for name in ATTRS} if "epoch" not in file.names else {}
            assert attrs in (ATTRS, {"": {}, "model/weight": {}}), attrs
            return {name: file.read(name, verify=True) for name in file.names}

    def by_torch() -> dict[str, Any]:
        state = {name: torch.zeros_like(x) for name, x in WHOLES.items()}
        dcp.load(state, storage_reader=HDF5Reader(path, verify=True), no_dist=True)
        return state

    def by_command() -> dict[str, Any]:
        return {name: load(f"{path}:{name}") for name in describe(str(path)).tensors}

    def loaded() -> dict[str, Any]:
        return dict(flat(staging.load(path, dim=None, group=team)))

    return {"load": loaded, "open": opened, "dcp": by_torch, "command": by_command}


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, x in tree.items():
        yield from flat(x, f"{prefix}{name}/") if isinstance(x, dict) else [(prefix + name, x)]


def verdict(read: Callable[[], dict[str, Any]]) -> str:
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


@pytest.mark.mpi
def test_flipped_bits(world: hd.World, findings: Findings, folder: Path) -> None:
    """300 of them, of which each rank tries its share on a copy of its own."""
    alone = world.comm.Split(world.rank)
    for number, kind in enumerate(KINDS):
        good = folder / f"{kind}.h5"
        write(kind, good)
        world.comm.Barrier()
        content, path, draw = good.read_bytes(), folder / f"{world.rank}.h5", random.Random(number)
        flips = [("any byte", draw.randrange(len(content))) for _ in range(ANYWHERE)]
        flips += [(place, draw.choice(at)) for place, at in places(good).items() for _ in range(DIRECTED)]
        bits = [draw.randrange(8) for _ in flips]
        path.write_bytes(content)
        ways = readers(path, alone)
        findings.check({verdict(read) for read in ways.values()} == {"right"}, f"{kind}, whole")
        for (place, at), bit in list(zip(flips, bits, strict=True))[world.rank :: world.world_size]:
            damaged = bytearray(content)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            for name, read in ways.items():
                seen, allowed = verdict(read), {"error"} if place != "any byte" else {"error", "right"}
                findings.check(seen in allowed, f"{kind}, {place}: bit {bit} of byte {at}: {name}: {seen}")
        world.comm.Barrier()
    alone.Free()


def replaced(name: str, x: Any, **options: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        attrs = dict(file[name].attrs)
        del file[name]
        file.create_dataset(name, data=x, **options).attrs.update(attrs)

    return change


def other_bits(file: h5py.File) -> None:
    file["model/bias"].attrs["torch_dtype"] = np.bytes_("float8_e5m2")


def other_plan(file: h5py.File) -> None:
    plan = file["_hpcdist/plan"]
    plan[...] = np.frombuffer(plan[()].tobytes().replace(b"index", b"indey"), np.uint8)


def other_values(file: h5py.File) -> None:
    if "checkpoint" not in file["_hpcdist"]:
        file["_hpcdist/checkpoint"] = np.frombuffer(b"{}", np.uint8)


def other_version(file: h5py.File) -> None:
    file["_hpcdist"].attrs["version"] = 2


FLOATS = WHOLES["model/weight"].numpy()
CHANGES: dict[str, tuple[Callable[[h5py.File], None], str]] = {
    "dtype": (replaced("model/weight", FLOATS.view("i4")), "model/weight has dtype torch.int32, not torch.float32"),
    "signs": (replaced("index", WHOLES["index"].numpy().view("u8")), "index has dtype torch.uint64, not torch.int64"),
    "raw bits": (other_bits, "model/bias has dtype torch.uint16, not torch.bfloat16"),
    "byte order": (replaced("model/weight", FLOATS.astype(">f4")), "torch.float32 stored as >f4, not <f4"),
    "shape": (replaced("model/weight", FLOATS[:16]), "model/weight has shape [16, 30], not [20, 30]"),
    "no value": (replaced("index", h5py.Empty("i8")), "index has shape None, not [100]"),
    "chunks": (replaced("model/weight", FLOATS, chunks=(2, 3)), "model/weight has chunks (2, 3), not None"),
    "name": (lambda file: file.move("index", "indey"), "holds no index, which its plan has"),
    "plan": (other_plan, "its plan, tables of pieces or values differ from their checksum"),
    "values": (other_values, "its plan, tables of pieces or values differ from their checksum"),
    "version": (other_version, "is in version 2 of the format, and this hpcdist reads 1 [HD402]"),
}


@pytest.mark.mpi
def test_a_file_is_held_against_its_plan(world: hd.World, findings: Findings, folder: Path) -> None:
    """By every reader, where HDF5 itself finds nothing wrong; unless our group is removed with what it describes."""
    write("plain", folder / "good.h5")
    content = (folder / "good.h5").read_bytes()
    path = folder / "x.h5"

    def change(step: Callable[[h5py.File], Any]) -> None:
        world.comm.Barrier()
        if world.rank == 0:
            path.write_bytes(content)
            with h5py.File(path, "r+") as file:
                step(file)
        world.comm.Barrier()

    for name, (step, text) in CHANGES.items():
        change(step)
        for read in (
            lambda: staging.load(path, "step"),
            lambda: staging.load(path, dim=None, verify=False),
            *(partial(listing.main, world, listing.parser(w).parse_args([str(path)])) for w in ("ls", "verify")),
        ):
            error = raises_on_all_ranks(world.comm, HpcdistError, read)
            findings.check(text in str(error) and "[HD40" in str(error), f"{name}: {error}")
        for read in (
            lambda: staging.open(path),
            lambda: load(f"{path}:step"),
            lambda: describe(str(path)),
            lambda: dcp.load({"step": torch.tensor(0)}, storage_reader=HDF5Reader(path), no_dist=True),
        ):
            with pytest.raises((HpcdistError, CheckpointException)) as caught:
                read()
            said = str(caught.value)
            findings.check(UNNAMED in said or (text in said and "[HD40" in said), f"{name}: {said}")

    def remove(file: h5py.File) -> None:
        CHANGES["shape"][0](file)
        del file["_hpcdist"]

    change(remove)
    findings.same(staging.load(path, "model/weight", dim=None), WHOLES["model/weight"][:16], "without our group")
    findings.check(not describe(str(path)).checked, "a foreign file")


def latin(file: h5py.File) -> None:
    file.attrs.create("title", np.array(b"ma\xdf", h5py.string_dtype("utf-8", 3)))


def other_torch(file: h5py.File) -> None:
    """Turn bfloat16 into a dtype that this torch does not have."""
    file["model/bias"].attrs["torch_dtype"] = np.bytes_("bfloat17")
    own = file["_hpcdist"]
    own["plan"][...] = np.frombuffer(own["plan"][()].tobytes().replace(b"bfloat16", b"bfloat17"), np.uint8)


LAWFUL: dict[str, tuple[Callable[[h5py.File], Any], dict[str, Tensor]]] = {
    "a dataset": (lambda file: file.create_dataset("more", data=[1, 2]), {"more": torch.tensor([1, 2])}),
    "a second name": (lambda file: file.update(a=file["index"]), {"a": WHOLES["index"]}),
    "a second name of a group": (lambda file: file.update(a=file["model"]), {"a/weight": WHOLES["model/weight"]}),
    "an attribute that is not UTF-8": (latin, {}),
    "a dtype of another torch": (other_torch, {"model/bias": WHOLES["model/bias"].view(torch.uint16)}),
}


@pytest.mark.mpi
def test_what_differs_lawfully_is_read(world: hd.World, findings: Findings, folder: Path) -> None:
    write("plain", folder / "good.h5")
    path = folder / "x.h5"
    for name, (step, more) in LAWFUL.items():
        world.comm.Barrier()
        if world.rank == 0:
            shutil.copy(folder / "good.h5", path)
            with h5py.File(path, "r+") as file:
                step(file)
            if step is other_torch:
                seal(path)
        world.comm.Barrier()
        got = dict(flat(staging.load(path, dim=None, verify=True)))
        for key, x in {**WHOLES, **more}.items():
            findings.same(got[key], x, f"{name}: {key}")
        with staging.open(path) as opened:
            findings.check(opened.attrs()["epoch"] == 3 and {*opened.names} >= {*more}, f"{name}: {opened.names}")


@pytest.mark.mpi
def test_nothing_is_in_the_global_heap(world: hd.World, folder: Path) -> None:
    """Which has no checksums: text and names of dtypes are strings of a fixed length, and come back as text."""
    text = {"a": "mäß", "empty": "", "list": ["x", "yz"], "bytes": b"abc", "grid": np.array([["a"], ["bc"]], object)}
    staging.save(folder / "x.h5", WHOLES["model/bias"], attrs={"": text, "data": {"unit": "m"}})
    with staging.open(folder / "x.h5") as file:
        found, unit = file.attrs(), file.attrs("data")
    found = {key: x.tolist() if isinstance(x, np.ndarray) else x for key, x in found.items()}
    assert_on_all_ranks(world.comm, found == {**text, "grid": [["a"], ["bc"]]} and unit == {"unit": "m"}, found)
    content = (folder / "x.h5").read_bytes()
    assert_on_all_ranks(world.comm, b"GCOL" not in content and b"bfloat16" in content)


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


@pytest.mark.once
def test_a_file_that_holds_hdf5_for_ever_ends_at_the_deadline(tmp_path: Path) -> None:
    """A foreign one, on a rank without others, too, where h5py holds Python's lock; the line is printed."""
    script = tmp_path / "read.py"
    script.write_text(textwrap.dedent(HELD))
    line = len(script.read_text().splitlines())
    for np_, how in ((0, "open"), (1, "load"), (2, "load")):
        job = mpirun(np_, str(script), how, cwd=tmp_path, env={"HPCDIST_TIMEOUT": "3"})
        assert job.status != 0, job
        said = "has waited for 3" if np_ == 2 else "Timeout (0:00:03)!"
        assert said in job.err and f'read.py", line {line}' in job.err, job.err


LINKS = """
    import torch
    import hpcdist as hd
    from hpcdist import staging

    with hd.init(device="cpu"):
        staging.save("x.h5", {str(i): torch.tensor(i) for i in range(9)})
        content = bytearray(open("x.h5", "rb").read())
        content[content.index(b"FHDB") + 30] ^= 1
        open("x.h5", "wb").write(content)
        try:
            staging.open("x.h5")
        except hd.FileError as error:
            print("refused", error)
"""


@pytest.mark.once
def test_a_flipped_bit_in_the_links_of_a_group_is_an_error(tmp_path: Path) -> None:
    """Of HDF5 1.10, too, which frees memory that it has not set where it cannot list the links of a group in order."""
    job = mpirun(1, code=LINKS, cwd=tmp_path, env={"MALLOC_PERTURB_": "165"})
    assert job.status == 0, job
    assert "refused" in job.out and "incorrect metadata checksum" in job.out, job
