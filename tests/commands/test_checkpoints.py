"""Files of torch.save, of every kind: what is read is what torch.load gives, or one line says why not."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import assert_refused, load, same_bits

from hpcdist.commands import inputs
from hpcdist.errors import FileError, InputError
from hpcdist.layout import Box
from hpcdist.staging.reader import OpenFiles, TensorReader

pytestmark = pytest.mark.usefixtures("here")

C = torch.arange(40).to(torch.complex64).view(4, 10) * (1 + 2j)
X = torch.arange(4 * 5 * 6).view(4, 5, 6)
NEW = {  # which the older format cannot hold
    "conjugate, complex32": C.to(torch.complex32).conj(),
    "uint16": torch.arange(7).to(torch.uint16),
    "float8": torch.arange(7).to(torch.float8_e4m3fn),
}
KINDS = {
    "conjugate": C.conj(),
    "conjugate, transposed": C.t().conj(),
    "negative": C.clone().conj().imag,
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
    "large": torch.arange(100_000),
}


def repack(source, target, how, change=lambda name, data: data):
    """Pack an archive again, as a zip tool does, with other contents; members of which None is made are left out, and
    the one with which torch calculates where data are."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", how) as new:
        for name in old.namelist():
            data = change(name.partition("/")[2], old.read(name))
            if data is not None and not name.endswith(".format_version"):
                new.writestr(name, data)


def test_every_tensor_is_read_as_torch_reads_it(monkeypatch):
    """Whole and in part: from an archive, one that was packed again, and one with a tensor that cannot be described;
    nested, of a GPU."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
        torch.save({"model": KINDS, 3: NEW}, "new.pt")
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    torch.save({"model": KINDS, "quantized": quantized}, "beside.pt")
    repack("new.pt", "again.pt", zipfile.ZIP_STORED)
    for path in ("new.pt", "again.pt", "beside.pt"):
        held = torch.load(path, weights_only=True, map_location="cpu")
        for key, x in [(f"{group}/{k}", x) for group in {"model", 3} & held.keys() for k, x in held[group].items()]:
            expected = x.detach().resolve_conj().resolve_neg()
            assert same_bits(load(f"{path}:{key}"), expected), (path, key)
            if key == "model/large":
                continue
            source = inputs.described(f"{path}:{key}")
            array = TensorReader(OpenFiles(source.contents), source.stored, 8, verify=True)
            with array.files:
                for dim, start in [(d, start) for d, extent in enumerate(x.shape) for start in range(extent)]:
                    part = expected.narrow(dim, start, 1)
                    out = torch.empty(part.shape[::-1], dtype=x.dtype).permute(*reversed(range(x.dim())))
                    offset = tuple(start * (d == dim) for d in range(x.dim()))
                    array.window = (8, 200, 2**20)[start % 3]
                    array.read(Box(offset, tuple(part.shape)), out)
                    assert same_bits(out, part), f"{path}: {key}, dim {dim}, {start}"
    with pytest.raises(InputError, match=r"holds 17 arrays; name one as new\.pt:NAME; it has: model/conjugate, "):
        load("new.pt")
    with pytest.raises(FileError, match=r"holds no tensor 'quantized', but quantized \(a quantized tensor\)"):
        load("beside.pt:quantized")


def test_archives_that_torch_alone_can_read(tmp_path):
    torch.save(X, "old.pt", _use_new_zipfile_serialization=False)
    torch.save(X, "x.pt")
    repack("x.pt", "deflated.pt", zipfile.ZIP_DEFLATED)
    repack("x.pt", "big.pt", zipfile.ZIP_STORED, lambda name, data: {"byteorder": b"big"}.get(name, data))
    text = "torch.save(torch.load(FILE), FILE) makes one that can be read"
    assert_refused(tmp_path, dict.fromkeys(("old.pt", "deflated.pt", "big.pt"), text))


def refused():
    """Files that cannot be read -> what the error says besides their name."""
    eye = torch.eye(3)
    itself = {}
    itself["again"] = itself
    for name, held in {
        "sparse_coo": eye.to_sparse(), "sparse_csr": eye.to_sparse_csr(), "meta": torch.empty(3, device="meta"),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "none": {},
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "good": torch.arange(100.0),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "numbers": {"epoch": 3},
        "list": [eye], "itself": itself, "pickle": Path("x"), "same": {"1": eye, 1: eye},
    }.items():  # fmt: skip
        torch.save(held, f"{name}.pt")
    Path("cut.pt").write_bytes(Path("good.pt").read_bytes()[:900])
    torch.save(torch.arange(100.0), "old.pt", _use_new_zipfile_serialization=False)
    os.truncate("old.pt", 500)
    for name, change in {
        "lying": lambda n, data: data[:40] if n.startswith("data/") else data,
        "order": lambda n, data: b"middle" if n == "byteorder" else data,
        "hollow": lambda n, data: None if n.startswith("data/") else data,
        "headless": lambda n, data: None if n == "data.pkl" else data,
    }.items():
        repack("good.pt", f"{name}.pt", 0, change)
    np.savez("npz.pt", x=[1])
    os.rename("npz.pt.npz", "npz.pt")
    with zipfile.ZipFile("endless.pt", "w", zipfile.ZIP_DEFLATED) as archive:  # gigabytes out of a few bytes
        archive.writestr("archive/data.pkl", bytes(300 * 2**20))
        archive.writestr("archive/version", b"3\n")
    kinds = {"sparse_coo": "", "sparse_csr": "", "jagged": "nested", "nested": "", "quantized": ""}
    damaged = ("endless", "lying", "pickle", "cut", "old", "order", "hollow", "headless", "npz", "meta")
    return {f"{name}.pt": f"holds no tensor, but a {kind or name} tensor" for name, kind in kinds.items()} | {
        **{f"{name}.pt": "cannot be read: " for name in damaged},
        **{f"{name}.pt": "holds no array" for name in ("none", "itself")},
        "numbers.pt": "holds no tensor, but epoch (a value: int)",
        "numbers.pt:epoch": "holds no tensor 'epoch', but epoch (a value: int)",
        "good.pt:w": "holds an array without a name, and no array 'w'",
        "list.pt": "holds list, expected a tensor or a dict of tensors",
        "same.pt": "two of its tensors have the name '1'",
    }


def test_what_cannot_be_read_is_one_line(tmp_path, capfd):
    assert_refused(tmp_path, refused())
    assert capfd.readouterr().err == ""
