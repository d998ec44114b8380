"""Files: every format both ways, other tools' files, and what is wrong with a file in one clear line."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from cases import assert_refused
from safetensors.torch import save_file

import hpcdist as hd
from hpcdist.comm.groups import Group
from hpcdist.comm.team import Team
from hpcdist.commands import sources as files
from hpcdist.commands.outputs import Array, Output
from hpcdist.errors import FileError, InputError, RankError
from hpcdist.layout import Box
from hpcdist.staging.target import SaveOptions
from hpcdist.tensors.storage import BARE, DTYPES, as_bytes


def save(x: torch.Tensor, path: str) -> None:
    """Write a tensor as the commands do, on one rank."""
    from mpi4py import MPI

    nowhere: Any = None  # what writes needs no settings
    team = Team(MPI.COMM_SELF.Dup(), Group(0, [0], {}, MPI.COMM_SELF), nowhere)
    out = Output(team, "test", Array(path, tuple(x.shape), x.dtype), SaveOptions(window=64))
    for row in out.mine():
        out.put(row, x[out.pieces[row].slices()].contiguous())
    out.finish()
    team.free()


SUFFIXES = (".npy", ".pt", ".safetensors", ".h5")
REFUSED = {
    ".npy": {d for d in DTYPES if d in (torch.bfloat16, torch.complex32, *BARE) or "float8" in str(d)},
    ".pt": {d for d in BARE if "int" in str(d)},
    ".safetensors": {torch.complex128, torch.complex32, *BARE},
}


def bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose bytes count up, so that an order error shows (bool: 0 and 1 in turn)."""
    n = int(np.prod(shape)) * dtype.itemsize
    raw = (torch.arange(n) * 7 % 251).to(torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_saved_is_loaded_bit_by_bit_or_refused_beforehand(
    suffix: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = str(tmp_path / f"x{suffix}")
    for shape in [(3, 4), (5,), (0, 2), (2, 1, 3)]:
        x = bits(shape, dtype)
        if dtype in REFUSED.get(suffix, set()):
            with pytest.raises(InputError, match=f"a {suffix} file cannot hold {dtype}; use one of"):
                files.check_output(path, dtype, x.nbytes)
            continue
        files.check_output(path, dtype, x.nbytes)
        save(x, path)
        y = files.load(path)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert torch.equal(as_bytes(y.contiguous()), as_bytes(x))
        assert files.describe(path) == files.Source(path, shape, dtype)
    assert {entry.name for entry in tmp_path.iterdir()} <= {f"x{suffix}"}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_strided_and_0d_tensors(suffix: str, tmp_path: Path) -> None:
    path = str(tmp_path / f"x{suffix}")
    for x in (torch.arange(12).view(3, 4).t(), torch.arange(12)[::3], torch.tensor(5)):
        save(x, path)
        assert torch.equal(files.load(path), x)


def test_files_of_other_tools(tmp_path: Path) -> None:
    """Big-endian, Fortran order, mapped, several arrays in a file, compressed, nested and scalar datasets."""
    x = np.arange(24, dtype=">i4").reshape(4, 6)
    np.save(tmp_path / "big.npy", x)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(x.astype("<f8")))
    np.savez(tmp_path / "two.npz", a=x, b=x[:2])
    np.savez_compressed(tmp_path / "one.npz", x.astype("u2"))
    torch.save({"w": torch.arange(3), "b": torch.arange(2)}, tmp_path / "dict.pt")
    torch.save(torch.arange(4), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file({"w": torch.arange(3), "b": torch.arange(2)}, tmp_path / "two.safetensors")
    with h5py.File(tmp_path / "deep.h5", "w") as file:
        file.create_dataset("model/layer/w", data=x, chunks=(2, 3), compression="gzip")
        file["model/flag"] = np.array([True, False])
        file["z"] = np.array([1 + 2j], np.complex64)
    expected = {
        "big.npy": x,
        "fortran.npy": x,
        "two.npz:a": x,
        "two.npz:b": x[:2],
        "one.npz": x,
        "dict.pt:w": np.arange(3),
        "old.pt": np.arange(4),
        "two.safetensors:b": np.arange(2),
        "deep.h5:/model/layer/w": x,
        "deep.h5:model/flag": [True, False],
        "deep.h5:/z": [1 + 2j],
    }
    for spec, values in expected.items():
        y = files.load(str(tmp_path / spec))
        assert y.tolist() == np.asarray(values).tolist(), spec
        assert tuple(y.shape) == files.describe(str(tmp_path / spec)).shape


def test_names_and_patterns(tmp_path: Path) -> None:
    for name in ("b.npy", "a.npy", "c.h5", "d[1].npy"):
        (tmp_path / name).touch()
    here = f"{tmp_path}/"
    assert files.expand([f"{here}b.npy", f"{here}a*.npy"]) == [f"{here}b.npy", f"{here}a.npy"]
    for name in ("s10", "s2", "s1", "s02", "s2a", "s10-9", "s10-10", "s", "S3"):
        (tmp_path / f"{name}.dat").touch()
    natural = ["S3", "s1", "s02", "s2", "s2a", "s10-9", "s10-10", "s10", "s"]
    assert files.expand([f"{here}*.dat"]) == [f"{here}{name}.dat" for name in natural]
    assert files.expand([f"{here}*.h5:/x/y"]) == [f"{here}c.h5:/x/y"]
    assert files.expand([f"{here}d[1].npy"]) == [f"{here}d[1].npy"]
    with pytest.raises(InputError, match="no such file, and no file matches"):
        files.expand([f"{here}x*.npy"])
    with pytest.raises(InputError, match=r"x\.npy: no such file \[HD401\]"):
        files.expand([f"{here}x.npy"])


def test_an_array_is_not_taken_twice_by_whatever_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file itself counts, and the array's name; two arrays of one file are two."""
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", [1, 2])
    np.save("b.npy", [1, 2])
    os.link("a.npy", "hard.npy")
    (tmp_path / "soft.npy").symlink_to("a.npy")
    (tmp_path / "sub").symlink_to(".")
    np.savez("one.npz", x=[1])
    np.savez("two.npz", x=[1], y=[2])
    with h5py.File("one.h5", "w") as file:
        file["x"] = [1]
        file["soft"] = h5py.SoftLink("/x")
    torch.save({"a": {"x": torch.ones(1)}}, "one.pt")

    def taken(*given: str) -> list[str]:
        sources = [files.describe(spec) for spec in files.expand(given)]
        files.check_once(sources)
        return [source.spec for source in sources]

    for given in (
        *(["a.npy", "*.npy"], ["a.npy", "./a.npy"], ["a.npy", f"{tmp_path}/a.npy"], ["a.npy", "sub/a.npy"]),
        *(["a.npy", "soft.npy"], ["a.npy", "hard.npy"], ["one.npz", "one.npz:x"], ["one.pt", "./one.pt:a/x"]),
        *(["one.h5:x", "one.h5:/x"], ["one.h5", "./one.h5:soft"]),
    ):
        with pytest.raises(InputError, match="named twice"):
            taken(*given)
    with pytest.raises(InputError, match=r"soft\.npy: named twice, also as a\.npy"):
        taken("a.npy", "soft.npy")
    assert taken("a.npy", "b.npy") == ["a.npy", "b.npy"]
    assert taken("two.npz:x", "two.npz:y") == ["two.npz:x", "two.npz:y"]


def test_names_with_anything_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are no UTF-8, colons, newlines, brackets, and as long as a name can be; in every format."""
    monkeypatch.chdir(tmp_path)
    for name in (os.fsdecode(b"a\xff"), "b:c", "d.h5:e", "f\ng", "h[1]*?", "i" * 230, " ", "-j", "é"):
        for suffix in (".npy", ".npz", ".pt", ".safetensors", ".h5"):
            path = f"{name}{suffix}"
            np.savez(path, x=np.arange(3)) if suffix == ".npz" else save(torch.arange(3), path)
            ((spec),) = files.expand([path])
            for by_library in (False, True):
                assert files.load(spec, by_library).tolist() == [0, 1, 2], spec
                if suffix != ".npy":
                    key = "x" if suffix == ".npz" else "data"
                    if suffix != ".pt":
                        assert files.load(f"{spec}:{key}", by_library).tolist() == [0, 1, 2], spec
    with pytest.raises(InputError, match=r"cannot be read: File name too long"):
        files.load(f"{'x' * 300}.npy")


def test_what_a_library_reads_is_what_we_read(tmp_path: Path) -> None:
    """Each format, dtype and shape, whole and in part; the library's reading shares nothing with ours."""
    for dtype in DTYPES:
        for suffix in SUFFIXES:
            if dtype in REFUSED.get(suffix, set()):
                continue
            for shape in [(3, 4), (0, 2), ()]:
                path = str(tmp_path / f"x{suffix}")
                x = bits(shape, dtype)
                save(x, path)
                y = files.load(path, by_library=True)
                assert (y.shape, y.dtype) == (x.shape, x.dtype)
                assert torch.equal(as_bytes(y), as_bytes(x)), (dtype, suffix)
    np.save(tmp_path / "f.npy", np.asfortranarray(np.arange(24, dtype=">f8").reshape(4, 6)))
    with files.open_array(f"{tmp_path}/f.npy", by_library=True) as array:
        out = torch.empty(2, 3, dtype=torch.float64)
        array.read(Box((1, 2), (2, 3)), out, 100)
    assert out.tolist() == [[8, 9, 10], [14, 15, 16]]


def damaged(folder: Path) -> dict[str, str]:
    """Files that cannot be used -> what the error says besides their name."""
    for suffix in (".npy", ".npz", ".pt", ".safetensors", ".h5"):
        (folder / f"junk{suffix}").write_bytes(b"this is none of these formats")
        (folder / f"empty{suffix}").touch()
        (folder / f"folder{suffix}").mkdir()
        os.mkfifo(folder / f"fifo{suffix}")  # nobody writes to it: whoever opens it waits
        (folder / f"device{suffix}").symlink_to("/dev/zero")
    np.save(folder / "cut.npy", np.arange(1000))
    os.truncate(folder / "cut.npy", 600)
    np.save(folder / "objects.npy", np.array([{}]), allow_pickle=True)
    np.save(folder / "text.npy", np.array(["a"]))
    torch.save([1, 2], folder / "list.pt")
    torch.save(torch.nn.Linear(1, 1), folder / "pickle.pt")
    np.savez(folder / "two.npz", a=[1], b=[2])
    with h5py.File(folder / "group.h5", "w") as file:
        file.create_group("g")
        file["null"] = h5py.Empty("f4")
    others = [suffix for suffix in SUFFIXES if suffix != ".h5"]
    wrong = {f"{kind}{suffix}": "cannot be read" for kind in ("junk", "empty") for suffix in others}
    wrong |= {"junk.h5": "not an HDF5 file", "empty.h5": "not an HDF5 file"}
    for suffix in (".npy", ".npz", ".pt", ".safetensors", ".h5"):
        wrong |= {f"folder{suffix}": "is a folder", f"fifo{suffix}": "is a FIFO, expected a regular file"}
        wrong |= {f"device{suffix}": "is a device, expected a regular file"}
    return wrong | {
        "missing.npy": "no such file",
        "cut.npy": "cannot be read",
        "objects.npy": "cannot be read: it holds Python objects",
        "text.npy": "holds dtype <U1",
        "list.pt": "holds list, expected a tensor",
        "pickle.pt": "cannot be read",
        "two.npz": "holds 2 arrays; name one as",
        "two.npz:c": "holds no array 'c'; it has: a, b",
        "group.h5:/g": "holds no array 'g'",
        "group.h5:/null": "holds no array 'null'",
        "what.txt": "unknown suffix '.txt'; expected one of .npy, .npz, .pt, .safetensors, .h5",
    }


def test_what_is_wrong_with_a_file_is_one_line_that_names_it(tmp_path: Path) -> None:
    assert_refused(tmp_path, damaged(tmp_path))


def test_outputs_that_cannot_be_written_are_found_beforehand(tmp_path: Path) -> None:
    (tmp_path / "folder.npy").mkdir()
    for name, message in {
        "x.txt": "unknown suffix '.txt'",
        "x.npz": "unknown suffix '.npz'",
        "no/x.npy": "no such folder",
        "folder.npy": "is a folder",
    }.items():
        with pytest.raises(InputError, match=message):
            files.check_output(str(tmp_path / name), torch.int64, 8)
    with pytest.raises(InputError, match="no space for the output"):
        files.check_output(str(tmp_path / "x.npy"), torch.int64, 2**60)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(suffix: str, tmp_path: Path) -> None:
    """A limit on the size of files makes the write fail half way, for root too."""
    path = tmp_path / f"x{suffix}"
    save(torch.arange(3), str(path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        with pytest.raises(RankError, match=r"(cannot be written|writing failed): (File too large|\[enforce fail)"):
            save(torch.arange(100_000), str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files.load(str(path)).tolist() == [0, 1, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_damaged_piece_of_ours_is_named(compression: str | None, tmp_path: Path) -> None:
    """Whatever is read of it, along any dim, the checksum is compared first; the other pieces can be read."""
    path = str(tmp_path / "x.h5")
    x = torch.arange(400).view(40, 10)
    with hd.init(device="cpu"):
        hd.staging.save(path, x, window=800, compression=compression, chunks=compression and (5, 10))
    assert files.load(path).equal(x)
    with h5py.File(path, "r+") as file:
        file["data"][20, 3] = 7
    with pytest.raises(
        InputError, match=r"x\.h5: data: piece 2 is damaged: elements \[20:30, 0:10\], written by rank 0"
    ):
        files.load(path)
    for box, right in ((Box((0, 0), (15, 10)), True), (Box((20, 9), (1, 1)), False), (Box((0, 2), (40, 1)), False)):
        out = torch.empty(box.shape, dtype=x.dtype)
        with files.open_array(path) as array:
            if right:
                array.read(box, out, 10**6)
                assert out.equal(x[box.slices()])
            else:
                with pytest.raises(FileError, match="piece 2 is damaged"):
                    array.read(box, out, 10**6)
