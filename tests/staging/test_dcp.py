"""HDF5Writer and HDF5Reader under torch.distributed.checkpoint: plain tensors, DTensors and FSDP2, values, failures."""

from __future__ import annotations

import gc
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import DTYPES, same_bits, whole_of
from collective import Findings, assert_on_all_ranks, raises_on_all_ranks
from conftest import holds
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import hpcdist as hd
from hpcdist import staging
from hpcdist.formats.paths import Commit
from hpcdist.layout import Box
from hpcdist.staging import dcp as hdf5_dcp
from hpcdist.staging.dcp import HDF5Reader, HDF5Writer
from hpcdist.staging.drivers import PartFile

pytestmark = pytest.mark.mpi

SMALL = 64  # bytes: a window that leaves every tensor in several pieces

WHOLES = {
    "rows": whole_of((7, 5), torch.float32),
    "columns": whole_of((6, 8, 3), torch.bfloat16, 1),
    "last": whole_of((3, 4, 5), torch.int64, 2),
    "same": whole_of((4, 3), torch.float64, 3),
    "few": whole_of((1, 9), torch.int16, 4),
    "none": whole_of((0, 3), torch.float32),
}
PLACEMENTS: dict[str, Placement] = {
    "rows": Shard(0), "columns": Shard(1), "last": Shard(2), "same": Replicate(), "few": Shard(0), "none": Shard(0),
}  # fmt: skip
OTHERS: dict[str, Placement] = {
    "rows": Shard(1), "columns": Shard(0), "last": Replicate(), "same": Shard(0), "few": Shard(1), "none": Shard(1),
}  # fmt: skip
VALUES = {
    "step": 7,
    "lr": [1e-3, float("inf")],
    "name": "a/b",
    "nested": {"groups": [{"betas": (0.9, 0.99), "params": [0, 1], "maximize": None}], "dtype": torch.bfloat16},
}
PLAIN = {str(dtype).removeprefix("torch."): whole_of((2, 3), dtype) for dtype in DTYPES} | {
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """DCP says that it assumes one process, and torch that a class of its own is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sharded(whole: Tensor, mesh: DeviceMesh, placement: Placement, zero: bool = False) -> DTensor:
    """A DTensor cut as torch does it, of the values of `whole` or zeros."""
    local = whole
    if isinstance(placement, Shard):
        chunks = torch.chunk(whole, mesh.size(), placement.dim)
        rank = mesh.get_local_rank()
        local = chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)
    local = torch.zeros_like(local) if zero else local.clone()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())


def state_of(mesh: DeviceMesh, placements: dict[str, Placement], zero: bool = False) -> dict[str, Any]:
    tensors = {name: sharded(whole, mesh, placements[name], zero) for name, whole in WHOLES.items()}
    plain = {name: torch.zeros_like(x) if zero else x.clone() for name, x in PLAIN.items() if _clonable(x)}
    groups: Any = [{"betas": None, "params": None, "maximize": 1}]
    values = {"step": 0, "lr": [], "name": "", "nested": {"groups": groups, "dtype": None}}
    return {"sharded": tensors, "plain": plain, "values": values if zero else dict(VALUES)}


def _clonable(x: Tensor) -> bool:
    """Whether DCP can plan this dtype, and copy it."""
    try:
        torch._utils._element_size(x.dtype)
        return same_bits(torch.zeros_like(x).copy_(x), x)
    except (RuntimeError, NotImplementedError, TypeError):
        return False


def check(findings: Findings, state: dict[str, Any], mesh: DeviceMesh, placements: dict[str, Placement]) -> None:
    for name, whole in WHOLES.items():
        wanted = sharded(whole, mesh, placements[name]).to_local()
        findings.same(state["sharded"][name].to_local(), wanted, f"{name} {placements[name]} of {mesh.size()}")
    for name, x in state["plain"].items():
        findings.same(x, PLAIN[name], name)
    findings.check(state["values"] == VALUES, f"values {state['values']}")


def save(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=HDF5Writer(path, **options))


def load(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.load(state, storage_reader=HDF5Reader(path, **options))


def failure(world: hd.World, step: Callable[[], object], text: str, ranks: Sequence[int] | None = None) -> object:
    """Run a step that must fail with DCP's error, which is not an Exception, on every rank, with this text in it, and
    from these ranks."""
    error: BaseException | None = None
    try:
        step()
    except BaseException as caught:
        error = caught
    right = isinstance(error, CheckpointException) and text in str(error)
    right = right and (ranks is None or [*error.failures] == [*ranks])  # type: ignore[union-attr]
    assert_on_all_ranks(world.comm, right, f"got {error!r}")
    return error


def reload(findings: Findings, path: Path, mesh: DeviceMesh, placements: dict[str, Placement] = PLACEMENTS) -> None:
    """What was saved is right in a file, which is alone in its folder."""
    state = state_of(mesh, placements, zero=True)
    load(state, path, verify=True)
    check(findings, state, mesh, placements)
    findings.check(os.listdir(path.parent) == ["x.h5"], os.listdir(path.parent))


@pytest.fixture
def mesh(world: hd.World) -> DeviceMesh:
    """Of all ranks."""
    return DeviceMesh("cpu", list(range(world.world_size)))


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "x.h5"


@pytest.mark.parametrize("window", [SMALL, 2**20])
def test_every_placement_on_any_number_of_ranks(
    window: int, findings: Findings, world: hd.World, path: Path, mesh: DeviceMesh
) -> None:
    """Each number of the last ranks loads what others have saved, and saves."""
    save(state_of(mesh, PLACEMENTS), path, window=window)
    for first in reversed(range(world.world_size)):
        some = DeviceMesh("cpu", list(range(first, world.world_size)))
        if world.rank >= first:
            group: Any = {"process_group": some.get_group()}
            for verify, placements in itertools.product((None, True, False), (PLACEMENTS, OTHERS)):
                state = state_of(some, placements, zero=True)
                dcp.load(state, storage_reader=HDF5Reader(path, window=window, verify=verify), **group)
                check(findings, state, some, placements)
            dcp.save(state_of(some, PLACEMENTS), storage_writer=HDF5Writer(path, window=window), **group)
        world.comm.Barrier()
    with h5py.File(path, locking=False) as file:
        for name in ("rows", "last", "none"):
            findings.same(torch.from_numpy(file[f"sharded.{name}"][()]), WHOLES[name], f"{name} by h5py")
        findings.check(file["plain.scalar"][()] == 2.5, "scalar by h5py")
    for name, whole in WHOLES.items():
        for dim in (None, 0, 1):
            got = staging.load(path, f"sharded.{name}", dim=dim, verify=True, window=max(window, 200))
            expected = whole if dim is None else whole.tensor_split(world.world_size, dim)[world.rank]
            findings.same(got, expected, f"{name} by staging.load {dim}")
    whole = WHOLES["columns"]  # in pieces of many runs
    for verify, size in itertools.product((None, True, False), (50, 200, 2**20)):
        for box in (((0, 0, 0), (6, 8, 3)), ((2, 3, 1), (3, 4, 1)), ((world.rank % 6, 0, 0), (1, 8, 3))):
            got = staging.load(path, "sharded.columns", box=box, verify=verify, window=size)
            findings.same(got, whole[Box(*box).slices()], f"{box} {verify} {size}")
    reload(findings, path, mesh)


def test_in_one_process_and_into_lazy_views(findings: Findings, world: hd.World, folder: Path) -> None:
    """Conjugated or negated ones are filled with the values of the file, as torch's own reader does."""
    path = folder / f"{world.rank}.h5"
    wave, reals = whole_of((4, 3), torch.complex64, world.rank), torch.arange(12.0).view(4, 3)
    dcp.save({"wave": wave, "reals": reals, "step": world.rank}, storage_writer=HDF5Writer(path), no_dist=True)
    for verify in (None, True):
        into = {"wave": torch.zeros(4, 3, dtype=wave.dtype).conj(), "reals": torch.zeros_like(wave).conj().imag}
        findings.check(into["wave"].is_conj() and into["reals"].is_neg(), "lazy")
        got: dict[str, Any] = {**into, "step": -1}
        dcp.load(got, storage_reader=HDF5Reader(path, verify=verify, window=SMALL), no_dist=True)
        findings.same(got["wave"].resolve_conj(), wave, "wave")
        findings.same(got["reals"].resolve_neg(), reals, "reals")
        findings.check(got["step"] == world.rank, got)


def model_of(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_a_model_of_fsdp_and_its_optimizer(findings: Findings, path: Path, mesh: DeviceMesh) -> None:
    """Trained, saved, loaded into another model: both give the same next step."""
    model, optimizer = model_of(mesh, 1)
    other, other_optimizer = model_of(mesh, 2)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(3))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [p.to_local().detach().clone() for p in model.parameters()]

    for _ in range(2):
        step(model, optimizer)
    step(other, other_optimizer)  # so that it has a state
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optim": moments}, path)
    weights, moments = get_state_dict(other, other_optimizer)
    loaded = {"model": weights, "optim": moments}
    load(loaded, path, verify=True)
    set_state_dict(other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    for mine, expected in zip(step(other, other_optimizer), step(model, optimizer), strict=True):
        findings.same(mine, expected, "a parameter after the next step")


def test_a_part_of_a_checkpoint(
    findings: Findings, world: hd.World, folder: Path, path: Path, mesh: DeviceMesh
) -> None:
    """Some names only; names that are not there, where DCP allows it; another dtype; a file of staging.save."""
    save(state_of(mesh, PLACEMENTS), path)
    rows = sharded(WHOLES["rows"], mesh, Shard(1), zero=True)
    load({"sharded": {"rows": rows}}, path)
    findings.same(rows.to_local(), sharded(WHOLES["rows"], mesh, Shard(1)).to_local(), "rows")
    more = {"sharded": {"same": torch.zeros(4, 3, dtype=torch.float32)}, "new": torch.ones(2)}
    failure(world, lambda: load(more, path), "Missing key in checkpoint state_dict: new")
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(more, storage_reader=HDF5Reader(path), planner=planner)
    findings.same(more["sharded"]["same"], WHOLES["same"].float(), "converted")
    findings.same(more["new"], torch.ones(2), "what is not in the file stays")
    staging.save(folder / "y.h5", {"a": {"b": torch.full((2, 3), world.rank)}})
    got = torch.zeros(2 * world.world_size, 3, dtype=torch.int64)
    dcp.load({"a/b": got}, checkpoint_id=folder / "y.h5", storage_reader=HDF5Reader(path))
    findings.check(got[:, 0].tolist() == [r // 2 for r in range(2 * world.world_size)], got)


def test_async_save_keeps_the_values_of_the_call(findings: Findings, path: Path, mesh: DeviceMesh) -> None:
    state = state_of(mesh, PLACEMENTS)
    future = dcp.async_save(state, storage_writer=HDF5Writer(path))
    for x in state["sharded"].values():
        x.to_local().zero_()
    state["values"]["step"] = 8
    hd.concat(torch.ones(1))  # meanwhile, on this thread
    future.result()
    reload(findings, path, mesh)


def _unreadable(reason: str) -> str:
    """What DCP says of a file that cannot be read at all: until torch 2.12, it drops the reader's own words."""
    return reason if torch.__version__ >= (2, 13) else "metadata is None"


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=["rows", "columns"])
def test_damage_is_found(placement: Shard, world: hd.World, path: Path, mesh: DeviceMesh) -> None:
    """By the rank that reads it, whose name DCP gives, and in whole pieces without being asked."""
    whole = whole_of((6, 6), torch.float32)
    save({"x": sharded(whole, mesh, placement), "v": [1]}, path)
    row = whole[-1].numpy().tobytes()

    def change(old: bytes, new: bytes) -> None:
        if world.rank == 0:
            path.write_bytes(path.read_bytes().replace(old, new))
        world.comm.Barrier()

    def again(verify: bool | None) -> None:
        load({"x": sharded(whole, mesh, placement, zero=True), "v": []}, path, verify=verify)

    change(row, row[:-1] + bytes([row[-1] ^ 1]))
    for verify in (None, True):
        failure(world, lambda: again(verify), "is damaged", [world.world_size - 1])  # noqa: B023
    again(False)
    world.comm.Barrier()
    change(b'"planner_data"', b'"planner_Data"')
    failure(world, lambda: again(None), _unreadable("its plan, tables of pieces or values differ"))


def fail_in(place: Any, step: str) -> None:
    """Let a step of a writer or planner fail, as torch's FaultyStorageWriter does."""
    inner = getattr(place, step)

    def fail(*args: Any, **named: Any) -> None:
        if step == "prepare_global_plan":
            inner(*args)  # what it has made is given up
        raise RuntimeError(f"fails in {step}")

    setattr(place, step, fail)


STEPS = ["prepare_local_plan", "prepare_global_plan", "write_data", "lookup_object", "finish"]


@pytest.mark.parametrize("step", STEPS)
def test_a_failure_on_one_rank(step: str, findings: Findings, world: hd.World, path: Path, mesh: DeviceMesh) -> None:
    """It is named on all ranks, the name keeps the old file, and the next save succeeds, also while the error lives."""
    state = state_of(mesh, PLACEMENTS)
    save({"old": torch.ones(2)}, path)
    rank = 0 if step in ("prepare_global_plan", "finish") else world.world_size - 1
    storage, planner = HDF5Writer(path), dcp.DefaultSavePlanner()
    if world.rank == rank:
        fail_in(planner if step == "lookup_object" else storage, step)
    begin = lambda: dcp.save(state, storage_writer=storage, planner=planner)  # noqa: E731
    error, old = failure(world, begin, f"fails in {step}", [rank]), torch.zeros(2)
    load({"old": old}, path)
    findings.check(old.eq(1).all(), f"the old file after {error}")
    save(state, path)
    reload(findings, path, mesh)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("step", ["write_data", "finish", "name"])
def test_what_a_failed_save_has_written_is_resumed(
    step: str, findings: Findings, world: hd.World, path: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, last = state_of(mesh, PLACEMENTS), world.world_size - 1
    options: dict[str, Any] = {"window": SMALL, "resume": True}
    storage, counts, write = HDF5Writer(path, **options), [0], PartFile.write
    with monkeypatch.context() as patch:
        if step == "name":  # when all else is in the file
            patch.setattr(Commit, "finish", lambda _: 1 / 0)
        elif world.rank == (last if step == "write_data" else 0):
            fail_in(storage, step)
        failure(world, lambda: dcp.save(state, storage_writer=storage), "")

    def counted(*args: Any) -> None:
        counts[0] += 1
        write(*args)

    monkeypatch.setattr(PartFile, "write", counted)
    if world.rank == 0:
        state["sharded"]["rows"].to_local()[0, 0] = 5  # another value: written again
    save(state, path, **options)
    left_out = step == "write_data" and world.rank == last
    findings.check(counts[0] > 4 if left_out else counts[0] == (world.rank == 0), counts)
    changed = WHOLES["rows"].clone()
    changed[0, 0] = 5
    monkeypatch.setitem(WHOLES, "rows", changed)
    reload(findings, path, mesh)


@pytest.mark.mpi(min_size=2)
def test_ranks_on_several_hosts(
    findings: Findings, world: hd.World, folder: Path, path: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank writes a page that it does not fill: the coordinator does, or says that there is too much of it."""
    monkeypatch.setattr(hdf5_dcp, "_host", lambda: f"host {world.rank}")
    write, page, filled = PartFile.write, os.stat(folder).st_blksize, list[bool]()

    def checked(driver: PartFile, place: int, data: memoryview, digest: Any = None) -> None:
        filled.append(place % page == len(data) % page == 0 and len(data) > 0)
        write(driver, place, data, digest)

    monkeypatch.setattr(PartFile, "write", checked)
    wholes = {"x": whole_of((4001, 5), torch.float32), "y": whole_of((300, 700), torch.float32, 1)}
    state = {name: sharded(whole, mesh, Shard(k)) for k, (name, whole) in enumerate(wholes.items())}
    save(state, path)
    findings.check(filled and all(filled), f"{len(filled)} writes")
    for name, whole in wholes.items():
        findings.same(staging.load(path, name, dim=None, verify=True), whole, name)
    failure(world, lambda: save(state, folder / "z.h5", window=1000), "more than window=1,000")
    gc.collect()  # the writer, which what has failed refers to
    world.comm.Barrier()
    findings.check(os.listdir(folder) == ["x.h5"], os.listdir(folder))


class Custom:
    """Not a plain value."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    __hash__ = None  # type: ignore[assignment]


def test_values_that_are_no_tensors(findings: Findings, world: hd.World, path: Path) -> None:
    """Torch's own safe types load; others if they are asked for."""
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    safe = {"size": torch.Size([2, 3]), "set": {1, 2}, "deep": deep}
    save({**safe, "pair": (torch.ones(2), 1), "own": Custom()}, path)
    got: dict[str, Any] = dict.fromkeys((*safe, "pair"))
    load(got, path)
    findings.check(torch.equal(got.pop("pair")[0], torch.ones(2)), "pair")
    findings.check(got == safe and type(got["size"]) is torch.Size, got)
    failure(world, lambda: load({"own": None}, path), "own is stored as a pickle")
    own = {"own": None}
    load(own, path, allow_pickle=True)
    findings.check(own["own"] == Custom(), own)


def test_what_is_refused(world: hd.World, folder: Path, path: Path) -> None:
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    bad: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"x": torch.ones(2)}, {"planner": planner}, "enable_plan_caching"),
        ({"x": torch.eye(3).to_sparse()}, {}, "float32 with layout torch.sparse_coo"),
        ({"a/": torch.ones(2)}, {}, "cannot be a name in an HDF5 file"),
        ({"_hpcdist": torch.ones(2)}, {}, "hpcdist's own"),
        ({"x": torch.ones(2)}, {"checkpoint_id": folder / "no" / "x.h5"}, "no such folder"),
    ]
    for state, options, text in bad:
        failure(world, lambda s=state, o=options: dcp.save(s, storage_writer=HDF5Writer(path), **o), text)
    alone = lambda: dcp.save({}, storage_writer=HDF5Writer(path), use_collectives=False)  # noqa: E731
    raised = raises_on_all_ranks(world.comm, ValueError, alone)
    assert_on_all_ranks(world.comm, "use_collectives" in str(raised), raised)
    failure(world, lambda: load({}, folder / "no.h5"), _unreadable("no such file"))
    holds(world, folder)
