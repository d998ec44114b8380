"""What benchmarks/staging.py times: the case, hpcdist's save and load, and the ways people write them by hand."""

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
from results import CONTROL, HPCDIST, HPCDIST_MPIO, HPCDIST_POSIX, PLAIN_H5PY, POSIX, UNCHECKED, UNVERIFIED

import hpcdist as hd

# Columns of int64; of dim1, those of each rank: a run of 16 KiB. 1001 lets shards begin in the middle of a page.
COLUMNS = {"even": 1024, "ragged": 1001, "dim1": 2048}
SERIAL = None if h5py.get_config().mpi else f"h5py {h5py.__version__} was built without MPI here"


@dataclass(frozen=True)
class Case:
    """A tensor of int64 split along a dim; each value is its index in the whole, so that a wrong place is seen.

    Attributes:
        size: bytes of a shard, in the mean.
        layout: a key of COLUMNS; ragged: of n ranks, rank r holds (2r+1)/n of `size`.
        counts: the extent of each rank's shard along `dim`.
        nbytes: of each rank's shard.
        folder: for the files, empty or made by this case.
        base: the byte of the shared file at which the tensor begins.
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
    def place(self) -> tuple[slice, ...]:
        """This rank's part, as an index of the whole."""
        first = sum(self.counts[: self.comm.rank])
        return (slice(None),) * self.dim + (slice(first, first + self.counts[self.comm.rank]),)

    @property
    def start(self) -> int:
        """The byte at which this rank's shard begins if the shards lie one after the other, as along dim 0."""
        return self.base + sum(self.nbytes[: self.comm.rank])

    def own(self, ending: str) -> Path:
        """A file of this rank alone."""
        return self.folder / f"x-{self.comm.rank}.{ending}"


@dataclass(frozen=True)
class Way:
    """A contender: its call returns what it has loaded, or None.

    Attributes:
        back: of a save, how to read what it has written, to check it.
        files: of a load, the pattern of what it reads, to have it in the page cache.
        in_order: of a load, it gets as many bytes, but those that lie one after the other.
        lacks: why it cannot run here.
    """

    name: str
    call: Callable[[Case], torch.Tensor | None]
    back: Callable[[Case], torch.Tensor] | None = None
    files: str = ""
    in_order: bool = False
    lacks: str | None = None


def make_case(comm: MPI.Intracomm, folder: Path, size: int, layout: str) -> Case:
    """The tensor of one size and layout, and this rank's shard."""
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
    """Bring a file, or the entries of a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def save_posix(case: Case) -> None:
    """The least that can be done for a file that is complete or not there; along dim 1, as if it were dim 0."""
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
    """In the place of a checksum: costs nothing."""

    def update(self, data: memoryview, /) -> None:
        pass

    def intdigest(self) -> int:
        return 0


def save_unchecked(case: Case) -> None:
    with mock.patch("hpcdist.files.h5.digest", NoDigest):
        save_hpcdist(case)


def load_hpcdist(case: Case, verify: bool | None = None) -> torch.Tensor:
    return hd.staging.load(case.path, "data", dim=case.dim, counts=case.counts, verify=verify)


def view(case: Case, file: MPI.File) -> int:
    """Let MPI-IO see this rank's part of the file; where in that its data begin."""
    if case.dim == 0:
        return case.start
    part = MPI.INT64_T.Create_subarray(case.shape, tuple(case.shard.shape), (0, case.place[1].start)).Commit()
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
            dset[case.place] = case.shard.numpy()
    sync(case.path)


def load_h5py(case: Case) -> torch.Tensor:
    with h5py.File(case.path, "r", driver="mpio", comm=case.comm) as file:
        dset = file["data"]
        with dset.collective:
            return torch.from_numpy(dset[case.place])


def load_h5py_alone(case: Case) -> torch.Tensor:
    with h5py.File(case.path, "r") as file:
        return torch.from_numpy(file["data"][case.place])


def save_torch(case: Case) -> None:
    torch.save(case.shard, case.own("pt"))
    sync(case.own("pt"))


def load_torch(case: Case) -> torch.Tensor:
    return torch.load(case.own("pt"))


def save_safetensors(case: Case) -> None:
    safetensors.torch.save_file({"x": case.shard}, case.own("safetensors"))
    sync(case.own("safetensors"))


def load_safetensors(case: Case) -> torch.Tensor:
    """Its tensors are views of the mapped file, of which nothing has been read yet: the others give new memory."""
    return safetensors.torch.load_file(case.own("safetensors"))["x"].clone()


def save_dcp(case: Case) -> None:
    """A key for each rank, which suits shards of any shape; its files are synced unless one says otherwise."""
    dcp.save({f"x{case.comm.rank}": case.shard}, checkpoint_id=case.folder / "x-dcp")


def load_dcp(case: Case) -> torch.Tensor:
    state = {f"x{case.comm.rank}": torch.empty_like(case.shard)}
    dcp.load(state, checkpoint_id=case.folder / "x-dcp")
    return state[f"x{case.comm.rank}"]


UNVERIFIED_LOAD = partial(load_hpcdist, verify=False)
SAVES = [
    Way(POSIX, save_posix, load_posix),
    Way(CONTROL, save_posix, load_posix),
    Way(HPCDIST_MPIO, partial(save_hpcdist, writer="mpio"), load_hpcdist, lacks=SERIAL),
    Way(HPCDIST_POSIX, partial(save_hpcdist, writer="posix"), load_hpcdist),
    Way(UNCHECKED, save_unchecked, UNVERIFIED_LOAD),
    Way("MPI-IO, Write_at_all", save_mpiio, load_mpiio),
    Way(PLAIN_H5PY, partial(save_h5py, collective=True), load_h5py_alone, lacks=SERIAL),
    Way("h5py, independent", partial(save_h5py, collective=False), load_h5py_alone, lacks=SERIAL),
    Way("torch.save, a file a rank", save_torch, load_torch),
    Way("torch DCP", save_dcp, load_dcp),
    Way("safetensors, a file a rank", save_safetensors, load_safetensors),
]
LOADS = [
    Way(POSIX, load_posix, files="x", in_order=True),
    Way(CONTROL, load_posix, files="x", in_order=True),
    Way(HPCDIST, load_hpcdist, files="x"),
    Way(UNVERIFIED, UNVERIFIED_LOAD, files="x"),
    Way("MPI-IO, Read_at_all", load_mpiio, files="x"),
    Way("h5py, collective", load_h5py, files="x", lacks=SERIAL),
    Way("h5py, each rank on its own", load_h5py_alone, files="x"),
    Way("torch.load, a file a rank", load_torch, files="x-*.pt"),
    Way("torch DCP", load_dcp, files="x-dcp/*"),
    Way("safetensors, a file a rank, copied", load_safetensors, files="x-*.safetensors"),
]
