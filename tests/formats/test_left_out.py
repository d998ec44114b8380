"""Arrays that torch lacks, or that their library does not open, are left out: every way to read a file lists them by
name and reason, and reads the others. What is damaged is refused by a message that names the file and the array."""

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import assert_refused

import hpcdist as hd
from hpcdist.commands import conversion, listing
from hpcdist.errors import FileError, RankError
from hpcdist.formats.known import describe
from hpcdist.staging import open as open_file

pytestmark = pytest.mark.usefixtures("alone")

X = torch.arange(6.0)


def changed(path, old, new):
    Path(path).write_bytes(Path(path).read_bytes().replace(old, new))


def npz(path):
    np.savez(path, x=X.numpy(), format=np.array("csr"), object=np.array([{}], object), time=np.array(1, "M8[s]"))


def h5(path):
    with h5py.File(path, "w") as file:
        file["x"], file["long"], file["vax"], file["gone"] = X.numpy(), np.zeros(3, "g"), np.zeros(3, "f8"), [1, 2]
        header = h5py.h5o.get_info(file.id, b"gone").addr
    vax = b"\x11\x20\x3f\0\x08\0\0\0"
    content = bytearray(Path(path).read_bytes())
    content[header] = 9  # the version of the header
    at = content.index(vax)
    content[at : at + 2] = b"\x31\x61"
    Path(path).write_bytes(content)


def safetensors(path):
    entries = {"x": ("F32", [6], [0, 24]), "four": ("F4", [4], [24, 26])}
    header = {name: dict(zip(("dtype", "shape", "data_offsets"), of, strict=True)) for name, of in entries.items()}
    text = json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + X.numpy().tobytes() + bytes(2))


def pt(path):
    torch.save({"x": X, "list": [X], "sparse": torch.eye(2).to_sparse(), "step": 7}, path)


def folder(path):
    Path(path).mkdir()
    dcp.save({"x": X, "step": 7}, checkpoint_id=path, no_dist=True)


LACKS = "which torch does not have"
FILES = {
    "a.npz": (npz, {"format": f"dtype <U3, {LACKS}", "object": "objects", "time": f"dtype datetime64[s], {LACKS}"}),
    "a.h5": (
        h5,
        {
            "gone": "cannot be read: ",
            "long": f"dtype {np.dtype('g')}, {LACKS}",
            "vax": "a type that numpy does not have",
        },
    ),
    "a.safetensors": (safetensors, {"four": "dtype F4, which is not supported"}),
    "a.pt": (pt, {"list": "a value: list of tensors", "sparse": "a sparse_coo tensor", "step": "a value: int"}),
    "folder": (folder, {"step": "a value"}),
}


@pytest.mark.parametrize("path", FILES)
def test_what_is_left_out_is_listed_alike(path, alone, capsys):
    make, reasons = FILES[path]
    make(path)
    with pytest.warns(UserWarning, match=r"left out: .*\[HD511\]") as told:
        found = hd.staging.load(path, dim=None)
    assert found.keys() == {"x"} and torch.equal(found["x"], X)
    with open_file(path) as file:
        said = file.left_out
        assert file.names == ["x"] and torch.equal(file.read("x"), X)
    assert said.keys() == reasons.keys() and all(text in said[name] for name, text in reasons.items()), said
    gone = [name for name in said if said[name].startswith("cannot be read")]
    for what in ("ls", "verify"):
        status = listing.main(alone, listing.parser(what).parse_args([path, "--json"]))
        report = json.loads(capsys.readouterr().out)
        assert report["left_out"] == said and status == (what == "verify" and bool(gone)), (status, report)
        assert what == "ls" or [text.split(": ")[:2] for text in report["damaged"]] == [[path, name] for name in gone]
    texts = [str(told[0].message), *said.values()]
    for how in ([], ["--json"]):
        conversion.main(alone, conversion.parser().parse_args([path, "copy.h5", *how]))
        texts.append(capsys.readouterr().out)
        Path("copy.h5").unlink()
    for name, why in said.items():
        assert f"{name} ({why})" in texts[0] and f"{name} ({why})" in texts[-2], texts
        assert json.loads(texts[-1])["left_out"][name] == why
        with pytest.raises(RankError, match="HD408") as caught:
            hd.staging.load(path, name)
        assert path in str(caught.value) and why in str(caught.value)


def test_two_members_of_one_name():
    """`x` and `x.npy`: numpy itself takes the first for both."""
    with zipfile.ZipFile("two.npz", "w") as archive:
        for name, value in (("x", [1]), ("x.npy", [2])):
            member = io.BytesIO()
            np.save(member, np.array(value))
            archive.writestr(name, member.getvalue())
    assert hd.staging.load("two.npz", "x").tolist() == [2]


def lose_a_member(path):
    """The directory of an archive ends before its last entry."""
    content = Path(path).read_bytes()
    first, last, end = content.index(b"PK\1\2"), content.rindex(b"PK\1\2"), content.rindex(b"PK\5\6")
    Path(path).write_bytes(
        content[:last] + content[end : end + 12] + struct.pack("<I", last - first) + content[end + 16 :]
    )


def described_by(path, content):
    """A folder of torch's DCP with this description."""
    Path(path).mkdir()
    Path(path, ".metadata").write_bytes(content)


def larger_than_its_data(path):
    folder(path)
    metadata = pickle.loads(Path(path, ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["x"]
    entry.size = entry.chunks[0].sizes = torch.Size([2**40])
    Path(path, ".metadata").write_bytes(pickle.dumps(metadata))


def test_what_a_check_can_find_is_found(tmp_path):
    """Lengths, counts and shapes are held against the file before memory is taken for them."""
    np.savez("lost.npz", x=X.numpy(), y=X.numpy())
    np.savez("small.npz", x=X.numpy())
    np.save("small.npy", X.numpy())
    torch.save({"x": X, "y": X}, "lost.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), "script.pt")
    with h5py.File("small.h5", "w") as file:
        file["x"] = X.numpy()
    content = Path("small.h5").read_bytes()
    at = content.index(struct.pack("<BBB5xQ", 1, 1, 1, 6)) + 8  # the dims of x
    Path("small.h5").write_bytes(content[:at] + b"\5" + content[at + 1 :])
    lose_a_member("lost.npz")
    lose_a_member("lost.pt")
    changed("small.npy", b"(6,)", b"(4,)")
    with zipfile.ZipFile("small.npz", "w") as archive:
        archive.write("small.npy", "x.npy")
    assert_refused(tmp_path, {
        "lost.npz": "lost.npz: is damaged: its directory does not list",
        "lost.pt": "lost.pt: is damaged: its directory does not list",
        "small.npz": "small.npz: x: cannot be read: 8 bytes follow its data",
        "small.npy": "small.npy: cannot be read: 8 bytes follow its data",
        "small.h5": "small.h5: x: is damaged: it has 24 bytes, which are not those of shape [5]",
        "script.pt": "script.pt: cannot be read: it holds a TorchScript module, not tensors",
    })  # fmt: skip
    described_by("memo", b"\x80\4Nr" + struct.pack("<I", 1_500_000_000) + b".")
    described_by("bytes", b"\x80\5\x96" + struct.pack("<Q", 2**40) + b".")
    larger_than_its_data("shape")
    for path, text in {
        "memo": "LONG_BINPUT 1,500,000,000 in 9 bytes",
        "bytes": "expected 1099511627776 bytes in a bytearray8",
        "shape": "shape: x: is damaged: its part at (0,) is larger than its data",
    }.items():
        with pytest.raises(FileError) as caught:
            describe(path)
        assert text in str(caught.value) and str(caught.value).startswith(path)
    with h5py.File("sparse.h5", "w") as file:
        file.create_dataset("x", (2**60,), "u1", chunks=(2**16,))
    for read in (hd.staging.load, lambda path: open_file(path).read("x")):
        with pytest.raises((FileError, RankError), match=r"sparse.h5: 1,152,921,504,606,846,976 bytes.*\[HD310\]"):
            read("sparse.h5")


def test_a_filter_that_is_not_installed():
    """As that of PyTables' blosc often is; a chunk that its writer has not packed is read."""
    with h5py.File("packed.h5", "w") as file:
        for name, mask in (("x", 0), ("plain", 1)):
            made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            made.set_chunk((6,))
            made.set_filter(32099, h5py.h5z.FLAG_OPTIONAL)
            dataset = h5py.h5d.create(file.id, name.encode(), h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((6,)), made)
            dataset.write_direct_chunk((0,), X.numpy().tobytes(), mask)
    with pytest.warns(UserWarning, match=r"left out: x \(cannot be read: it is packed by filter 32099"):
        assert hd.staging.load("packed.h5")["plain"].tolist() == X.tolist()
    assert list(describe("packed.h5").left_out) == ["x"]


def test_damage_that_is_met_later(alone, capsys):
    """Of compressed data, or of a file that is cut while it is open: named, and all that is damaged by verify."""
    with h5py.File("packed.h5", "w") as file:
        for name in "abc":
            file.create_dataset(name, data=np.random.default_rng(0).random(1000), compression="gzip", chunks=(1000,))
        places = [file[name].id.get_chunk_info(0).byte_offset for name in "ac"]
    content = bytearray(Path("packed.h5").read_bytes())
    for place in places:
        content[place + 50] ^= 255
    Path("packed.h5").write_bytes(content)
    assert listing.main(alone, listing.parser("verify").parse_args(["packed.h5", "--json"])) == 1
    assert [text.split(": ")[:2] for text in json.loads(capsys.readouterr().out)["damaged"]] == [
        ["packed.h5", "a"], ["packed.h5", "c"]
    ]  # fmt: skip
    for read in (lambda: hd.staging.load("packed.h5"), lambda: open_file("packed.h5").read("a")):
        with pytest.raises((FileError, RankError), match=r"packed.h5: a: cannot be read: .*\[HD402\]"):
            read()
    np.save("big.npy", X.numpy().astype(">f4"))
    with open_file("big.npy") as file:
        Path("big.npy").write_bytes(Path("big.npy").read_bytes()[:-4])
        with pytest.raises(FileError, match=r"big.npy: cannot be read: .*\[HD402\]"):
            file.read("")
