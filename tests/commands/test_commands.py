"""The commands as a user starts them: what they print, write and refuse, on any number of ranks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from launch import Job, commands, mpirun
from safetensors.torch import load_file, save_file

from hpcdist import __version__


def gather(np_: int, *args: object, cwd: Path | None = None) -> Job:
    return mpirun(np_, "-m", "hpcdist.gather", *map(str, args), cwd=cwd)


def gathers(np_: int, *lines: Sequence[object], cwd: Path | None = None) -> list[Job]:
    """Several gathers, one after the other in one job."""
    return commands(np_, *(("hpcdist.gather", *line) for line in lines), cwd=cwd)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Five ragged shards of one 2-d array, in files of four kinds; the second one has no rows."""
    whole = np.arange(44, dtype=np.int32).reshape(11, 4)
    parts = np.split(whole, [3, 3, 4, 9])
    folder = tmp_path / "shards"
    folder.mkdir()
    np.save(folder / "s0.npy", parts[0])
    np.savez(folder / "s1.npz", parts[1])
    torch.save(torch.from_numpy(parts[2]), folder / "s2.pt")
    save_file({"x": torch.from_numpy(parts[3])}, folder / "s3.safetensors")
    with h5py.File(folder / "s4.h5", "w") as file:
        file["deep/x"] = parts[4]
    np.save(tmp_path / "whole.npy", whole)
    return folder


@pytest.mark.once
@pytest.mark.parametrize("np_", [0, 6])
def test_default_input_is_the_standard_library(np_: int) -> None:
    """The hash is that of the files read here, one after the other."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(str(p) for p in root.rglob("*.py") if "site-packages" not in p.parts)
    digest = hashlib.sha256(b"".join(Path(p).read_bytes() for p in paths)).hexdigest()
    job = gather(np_)
    assert job.status == 0, job.err
    assert f"sha256 {digest}: equal to the inputs read on one process" in job.out
    assert f"gather: {len(paths)} source files" in job.out
    assert job.out.count("ranks:") == 1  # rank 0 alone prints


@pytest.mark.once
@pytest.mark.parametrize(
    ("np_", "output"), [(0, "out.h5"), (2, "out.npy"), (2, "out.h5"), (3, "out.pt"), (6, "out.safetensors")]
)
def test_files_of_any_kind_to_a_file_of_any_kind(np_: int, output: str, shards: Path, tmp_path: Path) -> None:
    out = tmp_path / output
    job = gather(np_, f"{shards}/*", "-o", out, "--verify", "--json", "--root", max(np_ - 1, 0))
    assert job.status == 0, job.err
    report = json.loads(job.out)
    assert report["verified"] is True
    assert (report["shape"], report["dtype"], report["files"], report["ranks"]) == ([11, 4], "int32", 5, max(np_, 1))
    if output.endswith(".npy"):
        got = np.load(out)
    elif output.endswith(".pt"):
        got = torch.load(out).numpy()
    elif output.endswith(".safetensors"):
        got = load_file(out)["data"].numpy()
    else:
        with h5py.File(out) as file:
            got = file["data"][()]
    assert got.dtype == np.int32
    assert np.array_equal(got, np.load(tmp_path / "whole.npy"))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([output, "shards", "whole.npy"])


@pytest.mark.once
def test_inputs_keep_their_order(tmp_path: Path) -> None:
    """As given; those of a pattern as one counts, s2 before s10. The report says so."""
    for i in range(12):
        np.save(tmp_path / f"s{i}.npy", np.full(2, i))
    named = ("s7.npy", "s1?.npy", "s[0-6].npy", "-o", "y.npy", "--json", "--verify")
    job, shown = gathers(2, named, ("s?.npy", "s1?.npy"), cwd=tmp_path)
    order = [7, 10, 11, 0, 1, 2, 3, 4, 5, 6]
    assert job.status == 0, job.err
    assert json.loads(job.out)["inputs"] == [f"s{i}.npy" for i in order]
    assert np.load(tmp_path / "y.npy").tolist() == [i for i in order for _ in range(2)]
    assert "order: s0.npy, s1.npy, s2.npy, s3.npy, ..., s11.npy" in shown.out, shown.err


@pytest.mark.once
def test_along_another_dim_on_all_ranks_over_every_route(tmp_path: Path) -> None:
    whole = torch.arange(60.0).view(3, 10, 2)
    for i, part in enumerate(whole.split([4, 0, 1, 5], dim=1)):
        torch.save(part.clone(), tmp_path / f"{i}.pt")
    routes = ("mpi", "gloo", "hdf5", "auto")
    asked = [("?.pt", "--dim", -2, "--all", "--route", route, "-o", f"{route}.npy", "--verify") for route in routes]
    for route, job in zip(routes, gathers(3, *asked, cwd=tmp_path), strict=True):
        assert job.status == 0, job.err
        assert "equal to the inputs" in job.out
        assert "shape (3, 10, 2) on every rank" in job.out
        assert np.array_equal(np.load(tmp_path / f"{route}.npy"), whole.numpy())


def test_compare_runs_every_route_on_the_same_data(shards: Path) -> None:
    job, text = gathers(2, (f"{shards}/*", "--compare", "--json"), (f"{shards}/*", "--compare"))
    assert job.status == 0, job.err
    report = json.loads(job.out)
    rows = {row["route"]: row for row in report["routes"]}
    assert set(rows) == {"nccl", "gloo", "mpi", "hdf5"}
    for route in ("gloo", "mpi", "hdf5"):
        assert rows[route]["same_result"] is True
        assert rows[route]["seconds"] > 0
        assert rows[route]["ratio_to_best"] >= 1
    assert min(rows[route]["ratio_to_best"] for route in ("gloo", "mpi", "hdf5")) == 1
    if not torch.cuda.is_available():
        assert "needs a GPU of its own" in rows["nccl"]["refused"]
    assert report["bytes_sent"] == 7 * 4 * 4  # the last two files, rows 4 to 10, go from rank 1 to rank 0
    assert "time (ms)" in text.out
    assert "ratio to best" in text.out


@pytest.mark.once
def test_scalars_are_stacked_and_nothing_at_all_is_gathered(tmp_path: Path) -> None:
    for i in range(3):
        np.save(tmp_path / f"s{i}.npy", np.float32(i))
        np.save(tmp_path / f"e{i}.npy", np.empty((0, 3)))
    jobs = gathers(2, *((f"{kind}*.npy", "-o", f"{kind}.npy", "--verify") for kind in "se"), cwd=tmp_path)
    assert [job.status for job in jobs] == [0, 0]
    assert np.load(tmp_path / "s.npy").tolist() == [0, 1, 2]
    assert np.load(tmp_path / "e.npy").shape == (0, 3)


NAMES = ((b"out", b"h5"), (b"out", b"npy"), (b"no", b"npy"))


@pytest.mark.once
@pytest.mark.parametrize("env", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}], ids=["", "C"])
def test_names_that_no_terminal_can_print(env: dict[str, str], tmp_path: Path) -> None:
    """Bytes that are no UTF-8, letters that ASCII lacks, a newline: read, written and printed, in one line each."""
    np.save(tmp_path / os.fsdecode(b"a\xff.npy"), np.arange(4))
    np.save(tmp_path / "b\né.npy", np.arange(4, 6))
    h5, npy, none = (os.fsdecode(name + b"\xff\n\xc3\xa9." + kind) for name, kind in NAMES)
    gathering = ("hpcdist.gather", "[ab]*.npy", "--verify", "-o")
    lines = [
        *((*gathering, h5), (*gathering, npy, "--json"), ("hpcdist.gather", none)),
        *(("hpcdist.staging", what, h5) for what in ("ls", "verify")),
    ]
    first, written, job, *both = commands(2, *lines, cwd=tmp_path, env=env)
    assert (first.status, written.status) == (0, 0), (first.err, written.err)
    assert r"written: out\udcff\n" in first.out
    assert "equal to the inputs" in first.out.splitlines()[-1]
    assert os.fsencode(json.loads(written.out)["output"]) == os.fsencode(npy)
    assert np.load(tmp_path / npy).tolist() == [0, 1, 2, 3, 4, 5]
    assert [one.status for one in both] == [0, 0], both
    assert r"out\udcff\n" in both[1].out
    assert both[1].out.count("\n") == 1
    ours = [line for line in job.err.splitlines() if line.startswith("hpcdist.gather: error: ")]
    assert job.status == 2
    assert len(ours) == 1 and r"no\udcff\n" in ours[0] and "no such file" in ours[0], job.err


GOOD = ["0.npy", "1.npy", "2.npy"]
MISTAKES: dict[str, tuple[list[object], str]] = {  # the bad file is met by the last rank
    "no file": ([*GOOD, "none.npy"], "none.npy: no such file"),
    "no match": (["none*.npy"], "none*.npy: no such file, and no file matches"),
    "damaged": ([*GOOD, "3-junk.npy"], "3-junk.npy: cannot be read"),
    "dtype": ([*GOOD, "3-float32.npy"], "3-float32.npy: dtype torch.float32, but 0.npy has torch.float64"),
    "extent": ([*GOOD, "3-wide.npy"], "3-wide.npy: shape (2, 4) does not fit (2, 3) of 0.npy along dim 0"),
    "dims": ([*GOOD, "3-flat.npy"], "3-flat.npy: shape (3,) does not fit (2, 3)"),
    "dim": ([*GOOD, "--dim", 2], "--dim 2: 0.npy has 2 dims, expected -2 to 1"),
    "root": ([*GOOD, "--root", 3], "--root 3: expected 0 to 1 with 2 ranks"),
    "route": ([*GOOD, "--route", "pigeon"], "invalid choice: 'pigeon'"),
    "root and all": ([*GOOD, "--root", 0, "--all"], "not allowed with argument"),
    "suffix": ([*GOOD, "-o", "out.txt"], "unknown suffix '.txt'"),
    "folder": ([*GOOD, "-o", "none/out.npy"], "none/out.npy: no such folder"),
    "an input": ([*GOOD, "-o", "1.npy"], "1.npy: is also an input, which it would replace"),
    "option": ([*GOOD, "--nonsense"], "unrecognized arguments: --nonsense"),
    "nothing to write": (["-o", "out.npy"], "out.npy: no INPUT is given, and without one nothing is written"),
    "twice": ([*GOOD, "0.npy"], "0.npy: named twice"),
}


@pytest.mark.once
def test_bad_input_is_one_clear_line_and_status_2(tmp_path: Path) -> None:
    """Each mistake in turn, in one job; that a job ends with the status, others see."""
    for name in GOOD:
        np.save(tmp_path / name, np.ones((2, 3)))
    np.save(tmp_path / "3-float32.npy", np.ones((2, 3), np.float32))
    np.save(tmp_path / "3-wide.npy", np.ones((2, 4)))
    np.save(tmp_path / "3-flat.npy", np.ones(3))
    (tmp_path / "3-junk.npy").write_bytes(b"junk")
    before = sorted(tmp_path.iterdir())
    jobs = gathers(2, *(args for args, _ in MISTAKES.values()), cwd=tmp_path)
    for (mistake, (_, message)), job in zip(MISTAKES.items(), jobs, strict=True):
        assert (job.status, job.out) == (2, ""), f"{mistake}: {job}"
        assert job.err.startswith("hpcdist.gather: error: ") and job.err.count("\n") == 1, f"{mistake}: {job}"
        assert message in job.err, f"{mistake}: {job}"
        code = re.search(r" \[(HD\d{3})\] \(see python -m hpcdist\.explain (HD\d{3})\)\n", job.err)
        assert code[1] == code[2] if code else job.err.endswith(" (see --help)\n"), f"{mistake}: {job}"
    assert sorted(tmp_path.iterdir()) == before


def test_a_route_that_cannot_run_here_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        return
    np.save(tmp_path / "x.npy", np.ones(3))
    asked = ("--route", "nccl", "x.npy")
    for job in (
        gather(2, *asked, cwd=tmp_path),
        *gathers(2, (*asked, "-o", "o.h5"), (*asked, "-o", "o.npy"), cwd=tmp_path),
    ):
        assert job.status == 2, job.err
        ours = "hpcdist.gather: error: route nccl needs a GPU of its own for each rank and a torch with NCCL; use route"
        assert [line for line in job.err.splitlines() if line.startswith(ours)] == [
            f"{ours} mpi or auto [HD207] (see python -m hpcdist.explain HD207)"
        ]
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


@pytest.mark.parametrize(
    ("output", "route"),
    [
        ("out.h5", "auto"),
        pytest.param("out.npy", "auto", marks=pytest.mark.once),
        pytest.param("out.pt", "mpi", marks=pytest.mark.once),
    ],
)
def test_no_space_half_way_leaves_nothing_behind(output: str, route: str, tmp_path: Path) -> None:
    """A write fails, and all ranks end with status 2."""
    np.save(tmp_path / "x.npy", np.arange(3_000_000))
    code = f"""
        import errno, os, runpy, sys
        pwrite, calls = os.pwrite, []
        def failing(fd, data, offset):
            calls.append(offset)
            if len(calls) > 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return pwrite(fd, data, offset)
        os.pwrite = failing
        from hpcdist.staging import drivers
        drivers.missing = lambda name: "made up"  # HDF5's own writes cannot be made to fail here
        sys.argv = ["gather", {str(tmp_path / "x.npy")!r}, "-o", {str(tmp_path / output)!r}, "--window", "1M"]
        sys.argv += ["--route", {route!r}]
        runpy.run_module("hpcdist.gather", run_name="__main__")
    """
    job = mpirun(2, code=code)
    assert job.status == 2, job.err
    assert f"{output}: writing failed: No space left on device" in job.err
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


@pytest.mark.once
def test_help_and_the_list_of_commands_are_printed_once() -> None:
    told, job = commands(3, ("hpcdist.gather", "--help"), ("hpcdist",))
    assert told.status == 0
    assert told.out.count("usage: hpcdist.gather") == 1
    assert job.status == 0, job.err
    assert job.out.count("python -m hpcdist.gather") == 1
    for line in (f"hpcdist  {' ' * 4}{__version__}", "MPI ", "HDF5 ", "ranks        3 on 1 node"):
        assert line in job.out


@pytest.mark.once
@pytest.mark.parametrize(("all_", "output"), [("", "out.npy"), ("", "out.h5"), ("--all", "out.npy")])
def test_the_result_that_differs_is_found(all_: str, output: str, tmp_path: Path) -> None:
    """--verify can fail: what is written is not what was read."""
    np.save(tmp_path / "x.npy", np.arange(10))
    code = f"""
        import runpy, sys
        from hpcdist.commands import outputs
        put = outputs.Output.put
        outputs.Output.put = lambda self, row, piece: put(self, row, piece.flip(0))
        sys.argv = ["gather", {str(tmp_path / "x.npy")!r}, "-o", {str(tmp_path / output)!r}, "--verify"]
        sys.argv += [{all_!r}] if {all_!r} else []
        runpy.run_module("hpcdist.gather", run_name="__main__")
    """
    job = mpirun(2, code=code)
    assert job.status == 1, job.err
    assert "NOT EQUAL to the inputs read on one process" in job.out
