"""The commands from files to files: in windows far smaller than the data, of any format, resumed, split and joined."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from launch import Job, commands, mpirun
from safetensors.torch import load_file, save_file

from hpcdist.staging import catalog

WHOLE = np.arange(3000 * 7, dtype=np.int32).reshape(3000, 7)


def run(np_: int, command: str, *args: object, cwd: Path | None = None) -> Job:
    return mpirun(np_, "-m", f"hpcdist.{command}", *map(str, args), cwd=cwd)


def ok(np_: int, command: str, *args: object, cwd: Path | None = None) -> dict[str, object]:
    job = run(np_, command, *args, "--json", cwd=cwd)
    assert job.status == 0, job.err
    report: dict[str, object] = json.loads(job.out)
    return report


def write(path: Path, x: np.ndarray) -> None:
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
            file.create_dataset("x", data=x, chunks=(100, 1), compression="gzip")


def read(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.asarray(np.load(path))
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True).numpy()
    if path.suffix == ".safetensors":
        return load_file(path)["data"].numpy()
    with h5py.File(path) as file:
        return np.asarray(file["data"][()])


@pytest.mark.once
@pytest.mark.parametrize(
    ("output", "dim"), [("out.npy", 0), ("out.h5", 0), ("out.pt", 1), ("out.safetensors", 0), ("out.h5", 1)]
)
def test_gather_every_format_in_a_small_window(output: str, dim: int, tmp_path: Path) -> None:
    cuts = [900, 900, 1500, 2900] if dim == 0 else [1, 1, 4, 6]
    suffixes = (".npy", ".npz", ".pt", ".safetensors", ".h5")
    for i, (part, suffix) in enumerate(zip(np.split(WHOLE, cuts, dim), suffixes, strict=True)):
        write(tmp_path / f"s{i}{suffix}", part)
    report = ok(
        2, "gather", f"{tmp_path}/s*", "--dim", dim, "-o", tmp_path / output, "--window", "4K", "--verify"
    )  # fmt: skip
    assert report["verified"] is True
    assert report["bytes_sent"] == 0
    assert np.array_equal(read(tmp_path / output), WHOLE)


@pytest.mark.parametrize("route", ["mpi", "gloo", "hdf5"], ids="over {}".format)  # pytest-mpi skips "mpi"
def test_gather_over_a_route_that_is_named(route: str, tmp_path: Path) -> None:
    for i, part in enumerate(np.split(WHOLE, [1000, 1001])):
        np.save(tmp_path / f"s{i}.npy", part)
    out = tmp_path / "out.h5"
    report = ok(3, "gather", f"{tmp_path}/s*", "-o", out, "--route", route, "--root", 1, "--window", "3K")
    assert np.array_equal(read(out), WHOLE)
    assert (report["bytes_sent"] == 0) == (route == "hdf5")


@pytest.mark.once
@pytest.mark.parametrize(("kind", "dim", "parts"), [(".npy", 0, None), (".pt", 1, 5), (".npz", 0, 7)])
def test_split(kind: str, dim: int, parts: int | None, tmp_path: Path) -> None:
    write(tmp_path / f"whole{kind}", WHOLE)
    (tmp_path / "parts").mkdir()
    out = ".h5" if kind == ".npz" else kind
    more = () if parts is None else ("--parts", parts)
    report = ok(
        2, "split", f"whole{kind}", "-o", f"parts/{{rank:04d}}{out}", "--dim", dim, "--window", "5K", "--verify", *more,
        cwd=tmp_path,
    )  # fmt: skip
    assert report["verified"] is True
    names = sorted(p.name for p in (tmp_path / "parts").iterdir())
    assert names == [f"{i:04d}{out}" for i in range(parts or 2)]
    expected = np.array_split(WHOLE, parts or 2, dim)
    for name, part in zip(names, expected, strict=True):
        assert np.array_equal(read(tmp_path / "parts" / name), part)


@pytest.mark.once
def test_split_by_the_rule_of_torch(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(10))
    ok(2, "split", "x.npy", "-o", "{rank}.npy", "--parts", 4, "--counts", "chunk", cwd=tmp_path)
    assert [np.load(tmp_path / f"{i}.npy").tolist() for i in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_concat_writes_one_file_or_a_copy_a_rank(tmp_path: Path) -> None:
    for i, part in enumerate(np.split(WHOLE, [1000])):
        np.save(tmp_path / f"s{i}.npy", part)
    concat = ("hpcdist.concat", "s?.npy", "--verify", "--json", "-o")
    for job in commands(2, (*concat, "one.h5"), (*concat, "copy-{rank}.npy", "--window", "8K"), cwd=tmp_path):
        assert job.status == 0, job.err
        assert json.loads(job.out)["verified"] is True
    for name in ("one.h5", "copy-0.npy", "copy-1.npy"):
        assert np.array_equal(read(tmp_path / name), WHOLE)
    text = run(3, "concat", "s?.npy", cwd=tmp_path)  # in memory, on every rank
    assert "shape (3000, 7) on every rank" in text.out


@pytest.mark.once
def test_bf16_through_every_format_that_has_it(tmp_path: Path) -> None:
    x = torch.arange(100).to(torch.bfloat16).view(20, 5)
    torch.save(x, tmp_path / "x.pt")
    *fine, job = commands(
        2,
        ("hpcdist.split", "x.pt", "-o", "{rank}.h5"),
        ("hpcdist.gather", "?.h5", "-o", "y.safetensors"),
        ("hpcdist.gather", "?.h5", "-o", "y.npy"),
        cwd=tmp_path,
    )
    assert [one.status for one in fine] == [0, 0], fine
    assert torch.equal(load_file(tmp_path / "y.safetensors")["data"], x)
    assert job.status == 2
    assert "a .npy file cannot hold torch.bfloat16; use one of .pt, .safetensors, .h5" in job.err


@pytest.mark.once
def test_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    """A gather dies half way; the next one writes only the rest."""
    np.save(tmp_path / "x.npy", WHOLE)
    code = """
        import os, runpy, signal, sys
        from hpcdist.staging import saving
        record = saving.Saving.record
        rows = []
        def dying(self, i, row, checksum):
            record(self, i, row, checksum)
            rows.append(row)
            if len(rows) == 4:
                self.team.comm.Barrier()
                os.kill(os.getpid(), signal.SIGKILL)
        saving.Saving.record = dying
        sys.argv = ["gather", "x.npy", "-o", "y.h5", "--window", "8K", "--resume"]
        runpy.run_module("hpcdist.gather", run_name="__main__")
    """
    job = mpirun(2, code=code, cwd=tmp_path)
    assert job.status != 0
    journal, part, x = sorted(p.name for p in tmp_path.iterdir())
    assert (journal.removesuffix(".journal"), x) == (part.removesuffix(".part"), "x.npy")
    listing = run(0, "staging", "ls", part, cwd=tmp_path)
    assert "8/21" in listing.out
    assert "INCOMPLETE" in listing.out
    refused = run(0, "staging", "verify", part, cwd=tmp_path)
    assert refused.status == 2
    assert f"{part}: incomplete: the job that wrote it ended before it was done" in refused.err
    code = code.replace("if len(rows) == 4:", "if False:").replace("runpy.run", "import atexit; runpy.run")
    code = code.replace("import atexit", "import atexit; atexit.register(lambda: sys.stdout.write(f'rows {rows}\\n'))")
    job = mpirun(3, code=code, cwd=tmp_path)
    assert job.status == 0, job.err
    again = [int(n) for rows in re.findall(r"rows \[(.*?)\]", job.out) for n in rows.split(",") if n]
    assert len(again) == 21 - 7  # at the border between two ranks, the page of both is written at the end
    assert "resumed: 7 of 21 pieces were there and are kept" in job.out
    assert np.array_equal(read(tmp_path / "y.h5"), WHOLE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npy", "y.h5"]


COMMANDS = ("gather", "concat", "split")
MISTAKES: dict[str, tuple[str, list[object], str]] = {
    "no pattern": ("split", ["x.npy", "-o", "part.npy"], "part.npy: gives parts the same name; write {rank}"),
    "bad pattern": ("split", ["x.npy", "-o", "{part}.npy"], "{part}.npy: cannot be a pattern"),
    "parts": ("split", ["x.npy", "-o", "{rank}.npy", "--parts", 0], "--parts 0: expected 1 to 1000000"),
    "too many parts": ("split", ["x.npy", "-o", "{rank}.npy", "--parts", 10**12], "--parts 1000000000000: expected 1"),
    "another field": ("split", ["x.npy", "-o", "{rank.numerator}.npy"], "cannot be a pattern (unsupported field)"),
    "a width without end": (
        "split",
        ["x.npy", "-o", "{rank:09999999999d}.npy"],
        "cannot be a pattern (unsupported field)",
    ),
    "one file for two parts": (
        "split",
        ["x.npy", "-o", "d{rank}/part.npy"],
        "d1/part.npy: is the same file as d0/part",
    ),
    "one file for two copies": ("concat", ["x.npy", "-o", "d{rank}/c.npy"], "d1/c.npy: is the same file as d0/c.npy"),
    "a copy over an input": ("concat", ["s1.npy", "-o", "s{rank}.npy"], "s1.npy: is also an input"),
    "a part over an input": ("split", ["s1.npy", "-o", "s{rank}.npy"], "s1.npy: is also an input"),
    "an input by another path": ("gather", ["x.npy", "-o", "d0/../x.npy"], "x.npy: is also an input"),
    "an input by a link": ("gather", ["x.npy", "-o", "link.npy"], "link.npy: is also an input"),
    "an input by another name": ("gather", ["x.npy", "-o", "hard.npy"], "hard.npy: is also an input"),
    "an input as a folder": ("gather", ["x.npy", "-o", "x.npy/."], "x.npy/.: is the name of a folder"),
    "a copy as a folder": ("concat", ["s1.npy", "-o", "s{rank}.npy//"], "s0.npy//: is the name of a folder"),
    "a part as a folder": ("split", ["s1.npy", "-o", "s{rank}.npy/."], "s0.npy/.: is the name of a folder"),
    "twice": ("gather", ["x.npy", "link.npy"], "link.npy: named twice, also as x.npy"),
    "a FIFO": ("gather", ["fifo.npy"], "fifo.npy: is a FIFO, expected a regular file"),
    "over a FIFO": ("gather", ["x.npy", "-o", "fifo.npy"], "fifo.npy: is a FIFO: only a regular file is replaced"),
    "a part over a FIFO": ("split", ["x.npy", "-o", "fifo{rank}.npy"], "fifo1.npy: is a FIFO: only a regular"),
    "a newline": ("gather", ["no\nfile.npy"], "no\\nfile.npy: no such file"),
    "no UTF-8": ("gather", [os.fsdecode(b"no\xff.npy")], "no\\udcff.npy: no such file"),
    "a name without end": ("gather", ["x" * 300 + ".npy"], "no such file"),
    "an output without end": ("gather", ["x.npy", "-o", "x" * 300 + ".npy"], "cannot be written: File name too long"),
    "nothing in it": ("gather", ["none.h5"], "none.h5: holds no array"),
    "more than memory": ("concat", ["large.npy"], "are available: with -o FILE, and without --all and --compare, they"),
    "more than memory on the root": ("gather", ["large.npy"], "memory on this host, and"),
    "more than memory to compare": ("gather", ["large.npy", "--compare"], "memory on this host, and"),
    "a large array cut": ("gather", ["cut.npy"], "cut.npy: cannot be read: it ends in the middle of its data"),
    "two inputs": ("split", ["[xz].npy", "-o", "{rank}.npy"], "[xz].npy: matches 2 files, expected one"),
    "dim": ("split", ["x.npy", "-o", "{rank}.npy", "--dim", 2], "--dim 2: x.npy has 2 dims"),
    "0-d": ("split", ["s.npy", "-o", "{rank}.npy"], "s.npy: is 0-d"),
    "over the input": ("split", ["0.npz", "-o", "{rank}.npz"], "unknown suffix '.npz'"),
    "an input": ("concat", ["x.npy", "-o", "{rank}/../x.npy"], "no such folder"),
    "resume": ("gather", ["x.npy", "-o", "y.npy", "--resume"], "--resume: needs -o with an .h5 file"),
    "resume and route": ("gather", ["x.npy", "-o", "y.h5", "--resume", "--route", "mpi"], "--resume: only where every"),
    "a pattern": ("gather", ["x.npy", "-o", "y{rank}.npy"], "y{rank}.npy: gather writes one file"),
    "a damaged input": ("gather", ["bad.npz", "-o", "y.npy"], "bad.npz: cannot be read"),
    "folder": ("gather", ["x.npy", "-o", "none/y.h5"], "none/y.h5: no such folder"),
    "staging": ("gather", ["x.npy", "--route", "hdf5", "--staging", "none"], "the staging folder: no such folder"),
}


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    """Each mistake in turn, in one job, which goes on: the commands are functions of the world."""
    np.save(tmp_path / "x.npy", WHOLE[:6])
    np.save(tmp_path / "z.npy", WHOLE[:6])
    np.save(tmp_path / "s.npy", np.float32(1))
    np.savez(tmp_path / "0.npz", WHOLE[:6])
    np.save(tmp_path / "s1.npy", WHOLE[:6])
    (tmp_path / "d0").mkdir()
    (tmp_path / "d1").symlink_to("d0")
    (tmp_path / "link.npy").symlink_to("x.npy")
    (tmp_path / "hard.npy").hardlink_to(tmp_path / "x.npy")
    for name in ("fifo.npy", "fifo1.npy"):
        os.mkfifo(tmp_path / name)
    h5py.File(tmp_path / "none.h5", "w").close()
    for name, size in {"large.npy": 2**42, "cut.npy": 2**20}.items():  # a file with a hole takes no space
        with (tmp_path / name).open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (2**42,)})
            file.truncate(file.tell() + size)
    np.savez_compressed(tmp_path / "bad.npz", WHOLE)
    damaged = bytearray((tmp_path / "bad.npz").read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    (tmp_path / "bad.npz").write_bytes(damaged)
    before = sorted(tmp_path.iterdir())
    code = f"""
        import hpcdist as hd
        from dataclasses import replace
        from importlib import import_module
        from hpcdist.runtime import cli
        with hd.init(device="cpu") as world:
            folder = world.staging
            for name, (what, args, _) in {MISTAKES!r}.items():
                module = import_module(f"hpcdist.commands.{{what}}")
                asked = module.parser().parse_args([str(arg) for arg in args])
                changed = replace(world.settings, staging=asked.staging or folder)
                world.settings = world.team.settings = changed
                try:
                    module.main(world, asked)
                except hd.HpcdistError as error:
                    print(f"<{{name}}: {{cli.line(error)}}>")
    """
    job = mpirun(2, code=code, cwd=tmp_path)
    assert job.status == 0, job.err
    said = re.findall(r"<(.*?): (.*?)>", job.out)
    for name, (_, _, message) in MISTAKES.items():
        lines = [text for mistake, text in said if mistake == name]
        assert len(lines) == 2, f"{name}: {job.out}"
        assert lines[0] == lines[1]
        assert message in lines[0]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.once
def test_a_wrong_option_is_one_line_and_status_2(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", WHOLE[:6])
    job = run(2, "gather", "x.npy", "-o", "y.npy", "--window", "much", cwd=tmp_path)
    ours = [line for line in job.err.splitlines() if line.startswith("hpcdist.gather: error: ")]
    assert (job.status, len(ours)) == (2, 1), job.err
    assert "expected a number of bytes such as 64M" in ours[0]


@pytest.mark.once
def test_what_the_parser_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Of every command: names that are empty, sizes that there are not."""
    wrong: list[tuple[str, list[str], str]] = [
        *((what, ["x.npy", "-o", ""], "-o/--output: expected a name, got an empty one") for what in COMMANDS),
        *((what, ["x.npy", "-o", "{rank}.npy", "--staging", ""], "--staging: expected a name") for what in COMMANDS),
        *(
            (what, ["x.npy", "-o", "{rank}.npy", "--window", "9" * 99], "a number of bytes such as")
            for what in COMMANDS
        ),
        *((what, ["x.npy", "-o", "{rank}.npy", "--window", "-1"], "a number of bytes such as") for what in COMMANDS),
        *((what, ["x.npy", "-o", "{rank}.npy", "--dim", "x\ny"], "invalid int value: 'x\\ny'") for what in COMMANDS),
        ("split", ["x.npy"], "the following arguments are required: -o/--output"),
        ("staging", [], "the following arguments are required: ls|verify"),
        ("staging", ["ls"], "the following arguments are required: FILE"),
        ("staging", ["list", "x.h5"], "invalid choice: 'list'"),
        ("jobscript", ["-o", ""], "-o/--script: expected a name, got an empty one"),
        ("jobscript", ["--nodes", "x"], "invalid int value: 'x'"),
        *(("doctor", ["--limit", v], f"--limit: expected seconds, more than 0, got '{v}'") for v in ("x", "-1", "nan")),
        ("doctor", ["--staging", ""], "--staging: expected a name, got an empty one"),
    ]
    for what, args, text in wrong:
        module = import_module(f"hpcdist.commands.{what}" if what in COMMANDS else f"hpcdist.{what}.__main__")
        with pytest.raises(SystemExit) as ended:
            module.main(args) if what == "jobscript" else module.parser().parse_args(args)
        err = capsys.readouterr().err
        assert (ended.value.code, err.count("\n")) == (2, 1), f"{what} {args}: {err}"
        assert err.startswith(f"hpcdist.{what}") and text in err, f"{what} {args}: {err}"


@pytest.mark.once
@pytest.mark.parametrize("what", [*COMMANDS, "jobscript", "doctor", "stage_env"])
def test_two_dashes_are_the_value_of_an_option(what: str) -> None:
    """Of ``--time=--``, argparse of Python 3.11 makes a list."""
    module = import_module(f"hpcdist.commands.{what}" if what in COMMANDS else f"hpcdist.{what}.__main__")
    parser = module.parser()
    required = [] if what in ("jobscript", "doctor") else ["x", "-o", "y"] if what == "split" else ["x"]
    options = [option for action in parser._actions if action.nargs is None for option in action.option_strings]
    assert len(options) > 1
    for option in options:
        given: dict[str, object] = {}
        with suppress(SystemExit):  # not a number, or not one of the choices
            given = vars(parser.parse_args([*required, f"{option}=--"]))
        assert not given or "--" in given.values() or ["--"] in given.values(), option


@pytest.mark.once
def test_a_damaged_file_is_found_and_its_piece_named(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", WHOLE)
    written, good, listed = commands(
        2,
        ("hpcdist.gather", "x.npy", "-o", "y.h5", "--window", "40K"),
        ("hpcdist.staging", "verify", "y.h5"),
        ("hpcdist.staging", "ls", "y.h5", "--json"),
        cwd=tmp_path,
    )
    assert written.status == 0, written.err
    assert (good.status, "y.h5: 5 pieces, 82.0 KiB: all as they were written" in good.out) == (0, True), good.out
    report = json.loads(listed.out)
    assert report["state"] == "complete"
    assert report["tensors"][0] | {"filters": ""} == {
        "name": "data", "shape": [3000, 7], "dtype": "int32", "bytes": 84000, "pieces": 5, "written": 5, "filters": ""
    }  # fmt: skip
    with h5py.File(tmp_path / "y.h5") as file:
        start = file["data"].id.get_offset()
    table = catalog.describe(str(tmp_path / "y.h5")).datasets["data"].pieces
    assert table is not None
    rank = table["rank"][4]
    with (tmp_path / "y.h5").open("r+b") as raw:
        raw.seek(start + WHOLE.nbytes - 2)
        raw.write(b"\xff")
    bad = run(2, "staging", "verify", "y.h5", cwd=tmp_path)
    assert bad.status == 1
    assert f"y.h5: data: piece 4 is damaged: elements [2924:3000, 0:7], written by rank {rank}" in bad.out
    assert "1 of 5 pieces are DAMAGED" in bad.out
    write(tmp_path / "foreign.h5", WHOLE)
    foreign = run(2, "staging", "verify", "foreign.h5", cwd=tmp_path)
    assert foreign.status == 2
    assert "it holds no checksums" in foreign.err


@pytest.mark.once
def test_verify_reads_in_another_way(tmp_path: Path) -> None:
    """What our own reading gets wrong is found, though it is wrong in the same way a second time: of every format,
    streamed and in memory, by all three commands."""
    for suffix in (".npy", ".npz", ".pt", ".safetensors"):
        write(tmp_path / f"x{suffix}", WHOLE)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = WHOLE
    code = """
        import json, hpcdist as hd
        from importlib import import_module
        from hpcdist.files import raw
        read_runs = raw.Raw._read_runs
        def misread(self, fetch, box, out):
            read_runs(self, fetch, box, out)
            raw.memory(out)[:1] = b"?"
        with hd.init(device="cpu") as world:
            for read in (read_runs, misread):
                raw.Raw._read_runs = read
                for suffix in (".npy", ".npz", ".pt", ".safetensors", ".h5"):
                    for what, args in (
                        ("gather", ["-o", "y.npy"]), ("gather", ["-o", "y.h5", "--route", "mpi"]), ("gather", []),
                        ("concat", ["-o", "y{rank}.h5"]), ("split", ["-o", "y{rank}.safetensors"]),
                    ):
                        module = import_module(f"hpcdist.commands.{what}")
                        asked = module.parser().parse_args([f"x{suffix}", "--verify", "--json", *args])
                        status = module.main(world, asked)
                        if world.rank == 0:
                            print(f"<{suffix} {what} {' '.join(args)}: {status}>")
    """
    job = mpirun(2, code=code, cwd=tmp_path)
    assert job.status == 0, job.err
    said = re.findall(r"<(.*): (\d)>", job.out)
    assert len(said) == 2 * 5 * 5
    assert [what for what, status in said[:25] if status != "0"] == []
    assert [what for what, status in said[25:] if status != "1"] == []


@pytest.mark.once
def test_memory_stays_within_the_window(tmp_path: Path) -> None:
    """600 MB gathered with a window of 16 MiB: the resident memory does not grow with the data."""
    small, big = _peak(tmp_path, 2_000_000), _peak(tmp_path, 75_000_000)
    grown = [b - s for b, s in zip(sorted(big), sorted(small), strict=True)]
    assert len(grown) == 2
    assert max(grown) < 40 * 1024, f"KiB more than for little data: {grown}"


def _peak(folder: Path, rows: int) -> list[int]:
    np.save(folder / "m.npy", np.arange(rows))
    code = """
        import resource, runpy, sys
        sys.argv = ["gather", "m.npy", "-o", "m.h5", "--window", "16M", "--verify"]
        try:
            runpy.run_module("hpcdist.gather", run_name="__main__")
        finally:
            print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss} ")
    """
    job = mpirun(2, code=code, cwd=folder)
    assert job.status == 0, job.err
    return [int(kib) for kib in re.findall(r"peak (\d+) ", job.out)]


@pytest.mark.once
@pytest.mark.parametrize("dim", [0, 1])
def test_save_and_load_stay_within_two_windows(dim: int, tmp_path: Path) -> None:
    """128 MiB a rank with a window of 16 MiB: what is resident beside the caller's tensors is two windows at most."""
    code = f"""
        import torch, hpcdist as hd

        def peak():
            return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

        with hd.init(device="cpu") as world:
            big, out = torch.ones(4096, 4096, dtype=torch.int64), torch.zeros(4096, 4096, dtype=torch.int64)
            for x, y in ((torch.ones(64, 64), torch.zeros(64, 64)), (big.t(), out), (big, out.t())):
                before = peak()
                hd.staging.save("m.h5", x, {dim}, window=2**24)
                saved = peak()
                hd.staging.load("m.h5", dim={dim}, out=y, window=2**24)
                print(f"peak {{saved - before}} {{peak() - saved}} ")
                assert y.sum() == x.sum()
    """
    job = mpirun(2, code=code, cwd=tmp_path)
    assert job.status == 0, job.err
    grown = [int(kib) for pair in re.findall(r"peak (\d+) (\d+) ", job.out) for kib in pair]
    assert len(grown) == 2 * 3 * 2, job.out
    assert max(grown) < (2 * 16 + 16) * 1024, f"KiB of save and load by turns: {grown}"
