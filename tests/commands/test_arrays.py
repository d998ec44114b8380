"""gather, concat and split as a user starts them: what they print, write and refuse, on any number of ranks, in windows
far smaller than the data."""

import hashlib
import json
import os
import re
import shutil
import sysconfig
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import commands, finished, mpirun
from safetensors.torch import load_file, save_file

import hpcdist as hd
from hpcdist.commands.arrays import OUTPUTS
from hpcdist.formats.known import describe

WHOLE = np.arange(3000 * 7, dtype=np.int32).reshape(3000, 7)
SUFFIXES = (".npy", ".npz", ".pt", ".safetensors", ".h5")


def jobs(np_, cwd, *lines, env=None):
    """Commands, one after the other in one job: ``gather x.npy -o y.h5``."""
    split = [line.split(" ") if isinstance(line, str) else line for line in lines]
    return commands(np_, *(("hpcdist", what, *args) for what, *args in split), cwd=cwd, env=env)


def reports(np_, cwd, *lines):
    """What commands report that end well, with a result that is verified."""
    done = jobs(np_, cwd, *(f"{line} --json --verify" for line in lines))
    assert [job.err for job in done if job.status] == []
    found = [json.loads(job.out) for job in done]
    assert all(report["verified"] for report in found)
    return found


def write(path, x):
    """An array in a file of any kind, by the libraries of others."""
    if path.suffix == ".npy":
        np.save(path, x)
    elif path.suffix == ".npz":
        np.savez_compressed(path, x)
    elif path.suffix == ".pt":
        torch.save({"x": torch.from_numpy(x.copy())}, path)
    elif path.suffix == ".safetensors":
        save_file({"x": torch.from_numpy(x.copy())}, path)
    else:
        with h5py.File(path, "w") as file:
            file.create_dataset("deep/x", data=x, chunks=(min(100, len(x)), 1), compression="gzip")


def read(path):
    if path.suffix == ".npy":
        return np.asarray(np.load(path))
    if path.suffix == ".safetensors":
        return load_file(path)["data"].numpy()
    with h5py.File(path) as file:
        return np.asarray(file["data"][()])


@pytest.mark.parametrize("np_", [0, 3])
def test_default_input_is_the_standard_library(np_):
    """The hash is that of the files read here, one after the other. What a command prints, rank 0 alone does."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)
    digest = hashlib.sha256(b"".join(map(Path.read_bytes, paths))).hexdigest()
    job, told, listed = commands(np_, ("hpcdist.gather",), ("hpcdist", "gather", "--help"), ("hpcdist",))
    for done, text in (
        (job, f"sha256 {digest}: equal to the inputs read on one process"),
        (job, f"gather: {len(paths)} source files"),
        (job, "ranks:"),
        (told, "usage: hpcdist gather"),
        (listed, "gather     join arrays"),
    ):
        assert (done.status, done.out.count(text)) == (0, 1), done


@pytest.mark.parametrize("np_", [0, 6])
def test_files_of_any_kind_to_a_file_of_any_kind(np_, tmp_path):
    """Ragged shards, of which the second one is empty, along either dim."""
    for dim, cuts in enumerate(([900, 900, 1500, 2900], [1, 1, 4, 6])):
        for i, (part, suffix) in enumerate(zip(np.split(WHOLE, cuts, dim), SUFFIXES, strict=True)):
            write(tmp_path / f"{dim}s{i}{suffix}", part)
    outs = [f"{dim}out{suffix}" for dim in (0, 1) for suffix in OUTPUTS]
    lines = [f"gather {out[0]}s* --dim {out[0]} -o {out} --window 4K --root {max(np_ - 1, 0)}" for out in outs]
    wanted = {"shape": [3000, 7], "dtype": "int32", "files": 5, "ranks": max(np_, 1), "bytes_sent": 0}
    for out, report in zip(outs, reports(np_, tmp_path, *lines), strict=True):
        assert wanted.items() <= report.items()
        assert np.array_equal(read(tmp_path / out), WHOLE)
    assert len(list(tmp_path.iterdir())) == 2 * 5 + len(outs)


@pytest.mark.both
def test_over_every_route_to_one_rank_or_all(tmp_path):
    """One route, or with --compare all of them on the same data."""
    whole = torch.arange(60.0).view(3, 10, 2)
    for i, part in enumerate(whole.split([4, 0, 1, 5], dim=1)):
        torch.save(part.clone(), tmp_path / f"{i}.pt")
    digest = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    all_, one = 2 * whole.nbytes, whole.nbytes * 9 // 10  # rank 1 has one row of ten
    routes = ("mpi", "gloo", "hdf5")
    sent = {f"concat --route {route}": all_ for route in routes} | {"concat": all_, "concat --compare -o w.npy": all_}
    sent |= {f"gather --root 1 --route {route}": one for route in routes}
    # From file to file, on no route, unless one is asked for.
    sent |= {"gather --root 1 --route gloo -o z.npy": one, "gather -o y.npy --window 3K": 0}
    done = reports(3, tmp_path, *(f"{line} ?.pt --dim -2" for line in sent))
    for report, (line, count) in zip(done, sent.items(), strict=True):
        assert (report["bytes_sent"], report["sha256"]) == (count, digest), line
        if "compare" in line:
            ran = [row for row in report["routes"] if "refused" not in row]
            assert {row["route"] for row in ran} >= {*routes}
            assert all(row["same_result"] is True and row["seconds"] > 0 for row in ran)
            refused = [row["refused"] for row in report["routes"] if row not in ran]
            assert torch.cuda.is_available() or "needs a GPU of its own" in refused[0]
    for name in "yzw":
        assert np.array_equal(np.load(tmp_path / f"{name}.npy"), whole.numpy()), name


def test_names_that_no_terminal_can_print(tmp_path):
    """Bytes that are no UTF-8, letters that ASCII lacks, a newline: read, written and printed, in one line each."""
    np.save(tmp_path / os.fsdecode(b"a\xff.npy"), np.arange(4))
    np.save(tmp_path / "b\né.npy", np.arange(4, 6))
    h5, npy, none = (os.fsdecode(name % b"\xff\n\xc3\xa9") for name in (b"out%s.h5", b"out%s.npy", b"no%s.npy"))
    gathering = ("gather", "[ab]*.npy", "--verify", "-o")
    lines = ((*gathering, h5), ("ls", h5), ("verify", h5), (*gathering, npy), ("gather", none))
    done = jobs(2, tmp_path, *lines, env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert [job.status for job in done] == [0, 0, 0, 0, 2], done
    assert r"written: out\udcff\n" in done[0].out
    assert "equal to the inputs" in done[0].out.splitlines()[-1]
    assert r"out\udcff\n" in done[2].out and done[2].out.count("\n") == 1
    assert np.load(tmp_path / npy).tolist() == [0, 1, 2, 3, 4, 5]
    assert re.fullmatch(r"hpcdist gather: error: no\\udcff\\n.*no such file.*\n", done[4].err), done[4].err


GOOD = "gather s0.npy s1.npy s2.npy "  # the bad file is met by the last rank
MISTAKES = {
    f"{GOOD}none.npy": "none.npy: no such file",
    "gather none*.npy": "none*.npy: no such file, and no file matches",
    f"{GOOD}junk.npy": "junk.npy: cannot be read",
    f"{GOOD}float32.npy": "float32.npy: torch.float32 (6, 7) does not fit torch.int32 (6, 7) of s0.npy along dim 0",
    f"{GOOD}wide.npy": "wide.npy: torch.int32 (6, 4) does not fit torch.int32 (6, 7) of s0.npy along dim 0",
    f"{GOOD}flat.npy": "flat.npy: torch.int32 (3,) does not fit torch.int32 (6, 7)",
    f"{GOOD}--dim 2": "--dim 2: s0.npy has 2 dims, expected -2 to 1",
    f"{GOOD}--root 3": "--root 3: expected 0 to 1 with 2 ranks",
    f"{GOOD}--route pigeon": "invalid choice: 'pigeon'",
    f"{GOOD}--nonsense": "unrecognized arguments: --nonsense",
    f"{GOOD}-o y.npy --window much": "expected a number of bytes such as 64M",
    f"{GOOD}-o y.txt": "'.txt' is not written",
    f"{GOOD}-o none/y.h5": "none/y.h5: no such folder",
    f"{GOOD}--resume": "--resume, and names with {rank}, need -o without --route and --compare",
    f"{GOOD}-o y.h5 --compare --resume": "--resume, and names with {rank}, need -o without",
    "concat s0.npy -o {rank}.npy --compare": "--resume, and names with {rank}, need -o without",
    f"{GOOD}s0.npy": "s0.npy: named twice",
    "gather s0.npy link.npy": "link.npy: named twice, also as s0.npy",
    "gather -o y.npy": "y.npy: no INPUT is given, and without one nothing is written",
    f"{GOOD}-o s1.npy": "s1.npy: is also an input, which it would replace",
    "gather s0.npy -o link.npy": "link.npy: is also an input",
    "gather s0.npy -o hard.npy": "hard.npy: is also an input",
    "concat s1.npy -o s{rank}.npy": "s1.npy: is also an input",
    "split s1.npy -o s{rank}.npy": "s1.npy: is also an input",
    "gather s0.npy -o s0.npy/.": "s0.npy/.: is the name of a folder",
    "concat s1.npy -o s{rank}.npy//": "s0.npy//: is the name of a folder",
    "split s1.npy -o s{rank}.npy/.": "s0.npy/.: is the name of a folder",
    "gather fifo.npy": "fifo.npy: is a FIFO, expected a regular file",
    f"{GOOD}-o fifo.npy": "fifo.npy: is a FIFO: only a regular file is replaced",
    "split s0.npy -o fifo{rank}.npy": "fifo1.npy: is a FIFO: only a regular",
    "gather no\nfile.npy": "no\\nfile.npy: no such file",
    "gather no\udcff.npy": "no\\udcff.npy: no such file",
    f"gather {'x' * 300}.npy": "no such file",
    f"{GOOD}-o {'x' * 300}.npy": "cannot be written: File name too long",
    "gather none.h5": "none.h5: holds no array",
    "gather bad.npz -o y.npy": "bad.npz: arr_0: cannot be read: Bad CRC-32",
    "gather cut.npy": "cut.npy: cannot be read: it ends in the middle of its data",
    "concat large.npy": "are available: with -o FILE they are streamed through a window of it",
    "gather large.npy": "memory on this host, and",
    "gather large.npy -o y.npy": "no space for the output",
    "gather many.npy -o y.npy --window 1K": "y.npy: data has 1,073,741,825 bytes, in more than 1,048,576 pieces of 512",
    "split s0.npy -o part.npy": "part.npy: gives parts the same name; write {rank} or",
    "split s0.npy -o {part}.npy": "{part}.npy: cannot be a pattern",
    "split s0.npy -o {rank.numerator}.npy": "cannot be a pattern (unsupported field)",
    "split s0.npy -o {rank:09999999999d}.npy": "cannot be a pattern (unsupported field)",
    "split s0.npy -o {rank}.npy --parts 0": "--parts 0: expected 1 to 1000000",
    "split s0.npy -o {rank}.npy --parts 1000000000000": "--parts 1000000000000: expected 1",
    "split s0.npy -o d{rank}/part.npy": "d1/part.npy: is the same file as d0/part",
    "concat s0.npy -o d{rank}/c.npy": "d1/c.npy: is the same file as d0/c.npy",
    "concat s0.npy -o {rank}/../s0.npy": "no such folder",
    "split s0.npy -o {rank}.npy --dim 2": "--dim 2: s0.npy has 2 dims",
    "split -o {rank}.npy": "{rank}.npy: no INPUT is given, and without one nothing is written",
    "gather d0": "d0: unknown suffix ''; expected one of .npy, .npz, .pt, ",
    "split bad.npz -o {rank}.npz": "'.npz' is not written; expected one of .npy, .safetensors, .h5",
    f"{GOOD}-o y.pt": "y.pt: '.pt' is not written; expected one of .npy, .safetensors, .h5",
    "convert sharded": "the following arguments are required: DST",
    "convert sharded sharded out.h5": "unrecognized arguments",
    "convert sharded out.h5 --dim 1": "unrecognized arguments: --dim",
    "convert sharded out.npy": "out.npy: expected a name that ends with .safetensors or .h5; dcp.load",
    "convert sharded out.h5 --max-shard-size 1KB": "max_shard_size is for .safetensors files",
    "convert sharded out.safetensors --max-shard-size much": "expected a number of bytes or text such as '5GB'",
    "convert d0 out.h5": "is a folder without a complete checkpoint",
    "convert no.txt out.h5": "no.txt: expected a file of tensors or a checkpoint: a folder",
    "convert sharded new": "new: expected a name that ends with .safetensors or .h5; dcp.load(state, storage_reader=",
    "convert mix.pt c.h5": "mix.pt: no such file",
    "convert s0.npy c.h5": "s0.npy: holds an array without a name: hpcdist.gather copies it",
    "convert names.safetensors out.h5": "cannot be a tensor and hold",
    "convert odd.h5 out.safetensors": "'z' has dtype torch.complex128, which a .safetensors file cannot hold",
    f"{GOOD}-o ": "-o/--output: expected a name, got an empty one",
    f"concat s0.npy -o {{rank}}.npy --window {'9' * 99}": "a number of bytes such as",
    "split s0.npy -o {rank}.npy --window -1": "a number of bytes such as",
    "concat s0.npy --dim x\ny": r"invalid int value: 'x\ny'",
    "split s0.npy": "the following arguments are required: -o/--output",
    "convert x.h5 ": "DST: expected a name, got an empty one",
    "ls": "the following arguments are required: FILE",
    "verify x.h5 y.h5": "unrecognized arguments: y.h5",
    "convert sharded sharded/model.safetensors": "would be read as a part of the input, sharded",
    "convert names.safetensors names.safetensors": "is also an input, which it would replace",
    "convert bare bare/model.safetensors --max-shard-size 2KB": "whose index is missing",
    "convert sharded out.safetensors/.": "is the name of a folder",
}
if not torch.cuda.is_available():
    refused = "route nccl needs a GPU of its own for each rank and a torch with NCCL; use route mpi or auto [HD207]"
    MISTAKES |= {f"{GOOD}--route nccl{out}": refused for out in ("", " --root 1", " -o y.h5")}


@pytest.mark.both
def test_bad_input_is_one_clear_line_and_status_2(here):
    """Each mistake in turn, in one job; nothing is written."""
    new = {"scalar": np.float32(1), "float32": np.float32(WHOLE[:6]), "wide": WHOLE[:6, :4], "flat": WHOLE[0, :3]}
    for name, x in {**new, **dict.fromkeys(("s0", "s1", "s2"), WHOLE[:6])}.items():
        np.save(name, x)
    Path("junk.npy").write_text("junk")
    os.mkdir("d0")
    os.symlink("d0", "d1")
    os.symlink("s0.npy", "link.npy")
    os.link("s0.npy", "hard.npy")
    for name in ("fifo.npy", "fifo1.npy"):
        os.mkfifo(name)
    h5py.File("none.h5", "w").close()
    with h5py.File("odd.h5", "w") as file:
        file["z"] = [1j]
    save_file({"a/b": torch.arange(2), "a": torch.arange(2)}, "names.safetensors")
    os.mkdir("sharded")
    with hd.init(device="cpu"):
        hd.staging.save("sharded/model.safetensors", {name: torch.arange(9) for name in "ab"}, max_shard_size=99)
    shutil.copytree("sharded", "bare", ignore=shutil.ignore_patterns("*.json"))
    large = 2**42  # a file with a hole takes no space
    for name, extent, size in (("large", large, large), ("cut", large, 2**20), ("many", 2**30 + 1, 2**30 + 1)):
        with open(f"{name}.npy", "wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (extent,)})
            file.truncate(file.tell() + size)
    np.savez_compressed("bad.npz", WHOLE)
    data = bytearray(Path("bad.npz").read_bytes())
    data[len(data) // 2] ^= 0xFF
    Path("bad.npz").write_bytes(data)
    before = sorted(os.listdir())
    for (line, message), job in zip(MISTAKES.items(), jobs(2, here, *MISTAKES), strict=True):
        assert (job.status, job.out) == (2, ""), f"{line}: {job}"
        assert job.err.startswith(f"hpcdist {line.split()[0]}: error: ") and job.err.count("\n") == 1, f"{line}: {job}"
        assert message in job.err, f"{line}: {job}"
        code = re.search(r" \[(HD\d{3})\].* \(see python -m hpcdist explain (HD\d{3})\)\n", job.err)
        assert code[1] == code[2] if code else job.err.endswith(" (see --help)\n"), f"{line}: {job}"
    assert sorted(os.listdir()) == before


def test_split_and_concat(tmp_path):
    """Parts and copies of every kind; bf16 through every format that has it."""
    for kind in (".npy", ".pt", ".npz"):
        write(tmp_path / f"x{kind}", WHOLE)
    x = torch.arange(100).to(torch.bfloat16).view(20, 5)
    torch.save(x, tmp_path / "b.pt")
    wanted = {("x.npy", ".npy"): (0, 2), ("x.pt", ".safetensors"): (1, 5), ("x.npz", ".h5"): (0, 7)}
    *_, text, table, refused = jobs(
        2, tmp_path,
        *(
            f"split {name} -o {{rank:04d}}-{name}{out} --dim {dim} --parts {parts} --window 5K --verify"
            for (name, out), (dim, parts) in wanted.items()
        ),
        *("split x.npy -o {rank}.npy", "concat [01].npy -o one.h5", "concat [01].npy -o copy-{rank}.npy --window 8K"),
        "split [01].npy -o again-{rank}.npy --parts 3",
        *("split b.pt -o b{rank}.h5", "gather b?.h5 -o b.safetensors"),
        *("concat [01].npy", "concat [01].npy --compare", "gather b?.h5 -o b.npy"),
    )  # fmt: skip
    for (name, out), (dim, parts) in wanted.items():
        for i, part in enumerate(np.array_split(WHOLE, parts, dim)):
            assert np.array_equal(read(tmp_path / f"{i:04d}-{name}{out}"), part)
        assert len(list(tmp_path.glob(f"*-{name}{out}"))) == parts
    assert torch.equal(load_file(tmp_path / "b.safetensors")["data"], x)
    assert "shape (3000, 7) on every rank" in text.out and "time (ms)" in table.out
    assert refused.status == 2
    assert "a .npy file cannot hold torch.bfloat16; use one of .safetensors, .h5" in refused.err
    for copy in ("copy-0.npy", "copy-1.npy", "one.h5"):
        assert np.array_equal(read(tmp_path / copy), WHOLE)
    assert [len(read(tmp_path / f"again-{i}.npy")) for i in range(3)] == [1000] * 3


RESUMED = """
    import atexit, os, runpy, signal, sys
    from hpcdist.staging.writer import RankWriter
    write, rows = RankWriter.write, []
    def dying(self, *piece):
        if kept := write(self, *piece):
            return kept
        rows.append(piece)
        if len(rows) == {until}:
            self.team.comm.Barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        return False
    RankWriter.write = dying
    atexit.register(lambda: sys.stdout.write(f"wrote {{len(rows)}}\\n"))
    sys.argv = {line!r}.split()
    runpy.run_module(sys.argv[0], run_name="__main__")
"""
TILED = np.tile(WHOLE, (8, 1))


@pytest.mark.parametrize(
    ("line", "change", "pieces"),
    [
        ("hpcdist.gather x.npy -o y.h5", 0, 21),
        ("hpcdist.gather x.npy -o y.npy", 1, 21),
        ("hpcdist.commands.conversion dcp y.safetensors", 0, 22),
    ],
)
def test_resume_on_another_number_of_ranks(line, change, pieces, tmp_path):
    """A job dies half way; the next one writes only the rest, and all of it where the input has changed."""
    np.save(tmp_path / "x.npy", TILED)
    dcp.save({"data": torch.from_numpy(TILED), "b": torch.arange(9)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    line += " --window 64K --resume"
    assert mpirun(2, code=RESUMED.format(until=4, line=line), cwd=tmp_path).status != 0
    np.save(tmp_path / "x.npy", TILED + change)
    job = finished(3, code=RESUMED.format(until=-1, line=line), cwd=tmp_path)
    kept = 0 if change else 8
    assert sum(map(int, re.findall(r"wrote (\d+)", job.out))) == pieces - kept
    assert f"resumed: {kept} of {pieces} pieces were there and are kept" in job.out
    output = line.split()[-4]
    assert np.array_equal(read(tmp_path / output), TILED + change)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dcp", "x.npy", output]


def test_a_damaged_piece_is_named(tmp_path):
    """Whatever is read of it, along any dim, and nothing is written. A file that is not complete is refused."""
    good, bad, part = (tmp_path / name for name in ("good.h5", "bad.h5", "part.h5"))
    with hd.init(device="cpu"):
        hd.staging.save(good, torch.from_numpy(WHOLE), window=40_000)
    count = len(describe(str(good)).tensors["data"].boxes)
    np.save(tmp_path / "x.npy", WHOLE)
    for path in (bad, part):
        shutil.copy(good, path)
    with h5py.File(bad, "r+") as file:
        file["data"][2999, 6] = 7
    with h5py.File(part, "r+") as file:
        del file["_hpcdist/state"]
    verified, listed, foreign, damaged, *refused = jobs(
        2, tmp_path, "verify good.h5", "ls good.h5 --json", "verify x.npy", "verify bad.h5", "gather bad.h5 -o z.npy",
        "convert bad.h5 z.h5", "split bad.h5 -o z{rank}.npy --dim 1", "ls part.h5", "verify part.h5",
    )  # fmt: skip
    named = rf"bad\.h5: data: piece {count - 1} is damaged: elements \[\d+:3000, 0:7\], written by rank 0"
    for job, status, text in (
        (verified, 0, rf"good\.h5: {count} pieces, 82\.0 KiB: all match their checksums"),
        (foreign, 0, "all can be read; there are no checksums"),
        *((damaged, 1, text) for text in (named, f"DAMAGED: 1 of {count} pieces")),
        *((job, 2, named) for job in refused[:3]),
        *((job, 2, r"part\.h5: incomplete: the job that wrote it ended before it was done") for job in refused[3:]),
    ):
        assert job.status == status and re.search(text, job.out + job.err), job
    report = json.loads(listed.out)
    assert (report["kind"], report["checksums"]) == ("HDF5 file", True)
    assert report["tensors"] == [
        {"name": "data", "shape": [3000, 7], "dtype": "int32", "bytes": 84000, "pieces": count}
        | {"writers": "rank 0", "storage": "contiguous"}
    ]
    assert sorted(os.listdir(tmp_path)) == ["bad.h5", "good.h5", "part.h5", "x.npy"]


def test_verify_reads_in_another_way(tmp_path):
    """What our own reading gets wrong is found, though it is wrong in the same way a second time, and so is what is not
    written as it was read: of every format, streamed and in memory, by all three commands."""
    for suffix in SUFFIXES[:4]:
        write(tmp_path / f"x{suffix}", WHOLE)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = WHOLE
    code = """
        import hpcdist as hd
        from hpcdist.commands import arrays
        from hpcdist.formats import plain
        from hpcdist.staging.reader import TensorReader
        from hpcdist.staging.writer import RankWriter
        read_runs, by_library, put = plain.Raw.read_runs, TensorReader.by_library, RankWriter.put
        def misread(self, fd, box, out):
            read_runs(self, fd, box, out)
            plain.memory(out)[:1] = b"?"
        def misread_by_library(self, box):
            x = by_library(self, box)
            plain.memory(x)[:1] = b"?"
            return x
        with hd.init(device="cpu") as world:
            for read, library, write in (
                (read_runs, by_library, put),
                (misread, misread_by_library, put),
                (read_runs, by_library, lambda self, i, row, box, piece: put(self, i, row, box, piece.flip(0))),
            ):
                plain.Raw.read_runs, TensorReader.by_library, RankWriter.put = read, library, write
                for suffix in (".npy", ".npz", ".pt", ".safetensors", ".h5"):
                    for what, *args in (
                        ("gather", "-o", "y.npy"), ("gather", "-o", "y.h5"), ("gather",), ("concat",),
                        ("concat", "-o", "y{rank}.h5"), ("split", "-o", "y{rank}.safetensors"),
                    ):
                        asked = arrays.parser(what).parse_args([f"x{suffix}", "--verify", *args])
                        status = (arrays.split_main if what == "split" else arrays.join_main)(world, asked)
                        if world.rank == 0:
                            print(f"<{suffix} {what} {' '.join(args)}: {status}>")
    """
    job = finished(2, code=code, cwd=tmp_path)
    said = re.findall(r"<(.*): (\d)>", job.out)
    assert len(said) == 3 * 30
    wrong = [i for i, (_, status) in enumerate(said) if status == "1"]
    in_memory = (*range(62, 90, 6), *range(63, 90, 6))  # nothing is written there
    assert wrong == [i for i in range(30, 90) if i not in in_memory]
    assert job.out.count("NOT EQUAL to the inputs") == len(wrong)


MEMORY = """
    import json, re, torch, hpcdist as hd
    from hpcdist.commands import arrays, conversion

    def at(path, pattern):
        return int(re.search(pattern + r":\\s+(\\d+)", open(path).read())[1])

    def run(main, parser, line):
        main(world, parser.parse_args(line.split()))

    with hd.init(device="cpu") as world:
        gather = lambda name: run(arrays.join_main, arrays.parser("gather"), name + " -o m.h5 --window 16M --verify")
        convert = lambda line: run(conversion.main, conversion.parser(), line + " --window 16M")
        gather("small.npy")
        big, out = torch.ones(4096, 4096, dtype=torch.int64), torch.zeros(4096, 4096, dtype=torch.int64)
        steps = [lambda: gather("big.npy")]
        for dim in (0, 1):
            for x, y in ((torch.ones(64, 64), torch.zeros(64, 64)), (big.t(), out), (big, out.t())):
                steps += [lambda x=x, dim=dim: hd.staging.save("m.h5", x, dim, window=2**24)]
                steps += [lambda y=y, dim=dim: hd.staging.load("m.h5", dim=dim, out=y, window=2**24)]
        for line in ("dcp x.h5", "x.h5 y.safetensors", "y.safetensors z.safetensors --max-shard-size 20MB",
                     "z.pt z.h5"):
            steps += [lambda line=line: convert(line)]
        for step in steps:
            open("/proc/self/clear_refs", "w").write("5")  # the peak is what is resident now
            before = at("/proc/self/status", "VmHWM"), at("/proc/self/io", "rchar")
            step()
            grown = at("/proc/self/status", "VmHWM") - before[0], at("/proc/self/io", "rchar") - before[1]
            if found := world.comm.gather(grown):
                print(json.dumps(found))
        assert out.sum() == big.sum()
"""


def test_memory_stays_within_the_window(tmp_path):
    """600 MB gathered with a window of 16 MiB, 128 MiB a rank saved and loaded, and 96 MiB converted: what is resident
    beside the caller's tensors is two windows at most. A conversion reads each byte once."""
    np.save(tmp_path / "small.npy", np.arange(2_000_000))
    np.save(tmp_path / "big.npy", np.arange(75_000_000))
    state = {"a": torch.arange(2**22), "b": torch.rand(12288, 1024), "c": torch.ones(2**21, dtype=torch.float64)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save(state, tmp_path / "z.pt")
    job = finished(2, code=MEMORY, cwd=tmp_path)
    steps = [json.loads(line) for line in job.out.splitlines() if line.startswith("[[")]
    assert len(steps) == 13 + 4, job.out
    assert max(grown for step in steps for grown, _ in step) < (2 * 16 + 16) * 1024, f"KiB: {steps}"
    data = sum(x.nbytes for x in state.values())
    assert all(data < sum(count for _, count in step) < 1.15 * data for step in steps[13:]), steps
