"""Files of torch.save, of every kind: what is read is what torch.load gives, or one line says why not."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import assert_refused, same_bits

from hpcdist import memory
from hpcdist.commands import sources
from hpcdist.errors import InputError
from hpcdist.layout import Box

C = torch.arange(40).to(torch.complex64).view(4, 10) * (1 + 2j)
X = torch.arange(4 * 5 * 6).view(4, 5, 6)
NESTED = {"model": {"w": X, 3: C}, "b": X[0], "epoch": 3}


def loaded(path: Path) -> torch.Tensor:
    """By torch itself."""
    return torch.load(path, weights_only=True, map_location="cpu").detach().resolve_conj().resolve_neg()


KINDS: dict[str, Any] = {
    "conjugate": C.conj(),
    "conjugate, complex32": C.to(torch.complex32).conj(),
    "conjugate, transposed": C.t().conj(),
    "negative": C.conj().imag,
    "a column": X[:, 2, 3],
    "transposed": X.permute(2, 0, 1),
    "every other": X[1::2, :, ::3],
    "expanded": torch.arange(3.0).view(3, 1, 1).expand(3, 4, 2),
    "a part of a storage": X[1:3],
    "windows that overlap": torch.arange(20).unfold(0, 5, 2),
    "nothing": torch.empty(0, 3).t(),
    "0-d": X[1, 2, 3],
    "parameter": torch.nn.Parameter(torch.arange(3.0)),
    "with a gradient": torch.arange(3.0, requires_grad=True),
    "uint16": torch.arange(7).to(torch.uint16),
    "float8": torch.arange(7).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("window", [8, 200, 2**20])
@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_read_as_torch_reads_it(kind: str, window: int, tmp_path: Path) -> None:
    """Whole and in part, from a zip archive, one that was packed again, and the older format."""
    torch.save(KINDS[kind], tmp_path / "new.pt")
    repack(tmp_path / "new.pt", tmp_path / "packed.pt", zipfile.ZIP_DEFLATED)
    names = ["new.pt", "packed.pt"]
    if KINDS[kind].dtype not in (torch.complex32, torch.uint16, torch.float8_e4m3fn):  # which the older one cannot hold
        torch.save(KINDS[kind], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        names.append("old.pt")
    for name in names:
        expected = loaded(tmp_path / name)
        assert same_bits(sources.load(str(tmp_path / name)), expected), name
        with sources.open_array(str(tmp_path / name)) as array:
            assert (array.shape, array.dtype) == (tuple(expected.shape), expected.dtype)
            for dim, extent in enumerate(expected.shape):
                for start in range(extent):
                    offset = tuple(start if d == dim else 0 for d in range(expected.dim()))
                    part = expected.narrow(dim, start, 1)
                    out = torch.empty(part.shape[::-1], dtype=part.dtype).permute(*reversed(range(part.dim())))
                    array.read(Box(offset, tuple(part.shape)), out, window)
                    assert same_bits(out, part), f"{name}, dim {dim}, {start}"


def repack(
    source: Path, target: Path, how: int, change: Callable[[str, bytes], bytes | None] = lambda name, data: data
) -> None:
    """Pack an archive again, as a zip tool does, with other contents; members of which None is made are left out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", how) as new:
        for name in old.namelist():
            data = change(name.partition("/")[2], old.read(name))
            if data is not None:
                new.writestr(name, data)


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_an_archive_that_was_packed_again(how: int, tmp_path: Path) -> None:
    """Its data are elsewhere than torch.save has put them: several storages, each found by its own name."""
    held = {name: torch.arange(n) for name, n in (("a", 3), ("b", 1000), ("c", 5), ("d", 100_000))}
    torch.save(held, tmp_path / "x.pt")
    repack(tmp_path / "x.pt", tmp_path / "y.pt", how)
    for name, x in held.items():
        assert same_bits(sources.load(f"{tmp_path}/y.pt:{name}"), x)


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
@pytest.mark.parametrize("dtype", ["<f4", "<i8", "<c8", "|u1", "<u2"])
def test_big_endian(dtype: str, how: int, tmp_path: Path) -> None:
    x = np.arange(2000).reshape(40, 50).astype(dtype)
    torch.save(torch.from_numpy(x).t(), tmp_path / "x.pt")

    def change(name: str, data: bytes) -> bytes:
        if name.startswith("data/"):
            return np.frombuffer(data, dtype).astype(dtype.replace("<", ">")).tobytes()
        return b"big" if name == "byteorder" else data

    repack(tmp_path / "x.pt", tmp_path / "big.pt", how, change)
    if dtype == "<u2":
        with pytest.raises(InputError, match=r"big\.pt: cannot be read: big-endian torch.uint16, which torch itself"):
            sources.load(f"{tmp_path}/big.pt")
        return
    assert same_bits(sources.load(f"{tmp_path}/big.pt"), torch.from_numpy(x).t())
    assert same_bits(loaded(tmp_path / "big.pt"), torch.from_numpy(x).t())


def test_nested_dicts_and_tensors_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
    torch.save(NESTED, tmp_path / "x.pt")
    torch.save(X, tmp_path / "alone.pt")
    for name, x in {"model/w": X, "model/3": C, "b": X[0]}.items():
        assert same_bits(sources.load(f"{tmp_path}/x.pt:{name}"), x)
    assert same_bits(sources.load(f"{tmp_path}/alone.pt"), X)
    with pytest.raises(InputError, match=r"holds 3 arrays; name one as .*x\.pt:NAME; it has: b, model/w, model/3"):
        sources.load(f"{tmp_path}/x.pt")


def test_beside_what_cannot_be_described(tmp_path: Path) -> None:
    """A quantized tensor cannot be made without data: then the file is read whole."""
    torch.save({"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "x": C.conj()}, tmp_path / "x.pt")
    assert same_bits(sources.load(f"{tmp_path}/x.pt:x"), C.conj().resolve_conj())
    with pytest.raises(InputError, match="holds a quantized tensor, expected a dense one"):
        sources.load(f"{tmp_path}/x.pt:q")


def test_the_older_format_must_fit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(X, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    monkeypatch.setattr(memory, "available", lambda: 100)
    with pytest.raises(InputError, match=r"can only be read whole: [\d,]+ bytes of memory needed, 100 available"):
        sources.load(f"{tmp_path}/x.pt")


def refused(folder: Path) -> dict[str, str]:
    """Files that cannot be read -> what the error says besides their name."""
    eye = torch.eye(3)
    itself: dict[str, Any] = {}
    itself["again"] = itself
    for name, held in {
        "coo": eye.to_sparse(), "csr": eye.to_sparse_csr(), "meta": torch.empty(3, device="meta"), "none": {},
        "numbers": {"epoch": 3}, "list": [eye], "itself": itself, "pickle": Path("x"), "same": {"1": eye, 1: eye},
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "good": torch.arange(100.0),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }.items():  # fmt: skip
        torch.save(held, folder / f"{name}.pt")
    good = (folder / "good.pt").read_bytes()
    (folder / "cut.pt").write_bytes(good[: len(good) // 2])
    torch.save(torch.arange(100.0), folder / "old.pt", _use_new_zipfile_serialization=False)
    os.truncate(folder / "old.pt", 500)
    repack(folder / "good.pt", folder / "lying.pt", 0, lambda n, data: data[:40] if n.startswith("data/") else data)
    repack(folder / "good.pt", folder / "order.pt", 0, lambda n, data: b"middle" if n == "byteorder" else data)
    repack(folder / "good.pt", folder / "hollow.pt", 0, lambda n, data: None if n.startswith("data/") else data)
    repack(folder / "good.pt", folder / "headless.pt", 0, lambda n, data: None if n == "data.pkl" else data)
    with zipfile.ZipFile(folder / "npz.pt", "w") as archive:
        archive.writestr("x.npy", b"")
    return {
        "coo.pt": "holds a sparse_coo tensor, expected a dense one",
        "csr.pt": "holds a sparse_csr tensor, expected a dense one",
        "jagged.pt": "holds a nested tensor, expected a dense one",
        "nested.pt": "holds a nested tensor, expected a dense one",
        "quantized.pt": "holds a quantized tensor, expected a dense one",
        "meta.pt": "holds a tensor without data",
        "none.pt": "holds no array",
        "numbers.pt": "holds no array",
        "numbers.pt:epoch": "holds no array 'epoch'; it has: nothing",
        "good.pt:w": "holds a tensor without a name, and no array 'w'",
        "list.pt": "holds list, expected a tensor or a dict of tensors",
        "itself.pt": "holds no array",
        "same.pt": "two of its tensors have the name '1'",
        "pickle.pt": "cannot be read: ",
        "cut.pt": "cannot be read: ",
        "old.pt": "cannot be read: ",
        "lying.pt": "cannot be read: a tensor is larger than its data",
        "order.pt": "cannot be read: its byte order is b'middle'",
        "hollow.pt": "cannot be read: ",
        "headless.pt": "cannot be read: not an archive of torch.save",
        "npz.pt": "cannot be read: not an archive of torch.save",
    }


def test_what_cannot_be_read_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_refused(tmp_path, refused(tmp_path))
    assert capfd.readouterr().err == ""


def test_nothing_is_read_but_what_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor in an archive, no more than the window and what is asked for."""
    torch.save(torch.arange(2_000_000).view(2000, 1000).t(), tmp_path / "x.pt")
    asked: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(sum(map(len, buffers)))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    with sources.open_array(f"{tmp_path}/x.pt") as array:
        out = torch.empty(1000, 5, dtype=torch.int64)
        array.read(Box((0, 7), (1000, 5)), out, 10_000)
    assert torch.equal(out, torch.arange(7000, 12000).view(5, 1000).t())
    assert sum(asked) == out.nbytes
    assert max(asked) <= 10_000


def test_a_description_without_end(tmp_path: Path) -> None:
    """A few bytes that stand for gigabytes are not unpacked."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("archive/data.pkl", "w") as member:
            for _ in range(300):
                member.write(bytes(2**20))
        archive.writestr("archive/version", b"3\n")
    with pytest.raises(InputError, match="its description is longer than"):
        sources.load(f"{tmp_path}/x.pt")
