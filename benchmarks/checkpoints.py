"""Checkpoints of a sharded model and its optimizer: torch's own (DCP) beside hpcdist's, in one run.

mpirun -n 2 python benchmarks/checkpoints.py --folder DIR       DIR on a disk, with space for eight times the state

The state is one of FSDP2: DTensors of float32 that are cut along dim 0, parameters and two moments of Adam for each.
`--sizes` is the bytes that a rank holds. Every save ends with its data on the disk. Three parts: save; load by the
ranks that have saved; load of what one rank has saved.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Step
from mpi4py import MPI
from results import (
    ELSEWHERE,
    LOAD,
    SAVE,
)
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import hpcdist as hd
from hpcdist.staging.dcp import HDF5Reader, HDF5Writer
from hpcdist.tools.timing import Contender

LAYERS, COLUMNS = 8, 1024
State = dict[str, Tensor]


@dataclass
class Case(harness.Data):
    """The state on this rank: each value is its index in the whole tensor, plus the number of the tensor.

    Attributes:
        state: what is saved.
        loaded: memory for what is loaded, of the same shapes.
        group: gloo's, by which DCP plans.
    """

    size: int
    what: str
    comm: MPI.Intracomm
    folder: Path
    group: dist.ProcessGroup
    state: State
    loaded: State
    skew: str = "even"

    @property
    def nbytes(self) -> list[int]:
        return [sum(_local(x).nbytes for x in self.state.values())] * self.comm.size

    def path(self, name: str) -> Path:
        return self.folder / name

    def reset(self) -> None:
        for x in self.loaded.values():
            _local(x).fill_(-1)

    def correct(self, result: Mapping[str, Tensor] | None) -> bool:
        """Compare what was loaded; what was saved is loaded first, by another way than it was written."""
        found = self.loaded if result is None else result
        return all(torch.equal(_local(found[name]), _local(x)) for name, x in self.state.items())

    def intact(self) -> bool:
        return all(bool((_local(x).view(-1)[:3].diff() == 1).all()) for x in self.state.values())


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def make_case(comm: MPI.Intracomm, what: str, size: int, folder: Path, group: dist.ProcessGroup) -> Case:
    """Make the state on this rank, and the files that loads read."""
    mesh = init_device_mesh("cpu", (comm.size,))
    rows = max(1, size // (3 * LAYERS * COLUMNS * 4))
    names = [f"{kind}.layers.{i}.weight" for kind in ("model", "exp_avg", "exp_avg_sq") for i in range(LAYERS)]
    state: State = {name: _sharded(mesh, comm, rows, number) for number, name in enumerate(names)}
    loaded: State = {name: DTensor.from_local(torch.empty(rows, COLUMNS), mesh, [Shard(0)]) for name in names}
    case = Case(size, what, comm, folder, group, state, loaded)
    if comm.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    comm.Barrier()
    if what == LOAD:
        save_folder(case)
        save_h5(case)
    elif what == ELSEWHERE:
        if comm.rank == 0:
            whole = {name: _values(rows * comm.size, number) for number, name in enumerate(names)}
            dcp.save(whole, storage_writer=dcp.FileSystemWriter(case.path("dcp"), overwrite=True), no_dist=True)
            dcp.save(whole, storage_writer=HDF5Writer(case.path("x.h5")), no_dist=True)
        comm.Barrier()
    return case


def _values(rows: int, number: int, start: int = 0) -> Tensor:
    return (torch.arange(rows * COLUMNS) + start * COLUMNS + number).float().view(rows, COLUMNS)


def _sharded(mesh: DeviceMesh, comm: MPI.Intracomm, rows: int, number: int) -> Tensor:
    return DTensor.from_local(_values(rows, number, rows * comm.rank), mesh, [Shard(0)])


def save_folder(case: Case) -> None:
    writer = dcp.FileSystemWriter(case.path("dcp"), overwrite=True)
    dcp.save(case.state, storage_writer=writer, process_group=case.group)


def save_h5(case: Case) -> None:
    dcp.save(case.state, storage_writer=HDF5Writer(case.path("x.h5")), process_group=case.group)


def save_consolidated(case: Case) -> None:
    writer = HuggingFaceStorageWriter(str(case.path("hf")), save_distributed=True, enable_consolidation=True)
    dcp.save(case.state, storage_writer=writer, process_group=case.group)


def save_on_root(case: Case) -> None:
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in case.state.items()}
    if case.comm.rank == 0:
        with case.path("whole.pt").open("wb") as file:
            torch.save(whole, file)
            file.flush()
            os.fsync(file.fileno())
    case.comm.Barrier()


def save_by_hpcdist(name: str, case: Case) -> None:
    hd.staging.save(case.path(name), {key: _local(x) for key, x in case.state.items()})


def load_folder(case: Case) -> None:
    dcp.load(case.loaded, storage_reader=dcp.FileSystemReader(case.path("dcp")), process_group=case.group)


def load_h5(case: Case) -> None:
    dcp.load(case.loaded, storage_reader=HDF5Reader(case.path("x.h5")), process_group=case.group)


def load_by_hpcdist(case: Case) -> State:
    found: State = hd.staging.load(case.path("x.h5"))
    return found


def _checked(save: Callable[[Case], None], back: Callable[[Case], Any]) -> Callable[[Case], Any]:
    """Load what the first call has saved, so that it is compared."""
    seen: set[int] = set()

    def call(case: Case) -> Any:
        save(case)
        if id(case) in seen:
            return None
        seen.add(id(case))
        return back(case)

    return call


def _back(name: str, case: Case) -> State:
    found: State = hd.staging.load(case.path(name))
    return found


def _back_from_torch(case: Case) -> State:
    case.comm.Barrier()
    whole = torch.load(case.path("whole.pt"), mmap=True)
    return {name: x.chunk(case.comm.size)[case.comm.rank] for name, x in whole.items()}


def _back_from_parts(pattern: str, case: Case) -> State:
    """Read the files of safetensors whole."""
    from safetensors.torch import load_file

    case.comm.Barrier()
    whole: State = {}
    for path in sorted(case.folder.glob(pattern)):
        whole |= load_file(path)
    return {name: x.chunk(case.comm.size)[case.comm.rank] for name, x in whole.items()}


_LOADS = [
    Contender("DCP, a folder of files", load_folder),
    Contender("DCP, hpcdist's HDF5Reader", load_h5),
    Contender("staging.load, .h5", load_by_hpcdist),
]
CONTENDERS = {
    SAVE: [
        Contender("DCP, a folder of files", _checked(save_folder, load_folder)),
        Contender("DCP, hpcdist's HDF5Writer", _checked(save_h5, partial(_back, "x.h5"))),
        Contender(
            "DCP, consolidated to one safetensors",
            _checked(save_consolidated, partial(_back_from_parts, "hf/*.safetensors")),
        ),
        Contender("gathered on rank 0, torch.save", _checked(save_on_root, _back_from_torch)),
        Contender("staging.save, .h5", _checked(partial(save_by_hpcdist, "y.h5"), partial(_back, "y.h5"))),
        Contender(
            "staging.save, .safetensors",
            _checked(partial(save_by_hpcdist, "y.safetensors"), partial(_back_from_parts, "y.safetensors")),
        ),
    ],
    LOAD: _LOADS,
    ELSEWHERE: _LOADS,
}


def main() -> None:
    parser = harness.parser(__doc__, "64M", seconds=120)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    harness.choice(parser, "--only", CONTENDERS)
    asked = parser.parse_args()
    with hd.init(device="cpu") as world, harness.shared_folder(world.comm, asked.folder, "checkpoints") as folder:
        group = dist.new_group(backend="gloo")
        record = harness.start("checkpoints", world.comm)
        steps = []
        for what in asked.only:
            for size in asked.sizes:
                make = partial(make_case, what=what, size=size, folder=folder / "files", group=group)
                steps.append(Step(make, CONTENDERS[what]))
        harness.run(record, world.comm, steps, asked)


if __name__ == "__main__":
    main()
