"""Private names of torch are in one file, and the package works without any of them."""

import ast
import json
from pathlib import Path

import pytest
from launch import finished

import hpcdist
from hpcdist import torch_names

ROOT = Path(hpcdist.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path.name != "torch_names.py"]
OF_PYTHON = {"_exit", "_getframe", "_current_frames", "_replace", "_asdict", "_fields"}
PATHS = sorted({name.path for name in torch_names.NAMES})


def _is_private(name):
    return name.startswith("_") and not name.startswith("__")


def _written(tree):
    """The names that a file gives to something itself."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__slots__":
            yield from (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))


def _named(tree):
    """(line, private name) of all that a file reads or imports of others, by a word or by a text."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "hpcdist":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
            names = [part.value for part in node.args[1:2] if isinstance(part, ast.Constant)]
        yield from ((node.lineno, name) for name in names if _is_private(name))


def test_no_other_file_names_anything_private_of_torch():
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    ours = OF_PYTHON.union(*map(_written, trees.values()))
    found = [(path, *one) for path, tree in trees.items() for one in _named(tree)]
    assert not [f"{path.relative_to(ROOT)}:{line}: {name}" for path, line, name in found if name not in ours]


def test_each_name_is_in_the_table_once_with_a_use_and_a_fallback():
    assert len(PATHS) == len(torch_names.NAMES)
    assert all(name.use and name.without for name in torch_names.NAMES)


@pytest.mark.parametrize(("version", "warns"), [("2.99.0", True), ("3.0.0a0+git12", True), ("2.11.0", False)])
def test_a_torch_newer_than_all_tested_ones_is_named(version, warns, monkeypatch, recwarn):
    monkeypatch.setattr("torch.__version__", version)
    torch_names.warn_if_newer()
    assert [f"torch {version} is newer" in str(one.message) for one in recwarn] == [True] * warns


PROGRAM = """
import json, sys
import torch, torch.distributed as dist
from importlib.machinery import SourceFileLoader
from pathlib import Path

without, file, saved = json.loads(sys.argv[1]), Path(sys.argv[2]) / "torch_names.py", sys.argv[3]
source, get_code = file.read_text(), SourceFileLoader.get_code
for path in without:
    assert source.count(f'"{path}"') == 1, path
    source = source.replace(f'"{path}"', f'"{path}_that_is_gone"')
ours = compile(source, str(file), "exec")
SourceFileLoader.get_code = lambda self, name: ours if name == "hpcdist.torch_names" else get_code(self, name)

import hpcdist as hd
from hpcdist import torch_names

assert sum(name.path.endswith("_that_is_gone") for name in torch_names.NAMES) == len(without)


def shard(rank, rows):
    return torch.arange((rank + 1) * rows * 2, dtype=torch.float32).view(-1, 2) + 1e6 * rank


with hd.init() as world:
    rank, size = world.rank, world.world_size
    for rows in (1, 200_000):  # 1.6 MB: from 1 MiB on results lie in the pool
        x, whole = shard(rank, rows), torch.cat([shard(one, rows) for one in range(size)])
        assert torch.equal(hd.concat(x.requires_grad_(), route="mpi"), whole)
        gathered = hd.gather(x.detach(), root=1, route="mpi")
        assert torch.equal(gathered, whole) if rank == 1 else gathered is None
        assert torch.equal(hd.split(gathered, root=1, counts=[len(shard(one, rows)) for one in range(size)]), x)
        column = hd.redistribute(x.detach(), hd.Split(0), hd.Split(1))
        assert torch.equal(column, whole[:, rank : rank + 1])
        hd.staging.save(saved, {"w": x.detach()}, dim=0)
        assert torch.equal(hd.concat(hd.staging.load(saved, "w")), whole)
    y = torch.full((3,), float(rank))
    dist.all_reduce(y)
    assert y.tolist() == [sum(range(size))] * 3
print("worked", flush=True)
"""


@pytest.mark.parametrize("without", ["nothing", "all", *PATHS])
def test_the_verbs_and_files_on_route_mpi_work_without(without, tmp_path):
    paths = {"nothing": [], "all": PATHS}.get(without, [without])
    job = finished(2, "-c", PROGRAM, json.dumps(paths), str(ROOT), str(tmp_path / "x.h5"))
    assert job.out.count("worked") == 2, job.out + job.err
