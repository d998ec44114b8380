"""The contenders of benchmarks/staging.py: the case, hpcdist's save and load, and common hand-written equivalents."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from unittest import mock

import h5py
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from mpi4py import MPI
from report import SHARED_FILE
from results import (
    CONTROL,
    H5PY_ALONE,
    HPCDIST,
    HPCDIST_MPIO,
    HPCDIST_POSIX,
    PLAIN_H5PY,
    POSIX,
    SAFETENSORS,
    UNCHECKED,
    UNVERIFIED,
)

import hpcdist as hd

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
    with mock.patch("hpcdist.formats.hdf5.digest", NoDigest):
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
    Method(HPCDIST_MPIO, partial(save_hpcdist, writer="mpio"), load_hpcdist, unsupported=SERIAL),
    Method(HPCDIST_POSIX, partial(save_hpcdist, writer="posix"), load_hpcdist),
    Method(UNCHECKED, save_unchecked, UNVERIFIED_LOAD),
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
    Method(HPCDIST, load_hpcdist, files="x"),
    Method(UNVERIFIED, UNVERIFIED_LOAD, files="x"),
    Method("MPI-IO, Read_at_all", load_mpiio, files="x"),
    Method(PLAIN_H5PY, load_h5py, files="x", unsupported=SERIAL),
    Method(H5PY_ALONE, load_h5py_alone, files="x"),
    Method("torch.load, a file a rank", load_torch, files="x-*.pt"),
    Method("torch DCP", load_dcp, files="x-dcp/*"),
    Method(SAFETENSORS, load_safetensors, files="x-*.safetensors"),
]
