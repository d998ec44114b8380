"""The plan of the house holds: who imports whom, who reads the environment, how long things are."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hpcdist

ROOT = Path(hpcdist.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

MAX_FILE = 350
MAX_FUNCTION = 60  # lines, without the docstring

# Each floor uses those below it, and nothing above. A module that is new has to be given its place here.
FLOORS = (
    ("errors", "versions", "settings", "tensors", "tensors.dtypes"),
    ("layout.rules", "jobscript.parts", "memory", "regular"),
    ("layout.box", "jobscript"),
    ("layout.layouts", "layout.overlaps"),
    ("abort", "commit", "eager", "forks", "groups", "layout", "launcher", "output", "watch", "watch.record"),
    ("control", "control.codec"),
    ("control.objects",),
    ("exits", "watch.look", "watch.wire", "watch.table"),
    ("buffers", "watch.limits"),
    ("matching", "raw", "tree"),
    ("merging", "packing"),
    (
        "routes",
        "routes.base",
        "routes.select",
        "routes.exchange",
        "routes.cuda_aware",
        "routes.c10d",
        "routes.datatypes",
        "routes.mpi",
        "routes.staged",
    ),
    ("call", "pages"),
    ("checks", "agree"),
    ("results", "digests", "staging.format", "staging.journal"),
    ("routes.hdf5",),
    ("team", "rendezvous", "devices", "watch.survey"),
    ("process_group", "watch.watcher"),
    ("gradient",),
    ("handle",),
    ("plan", "post"),
    ("transfers", "world"),
    ("structures",),
    ("gather", "concat", "split", "redistribute", "local", "p2p", "dtensor"),
    ("staging.links", "staging.boxes"),
    ("staging.names", "staging.host", "staging.writers", "staging.contents"),
    ("staging.pieces", "staging.written"),
    ("staging.reader", "staging.wants"),
    ("staging.saving",),
    ("staging.save", "staging.load", "staging.readfile"),
    ("staging.writefile",),
    ("staging.piecewise",),
    ("staging",),
    ("",),  # the package itself: the public names
    ("arrays", "patterns", "command"),
    ("checkpoints",),
    ("formats",),
    ("libraries",),
    ("files", "outputs"),
    ("inputs",),
    ("gather.compare", "streaming", "doctor", "doctor.findings"),
    ("doctor.ward",),
    ("doctor.launch", "doctor.cores", "doctor.network", "doctor.gpus", "doctor.files", "doctor.timing"),
    ("doctor.examine",),
    ("gather.__main__", "staging.__main__", "jobscript.__main__", "doctor.__main__", "__main__"),
    ("concat.__main__", "split.__main__"),
    ("examples",),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def _name(path: Path) -> str:
    """The module of a file, without the package: "" for hpcdist itself. The examples are users, and all of a kind."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "examples":
        return "examples"
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING``, which never run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield other
                yield from _running(other)
        else:
            yield child
            yield from _running(child)


def _imports(path: Path) -> Iterator[str]:
    """The modules of the package that this file imports, wherever in it."""
    modules = {_name(file) for file in FILES}
    for node in _running(_tree(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} line {node.lineno}: a relative import"
            if (node.module or "").split(".")[0] == "hpcdist":
                base = (node.module or "").removeprefix("hpcdist").removeprefix(".")
                for alias in node.names:
                    inner = f"{base}.{alias.name}".removeprefix(".")
                    yield inner if inner in modules else base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "hpcdist":
                    yield alias.name.removeprefix("hpcdist").removeprefix(".")


@pytest.mark.parametrize("path", FILES, ids=lambda path: _name(path) or "hpcdist")
def test_imports_go_downward(path: Path) -> None:
    here = _name(path)
    assert here in FLOOR_OF, f"{path.name} has no floor yet: give it one in FLOORS"
    for other in _imports(path):
        if other == here:
            continue
        # What a package shares, its __init__ may hold: routes.mpi imports routes.
        within = other.split(".")[0] == here.split(".")[0] == "routes"
        assert FLOOR_OF[other] < FLOOR_OF[here] or within, f"{here or 'hpcdist'} imports {other or 'hpcdist'}: upward"


def test_every_floor_is_in_the_house() -> None:
    assert set(FLOOR_OF) <= {_name(path) for path in FILES}


def test_layout_knows_neither_torch_nor_mpi() -> None:
    nodes = [node for path in (ROOT / "layout").glob("*.py") for node in ast.walk(_tree(path))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    plain = {
        "__future__",
        "bisect",
        "collections.abc",
        "dataclasses",
        "functools",
        "itertools",
        "math",
        "operator",
        "typing",
    }
    assert all(name in plain or name.startswith("hpcdist.layout") for name in names | modules), names | modules


def test_importing_the_package_starts_no_mpi() -> None:
    """In a process without a launcher and without its variables. Nor is the compiler imported, which takes seconds."""
    code = "import sys, hpcdist; print({'mpi4py.MPI', 'h5py', 'torch._dynamo'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("set()", 0), done.stderr


def _reads_environment(path: Path) -> list[str]:
    found = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv", "unsetenv"):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [alias.name for alias in node.names if "env" in alias.name]
    return found


def test_only_world_reads_the_environment() -> None:
    readers = {_name(path): _reads_environment(path) for path in FILES}
    assert {name for name, found in readers.items() if found} == {"world"}


def test_only_commands_print() -> None:
    """But for the reason of an abort, which nobody could tell otherwise."""
    printers = {
        _name(path)
        for path in FILES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert {name for name in printers if not name.endswith("__main__")} <= {"abort", "command", "examples"}


_FACTORIES = {"arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "ones", "randn", "tensor", "zeros"}


def test_every_new_tensor_names_its_device() -> None:
    """Else it is wherever the user's torch.set_default_device says. The examples are users."""
    found = [
        f"{_name(path)} line {node.lineno}: {ast.unparse(node)}"
        for path in FILES
        if _name(path) != "examples"
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FACTORIES
        if ast.unparse(node.func.value) == "torch" and "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not found, found


@pytest.mark.parametrize("path", FILES, ids=lambda path: _name(path) or "hpcdist")
def test_lengths(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= MAX_FILE, f"{path.name} has {lines} lines"
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert length <= MAX_FUNCTION, f"{path.name}: {node.name} has {length} lines"


def test_every_public_name_is_explained() -> None:
    for name in hpcdist.__all__:
        assert getattr(hpcdist, name).__doc__, name
    for path in FILES:
        assert ast.get_docstring(_tree(path)) or not path.read_text().strip(), f"{path} has no docstring"


def test_no_second_copy_under_another_name() -> None:
    """The editable install, the checkout and the tests are about one package."""
    assert os.path.samefile(ROOT, Path(sys.modules["hpcdist.world"].__file__ or "").parent)
