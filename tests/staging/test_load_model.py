"""load(into=): every kind of model from every kind of file, what is read and by whom, names that differ, refusals."""

import json
import pickle
from functools import partial

import pytest
import torch
from cases import whole_of
from collective import goes_on, refused, several_ranks
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hpcdist as hd
from hpcdist import staging
from hpcdist.control import objects
from hpcdist.formats import plain
from hpcdist.formats.contents import Stored
from hpcdist.staging.reader import TensorReader
from hpcdist.tensors.storage import Scratch

INDEX = "model.safetensors.index.json"
WHOLES = {
    "big": whole_of((401, 250), torch.float32),  # of which up to 6 ranks read their rows on their own
    "rows": whole_of((7, 5), torch.float32, 1),
    "columns": whole_of((6, 9, 3), torch.float32, 2),
    "wide": whole_of((2, 40_000), torch.bfloat16, 3),
    "few": whole_of((1, 9), torch.float32, 4),
    "count": torch.tensor(7),
    "none": torch.empty(0, 3),
}
BUFFERS = ("count", "none")
DIMS = {"big": 1, "rows": 0, "columns": 1, "wide": 1, "few": None}
NBYTES = sum(x.nbytes for x in WHOLES.values())


class Model(torch.nn.Module):
    """Of zeros, or of other values; `tied` is another name of `rows`."""

    def __init__(self, values=(), names=tuple(WHOLES)):
        super().__init__()
        for name in names:
            x = torch.zeros_like(WHOLES[name]) if name not in values else values[name].clone()
            if name in BUFFERS:
                self.register_buffer(name, x)
            else:
                self.register_parameter(name, torch.nn.Parameter(x))
        self.register_buffer("other", torch.ones(3), persistent=False)
        if "rows" in names:
            self.tied = self.rows

    def forward(self, x):
        return x


def fsdp(mesh_of):
    return fully_shard(Model(), mesh=mesh_of(-1))


def on_meta(mesh_of):
    model = fully_shard(Model().to("meta"), mesh=mesh_of(-1))
    model.to_empty(device="cpu")
    model.tied = model.rows  # as the libraries tie them again
    return model


def placed(mesh, placements, names=tuple(WHOLES)):
    """Every parameter as a DTensor."""
    model = Model(names=names)
    for name in [name for name in DIMS if name in names]:
        x = distribute_tensor(getattr(model, name).data, mesh, placements(DIMS[name]))
        setattr(model, name, torch.nn.Parameter(x))
    if "rows" in names:
        model.tied = model.rows
    return model


def tensor_parallel(mesh_of, names=tuple(WHOLES)):
    return placed(mesh_of(-1), lambda dim: [Replicate() if dim is None else Shard(dim)], names)


def on_two_dims(mesh_of):
    """Rows by columns."""
    return placed(mesh_of(), lambda dim: [Shard(0), Shard(1)])


def hybrid(mesh_of):
    """Copies of shards."""
    return fully_shard(Model(), mesh=mesh_of())


def fsdp_and_tensor_parallel(mesh_of):
    mesh = mesh_of()
    return fully_shard(placed(mesh["tp"], lambda dim: [Replicate() if dim is None else Shard(dim)]), mesh=mesh["dp"])


def unsharded(mesh_of, names=tuple(WHOLES)):
    return Model(names=names)


MODELS = [
    unsharded, fsdp, on_meta, tensor_parallel, on_two_dims, hybrid, fsdp_and_tensor_parallel,
]  # fmt: skip


@pytest.fixture
def mesh_of(size):
    """Meshes of all ranks: of one dim, or of two."""

    def make(dims=2):
        if dims == -1:
            return init_device_mesh("cpu", (size,))
        first = 2 if size % 2 == 0 else 1
        return init_device_mesh("cpu", (first, size // first), mesh_dim_names=("dp", "tp"))

    return make


@pytest.fixture
def reads(monkeypatch):
    """The bytes of each read of this rank."""
    counts, inner = [], plain.read_at

    def counted(fd, offset, into, *rest):
        counts.append(len(into))
        return inner(fd, offset, into, *rest)

    monkeypatch.setattr(plain, "read_at", counted)
    return counts


def write_folder(folder, tensors, index=True):
    """A folder as Hugging Face's libraries write it, of three files."""
    if hd.current().rank == 0:
        folder.mkdir()
        where = {name: f"model-{1 + i % 3:05d}-of-00003.safetensors" for i, name in enumerate(tensors)}
        for file in set(where.values()):
            held = {name: x for name, x in tensors.items() if where[name] == file}
            save_file(held, folder / (file if index else file.replace("-of-00003", "")), {"format": "pt"})
        if index:
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    hd.current().comm.Barrier()
    return folder


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def check(findings, model, expected, what):
    for name, x in model.state_dict().items():
        findings.same(whole(x), expected["rows" if name == "tied" else name], f"{what}: {name}")
    findings.check(what == "on_meta" or model.other.eq(1).all(), "a buffer that is not persistent")


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_every_model(make, findings, world, folder, mesh_of, reads):
    """From files of every kind, each byte of which one rank reads, once."""
    sources = [write_folder(folder / "index", WHOLES), write_folder(folder / "files", WHOLES, index=False)]
    sources += [folder / "x.h5", folder / "x.safetensors"]
    for path in sources[2:]:
        staging.save(path, WHOLES, None)
    for path in sources:
        model, what = make(mesh_of), f"{make.__name__} of {path.name}"
        version = model.big._version
        reads.clear()
        keys = staging.load(path, into=model)
        findings.check(keys == ([], []), keys)
        findings.check(world.comm.allreduce(sum(reads)) == NBYTES, f"{what}: {sum(reads)} of {NBYTES} bytes")
        findings.check(model.big._version > version or make is not unsharded, "autograd must see it")
        check(findings, model, WHOLES, make.__name__)


@pytest.mark.parametrize("window", [1000, 2**17, 2**28])
def test_ranks_share_the_reading(window, findings, size, folder, mesh_of, reads, monkeypatch):
    """Evenly, in the memory that they may use, each in one part of the files."""
    scratches, made = [], Scratch.__init__
    monkeypatch.setattr(Scratch, "__init__", lambda self, **how: (scratches.append(self), made(self, **how))[0])
    path = write_folder(folder / "index", WHOLES)
    for model, limit in ((Model(), 2 * window), (tensor_parallel(mesh_of), 4 * window)):
        reads.clear()
        staging.load(path, into=model, window=window)
        check(findings, model, WHOLES, "window")
        largest = max(40_000 * 2 if window > 2**20 else window // size, *(x.nbytes for x in WHOLES.values()))
        findings.check(sum(reads) <= NBYTES / size + largest, f"{sum(reads)} bytes of {NBYTES}")
        held = [sum(x.numel() for x in scratch.held) for scratch in scratches]
        findings.check(held and max(held) <= limit, f"{max(held)} bytes of {window}")
        scratches.clear()


@pytest.mark.parametrize("suffix", [".safetensors", ".h5"])
def test_shards_are_not_listed_to_all_ranks(suffix, findings, size, folder, mesh_of, monkeypatch):
    """What ranks tell each other of a sharded model does not grow with the tensors, and no table is read whole."""
    told, inner = [], objects.run_on_all

    def noted(comm, what, step):
        return inner(comm, what, lambda: (value := step(), told.append(len(pickle.dumps(value))))[0])

    monkeypatch.setattr(objects, "run_on_all", noted)
    tables = []
    monkeypatch.setattr(Stored, "with_table", lambda self, inner=Stored.with_table: tables.append(1) or inner(self))
    for count in (2, 40):
        tensors = {f"x{i}": torch.arange(12.0).view(6, 2) + 100 * i for i in range(count)}
        staging.save(folder / f"x{suffix}", tensors, None)
        model = torch.nn.Module()
        for name in tensors:
            x = torch.nn.Parameter(torch.zeros(6, 2))
            model.register_parameter(name, x)
        fully_shard(model, mesh=mesh_of(-1))
        told.clear()
        findings.check(staging.load(folder / f"x{suffix}", into=model) == ([], []), "keys")
        for name, x in model.state_dict().items():
            findings.same(x.full_tensor(), tensors[name], name)
        findings.check(max(told) < 100 and not tables, (told, tables))


def test_names_of_a_group(findings, folder):
    """Of a nested dict that was saved, one part."""
    staging.save(folder / "x.h5", {"model": {"rows": WHOLES["rows"]}, "step": torch.tensor(3)}, None)
    model = Model(names=["rows"])
    for name in ("model", "/model/"):
        findings.check(staging.load(folder / "x.h5", name, into=model) == ([], []), "keys")
        findings.same(model.rows.data, WHOLES["rows"], name)
        torch.nn.init.zeros_(model.rows)


def test_a_model_that_differs_between_ranks(findings, rank, size, folder):
    """As stages of a pipeline: what no rank has is unexpected."""
    names = ["big", "few"][rank % 2 :][:1]
    path = write_folder(folder / "x", {name: WHOLES[name] for name in ("big", "few", "rows")})
    model = Model(names=names)
    keys = staging.load(path, into=model, strict=False)
    expected = {"big", "few", "rows"} - {"big"} - ({"few"} if size > 1 else set())
    findings.check((keys.missing_keys, set(keys.unexpected_keys)) == ([], expected), keys)
    check(findings, model, WHOLES, names)


def test_names_and_shapes_that_differ(findings, folder, reads):
    """All of them in one error, before anything is read; strict=False allows names."""
    tensors = {name: x for name, x in WHOLES.items() if name not in ("few", "none", "rows")}
    tensors |= {"more": torch.ones(2), "big": WHOLES["big"].t().contiguous(), "wide": WHOLES["wide"].float()}
    path = write_folder(folder / "x", tensors)
    load, model = partial(staging.load, path), Model()
    error = str(refused("4 missing: rows, few, tied, none;", load, into=model, ranks=[0]))
    for text in ("1 unexpected: more", "big (torch.float32 of (250, 401), in the model torch.float32 of (401, 250))"):
        findings.check(text in error, error)
    findings.check(
        "2 of another shape or dtype" in error and "wide (torch.float32 of" in error and "[HD408]" in error, error
    )
    error = str(refused("1 of another shape or dtype: big", load, into=model, ranks=[0], convert=True, strict=False))
    findings.check("missing" not in error and not reads, error)
    findings.check(not model.columns.any(), "nothing was loaded")
    model = Model(names=["columns", "few", "count"])
    keys = load(into=model, strict=False)
    findings.check(keys.missing_keys == ["few"], keys)
    findings.check(sorted(keys.unexpected_keys) == ["big", "more", "wide"], keys)
    findings.same(model.columns.data, WHOLES["columns"], "columns")
    findings.check(not model.few.any(), "few stays")
    goes_on()


@several_ranks
def test_a_rank_with_another_shape(folder, rank, last):
    path = write_folder(folder / "x", {"rows": WHOLES["rows"]})
    model = Model(names=["rows"])
    if rank == last:
        model.rows = model.tied = torch.nn.Parameter(torch.zeros(5, 7))
    refused("1 of another shape or dtype: rows", staging.load, path, into=model, ranks=[last])


@pytest.mark.parametrize("make", [unsharded, fsdp, tensor_parallel], ids=["plain", "fsdp", "tensor_parallel"])
def test_converted(make, findings, folder, mesh_of):
    """To the dtype of the model."""
    others = {name: x if name in BUFFERS else x.double().nan_to_num() for name, x in WHOLES.items()}
    path = write_folder(folder / "x", others)
    refused("5 of another shape or dtype", staging.load, path, into=make(mesh_of), ranks=[0])
    expected = {name: x.to(WHOLES[name].dtype) for name, x in others.items()}
    for window in (2**12, 2**28):
        model = make(mesh_of)
        staging.load(path, into=model, convert=True, window=window)
        check(findings, model, expected, f"converted {window}")


def test_tied_under_either_name(findings, folder):
    for name in ("rows", "tied"):
        path = write_folder(folder / name, {name: WHOLES["rows"]})
        model = Model(names=["rows"])
        findings.check(staging.load(path, into=model) == ([], []), name)
        findings.same(model.rows.data, WHOLES["rows"], name)


def test_tied_under_both_names(findings, world, folder, reads):
    """Of which the file has different values: all ranks get the last, as by load_state_dict(); only that is read."""
    path = write_folder(folder / "x", {"rows": WHOLES["rows"], "tied": WHOLES["rows"] + 1})
    for _ in range(5):
        model = Model(names=["rows"])
        reads.clear()
        findings.check(staging.load(path, into=model) == ([], []), "keys")
        findings.same(model.rows.data, WHOLES["rows"] + 1, "the last")
        findings.check(world.comm.allreduce(sum(reads)) == WHOLES["rows"].nbytes, reads)


def test_a_model_whose_state_is_a_copy(findings, size, folder):
    """Filling it would leave the model as it is; what only the module itself can load is left out."""

    class Copying(Model):
        def state_dict(self, **options):
            return {name: x.clone() for name, x in super().state_dict(**options).items()}

        def get_extra_state(self):
            return torch.ones(3)

    path = write_folder(folder / "x", {name: WHOLES[name] for name in ("rows", "few")})
    text = "has copies, as of FSDP1: rows, few, tied [HD419]"
    refused(text, staging.load, path, into=Copying(names=["rows", "few"]), ranks=range(size))
    Copying.state_dict = Model.state_dict
    model = Copying(names=["rows", "few"])
    findings.check(staging.load(path, into=model) == ([], []), "keys")
    findings.same(model.few.data, WHOLES["few"], "few")


def test_arguments(rank, last, size, folder):
    """One error on all ranks, from the rank that is wrong."""
    path = write_folder(folder / "x", WHOLES)
    load, wrong, everyone = partial(staging.load, path), rank == last, range(size)
    refused("into is a dict, expected a torch.nn.Module", load, into={} if wrong else Model(), ranks=[last])
    model = Model().to("meta")
    refused("to_empty(device=...): big, rows", load, into=model if wrong else Model(), ranks=[last])
    refused("into is given together with dim", load, into=Model(), out=torch.ones(2), ranks=everyone)
    refused("into is given together with dim", load, into=Model(), dim=1, ranks=everyone)
    refused("is given without into", load, strict=False, ranks=everyone)
    refused("is given without into", load, convert=True, ranks=everyone)
    refused("into is given, for which nothing is planned", hd.plan, staging.load, path, into=Model(), ranks=[0])
    refused("window is 0", load, into=Model(), window=0, ranks=everyone)
    model = Model()
    model.few = torch.nn.Parameter(torch.zeros(1, 1).expand(1, 9))
    refused("few overlaps itself", load, into=model if wrong else Model(), ranks=[last])
    if size > 1:
        refused("convert is", load, into=Model(), convert=wrong, ranks=[last])
        refused("into is", load, **({"into": Model()} if wrong else {}), ranks=[last])
    goes_on()


def test_files_that_are_incomplete_or_damaged(findings, rank, folder):
    path = write_folder(folder / "x", WHOLES)
    load = partial(staging.load, path, into=Model())
    shard = path / "model-00002-of-00003.safetensors"
    data = shard.read_bytes()
    for text, content in (("truncated", data[:-1]), ("x", b"\xff" * 8 + data[8:]), ("x", data[:7]), ("No such", None)):
        hd.current().comm.Barrier()
        if rank == 0:
            shard.unlink() if content is None else shard.write_bytes(content)
        error = refused("00002-of-00003" if text != "x" else "", load, ranks=[0])
        findings.check(text == "x" or error.codes, error)
    (path / INDEX).unlink(missing_ok=True)
    refused("whose index is missing", load)
    refused("is a folder without a complete checkpoint", staging.load, folder, into=Model())
    refused("HD401", staging.load, folder / "none", into=Model())
    goes_on()


@several_ranks
def test_a_file_that_differs_between_ranks(rank, last, folder, monkeypatch):
    """As on nodes that do not share the folder."""
    path = write_folder(folder / "x", WHOLES)
    monkeypatch.setattr("hpcdist.staging.reader.NAPS", (0,))
    if rank == last:
        monkeypatch.setattr("hpcdist.formats.contents.Identity.is_of", lambda self, fd: False)
    refused("HD413", staging.load, path, into=Model(), ranks=[last])


def test_a_failed_read(rank, last, folder, mesh_of, monkeypatch):
    """Damage, and an error of one rank: the others finish, and all raise it."""
    path = folder / "x.h5"
    staging.save(path, {"big": WHOLES["big"]}, None)
    if rank == 0:
        row = WHOLES["big"][-1].numpy().tobytes()
        path.write_bytes(path.read_bytes().replace(row, row[:-1] + bytes([row[-1] ^ 1])))
    hd.current().comm.Barrier()
    for make in (unsharded, tensor_parallel):
        model = make(mesh_of, ["big"])
        refused("is damaged", staging.load, path, into=model, verify=True)
        staging.load(path, into=model, verify=False)
    if rank == last:
        monkeypatch.setattr(TensorReader, "fill", lambda *_: 1 / 0)
    path = write_folder(folder / "x", WHOLES)
    for make in (unsharded, fsdp):
        refused("division by zero [HD402]; into is incomplete", staging.load, path, into=make(mesh_of), ranks=[last])
    monkeypatch.undo()
    goes_on()
