"""Files that lie, of every format: headers, tables and archives that somebody has forged, or that are cut off. Each is
read, or refused in one line; nothing in them runs, and no more memory is taken than the data have."""

import io
import os
import pickle
import resource
import shutil
import struct
import sys
import warnings
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from cases import assert_refused, load
from launch import finished, run

import hpcdist as hd
from hpcdist.errors import FileError, HpcdistError
from hpcdist.formats.contents import row_checksums, row_dtype
from hpcdist.formats.known import describe
from hpcdist.process import machine

X = np.arange(6)


@contextmanager
def little_memory():
    """Much less memory is taken than the files ask for."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB


def framed(header, version=1, length=None):
    size = struct.pack("<H" if version == 1 else "<I", len(header) if length is None else length)
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + bytes(64)


def npy(changed=""):
    """A header, in which what comes last counts."""
    return f"{{'descr': '<i8', 'fortran_order': False, 'shape': (2,), {changed}}}\n".encode()


class Evil:
    def __reduce__(self):
        return os.mkdir, ("HACKED",)


CHANGED = {
    "'shape': (-1,)": "cannot be read: shape (-1,)",
    f"'shape': ({10**30},)": "cannot be read: shape",
    f"'shape': ({2**62}, {2**62})": "it ends in the middle of its data",
    f"'shape': ({'9' * 5000},)": "cannot be read: Cannot parse header",
    "'shape': (nan,)": "cannot be read: ",
    "'descr': '|O'": "text, references or objects",
    "'descr': [('a', '<i4'), ('b', '|O')]": "text, references or objects",
    "'descr': [('a', '<i4'), ('b', '<i4')]": "which torch does not have",
    "'descr': ('<i4', (2,))": "which torch does not have",
    "'descr': '<m8[s]'": "dtype timedelta64[s], which torch does not have",
    "'descr': '<f16'": "dtype float128, which torch does not have",
    "'descr': 'zzz'": "cannot be read: descr is not a valid dtype descriptor",
    "'fortran_order': 1": "cannot be read: fortran_order is not a valid bool",
}
HEADERS = {
    framed(b"__import__('os').mkdir('HACKED')\n"): "cannot be read: malformed node",
    framed(b"(" * 5000): "cannot be read: ",
    framed(npy(), 9): "version (9, 0) of the format is not known",
    framed(npy(), length=65535): "cannot be read: EOF",
    framed(npy(), 2, 2**32 - 1): "its header has 4,294,967,295 bytes, more than the expected 65,536",
    pickle.dumps(Evil()): "cannot be read: the magic string is not correct",
}


def test_npy_headers(here):
    np.save("good.npy", X)
    good = Path("good.npy").read_bytes()
    headers = {framed(npy(changed)): text for changed, text in CHANGED.items()} | HEADERS
    headers |= {good[:n]: "cannot be read: " for n in range(len(good) - 1)}
    for i, content in enumerate(headers):
        Path(f"{i}.npy").write_bytes(content)
    assert_refused(here, {f"{i}.npy": text for i, text in enumerate(headers.values())})
    Path("2.npy").write_bytes(framed(npy("'shape': (8L,)")))  # as Python 2 wrote it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for by_library in (False, True):
            assert load("2.npy", by_library).tolist() == [0] * 8
    assert not Path("HACKED").exists()


def test_archives(here, monkeypatch):
    """Of numpy: 1 GiB that unpacks from 1 MB, in a header and in data."""
    np.savez("evil.npz", np.array([Evil()], object))
    np.savez_compressed("good.npz", x=X)
    good = Path("good.npz").read_bytes()
    at = good.rindex(b"PK\1\2")
    secret, method = good[: at + 8] + b"\1" + good[at + 9 :], good[: at + 10] + b"\x63" + good[at + 11 :]
    wrong = {
        "evil.npz": "text, references or objects",
        "header.npz": "its header has 4,294,967,295 bytes",
    }
    for n, content in enumerate([secret, method, *(good[:n] for n in range(0, len(good), 20))]):
        Path(f"{n}.npz").write_bytes(content)
        wrong[f"{n}.npz"] = "cannot be read: "
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (2**30,)})
    for name, start in {"data": header.getvalue(), "header": b"\x93NUMPY\2\0\xff\xff\xff\xff"}.items():
        archive = zipfile.ZipFile(f"{name}.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        with archive, archive.open("x.npy", "w") as member:
            member.write(start)
            for _ in range(64):
                member.write(bytes(2**24))
    with little_memory():
        assert_refused(here, wrong)
        monkeypatch.setattr(machine, "available", lambda: 2**20)
        assert_refused(here, {"data.npz": "can only be read whole: 1,073,741,824 bytes of memory needed"})
    assert not Path("HACKED").exists()


def test_checkpoints(here):
    wrong = {"pickle.pt": "cannot be read: ", "laughs.pt": "more than 1,048,576 dicts and tensors"}
    for name, held in {"evil": Evil(), "inside": {"x": torch.ones(2), "e": Evil()}}.items():
        torch.save(held, f"{name}.pt")
        wrong[f"{name}.pt"] = "it holds Python objects (posix.mkdir"
    Path("pickle.pt").write_bytes(pickle.dumps(Evil()))
    laughs = {"x": torch.ones(1)}
    for _ in range(60):
        laughs = {"a": laughs, "b": laughs}
    torch.save(laughs, "laughs.pt")
    torch.save(torch.arange(6.0).view(2, 3), "good.pt")
    shape, number = b"K\0K\x02K\x03\x86", b"\x8a\x09" + (2**62).to_bytes(9, "little")
    assert shape in zipfile.ZipFile("good.pt").read("good/data.pkl")
    for name, instead in {
        "offset": b"J\xff\xff\xff\xffK\x02K\x03\x86",
        "wide": b"K\0" + number * 2 + b"\x86",
        "negative": b"K\0J\xfe\xff\xff\xffK\x03\x86",
    }.items():
        with zipfile.ZipFile("good.pt") as good, zipfile.ZipFile(f"{name}.pt", "w") as archive:
            for info in good.infolist():
                if not info.filename.endswith(".format_version"):  # else it is refused as packed again
                    archive.writestr(info.filename, good.read(info).replace(shape, instead))
        wrong[f"{name}.pt"] = "cannot be read: "
    assert_refused(here, wrong)
    assert not Path("HACKED").exists()


RIGHT = '{"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}'
HEADS = {  # by name, the place of a tensor
    "overlap": RIGHT,
    "overlap in part": '{"dtype": "F32", "shape": [2, 3], "data_offsets": [12, 36]}',
    "beyond": '{"dtype": "F32", "shape": [2, 3], "data_offsets": [24, 1099511627776]}',
    "backwards": '{"dtype": "F32", "shape": [2, 3], "data_offsets": [48, 24]}',
    "negative offset": '{"dtype": "F32", "shape": [2, 3], "data_offsets": [-24, 0]}',
    "hole": '{"dtype": "F32", "shape": [2, 3], "data_offsets": [32, 56]}',
    "huge": '{"dtype": "F32", "shape": [9223372036854775808, 9223372036854775808], "data_offsets": [24, 48]}',
    "nan": '{"dtype": "F32", "shape": [NaN], "data_offsets": [24, 48]}',
    "negative": '{"dtype": "F32", "shape": [-2, -3], "data_offsets": [24, 48]}',
    "dtype": '{"dtype": "F99", "shape": [2, 3], "data_offsets": [24, 48]}',
    "list": "[1]",
    "deep": '{"x":' * 10**5,
}


def test_safetensors_headers(tmp_path):
    texts = {name: f'{{"a": {RIGHT}, "x": {entry}}}'.encode() for name, entry in HEADS.items()}
    good = texts["dtype"].replace(b"F99", b"F32")
    names = {"twice": b"a", "utf": b"\xff", "surrogate": b"\\ud800"}
    texts |= {"bare": b"[1]"} | {what: good.replace(b"x", name) for what, name in names.items()}
    for name, text in texts.items():
        (tmp_path / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(48))
    for length in (0, 10**8, 2**63, 2**64 - 1):
        (tmp_path / f"{length}.safetensors").write_bytes(struct.pack("<Q", length) + good)
        texts[f"{length}"] = b""
    assert_refused(tmp_path, {f"{name}.safetensors": "cannot be read: " for name in texts})


def test_hdf5_bombs_loops_and_names(here):
    with h5py.File("bomb.h5", "w") as file:
        x = file.create_dataset("x", (4,), "u1", maxshape=(None,), chunks=(2**29,), compression="gzip")
        packer = zlib.compressobj(9)
        parts = [packer.compress(bytes(2**24)) for _ in range(32)]
        x.id.write_direct_chunk((0,), b"".join([*parts, packer.flush()]))
        file.create_dataset("arrays", (2,), np.dtype(("i4", (3,))))
    with little_memory():
        for by_library in (False, True):
            with pytest.raises(HpcdistError, match=r"x: is stored in chunks of 536,870,912 bytes, which HDF5 reads"):
                load("bomb.h5:x", by_library)
    with h5py.File("loop.h5", "w") as file:
        file["a/x"] = X
        file["a/again"], file["a/root"] = file["a"], file["/"]
    with h5py.File("names.h5", "w") as file:
        h5py.h5d.create(file.id, b"a\xff", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((3,)))
        file["n\nl"] = X
    for spec in ("loop.h5", "loop.h5:a/x", "names.h5:n\nl"):
        assert load(spec).tolist() == X.tolist()
    for depth in (500, 1500):
        with h5py.File(f"{depth}.h5", "w", libver="latest") as file:
            group = file.id
            for _ in range(depth):
                group = h5py.h5g.create(group, b"a")
            h5py.h5d.create(group, b"x", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((3,)))
    assert describe("500.h5").nbytes() == 12
    wrong = {
        "1500.h5": "more than 1,000 groups within each other",
        "names.h5:a\udcff": "is not text that UTF-8 can hold",
    }
    assert_refused(here, wrong | {"bomb.h5:arrays": "holds no tensor 'arrays', but arrays ("})


TABLES = {
    "far": ("offset", 2**62),
    "before": ("offset", -5),
    "wide": ("shape", 2**40),
    "negative": ("shape", -1),
    "a part": ("shape", (2, 2)),
    "twice": ("", 2),
    "none": ("", 0),
}


def test_staging_tables(here):
    """Nothing is read where a forged table says, and what is not as hpcdist writes it is not taken for its own."""
    with hd.init(device="cpu"):
        hd.staging.save("x.h5", torch.arange(60).view(10, 6))
    for name, (field, value) in TABLES.items():
        with h5py.File(shutil.copy("x.h5", f"{name}.h5"), "r+") as file:
            table = file["_hpcdist/pieces"][()].view(row_dtype(2))
            if field:
                table[field] = value
                table["check"] = row_checksums(table).astype(np.uint32)
            del file["_hpcdist/pieces"]
            file["_hpcdist/pieces"] = np.tile(table, 1 if field else value).view("u1")
        with pytest.raises(FileError, match=rf"^{name}.h5: its tables? of .* (is|are) damaged"):
            describe(f"{name}.h5").with_tables()
    for part, text in {"pieces": "tables of pieces are damaged", "plan": "differ", "state": "incomplete"}.items():
        with h5py.File(shutil.copy("x.h5", "y.h5"), "r+") as file:  # gigabytes out of nothing
            del file[f"_hpcdist/{part}"]
            file.create_dataset(f"_hpcdist/{part}", (2**31,), "u1", chunks=(2**24,), compression="gzip")
        assert_refused(here, {"y.h5": text})


FEW = """
    import resource, runpy, sys
    from hpcdist.commands.arrays import join_main, parser
    from mpi4py import MPI
    import hpcdist as hd, os
    with hd.init(device="cpu") as world:
        for inputs, output in (("s*.npy", "s.npy"), ("t*.pt", "t.h5"), ("s*.npy", None)):
            args = [inputs, "--verify", "--window", "1K", *(["-o", output] if output else [])]
            now = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, now + 20), 2**12))
            assert join_main(world, parser("gather").parse_args(args)) == 0
"""


def test_two_thousand_inputs_and_few_file_descriptors(tmp_path):
    for i in range(2000):
        np.save(tmp_path / f"s{i}.npy", [i])
    for i in range(100):
        torch.save(torch.tensor([i]), tmp_path / f"t{i}.pt")
    finished(2, code=FEW, cwd=tmp_path)
    assert np.load(tmp_path / "s.npy").tolist() == [*range(2000)]


def test_a_host_name_that_nobody_knows(tmp_path):
    np.save(tmp_path / "x.npy", X)
    script = f"hostname nohost.invalid && exec '{sys.executable}' -m hpcdist.gather x.npy -o y.npy"
    job = run(["unshare", "-r", "-u", "bash", "-c", script], cwd=tmp_path)
    assert job.status == 0, job.err
    assert np.load(tmp_path / "y.npy").tolist() == X.tolist()
