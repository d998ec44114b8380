"""HDF5Writer and HDF5Reader under torch.distributed.checkpoint: plain tensors, DTensors and FSDP2, values, failures."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import DTYPES, same_bits, whole_of
from collective import Findings, assert_on_all_ranks, raises_on_all_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import hpcdist as hd
from hpcdist import staging
from hpcdist.files.commit import Commit
from hpcdist.layout import Box
from hpcdist.staging.catalog import describe
from hpcdist.staging.dcp import HDF5Reader, HDF5Writer, writer, writing

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


def failure(world: hd.World, step: Callable[[], object]) -> CheckpointException:
    """Run a step that must fail with DCP's error, which is not an Exception, on every rank; returns the error."""
    error: BaseException | None = None
    try:
        step()
    except BaseException as caught:
        error = caught
    assert_on_all_ranks(world.comm, isinstance(error, CheckpointException), f"got {error!r}")
    assert isinstance(error, CheckpointException)
    return error


def mesh_of(world: hd.World, ranks: int) -> DeviceMesh:
    """A mesh of the first ranks. Collective over all."""
    return DeviceMesh("cpu", list(range(ranks)))


@pytest.mark.parametrize("window", [SMALL, 2**20])
def test_every_placement_loads_on_any_number_of_ranks(window: int, world: hd.World, folder: Path) -> None:
    findings, path = Findings(world.comm), folder / "x.h5"
    mesh = mesh_of(world, world.world_size)
    dcp.save(state_of(mesh, PLACEMENTS), storage_writer=HDF5Writer(path, window=window))
    for ranks in range(1, world.world_size + 1):
        other = mesh_of(world, ranks)
        for verify in (None, True, False):
            if world.rank < ranks:
                for placements in (PLACEMENTS, OTHERS):
                    state = state_of(other, placements, zero=True)
                    reader = HDF5Reader(path, window=window, verify=verify)
                    dcp.load(state, storage_reader=reader, process_group=other.get_group())
                    check(findings, state, other, placements)
    with h5py.File(path, locking=False) as file:
        for name in ("rows", "last", "same", "few", "none"):
            findings.same(torch.from_numpy(file[f"sharded.{name}"][()]), WHOLES[name], f"{name} by h5py")
        findings.check(file["plain.scalar"][()] == 2.5, "scalar by h5py")
    for name, whole in WHOLES.items():
        for dim in (None, 0, 1):
            got = staging.load(path, f"sharded.{name}", dim=dim, verify=True, window=max(window, 200))
            shards = world.comm.allgather(got)
            findings.same(got if dim is None else torch.cat(shards, dim), whole, f"{name} by staging.load {dim}")
    findings.check(len(describe(str(path)).datasets) == len(WHOLES) + len(state_of(mesh, PLACEMENTS)["plain"]), "names")
    findings.check(os.listdir(folder) == ["x.h5"], os.listdir(folder))
    findings.settle()


def test_in_one_process(world: hd.World, folder: Path) -> None:
    findings, path = Findings(world.comm), folder / f"{world.rank}.h5"
    state = {"w": whole_of((4, 3), torch.float32, world.rank), "step": world.rank}
    dcp.save(state, storage_writer=HDF5Writer(path, window=SMALL), no_dist=True)
    got: dict[str, Any] = {"w": torch.zeros(4, 3), "step": -1}
    dcp.load(got, storage_reader=HDF5Reader(path), no_dist=True)
    findings.same(got["w"], state["w"], "w")
    findings.check(got["step"] == world.rank, got)
    findings.settle()


def test_into_lazy_views(world: hd.World, folder: Path) -> None:
    """Conjugated or negated ones are filled with the values of the file, as torch's own reader does."""
    wave, reals = whole_of((4, 3), torch.complex64), torch.arange(12.0).view(4, 3)
    dcp.save({"wave": wave, "reals": reals}, storage_writer=HDF5Writer(folder / "x.h5"))
    for verify in (None, True):
        got = {"wave": torch.zeros(4, 3, dtype=wave.dtype).conj(), "reals": torch.zeros_like(wave).conj().imag}
        assert got["wave"].is_conj() and got["reals"].is_neg()
        dcp.load(got, storage_reader=HDF5Reader(folder / "x.h5", verify=verify, window=SMALL))
        assert_on_all_ranks(world.comm, torch.equal(got["wave"], wave) and torch.equal(got["reals"], reals), got)


def model_of(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_a_model_of_fsdp_and_its_optimizer(world: hd.World, folder: Path) -> None:
    """Trained, saved, loaded into another model: both give the same next step."""
    findings, mesh = Findings(world.comm), mesh_of(world, world.world_size)
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
    dcp.save({"model": weights, "optim": moments}, storage_writer=HDF5Writer(folder / "m.h5"))
    weights, moments = get_state_dict(other, other_optimizer)
    loaded = {"model": weights, "optim": moments}
    dcp.load(loaded, storage_reader=HDF5Reader(folder / "m.h5", verify=True))
    set_state_dict(other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    for mine, expected in zip(step(other, other_optimizer), step(model, optimizer), strict=True):
        findings.same(mine, expected, "a parameter after the next step")
    findings.settle()


def test_a_part_of_a_checkpoint(world: hd.World, folder: Path) -> None:
    """Some names only; names that are not there, where DCP allows it; another dtype; a file of staging.save."""
    findings, mesh, path = Findings(world.comm), mesh_of(world, world.world_size), folder / "x.h5"
    dcp.save(state_of(mesh, PLACEMENTS), storage_writer=HDF5Writer(path))
    state = {"sharded": {"rows": sharded(WHOLES["rows"], mesh, Shard(1), zero=True)}}
    dcp.load(state, storage_reader=HDF5Reader(path))
    findings.same(state["sharded"]["rows"].to_local(), sharded(WHOLES["rows"], mesh, Shard(1)).to_local(), "rows")
    more = {"sharded": {"same": torch.zeros(4, 3, dtype=torch.float32)}, "new": torch.ones(2)}
    error = failure(world, lambda: dcp.load(more, storage_reader=HDF5Reader(path)))
    findings.check("Missing key in checkpoint state_dict: new" in str(error), str(error)[-300:])
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(more, storage_reader=HDF5Reader(path), planner=planner)
    findings.check(torch.equal(more["sharded"]["same"], WHOLES["same"].float()), "converted")
    findings.check(more["new"].eq(1).all(), "what is not in the file stays")
    staging.save(folder / "y.h5", {"a": {"b": torch.full((2, 3), world.rank)}})
    got = {"a/b": torch.zeros(2 * world.world_size, 3, dtype=torch.int64)}
    dcp.load(got, checkpoint_id=folder / "y.h5", storage_reader=HDF5Reader(path))
    findings.check(got["a/b"][:, 0].tolist() == [r // 2 for r in range(2 * world.world_size)], got)
    findings.settle()


def test_async_save_keeps_the_values_of_the_call(world: hd.World, folder: Path) -> None:
    findings, mesh, path = Findings(world.comm), mesh_of(world, world.world_size), folder / "x.h5"
    state = state_of(mesh, PLACEMENTS)
    future = dcp.async_save(state, storage_writer=HDF5Writer(path))
    for x in state["sharded"].values():
        x.to_local().zero_()
    state["values"]["step"] = 8
    hd.concat(torch.ones(1))  # meanwhile, on this thread
    future.result()
    loaded = state_of(mesh, PLACEMENTS, zero=True)
    dcp.load(loaded, storage_reader=HDF5Reader(path, verify=True))
    check(findings, loaded, mesh, PLACEMENTS)
    findings.settle()


def _unreadable(reason: str) -> str:
    """What DCP says of a file that cannot be read at all: until torch 2.12, it drops the reader's own words."""
    return reason if torch.__version__ >= (2, 13) else "metadata is None"


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=["rows", "columns"])
def test_damage_is_found(placement: Shard, world: hd.World, folder: Path) -> None:
    """By the rank that reads it, whose name DCP gives, and in whole pieces without being asked."""
    mesh, path = mesh_of(world, world.world_size), folder / "x.h5"
    whole = whole_of((6, 6), torch.float32)
    dcp.save({"x": sharded(whole, mesh, placement), "v": [1]}, storage_writer=HDF5Writer(path))
    stored = describe(str(path)).datasets["x"]
    assert stored.raw is not None and stored.pieces is not None
    if world.rank == 0:
        with path.open("r+b") as file:
            file.seek(stored.raw.offset + 4 * (6 * 6 - 1))
            file.write(b"\xff")
    world.comm.Barrier()
    for verify in (None, True):
        state = {"x": sharded(whole, mesh, placement, zero=True), "v": []}
        reader = HDF5Reader(path, verify=verify)
        error = failure(world, lambda s=state, r=reader: dcp.load(s, storage_reader=r))
        assert_on_all_ranks(world.comm, list(error.failures) == [world.world_size - 1], error.failures)
        assert_on_all_ranks(world.comm, "is damaged" in str(error), error)
    dcp.load({"x": sharded(whole, mesh, placement)}, storage_reader=HDF5Reader(path, verify=False))
    world.comm.Barrier()
    if world.rank == 0:
        data = path.read_bytes()
        path.write_bytes(data.replace(b'"planner_data"', b'"planner_Data"'))
    world.comm.Barrier()
    error = failure(world, lambda: dcp.load({}, storage_reader=HDF5Reader(path)))
    assert_on_all_ranks(world.comm, _unreadable("its plan, tables of pieces or values differ") in str(error), error)


class Faulty(HDF5Writer):
    """Fails in one step on some ranks, as torch's FaultyStorageWriter does."""

    def __init__(self, path: Path, step: str, fails: bool, **options: Any) -> None:
        super().__init__(path, **options)
        self.step, self.fails = step, fails

    def _fail(self, step: str) -> None:
        if self.fails and step == self.step:
            raise RuntimeError(f"fails in {step}")

    def prepare_local_plan(self, plan: Any) -> Any:
        self._fail("prepare_local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        found = super().prepare_global_plan(plans)
        self._fail("prepare_global_plan")
        return found

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self.fails and self.step == "resolve":
            planner.lookup_object = lambda index: self._fail("resolve")
        self._fail("write_data")
        return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self._fail("finish")
        super().finish(metadata, results)


STEPS = ["prepare_local_plan", "prepare_global_plan", "write_data", "resolve", "finish"]


@pytest.mark.parametrize("step", STEPS)
def test_a_failure_on_one_rank(step: str, world: hd.World, folder: Path) -> None:
    """It is named on all ranks, the name keeps the old file, and the next save succeeds, also while the error lives."""
    path, mesh = folder / "x.h5", mesh_of(world, world.world_size)
    state = state_of(mesh, PLACEMENTS)
    dcp.save({"old": torch.ones(2)}, storage_writer=HDF5Writer(path))
    rank = 0 if step in ("prepare_global_plan", "finish") else world.world_size - 1
    storage = Faulty(path, step, world.rank == rank)
    error = failure(world, lambda: dcp.save(state, storage_writer=storage))
    assert_on_all_ranks(world.comm, list(error.failures) == [rank], error.failures)
    assert_on_all_ranks(world.comm, f"fails in {step}" in str(error), error)
    old = {"old": torch.zeros(2)}
    dcp.load(old, storage_reader=HDF5Reader(path))
    assert_on_all_ranks(world.comm, old["old"].eq(1).all(), "the old file")
    findings = Findings(world.comm)
    dcp.save(state, storage_writer=HDF5Writer(path))
    loaded = state_of(mesh, PLACEMENTS, zero=True)
    dcp.load(loaded, storage_reader=HDF5Reader(path, verify=True))
    check(findings, loaded, mesh, PLACEMENTS)
    findings.check(os.listdir(folder) == ["x.h5"], os.listdir(folder))
    findings.settle()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("step", ["write_data", "finish", "name"])
def test_what_a_failed_save_has_written_is_resumed(
    step: str, world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, mesh, findings = folder / "x.h5", mesh_of(world, world.world_size), Findings(world.comm)
    state = state_of(mesh, PLACEMENTS)
    last = world.world_size - 1
    options: dict[str, Any] = {"window": SMALL, "resume": True}
    storage = Faulty(path, step, world.rank == (last if step == "write_data" else 0), **options)
    with monkeypatch.context() as patch:
        if step == "name":  # when all else is in the file
            patch.setattr(Commit, "finish", lambda _: storage._fail("name"))
        failure(world, lambda: dcp.save(state, storage_writer=storage))
    counts = [0]
    plain = writing.write_ahead

    def counted(*args: Any) -> None:
        counts[0] += 1
        plain(*args)

    monkeypatch.setattr(writing, "write_ahead", counted)
    if world.rank == 0:
        state["sharded"]["rows"].to_local()[0, 0] = 5  # another value: written again
    dcp.save(state, storage_writer=HDF5Writer(path, **options))
    left_out = step == "write_data" and world.rank == last
    findings.check(counts[0] > 4 if left_out else counts[0] == (world.rank == 0), counts)
    loaded = state_of(mesh, PLACEMENTS, zero=True)
    dcp.load(loaded, storage_reader=HDF5Reader(path, verify=True))
    for name in WHOLES:
        findings.same(loaded["sharded"][name].to_local(), state["sharded"][name].to_local(), name)
    findings.check(os.listdir(folder) == ["x.h5"], os.listdir(folder))
    findings.settle()


def test_ranks_on_several_hosts(world: hd.World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank writes a page that it does not fill: the coordinator does, or says that there is too much of it."""
    path, mesh, findings = folder / "x.h5", mesh_of(world, world.world_size), Findings(world.comm)
    monkeypatch.setattr(writer, "_host", lambda: f"host {world.rank}")
    plain, several = writing.write_ahead, world.world_size > 1
    filled = []

    def checked(fd: int, place: int, data: memoryview, digest: Any = None) -> None:
        page = os.stat(folder).st_blksize
        filled.append(not several or (place % page == 0 and len(data) % page == 0 and len(data) > 0))
        plain(fd, place, data, digest)

    monkeypatch.setattr(writing, "write_ahead", checked)
    wholes = {"x": whole_of((4001, 5), torch.float32), "y": whole_of((300, 700), torch.float32, 1)}
    state = {name: sharded(whole, mesh, Shard(k)) for k, (name, whole) in enumerate(wholes.items())}
    dcp.save(state, storage_writer=HDF5Writer(path))
    findings.check(filled and all(filled), f"{len(filled)} writes")
    for name, whole in wholes.items():
        findings.same(staging.load(path, name, dim=None, verify=True), whole, name)
    if several:
        error = failure(world, lambda: dcp.save(state, storage_writer=HDF5Writer(folder / "z.h5", window=1000)))
        findings.check("more than window=1,000" in str(error), error)
        del error
        gc.collect()  # the writer, which what has failed refers to
        world.comm.Barrier()
    findings.check(os.listdir(folder) == ["x.h5"], os.listdir(folder))
    findings.settle()


@pytest.mark.mpi(min_size=2)
def test_some_of_the_ranks_save(world: hd.World, folder: Path) -> None:
    findings, path = Findings(world.comm), folder / "x.h5"
    mesh = DeviceMesh("cpu", list(range(1, world.world_size)))
    if world.rank > 0:
        state = state_of(mesh, PLACEMENTS)
        dcp.save(state, storage_writer=HDF5Writer(path), process_group=mesh.get_group())
    world.comm.Barrier()
    findings.same(staging.load(path, "sharded.rows", dim=None, verify=True), WHOLES["rows"], "rows")
    loaded = {"sharded": {"rows": torch.zeros(7, 5)}, "values": {"step": 0}}
    dcp.load(loaded, storage_reader=HDF5Reader(path))
    findings.check(loaded["values"] == {"step": 7}, loaded["values"])
    findings.settle()


class Custom:
    """Not a plain value."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    __hash__ = None  # type: ignore[assignment]


def test_values_that_json_cannot_hold(world: hd.World, folder: Path) -> None:
    """Torch's own safe types load; others if they are asked for."""
    findings, path = Findings(world.comm), folder / "x.h5"
    safe = {"size": torch.Size([2, 3]), "pair": (torch.ones(2), 1), "set": {1, 2}, "deep": _deep(200)}
    dcp.save({**safe, "own": Custom()}, storage_writer=HDF5Writer(path))
    got: dict[str, Any] = dict.fromkeys(safe)
    dcp.load(got, storage_reader=HDF5Reader(path))
    findings.check(got["size"] == safe["size"] and type(got["size"]) is torch.Size, got["size"])
    findings.check(torch.equal(got["pair"][0], torch.ones(2)) and got["set"] == {1, 2}, got)
    findings.check(_depth(got["deep"]) == 200, "deep")
    error = failure(world, lambda: dcp.load({"own": None}, storage_reader=HDF5Reader(path)))
    findings.check("own is stored as a pickle" in str(error) and "allow_pickle=True" in str(error), error)
    own = {"own": None}
    dcp.load(own, storage_reader=HDF5Reader(path, allow_pickle=True))
    findings.check(own["own"] == Custom(), own)
    text = describe(str(path)).checkpoint or b""
    findings.check(text.count(b'"pickle"') == 4, text)
    findings.settle()


def _deep(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth - 1):
        found = [found]
    return found


def _depth(x: Any) -> int:
    depth = 0
    while isinstance(x, list):
        depth, x = depth + 1, x[0] if x else None
    return depth


def test_what_is_refused(world: hd.World, folder: Path) -> None:
    findings, path = Findings(world.comm), folder / "x.h5"
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    bad: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"x": torch.ones(2)}, {"planner": planner}, "enable_plan_caching"),
        ({"x": torch.eye(3).to_sparse()}, {}, "float32 with layout torch.sparse_coo"),
        ({"a/": torch.ones(2)}, {}, "cannot be a name in an HDF5 file"),
        ({"_hpcdist": torch.ones(2)}, {}, "hpcdist's own"),
        ({"x": torch.ones(2)}, {"checkpoint_id": folder / "no" / "x.h5"}, "no such folder"),
    ]
    for state, options, text in bad:
        error = failure(world, lambda s=state, o=options: dcp.save(s, storage_writer=HDF5Writer(path), **o))
        findings.check(text in str(error), error)
    state, alone = {"x": torch.ones(2)}, {"use_collectives": False}
    raised = raises_on_all_ranks(
        world.comm, ValueError, lambda: dcp.save(state, storage_writer=HDF5Writer(path), **alone)
    )
    findings.check("use_collectives" in str(raised), raised)
    error = failure(world, lambda: dcp.load({}, storage_reader=HDF5Reader(folder / "no.h5")))
    findings.check(_unreadable("no such file") in str(error), error)
    findings.check(os.listdir(folder) == [], os.listdir(folder))
    findings.settle()


def test_pieces_of_columns_are_checked_and_read_by_staging(world: hd.World, folder: Path) -> None:
    """Pieces of many runs, which only DCP makes: every box, with and without checksums, in small windows."""
    findings, path, mesh = Findings(world.comm), folder / "x.h5", mesh_of(world, world.world_size)
    whole = whole_of((9, 10), torch.int32)
    dcp.save({"x": sharded(whole, mesh, Shard(1))}, storage_writer=HDF5Writer(path, window=100))
    for verify in (None, True, False):
        for box in (((0, 0), (9, 10)), ((2, 3), (5, 4)), ((world.rank % 9, 0), (1, 10)), ((0, 9), (9, 1))):
            for window in (50, 200, 2**20):
                got = staging.load(path, "x", box=box, verify=verify, window=window)
                findings.same(got, whole[Box(*box).slices()], f"{box} {verify} {window}")
    findings.settle()
    assert dist.is_initialized()
