"""Files: every format both ways, other tools' files, and what is wrong with a file in one clear line."""

import os
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from cases import assert_refused, load, same_bits, whole_of
from safetensors.torch import save_file

import hpcdist as hd
from hpcdist.commands import inputs
from hpcdist.commands.arrays import join_main, parser
from hpcdist.errors import HpcdistError
from hpcdist.tensors.storage import BARE, DTYPES

SUFFIXES = (".npy", ".safetensors", ".h5")
REFUSED = {
    ".npy": {d for d in DTYPES if d in (torch.bfloat16, torch.complex32, *BARE) or "float8" in str(d)},
    ".safetensors": {torch.complex128, torch.complex32, *BARE},
}


def gather(world, *args):
    return join_main(world, parser("gather").parse_args(args))


def test_every_dtype_is_written_bit_by_bit_or_refused_beforehand(alone):
    """To every format; what is read is what its own library reads."""
    for dtype, shape in [(dtype, (2, 1, 300)) for dtype in DTYPES] + [(torch.int16, (0, 2)), (torch.int16, ())]:
        x = whole_of(shape, dtype)
        hd.staging.save("x.h5", x)
        for suffix in SUFFIXES:
            asked = "x.h5", "-o", f"y{suffix}", "--window", "1K", "--verify"
            if dtype in REFUSED.get(suffix, set()):
                with pytest.raises(HpcdistError, match=f"a {suffix} file cannot hold {dtype}; use one of"):
                    gather(alone, *asked)
                continue
            assert gather(alone, *asked) == 0
            for by_library in (False, True):
                assert same_bits(load(f"y{suffix}", by_library), x.view(shape or (1,))), (suffix, dtype, shape)
            os.unlink(f"y{suffix}")
    assert os.listdir() == ["x.h5"]


def test_files_of_other_tools(tmp_path):
    """Big-endian, Fortran order, several arrays in a file, compressed; for those of HDF5 see tests/staging."""
    x = np.arange(24, dtype=">i4").reshape(4, 6)
    np.save(tmp_path / "big.npy", x)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(x.astype(">f8")))
    np.savez(tmp_path / "two.npz", a=x, b=x[:2])
    np.savez_compressed(tmp_path / "one.npz", x.astype("u2"))
    save_file({"w": torch.arange(3), "b": torch.arange(2)}, tmp_path / "two.safetensors")
    same = dict.fromkeys(("big.npy", "fortran.npy", "two.npz:a", "one.npz"), x)
    for spec, values in {**same, "two.npz:b": x[:2], "two.safetensors:b": np.arange(2)}.items():
        for by_library in (False, True):
            assert load(str(tmp_path / spec), by_library, 100).tolist() == values.tolist(), spec


def test_names_and_patterns(alone):
    """A pattern's names come as one counts, s2 before s10; those that are given keep their order."""
    natural = ["S3", "s1", "s02", "s2", "s2a", "s10-9", "s10-10", "s10", "s"]
    for name in ("b", "a", "d[1]", *natural):
        np.save(f"{name}.npy", [1])
    with h5py.File("c.h5", "w") as file:
        file["x/y"] = [1]
    for given, names in {
        "b.npy a*.npy": ["b.npy", "a.npy"],
        "[sS]*.npy": [f"{name}.npy" for name in natural],
        "*.h5:/x/y": ["c.h5:/x/y"],
        "d[1].npy": ["d[1].npy"],
    }.items():
        assert [source.spec for source in inputs.find(alone, given.split(), 0).sources] == names


def test_an_array_is_not_taken_twice_by_whatever_paths(alone):
    """The file itself counts, and the array's name; two arrays of one file are two."""
    for name in "ab":
        np.save(f"{name}.npy", [1, 2])
    os.link("a.npy", "hard.npy")
    os.symlink("a.npy", "soft.npy")
    os.symlink(".", "sub")
    np.savez("two.npz", x=[1], y=[2])
    with h5py.File("one.h5", "w") as file:
        file["x"] = [1]
    torch.save({"a": {"x": torch.ones(1)}}, "one.pt")
    twice = "*.npy", "./a.npy", os.path.abspath("a.npy"), "sub/a.npy", "soft.npy", "hard.npy"
    for given in (*(f"a.npy {name}" for name in twice), "one.pt ./one.pt:a/x", "one.h5:x one.h5:/x"):
        with pytest.raises(HpcdistError, match="named twice"):
            inputs.find(alone, given.split(), 0)
    for fine in ("a.npy b.npy", "two.npz:x two.npz:y"):
        assert len(inputs.find(alone, fine.split(), 0).sources) == 2


def test_names_with_anything_in_them(alone):
    """Bytes that are no UTF-8, colons, newlines, brackets, and as long as a name can be; in every format."""
    np.save("in.npy", [0, 1, 2])
    for name in (os.fsdecode(b"a\xff"), "b:c", "d.h5:e", "f\ng", "h[1]*?", "i" * 230, " ", "-j", "é"):
        for suffix in SUFFIXES:
            path = f"{name}{suffix}"
            gather(alone, "in.npy", f"--output={path}")
            assert inputs.find(alone, [path], 0).sources[0].spec == path
            for spec in [path] if suffix == ".npy" else [path, f"{path}:data"]:
                for by_library in (False, True):
                    assert load(spec, by_library).tolist() == [0, 1, 2], spec


def damaged():
    """Files that cannot be used -> what the error says besides their name."""
    wrong = {}
    for suffix in (*SUFFIXES, ".npz", ".pt"):
        Path(f"junk{suffix}").write_bytes(b"this is none of these formats")
        Path(f"empty{suffix}").touch()
        os.mkdir(f"folder{suffix}")
        os.mkfifo(f"fifo{suffix}")  # nobody writes to it: whoever opens it waits
        os.symlink("/dev/zero", f"device{suffix}")
        bad = "not an HDF5 file" if suffix == ".h5" else "" if suffix == ".pt" else "cannot be read"
        wrong |= {f"junk{suffix}": bad, f"empty{suffix}": bad, f"folder{suffix}": "is a folder"}
        wrong |= {f"{kind.lower()}{suffix}": f"is a {kind}, expected a regular file" for kind in ("FIFO", "device")}
    np.save("cut.npy", np.arange(1000))
    os.truncate("cut.npy", 600)
    np.save("text.npy", np.array(["a"]))
    np.savez("two.npz", a=[1], b=[2])
    with h5py.File("group.h5", "w") as file:
        file.create_group("g")
        file["null"] = h5py.Empty("f4")
    return wrong | {
        f"{'x' * 300}.npy": "cannot be read: File name too long",
        "cut.npy": "cannot be read: it ends in the middle of its data",
        "text.npy": "holds no tensor, but dtype <U1",
        "two.npz": "holds 2 arrays; name one as",
        "two.npz:c": "holds no tensor 'c'; it has: a, b",
        "group.h5:/g": "holds no tensor 'g'",
        "group.h5:/null": "holds no tensor 'null', but null (without a value)",
        "what.txt": "unknown suffix '.txt'; expected one of .npy, .npz, .pt, .safetensors, .h5",
    }


def test_what_is_wrong_with_a_file_is_one_line_that_names_it(here):
    assert_refused(here, damaged())


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(alone):
    """A limit on the size of files makes the write fail half way, for root too."""
    np.save("small.npy", [0, 1, 2])
    np.save("large.npy", np.arange(100_000))
    names = [f"x{suffix}" for suffix in SUFFIXES]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name in names:
        gather(alone, "small.npy", "-o", name)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
        try:
            with pytest.raises(HpcdistError, match=r": (cannot be written|writing failed): (File|\[enf|basic)"):
                gather(alone, "large.npy", "-o", name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert load(name).tolist() == [0, 1, 2]
    assert {*os.listdir()} == {"small.npy", "large.npy", *names}
