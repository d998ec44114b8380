"""Files that lie, of every format: headers, tables and archives that somebody has forged, or that are cut off. Each is
read, or refused in one line; nothing in them runs, and no more memory is taken than the data have."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import resource
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from cases import assert_refused, seal
from launch import mpirun, run

import hpcdist as hd
from hpcdist import layout, memory
from hpcdist.commands import sources
from hpcdist.errors import FileError, InputError
from hpcdist.files.h5 import record_dtype
from hpcdist.runtime import cli
from hpcdist.staging.catalog import describe

X = np.arange(6)


def npy(descr: str = "'<i8'", shape: str = "(2,)", fortran: str = "False", more: str = "") -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, {more}}}\n".encode()


def framed(header: bytes, version: int = 1, length: int | None = None) -> bytes:
    size = struct.pack("<H" if version == 1 else "<I", len(header) if length is None else length)
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + bytes(64)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("HACKED",)


HEADERS: dict[str, tuple[bytes, str]] = {
    "negative": (framed(npy(shape="(-1,)")), "cannot be read: shape (-1,)"),
    "huge": (framed(npy(shape=f"({10**30},)")), "cannot be read: shape"),
    "more than the file": (framed(npy(shape=f"({2**62}, {2**62})")), "it ends in the middle of its data"),
    "digits": (framed(npy(shape=f"({'9' * 5000},)")), "cannot be read: Cannot parse header"),
    "nan": (framed(npy(shape="(nan,)")), "cannot be read: "),
    "float": (framed(npy(shape="(2.0,)")), "cannot be read: shape is not valid"),
    "list": (framed(npy(shape="[2]")), "cannot be read: shape is not valid"),
    "object": (framed(npy("'|O'")), "it holds Python objects"),
    "object inside": (framed(npy("[('a', '<i4'), ('b', '|O')]")), "it holds Python objects"),
    "structured": (framed(npy("[('a', '<i4'), ('b', '<i4')]")), "which torch does not have"),
    "array of arrays": (framed(npy("('<i4', (2,))")), "which torch does not have"),
    "datetime": (framed(npy("'<M8[s]'")), "holds dtype datetime64[s], which torch does not have"),
    "timedelta": (framed(npy("'<m8[s]'")), "holds dtype timedelta64[s], which torch does not have"),
    "long double": (framed(npy("'<f16'")), "holds dtype float128, which torch does not have"),
    "no bytes": (framed(npy("'|V0'")), "which torch does not have"),
    "no dtype": (framed(npy("'zzz'")), "cannot be read: descr is not a valid dtype descriptor"),
    "another key": (framed(npy(more="'x': 1")), "cannot be read: Header does not contain the correct keys"),
    "fortran": (framed(npy(fortran="1")), "cannot be read: fortran_order is not a valid bool"),
    "code": (framed(b"__import__('os').mkdir('HACKED')\n"), "cannot be read: malformed node"),
    "nested": (framed(b"-" * 9000 + b"1"), "cannot be read: "),
    "brackets": (framed(b"(" * 5000), "cannot be read: "),
    "version": (framed(npy(), 9), "version (9, 0) of the format is not known"),
    "longer than the file": (framed(npy(), length=65535), "cannot be read: EOF"),
    "4 GiB": (framed(npy(), 2, 2**32 - 1), "its header has 4,294,967,295 bytes, 65,536 at most are expected"),
    "a pickle": (pickle.dumps(Evil()), "cannot be read: the magic string is not correct"),
}


def test_npy_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (content, _) in HEADERS.items():
        (tmp_path / f"{name}.npy").write_bytes(content)
    np.save("good.npy", X)
    good = (tmp_path / "good.npy").read_bytes()
    cut = {f"cut{n}.npy": "cannot be read: " for n in range(len(good) - 1)}
    for n, name in enumerate(cut):
        (tmp_path / name).write_bytes(good[:n])
    assert_refused(tmp_path, {f"{name}.npy": text for name, (_, text) in HEADERS.items()} | cut)
    (tmp_path / "2.npy").write_bytes(framed(npy(shape="(2L,)")))  # as Python 2 wrote it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for by_library in (False, True):
            assert sources.load("2.npy", by_library).tolist() == [0, 0]
    with pytest.raises(InputError) as caught:
        sources.load("digits.npy")
    assert len(str(caught.value)) < 400
    assert not (tmp_path / "HACKED").exists()


@pytest.mark.once
def test_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of numpy: 1 GiB that unpacks from 1 MB, in a header and in data."""
    monkeypatch.chdir(tmp_path)
    np.savez("evil.npz", np.array([Evil()], object))
    np.savez_compressed("good.npz", x=X)
    good = (tmp_path / "good.npz").read_bytes()
    bad = {f"cut{n}.npz": "cannot be read: " for n in range(0, len(good), 20)}
    for n, name in enumerate(bad):
        (tmp_path / name).write_bytes(good[: 20 * n])
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (2**30,)})
    for name, start in {"data": header.getvalue(), "header": b"\x93NUMPY\2\0\xff\xff\xff\xff"}.items():
        archive = zipfile.ZipFile(f"{name}.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        with archive, archive.open("x.npy", "w") as member:
            member.write(start)
            for _ in range(64):
                member.write(bytes(2**24))
    at = good.rindex(b"PK\1\2")
    (tmp_path / "secret.npz").write_bytes(good[: at + 8] + b"\1" + good[at + 9 :])
    (tmp_path / "method.npz").write_bytes(good[: at + 10] + b"\x63" + good[at + 11 :])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_refused(
        tmp_path,
        bad
        | {
            "evil.npz": "it holds Python objects",
            "secret.npz": "cannot be read: ",
            "method.npz": "cannot be read: ",
            "header.npz": "its header has 4,294,967,295 bytes",
        },
    )
    with sources.open_array("data.npz") as array:
        out = torch.ones(5, dtype=torch.uint8)
        array.read(layout.Box((2**20,), (5,)), out, 100)
        assert out.tolist() == [0] * 5
    monkeypatch.setattr(memory, "available", lambda: 2**20)
    with pytest.raises(
        InputError, match=r"data\.npz: can only be verified whole: 1,073,741,952 bytes of memory needed"
    ):
        sources.load("data.npz", by_library=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB
    assert not (tmp_path / "HACKED").exists()


def test_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, held in {"evil": Evil(), "inside": {"x": torch.ones(2), "e": Evil()}}.items():
        torch.save(held, f"{name}.pt")
        torch.save(held, f"{name}-old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Evil()))
    laughs: dict[str, Any] = {"x": torch.ones(1)}
    for _ in range(60):
        laughs = {"a": laughs, "b": laughs}
    torch.save(laughs, "laughs.pt")
    evil = {
        f"{name}{old}.pt": "it holds Python objects (posix.mkdir" for name in ("evil", "inside") for old in ("", "-old")
    }
    assert_refused(
        tmp_path, {**evil, "pickle.pt": "cannot be read: ", "laughs.pt": "holds more than 262,144 dicts and tensors"}
    )
    torch.save(torch.arange(6.0).view(2, 3), "good.pt")
    shape, place = b"K\0K\x02K\x03\x86", zipfile.ZipFile("good.pt").read("good/data.pkl")
    assert shape in place
    number = lambda n: b"\x8a\x09" + n.to_bytes(9, "little", signed=True)  # noqa: E731
    forged = {
        "offset": b"J\xff\xff\xff\xffK\x02K\x03\x86",
        "far": number(2**62) + b"K\x02K\x03\x86",
        "wide": b"K\0" + number(2**62) * 2 + b"\x86",
        "negative": b"K\0J\xfe\xff\xff\xffK\x03\x86",
        "nan": b"K\0G" + struct.pack(">d", float("nan")) + b"K\x03\x86",
        "beyond": b"K\0K\xffK\x03\x86",
    }
    for name, instead in forged.items():
        with zipfile.ZipFile("good.pt") as good, zipfile.ZipFile(f"{name}.pt", "w") as archive:
            for info in good.infolist():
                archive.writestr(info.filename, good.read(info).replace(shape, instead))
    assert_refused(tmp_path, {f"{name}.pt": "cannot be read: " for name in forged})
    assert not (tmp_path / "HACKED").exists()


def test_safetensors_headers(tmp_path: Path) -> None:
    right: dict[str, Any] = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    entries: dict[str, Any] = {
        "overlap": {"x": right, "y": right},
        "overlap in part": {"x": right, "y": right | {"data_offsets": [12, 36]}},
        "beyond": {"x": right | {"data_offsets": [0, 2**40]}},
        "backwards": {"x": right | {"data_offsets": [24, 0]}},
        "negative offset": {"x": right | {"data_offsets": [-24, 0]}},
        "hole": {"x": right | {"data_offsets": [8, 32]}},
        "huge": {"x": right | {"shape": [2**63, 2**63]}},
        "nan": {"x": right | {"shape": [float("nan")]}},
        "negative": {"x": right | {"shape": [-2, -3]}},
        "dtype": {"x": right | {"dtype": "F99"}},
        "list": [1],
    }
    texts = {name: json.dumps(entry).encode() for name, entry in entries.items()}
    one = json.dumps(right).encode()
    texts |= {
        "twice": b'{"x":' + one + b',"x":' + one.replace(b"[0, 24]", b"[24, 48]") + b"}",
        "deep": b'{"x":' * 10**5,
    }
    texts |= {"utf": b'{"\xff": 1}', "surrogate": b'{"\\ud800":' + one + b"}"}
    for name, text in texts.items():
        (tmp_path / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))
    for name, length in {"no header": 0, "100 MB": 10**8, "2^63": 2**63, "2^64": 2**64 - 1}.items():
        (tmp_path / f"{name}.safetensors").write_bytes(struct.pack("<Q", length) + one)
        texts[name] = b""
    assert_refused(tmp_path, {f"{name}.safetensors": "cannot be read: " for name in texts})


def bomb(nbytes: int) -> bytes:
    packer = zlib.compressobj(9)
    return b"".join([*(packer.compress(bytes(2**24)) for _ in range(nbytes >> 24)), packer.flush()])


def test_hdf5_bombs_loops_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with h5py.File("bomb.h5", "w") as file:
        x = file.create_dataset("x", (4,), "u1", maxshape=(None,), chunks=(2**29,), compression="gzip")
        x.id.write_direct_chunk((0,), bomb(2**29))
        file.create_dataset("arrays", (2,), np.dtype(("i4", (3,))))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for by_library in (False, True):
        with pytest.raises(InputError, match=r"x: is stored in chunks of 536,870,912 bytes, which HDF5 reads whole"):
            sources.load("bomb.h5:x", by_library)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB
    assert_refused(tmp_path, {"bomb.h5:arrays": "holds no array 'arrays'"})
    with h5py.File("loop.h5", "w") as file:
        file["a/x"] = X
        file["a/again"], file["a/root"] = file["a"], file["/"]
    assert sources.load("loop.h5").tolist() == sources.load("loop.h5:a/root/a/again/x").tolist() == X.tolist()
    with h5py.File("names.h5", "w") as file:
        h5py.h5d.create(file.id, b"a\xff", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((3,)))
        file["n\nl"] = X
    assert sources.load("names.h5:n\nl").tolist() == X.tolist()
    assert_refused(tmp_path, {"names.h5:a\udcff": "has a name that is not UTF-8"})
    for depth in (500, 1500):
        with h5py.File(f"{depth}.h5", "w", libver="latest") as file:
            group = file.id
            for _ in range(depth):
                group = h5py.h5g.create(group, b"a")
            h5py.h5d.create(group, b"x", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((3,)))
    assert sources.describe("500.h5").shape == (3,)
    assert_refused(tmp_path, {"1500.h5": "more than 1,000 groups within each other"})


def changed(table: np.ndarray[Any, Any], **values: Any) -> np.ndarray[Any, Any]:
    for name, value in values.items():
        table[name] = value
    return table


TABLES: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "far": lambda t: changed(t, offset=2**62),
    "before": lambda t: changed(t, offset=-5),
    "wide": lambda t: changed(t, shape=2**40),
    "negative": lambda t: changed(t, shape=-1),
    "a part": lambda t: changed(t, shape=(2, 2)),
    "written": lambda t: changed(t, written=99),
    "twice": lambda t: np.concatenate([t, t]),
    "none": lambda t: t[:0],
}


@pytest.mark.once
def test_staging_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read where a forged table says, and what is not as hpcdist writes it is not taken for its own."""
    monkeypatch.chdir(tmp_path)
    with hd.init(device="cpu"):
        hd.staging.save("x.h5", torch.arange(60).view(10, 6))
    whole = (tmp_path / "x.h5").read_bytes()
    for name, forge in TABLES.items():
        (tmp_path / "y.h5").write_bytes(whole)
        with h5py.File("y.h5", "r+") as file:
            table = np.frombuffer(file["_hpcdist/pieces"][()].tobytes(), record_dtype(2))
            del file["_hpcdist/pieces"]
            file["_hpcdist/pieces"] = np.frombuffer(forge(table.copy()).tobytes(), np.uint8)
        seal(tmp_path / "y.h5")
        with pytest.raises(FileError) as caught:
            describe("y.h5")
        assert re.match(r"y.h5: (data: its table|its tables) of pieces (is|are) damaged", str(caught.value)), name
    for part, content in {"token": np.zeros(16), "plan": None, "state": "x"}.items():
        (tmp_path / "y.h5").write_bytes(whole)
        with h5py.File("y.h5", "r+") as file:
            del file[f"_hpcdist/{part}"]
            if content is None:  # gigabytes out of nothing
                file.create_dataset(f"_hpcdist/{part}", (2**31,), "u1", chunks=(2**24,), compression="gzip")
            else:
                file[f"_hpcdist/{part}"] = content
        assert describe("y.h5").plan is None, part
        with hd.staging.open("y.h5") as opened:
            assert opened.read("data").tolist() == torch.arange(60).view(10, 6).tolist()


@pytest.mark.once
def test_two_thousand_inputs_and_few_file_descriptors(tmp_path: Path) -> None:
    for i in range(2000):
        np.save(tmp_path / f"s{i}.npy", np.array([i]))
    for i in range(100):
        torch.save(torch.tensor([i]), tmp_path / f"t{i}.pt")
    code = """
        import resource, runpy, sys
        from importlib import import_module
        from mpi4py import MPI
        import hpcdist as hd, os
        with hd.init(device="cpu") as world:
            for inputs, output in (("s*.npy", "s.npy"), ("t*.pt", "t.h5"), ("s*.npy", None)):
                module = import_module("hpcdist.commands.gather")
                args = [inputs, "--verify", "--window", "1K", *(["-o", output] if output else [])]
                now = len(os.listdir("/proc/self/fd"))
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, now + 20), 2**12))
                assert module.main(world, module.parser().parse_args(args)) == 0
    """
    job = mpirun(2, code=code, cwd=tmp_path)
    assert job.status == 0, job.err
    assert np.load(tmp_path / "s.npy").tolist() == list(range(2000))


def test_little_shared_memory_is_told_before_mpi_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 256, 256, 256, 0, 0, 0, 0, 255)))
    cli._warn_of_small_shm("hpcdist.gather")
    text = "/dev/shm has 1.0 MiB free: MPI may end with a bus error; see python -m hpcdist.doctor [HD116]"
    assert capsys.readouterr().err == f"hpcdist.gather: warning: {text}\n"


@pytest.mark.once
def test_a_host_name_that_nobody_knows(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    command_ = ["unshare", "-r", "-u", "bash", "-c"]
    script = f"hostname nohost.invalid && exec {sys.executable} -m hpcdist.gather x.npy -o y.npy"
    job = run([*command_, script], cwd=tmp_path)
    assert job.status == 0, job.err
    assert np.load(tmp_path / "y.npy").tolist() == X.tolist()
