"""staging.save and staging.load, compared with other methods to write shards to a disk and read them back.

mpirun -n 2 python benchmarks/staging.py --folder DIR       DIR on a disk, with space for five times the shards
benchmarks/disk.sh ext4 aged mpirun -n 2 python benchmarks/staging.py --shared --sizes 128M --layouts even
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from unittest import mock

import h5py
import harness
import report
import results
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from mpi4py import MPI
from results import (
    CONTROL,
    H5PY_ALONE,
    PLAIN_H5PY,
    POSIX,
)
from tqdm import tqdm

import hpcdist as hd

# Ways with one file of all ranks.
SHARED_FILE = (POSIX, "MPI-IO, Write_at_all", "MPI-IO, Read_at_all", PLAIN_H5PY, "h5py, independent", H5PY_ALONE)
FEWEST = 3  # rounds, for a contender that is too slow for all of them
# Columns of int64; for dim1, those of each rank: a run of 16 KiB. With 1001, shards start in the middle of a page.
COLUMNS = {"even": 1024, "ragged": 1001, "dim1": 2048}
SERIAL = None if h5py.get_config().mpi else f"h5py {h5py.__version__} was built without MPI here"


@dataclass(frozen=True)
class Case:
    """A tensor of int64 split along a dim; each value is its index in the whole, to detect misplaced data.

    Attributes:
        size: mean bytes of a shard.
        layout: key of COLUMNS; ragged: of n ranks, rank r holds (2r+1)/n of `size`.
        counts: extent of each rank's shard along `dim`.
        nbytes: bytes of each rank's shard.
        folder: folder for the files, empty or created by this case.
        base: offset of the tensor in the shared file.
    """

    size: int
    layout: str
    comm: MPI.Intracomm
    folder: Path
    dim: int
    counts: list[int]
    shape: tuple[int, int]
    nbytes: list[int]
    shard: torch.Tensor
    base: int = 0

    @property
    def path(self) -> Path:
        return self.folder / "x"

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of this rank's part in the whole."""
        first = sum(self.counts[: self.comm.rank])
        return (slice(None),) * self.dim + (slice(first, first + self.counts[self.comm.rank]),)

    @property
    def start(self) -> int:
        """Offset of this rank's shard in the file if the shards are contiguous, as along dim 0."""
        return self.base + sum(self.nbytes[: self.comm.rank])

    def own(self, ending: str) -> Path:
        """Return the path of a file of this rank alone."""
        return self.folder / f"x-{self.comm.rank}.{ending}"


@dataclass(frozen=True)
class Method:
    """A contender: its call returns the loaded tensor, or None.

    Attributes:
        back: function to load what a save has written, to check it.
        files: pattern of the files that a load reads, to bring them into the page cache.
        in_order: whether a load reads as many bytes, but contiguous ones.
        unsupported: reason why it cannot run here.
    """

    name: str
    call: Callable[[Case], torch.Tensor | None]
    back: Callable[[Case], torch.Tensor] | None = None
    files: str = ""
    in_order: bool = False
    unsupported: str | None = None

    @property
    def shared(self) -> bool:
        """Whether all ranks use one file, as with hpcdist."""
        return self.name.startswith("hpcdist") or self.name in (CONTROL, *SHARED_FILE)


def make_case(comm: MPI.Intracomm, folder: Path, size: int, layout: str) -> Case:
    """Make the tensor of one size and layout, and this rank's shard."""
    columns, n = COLUMNS[layout], comm.size
    rows = max(n, size // (columns * 8))
    if layout == "dim1":
        counts, shape = [columns] * n, (rows, columns * n)
        first = comm.rank * columns
        shard = torch.arange(rows).unsqueeze(1) * shape[1] + torch.arange(first, first + columns)
        return Case(size, layout, comm, folder, 1, counts, shape, [rows * columns * 8] * n, shard)
    counts = [rows * (2 * r + 1) // n if layout == "ragged" else rows for r in range(n)]
    first, end = (columns * edge for edge in list(accumulate(counts, initial=0))[comm.rank : comm.rank + 2])
    nbytes = [count * columns * 8 for count in counts]
    shard = torch.arange(first, end).view(-1, columns)
    return Case(size, layout, comm, folder, 0, counts, (sum(counts), columns), nbytes, shard)


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def save_posix(case: Case) -> None:
    """Write a file that is either complete or missing, with minimal effort; along dim 1, as if it were dim 0."""
    part = case.folder / ".x.part"
    if case.comm.rank == 0:
        part.touch()
    case.comm.Barrier()
    fd = os.open(part, os.O_WRONLY)
    data, done = case.shard.numpy().data.cast("B"), 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], case.start + done)
    os.fsync(fd)
    os.close(fd)
    case.comm.Barrier()
    if case.comm.rank == 0:
        os.replace(part, case.path)
        sync(case.folder)


def load_posix(case: Case) -> torch.Tensor:
    out = torch.empty_like(case.shard)
    data, done = out.numpy().data.cast("B"), 0
    fd = os.open(case.path, os.O_RDONLY)
    while done < len(data):
        got = os.preadv(fd, [data[done:]], case.start + done)
        if got == 0:
            raise EOFError(case.path)
        done += got
    os.close(fd)
    return out


def save_hpcdist(case: Case, writer: str = "auto") -> None:
    hd.staging.save(case.path, case.shard, dim=case.dim, writer=writer)


class NoDigest:
    """A substitute for checksums without cost."""

    def update(self, data: memoryview, /) -> None:
        pass

    def intdigest(self) -> int:
        return 0


def save_unchecked(case: Case) -> None:
    with mock.patch("hpcdist.formats.plain.digest", NoDigest):
        save_hpcdist(case)


def load_hpcdist(case: Case, verify: bool | None = None) -> torch.Tensor:
    return hd.staging.load(case.path, "data", dim=case.dim, counts=case.counts, verify=verify)


def view(case: Case, file: MPI.File) -> int:
    """Set the view of this rank's part of the file; return the offset of its data in the view."""
    if case.dim == 0:
        return case.start
    part = MPI.INT64_T.Create_subarray(case.shape, tuple(case.shard.shape), (0, case.index[1].start)).Commit()
    file.Set_view(case.base, MPI.INT64_T, part)
    part.Free()
    return 0


def save_mpiio(case: Case) -> None:
    file = MPI.File.Open(case.comm, str(case.path), MPI.MODE_CREATE | MPI.MODE_WRONLY)
    file.Write_at_all(view(case, file), [case.shard.numpy(), MPI.INT64_T])
    file.Sync()
    file.Close()


def load_mpiio(case: Case) -> torch.Tensor:
    out = torch.empty_like(case.shard)
    file = MPI.File.Open(case.comm, str(case.path), MPI.MODE_RDONLY)
    file.Read_at_all(view(case, file), [out.numpy(), MPI.INT64_T])
    file.Close()
    return out


def save_h5py(case: Case, collective: bool) -> None:
    """As in h5py's documentation."""
    with h5py.File(case.path, "w", driver="mpio", comm=case.comm) as file:
        dset = file.create_dataset("data", case.shape, "i8")
        with dset.collective if collective else nullcontext():
            dset[case.index] = case.shard.numpy()
    sync(case.path)


def load_h5py(case: Case) -> torch.Tensor:
    with h5py.File(case.path, "r", driver="mpio", comm=case.comm) as file:
        dset = file["data"]
        with dset.collective:
            return torch.from_numpy(dset[case.index])


def load_h5py_alone(case: Case) -> torch.Tensor:
    with h5py.File(case.path, "r") as file:
        return torch.from_numpy(file["data"][case.index])


def save_torch(case: Case) -> None:
    torch.save(case.shard, case.own("pt"))
    sync(case.own("pt"))


def load_torch(case: Case) -> torch.Tensor:
    return torch.load(case.own("pt"))


def save_safetensors(case: Case) -> None:
    safetensors.torch.save_file({"x": case.shard}, case.own("safetensors"))
    sync(case.own("safetensors"))


def load_safetensors(case: Case) -> torch.Tensor:
    """Load, and clone: its tensors are lazy views of the mapped file, while the others return new memory."""
    return safetensors.torch.load_file(case.own("safetensors"))["x"].clone()


def save_dcp(case: Case) -> None:
    """Save one key per rank, which allows shards of any shape; files are synced by default."""
    dcp.save({f"x{case.comm.rank}": case.shard}, checkpoint_id=case.folder / "x-dcp")


def load_dcp(case: Case) -> torch.Tensor:
    state = {f"x{case.comm.rank}": torch.empty_like(case.shard)}
    dcp.load(state, checkpoint_id=case.folder / "x-dcp")
    return state[f"x{case.comm.rank}"]


UNVERIFIED_LOAD = partial(load_hpcdist, verify=False)
SAVES = [
    Method(POSIX, save_posix, load_posix),
    Method(CONTROL, save_posix, load_posix),
    Method("hpcdist, writer mpio", partial(save_hpcdist, writer="mpio"), load_hpcdist, unsupported=SERIAL),
    Method("hpcdist, writer posix", partial(save_hpcdist, writer="posix"), load_hpcdist),
    Method("hpcdist, checksums switched off", save_unchecked, UNVERIFIED_LOAD),
    Method("MPI-IO, Write_at_all", save_mpiio, load_mpiio),
    Method(PLAIN_H5PY, partial(save_h5py, collective=True), load_h5py_alone, unsupported=SERIAL),
    Method("h5py, independent", partial(save_h5py, collective=False), load_h5py_alone, unsupported=SERIAL),
    Method("torch.save, a file a rank", save_torch, load_torch),
    Method("torch DCP", save_dcp, load_dcp),
    Method("safetensors, a file a rank", save_safetensors, load_safetensors),
]
LOADS = [
    Method(POSIX, load_posix, files="x", in_order=True),
    Method(CONTROL, load_posix, files="x", in_order=True),
    Method("hpcdist", load_hpcdist, files="x"),
    Method("hpcdist, verify=False", UNVERIFIED_LOAD, files="x"),
    Method("MPI-IO, Read_at_all", load_mpiio, files="x"),
    Method(PLAIN_H5PY, load_h5py, files="x", unsupported=SERIAL),
    Method(H5PY_ALONE, load_h5py_alone, files="x"),
    Method("torch.load, a file a rank", load_torch, files="x-*.pt"),
    Method("torch DCP", load_dcp, files="x-dcp/*"),
    Method("safetensors, a file a rank, copied", load_safetensors, files="x-*.safetensors"),
]


def clear(case: Case) -> None:
    """Remove all files, and sync the folder. Collective."""
    if case.comm.rank == 0:
        shutil.rmtree(case.folder, ignore_errors=True)
        case.folder.mkdir()
        sync(case.folder)
        sync(case.folder.parent)
    case.comm.Barrier()


def page_in(case: Case, pattern: str) -> None:
    """Read files into the page cache, each rank a part, so that no contender pays for pages that the kernel dropped."""
    buffer = bytearray(2**22)
    for path in sorted(case.folder.glob(pattern)):
        with path.open("rb", buffering=0) as file:
            share = -(-path.stat().st_size // case.comm.size)
            file.seek(case.comm.rank * share)
            for _ in range(-(-share // len(buffer))):
                file.readinto(buffer)


def sample(case: Case, method: Method) -> tuple[float, torch.Tensor | None]:
    """Return (seconds of one call on the slowest rank, its result). Collective."""
    if method.files:
        page_in(case, method.files)
    else:
        clear(case)
    case.comm.Barrier()
    start = time.perf_counter()
    result = method.call(case)
    mine = time.perf_counter() - start
    return float(case.comm.allreduce(mine, op=MPI.MAX)), result


def check(case: Case, method: Method) -> float:
    """Call a method once, exit if the data are wrong; return the seconds per round. Collective."""
    begin = time.monotonic()
    _, result = sample(case, method)
    cost = case.comm.allreduce(time.monotonic() - begin, op=MPI.MAX)
    got = method.back(case) if method.back else result
    want, first = case.shard, case.start - case.base
    if method.in_order:
        want = torch.arange(first // 8, first // 8 + want.numel()).view_as(want)
    wrong = [rank for rank, ok in enumerate(case.comm.allgather(got is not None and torch.equal(got, want))) if not ok]
    if wrong:
        raise SystemExit(f"{method.name!r} gave wrong data on ranks {wrong} ({case.size} bytes a rank, {case.layout})")
    return float(cost)


def measure(case: Case, methods: Sequence[Method], rounds: int, seconds: float) -> list[results.Timing]:
    """Check all contenders, then time them in turn; slow ones in fewer rounds, if necessary. Collective."""
    until = time.monotonic() + seconds
    costs = {method.name: check(case, method) for method in methods if not method.unsupported}
    share = case.comm.bcast(until - time.monotonic()) / len(costs)
    taken = {name: min(rounds, max(FEWEST, int(share / cost))) for name, cost in costs.items()}
    taken[POSIX] = total = max(taken.values())
    timings = [results.Timing(method.name, 1, [None] * total, method.unsupported) for method in methods]
    turns = {name: {i * total // n for i in range(n)} for name, n in taken.items()}
    for round_ in range(total):
        for method, timing in random.Random(round_).sample(list(zip(methods, timings, strict=True)), len(methods)):
            if round_ in turns.get(method.name, ()):
                timing.samples[round_] = float(f"{sample(case, method)[0]:.4g}")
    return timings


def measure_loads(case: Case, methods: Sequence[Method], rounds: int, seconds: float) -> list[results.Timing]:
    """Measure loads, of hpcdist's file, which most of them read, or of their own. Collective."""
    clear(case)
    for save in (save_hpcdist, save_torch, save_dcp, save_safetensors):
        save(case)
    case.comm.Barrier()
    with h5py.File(case.path, "r") as file:
        base = file["data"].id.get_offset()
    return measure(replace(case, base=base), methods, rounds, seconds)


def run(asked: argparse.Namespace, world: hd.World, folder: Path) -> None:
    """Time every layout and size, print on rank 0, write JSON."""
    comm, end = world.comm, time.monotonic() + asked.seconds
    cpus = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cpus // comm.size))
    record = harness.new_record("staging", comm.size, cpus)
    kind = "without MPI" if SERIAL else f"HDF5 {h5py.version.hdf5_version} with MPI"
    record.versions |= {"h5py": f"{h5py.__version__} ({kind})", "safetensors": safetensors.__version__}
    record.versions[results.WRITER] = hd.staging.writer()[0]
    root = comm.rank == 0
    steps = list(product(asked.layouts, asked.sizes, ("save", "load")))
    weights = [size for _, size, _ in steps]
    for done, (layout, size, what) in enumerate(tqdm(steps, "staging", disable=None if root else True)):
        case = make_case(comm, folder / "files", size, layout)
        seconds = comm.bcast(max(0, end - time.monotonic()) * size / sum(weights[done:]))
        rounds = (asked.rounds, seconds)
        methods = [m for m in (LOADS if what == "load" else SAVES) if not asked.shared or m.shared]
        timings = (measure_loads if what == "load" else measure)(case, methods, *rounds)
        record.cases.append(results.Case(size, layout, case.nbytes, timings, what))
        if root:
            tqdm.write(report.case_table(record, record.cases[-1]) + "\n")
        if root and asked.json:  # keeps the measurements if the run is interrupted
            results.save(record, asked.json)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=harness.sizes, default="64M", metavar="LIST", help="bytes per rank (%(default)s)"
    )
    harness.choice(parser, "--layouts", COLUMNS)
    parser.add_argument("--rounds", type=harness.rounds, default=5, help="samples per contender (%(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=900,
        help=f"target duration of the run: slow contenders get fewer rounds, at least {FEWEST} (%(default)g)",
    )
    parser.add_argument(
        "--folder", type=Path, default=tempfile.gettempdir(), help="folder on the disk to measure (%(default)s)"
    )
    parser.add_argument("--shared", action="store_true", help="only contenders with one file of all ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all samples; in a folder: MPI-npN-staging")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    with hd.init(device="cpu") as world, harness.shared_folder(world.comm, asked.folder, "staging") as folder:
        run(asked, world, folder)


if __name__ == "__main__":
    main()
