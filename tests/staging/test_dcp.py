"""HDF5Writer and HDF5Reader under torch.distributed.checkpoint: plain tensors, DTensors and FSDP2, values, failures."""

import gc
import itertools
import os
from dataclasses import replace

import h5py
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import DTYPES, same_bits, whole_of
from collective import assert_on_all_ranks, raises_on_all_ranks, several_ranks
from conftest import holds
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hpcdist import staging
from hpcdist.errors import FileError
from hpcdist.formats.contents import identity
from hpcdist.formats.paths import Commit
from hpcdist.staging import dcp as hdf5_dcp
from hpcdist.staging.dcp import HDF5Reader, HDF5Writer
from hpcdist.staging.drivers import PartFile

# DCP says that it assumes one process, and torch that a class of its own is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = 64  # bytes: a window that leaves every tensor in several pieces

WHOLES = {
    "rows": whole_of((7, 5), torch.float32),
    "columns": whole_of((6, 8, 3), torch.bfloat16, 1),
    "last": whole_of((3, 4, 5), torch.int64, 2),
    "same": whole_of((4, 3), torch.float64, 3),
    "few": whole_of((1, 9), torch.int16, 4),
    "none": whole_of((0, 3), torch.float32),
}
PLACEMENTS = dict(zip(WHOLES, (Shard(0), Shard(1), Shard(2), Replicate(), Shard(0), Shard(0)), strict=True))
OTHERS = dict(zip(WHOLES, (Shard(1), Shard(0), Replicate(), Shard(0), Shard(1), Shard(1)), strict=True))
VALUES = {
    "step": 7,
    "lr": [1e-3, float("inf")],
    "name": "a/b",
    "nested": {"groups": [{"betas": (0.9, 0.99), "params": [0, 1], "maximize": None}], "dtype": torch.bfloat16},
}


def _clonable(x):
    """Whether DCP can plan this dtype, and copy it."""
    try:
        torch._utils._element_size(x.dtype)
        return same_bits(torch.zeros_like(x).copy_(x), x)
    except (RuntimeError, NotImplementedError, TypeError):
        return False


PLAIN = {str(dtype).removeprefix("torch."): whole_of((2, 3), dtype) for dtype in DTYPES}
PLAIN |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}
PLAIN = {name: x for name, x in PLAIN.items() if _clonable(x)}


def sharded(whole, mesh, placement, zero=False):
    """A DTensor cut as torch does it, of the values of `whole` or zeros."""
    local = whole
    if isinstance(placement, Shard):
        chunks = torch.chunk(whole, mesh.size(), placement.dim)
        rank = mesh.get_local_rank()
        local = chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)
    local = torch.zeros_like(local) if zero else local.clone()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())


def state_of(mesh, placements, zero=False):
    tensors = {name: sharded(whole, mesh, placements[name], zero) for name, whole in WHOLES.items()}
    plain = {name: torch.zeros_like(x) if zero else x.clone() for name, x in PLAIN.items()}
    groups = [{"betas": None, "params": None, "maximize": 1}]
    values = {"step": 0, "lr": [], "name": "", "nested": {"groups": groups, "dtype": None}}
    return {"sharded": tensors, "plain": plain, "values": values if zero else dict(VALUES)}


def check(findings, state, mesh, placements):
    for name, whole in WHOLES.items():
        wanted = sharded(whole, mesh, placements[name]).to_local()
        findings.same(state["sharded"][name].to_local(), wanted, f"{name} {placements[name]} of {mesh.size()}")
    for name, x in state["plain"].items():
        findings.same(x, PLAIN[name], name)
    findings.check(state["values"] == VALUES, f"values {state['values']}")


def save(state, path, **options):
    dcp.save(state, storage_writer=HDF5Writer(path, **options))


def load(state, path, **options):
    dcp.load(state, storage_reader=HDF5Reader(path, **options))


def failure(step, text, ranks=None):
    """Run a step that must fail with DCP's error, which is not an Exception, on every rank, with this text in it, and
    from these ranks."""
    error = None
    try:
        step()
    except BaseException as caught:
        error = caught
    right = isinstance(error, CheckpointException) and text in str(error)
    right = right and (ranks is None or [*error.failures] == [*ranks])
    assert_on_all_ranks(right, f"got {error!r}")
    return error


def reload(findings, path, mesh, placements=PLACEMENTS):
    """What was saved is right in a file, which is alone in its folder."""
    state = state_of(mesh, placements, zero=True)
    load(state, path, verify=True)
    check(findings, state, mesh, placements)
    findings.check(os.listdir(path.parent) == ["x.h5"], os.listdir(path.parent))


@pytest.fixture
def mesh(world):
    """Of all ranks."""
    return DeviceMesh("cpu", list(range(world.world_size)))


@pytest.fixture
def path(folder):
    return folder / "x.h5"


@pytest.mark.parametrize("window", [SMALL, 2**20])
def test_every_placement_on_any_number_of_ranks(window, findings, world, rank, path, mesh):
    """Each number of the last ranks loads what others have saved, and saves."""
    save(state_of(mesh, PLACEMENTS), path, window=window)
    for first in reversed(range(world.world_size)):
        some = DeviceMesh("cpu", list(range(first, world.world_size)))
        if rank >= first:
            group = {"process_group": some.get_group()}
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
    for (name, whole), dim in itertools.product(WHOLES.items(), (None, 0, 1)):
        got = staging.load(path, f"sharded.{name}", dim=dim, verify=True, window=max(window, 200))
        expected = whole if dim is None else whole.tensor_split(world.world_size, dim)[rank]
        findings.same(got, expected, f"{name} by staging.load {dim}")
    for verify, size in itertools.product((None, True, False), (50, 200, 2**20)):
        got = staging.load(path, "sharded.columns", box=((2, 3, 1), (3, 4, 1)), verify=verify, window=size)
        findings.same(got, WHOLES["columns"][2:5, 3:7, 1:2], f"of pieces of many runs, {verify} {size}")
    reload(findings, path, mesh)


def test_in_one_process_and_into_lazy_views(findings, rank, folder):
    """Conjugated or negated ones are filled with the values of the file, as torch's own reader does."""
    path, reals = folder / f"{rank}.h5", torch.arange(12.0).view(4, 3)
    wave = whole_of((4, 3), torch.complex64, rank)
    dcp.save({"wave": wave, "reals": reals, "step": rank}, storage_writer=HDF5Writer(path), no_dist=True)
    got = {"wave": torch.zeros_like(wave).conj(), "reals": torch.zeros_like(wave).conj().imag, "step": -1}
    findings.check(got["wave"].is_conj() and got["reals"].is_neg(), "lazy")
    dcp.load(got, storage_reader=HDF5Reader(path, window=SMALL), no_dist=True)
    findings.same(got["wave"].resolve_conj(), wave, "wave")
    findings.same(got["reals"].resolve_neg(), reals, "reals")
    findings.check(got["step"] == rank, got)


def test_a_part_of_a_checkpoint(findings, world, folder, path, mesh):
    """Some names only; names that are not there, where DCP allows it; another dtype; a file of staging.save."""
    save(state_of(mesh, PLACEMENTS), path)
    rows = sharded(WHOLES["rows"], mesh, Shard(1), zero=True)
    load({"sharded": {"rows": rows}}, path)
    findings.same(rows.to_local(), sharded(WHOLES["rows"], mesh, Shard(1)).to_local(), "rows")
    more = {"sharded": {"same": torch.zeros(4, 3, dtype=torch.float32)}, "new": torch.ones(2)}
    failure(lambda: load(more, path), "Missing key in checkpoint state_dict: new")
    dcp.load(more, storage_reader=HDF5Reader(path), planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    findings.same(more["sharded"]["same"], WHOLES["same"].float(), "converted")
    findings.same(more["new"], torch.ones(2), "what is not in the file stays")
    whole = torch.arange(world.world_size).repeat_interleave(2)
    staging.save(folder / "y.h5", {"a": {"b": whole[2 * world.rank :][:2]}})
    got = torch.zeros_like(whole)
    dcp.load({"a/b": got}, checkpoint_id=folder / "y.h5", storage_reader=HDF5Reader(path))
    findings.same(got, whole, "of staging.save")


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=["rows", "columns"])
def test_damage_is_found(placement, world, path, mesh):
    """By the rank that reads it, whose name DCP gives, and in whole pieces without being asked."""
    whole = whole_of((6, 6), torch.float32)
    save({"x": sharded(whole, mesh, placement)}, path)
    again = lambda verify: load({"x": sharded(whole, mesh, placement, zero=True)}, path, verify=verify)  # noqa: E731
    if world.rank == 0:
        row = whole[-1].numpy().tobytes()
        path.write_bytes(path.read_bytes().replace(row, row[:-1] + bytes([row[-1] ^ 1])))
    world.comm.Barrier()
    for verify in (None, True):
        failure(lambda: again(verify), "is damaged", [world.world_size - 1])  # noqa: B023
    again(False)


def fail_in(place, step):
    """Let a step of a writer or planner fail, as torch's FaultyStorageWriter does."""
    inner = getattr(place, step)

    def fail(*args, **named):
        if step == "prepare_global_plan":
            inner(*args)  # what it has made is given up
        raise RuntimeError(f"fails in {step}")

    setattr(place, step, fail)


STEPS = ["prepare_local_plan", "prepare_global_plan", "write_data", "lookup_object", "finish"]


@pytest.mark.parametrize("step", STEPS)
def test_a_failure_on_one_rank(step, findings, world, path, mesh):
    """It is named on all ranks, the name keeps the old file, and the next save succeeds, also while the error lives."""
    state, old = state_of(mesh, PLACEMENTS), torch.zeros(2)
    save({"old": torch.ones(2)}, path)
    rank = 0 if step in ("prepare_global_plan", "finish") else world.world_size - 1
    storage, planner = HDF5Writer(path), dcp.DefaultSavePlanner()
    if world.rank == rank:
        fail_in(planner if step == "lookup_object" else storage, step)
    begin = lambda: dcp.save(state, storage_writer=storage, planner=planner)  # noqa: E731
    error = failure(begin, f"fails in {step}", [rank])
    load({"old": old}, path)
    findings.check(old.eq(1).all(), f"the old file after {error}")
    save(state, path)
    reload(findings, path, mesh)


@several_ranks
@pytest.mark.parametrize("step", ["write_data", "finish", "name"])
def test_what_a_failed_save_has_written_is_resumed(step, findings, last, rank, path, mesh, monkeypatch):
    state = state_of(mesh, PLACEMENTS)
    options = {"window": SMALL, "resume": True}
    storage, counts, write = HDF5Writer(path, **options), [0], PartFile.write
    with monkeypatch.context() as patch:
        if step == "name":  # when all else is in the file
            patch.setattr(Commit, "finish", lambda _: 1 / 0)
        elif rank == (last if step == "write_data" else 0):
            fail_in(storage, step)
        failure(lambda: dcp.save(state, storage_writer=storage), "")

    def counted(*args):
        counts[0] += 1
        write(*args)

    monkeypatch.setattr(PartFile, "write", counted)
    if rank == 0:
        state["sharded"]["rows"].to_local()[0, 0] = 5  # another value: written again
    save(state, path, **options)
    left_out = step == "write_data" and rank == last
    few = range(2, 5) if rank == 0 else [0]  # the value, and rows of the table from the first that differs
    findings.check(counts[0] > 4 if left_out else counts[0] in few, counts)
    changed = WHOLES["rows"].clone()
    changed[0, 0] = 5
    monkeypatch.setitem(WHOLES, "rows", changed)
    reload(findings, path, mesh)


@several_ranks
def test_ranks_on_several_hosts(findings, world, folder, path, mesh, monkeypatch):
    """No rank writes a page that it does not fill: the coordinator does, or says that there is too much of it."""
    monkeypatch.setattr(hdf5_dcp, "host_identity", lambda: f"host {world.rank}")
    write, page, filled = PartFile.write, os.stat(folder).st_blksize, []

    def checked(driver, place, data, digest=None):
        filled.append(place % page == len(data) % page == 0 and len(data) > 0)
        write(driver, place, data, digest)

    monkeypatch.setattr(PartFile, "write", checked)
    wholes = {"x": whole_of((4001, 5), torch.float32), "y": whole_of((300, 700), torch.float32, 1)}
    state = {name: sharded(whole, mesh, Shard(k)) for k, (name, whole) in enumerate(wholes.items())}
    save(state, path)
    findings.check(filled and all(filled), f"{len(filled)} writes")
    for name, whole in wholes.items():
        findings.same(staging.load(path, name, dim=None, verify=True), whole, name)
    failure(lambda: save(state, folder / "z.h5", window=1000), "more than window=1,000")
    gc.collect()  # the writer, which what has failed refers to
    world.comm.Barrier()
    findings.check(os.listdir(folder) == ["x.h5"], os.listdir(folder))


@several_ranks
@pytest.mark.parametrize("seen", ["nothing", "the old file"])
def test_a_load_waits_for_a_file_that_a_rank_cannot_see_yet(
    seen, findings, last, rank, folder, path, mesh, monkeypatch
):
    """As staging.load: its cache of names may be some seconds out of date."""
    old, describe, times = str(folder / "old.h5"), hdf5_dcp.describe, iter(range(2 if seen == "nothing" else 1))
    save({"x": torch.zeros(4), "step": 1}, old)
    save({"x": torch.ones(4), "step": 2}, path)

    def late(name):
        if name != str(path) or rank != last or next(times, None) is None:
            return describe(name)
        if seen == "nothing":
            raise FileError("HD401", f"{name}: no such file")
        return replace(describe(old), path=name, files={name: identity(old)})

    monkeypatch.setattr(hdf5_dcp, "describe", late)
    state = {"x": torch.zeros(4), "step": 0}
    load(state, path)
    findings.check(state["x"].eq(1).all() and state["step"] == 2, state)


class Custom:
    """Not a plain value."""

    def __eq__(self, other):
        return isinstance(other, Custom)

    __hash__ = None


def test_values_that_are_no_tensors(findings, path):
    """Torch's own safe types load; others if they are asked for."""
    deep = []
    for _ in range(200):
        deep = [deep]
    safe = {"size": torch.Size([2, 3]), "set": {1, 2}, "deep": deep}
    save({**safe, "pair": (torch.ones(2), 1), "own": Custom()}, path)
    got = dict.fromkeys((*safe, "pair"))
    load(got, path)
    findings.check(torch.equal(got.pop("pair")[0], torch.ones(2)), "pair")
    findings.check(got == safe and type(got["size"]) is torch.Size, got)
    failure(lambda: load({"own": None}, path), "own is stored as a pickle")
    own = {"own": None}
    load(own, path, allow_pickle=True)
    findings.check(own["own"] == Custom(), own)


class Caching(dcp.DefaultSavePlanner):
    """torch keeps plans by the name of this class."""


def test_a_planner_that_keeps_plans(findings, world, rank, folder, path, monkeypatch):
    """Other values under another name are not planned again, nor sent; a tensor that changes on one rank is."""
    planned, written, n = [], [], world.world_size
    plan_file, write_data = hdf5_dcp.plan_file, HDF5Writer.write_data
    monkeypatch.setattr(hdf5_dcp, "plan_file", lambda *args: planned.append(rank) or plan_file(*args))
    monkeypatch.setattr(
        HDF5Writer, "write_data", lambda self, plan, of: written.append(len(plan.items)) or write_data(self, plan, of)
    )
    mesh, writer = DeviceMesh("cpu", list(range(n))), HDF5Writer(path, window=SMALL)

    def saved(k, extents, writer=writer):
        whole = WHOLES["rows"] + k
        own = {f"own {r}": torch.full((extents[r],), k + r) for r in range(n)}
        state = {"x": sharded(whole, mesh, Shard(0)), "n": k, f"own {rank}": own[f"own {rank}"]}
        planner = Caching(enable_plan_caching=True)
        dcp.save(state, storage_writer=writer, checkpoint_id=folder / f"{k}.h5", planner=planner)
        for name, x in {"x": whole, **own}.items():
            findings.same(staging.load(folder / f"{k}.h5", name, dim=None, verify=True), x, f"{k}: {name}")
        got = {"n": None}
        load(got, folder / f"{k}.h5")
        findings.check(got["n"] == k, got)

    even, longer = [3] * n, [3 + (r == n - 1) for r in range(n)]
    for k, extents in enumerate((even, even, even, longer, longer)):
        saved(k, extents)
    findings.check(planned == ([0, 0] if rank == 0 else []), planned)
    findings.check([items > 0 for items in written] == [True, False, False, True, False], written)
    failure(lambda: saved(9, longer, HDF5Writer(path)), "HD419", [0])
    saved(5, longer)


def test_plans_that_are_out_of_date(findings, world, rank, folder):
    """A state is saved whole or not at all, whoever has planned another since, and wherever that save failed."""
    a, b, n = torch.ones(2), torch.ones(3), world.world_size
    more, writers = {"a": a, "b": b, "n": 1}, [HDF5Writer("x.h5"), HDF5Writer("x.h5")]

    def planner(name):
        return type(name, (dcp.DefaultSavePlanner,), {})(enable_plan_caching=True)

    def saved(which, name, state, **options):
        path = folder / f"{options.pop('under', '.')}/x.h5"
        dcp.save(state, storage_writer=writers[which], checkpoint_id=path, planner=planner(name), **options)
        got = {key: torch.zeros_like(x) if isinstance(x, torch.Tensor) else None for key, x in state.items()}
        load(got, path)
        for key in ("a", "b"):
            findings.check(key not in state or torch.equal(got[key], state[key]), f"{name}: {key}")
        names = [*staging.load(path, dim=None)]
        findings.check(names == [key for key in state if key != "n"], f"{name}: {names}")

    saved(0, "Torn", more)
    failure(lambda: saved(0, "Torn", {"a": a}, under="no"), "no such folder", [0])
    saved(0, "Torn", more)  # as torch's planner still has it on this rank, but not on the coordinator
    failure(lambda: saved(0, "Torn", {"a": a, "b/": b}), "HD418", [0])
    kept = torch.__version__ >= "2.13"  # by torch, the plan of the latest save that was written
    failure(lambda: saved(0, "Torn", {"a": a, "b/": b}), "HD418" if kept else "HD419", [0] if kept else range(n))
    saved(0, "Torn", {"a": a, "b": b})
    saved(0, "Others", {"b": b})
    failure(lambda: saved(0, "Torn", {"a": a, "b": b}), "HD419", [0])

    def whole_or_refused(*args):
        try:
            saved(*args)
        except CheckpointException as error:
            findings.check("HD419" in str(error), str(error))

    meshes = [DeviceMesh("cpu", order) for order in ([*range(n)], [*range(n)][::-1])]
    x, y = ({"a": sharded(WHOLES["rows"], mesh, Shard(0))} for mesh in meshes)  # the same chunks on other ranks
    for name, first, second in ("Two", {"a": a}, {"a": a, "b": b}), ("Moved", x, y):
        writers[:] = HDF5Writer("x.h5"), HDF5Writer("x.h5")
        saved(0, name, first)
        whole_or_refused(1, name, second)
        whole_or_refused(0, name, second)


def test_one_writer_for_several_groups(world, rank, folder):
    group, writer = dist.new_group([0], backend="mpi"), HDF5Writer("x.h5")
    for k, some in enumerate((None, group, None)):
        error = None
        try:
            if some is None or rank == 0:
                dcp.save({}, storage_writer=writer, checkpoint_id=folder / f"{k}.h5", process_group=some)
        except CheckpointException as caught:
            error = caught
        assert_on_all_ranks(error is None, error)


def test_what_is_refused(folder, path):
    x = torch.ones(2)
    for state, options, text in (
        ({"x": torch.eye(3).to_sparse()}, {}, "float32 with layout torch.sparse_coo"),
        ({"a/": x}, {}, "cannot be a name in an HDF5 file"),
        ({"_hpcdist": x}, {}, "hpcdist's own"),
        ({"x": x}, {"checkpoint_id": folder / "no" / "x.h5"}, "no such folder"),
        ({"n": 3}, {"checkpoint_id": folder / "x.safetensors"}, "an HDF5 file is written"),  # it would hold no values
        ({"x": x}, {"checkpoint_id": folder / "x.npy"}, "an HDF5 file is written"),
    ):
        failure(lambda s=state, o=options: dcp.save(s, storage_writer=HDF5Writer(path), **o), text)
    alone = lambda: dcp.save({}, storage_writer=HDF5Writer(path), use_collectives=False)  # noqa: E731
    raised = raises_on_all_ranks(ValueError, alone)
    assert_on_all_ranks("use_collectives" in str(raised), raised)
    # Until torch 2.12, DCP drops the words of a reader that cannot read a file at all.
    text = "no such file" if torch.__version__ >= (2, 13) else "metadata is None"
    failure(lambda: load({}, folder / "no.h5"), text)
    holds(folder)
