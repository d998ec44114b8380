"""The plan of the house holds: who imports whom, who reads the environment, how long things are."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from launch import run

import hpcdist
from hpcdist.__main__ import COMMANDS

ROOT = Path(hpcdist.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

MAX_FUNCTION = 60  # lines, without the docstring

# Each floor uses those below it, and nothing above: one row a package (or a file beside the packages).
FLOORS = {
    "errors": 0, "activity": 0,
    "torch_names": 1, "layout": 1, "process": 1, "control": 1,
    "tensors": 2,
    "comm": 3, "formats": 3, "watch": 3, "launch": 3,
    "routes": 4, "validation": 4,
    "backend": 5,
    "runtime": 6,
    "collectives": 7, "p2p": 7, "staging": 7,
    "commands": 8, "data": 8, "horovod": 8, "run": 8,
    "gather": 9, "concat": 9, "split": 9,
    "tools": 10, "": 10, "__main__": 10,
    "examples": 11,  # users
}  # fmt: skip


def _name(path):
    """The module of a file, without the package: "" for hpcdist itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(module):
    return module.split(".")[0]


@cache
def _tree(path):
    return ast.parse(path.read_text(), str(path))


def _imports(path):
    """The modules of the package that this file imports, wherever in it; also those for a type checker alone."""
    modules = {_name(file) for file in FILES}
    for node in ast.walk(_tree(path)):
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
def test_imports_go_downward(path):
    here = _room(_name(path))
    assert here in FLOORS, f"{path.name} has no floor yet: give it one in FLOORS"
    for other in _imports(path):
        room = _room(other)
        assert room == here or FLOORS[room] < FLOORS[here], f"{_name(path)} imports {other}: not downward"


def test_no_files_import_each_other():
    """In a circle, however long."""
    waiting = {_name(path): set(_imports(path)) - {_name(path)} for path in FILES}
    while free := {name for name, needs in waiting.items() if not needs & waiting.keys()}:
        waiting = {name: needs for name, needs in waiting.items() if name not in free}
    assert not waiting, f"in circles, or above them: {sorted(waiting)}"


def test_each_name_of_a_file_is_there_once():
    """But for commands, whose users choose the name."""
    names = [path.name for path in FILES if path.parent != ROOT and path.name not in ("__init__.py", "__main__.py")]
    assert [name for name in set(names) if names.count(name) > 1] == []


def test_every_floor_is_in_the_house():
    assert set(FLOORS) == {_room(_name(path)) for path in FILES}


def test_layout_knows_neither_torch_nor_mpi():
    nodes = [node for path in (ROOT / "layout").glob("*.py") for node in ast.walk(_tree(path))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    plain = {
        *("__future__", "abc", "bisect", "collections.abc", "dataclasses", "functools", "hashlib", "hpcdist.errors"),
        *("itertools", "math", "numpy", "operator", "typing"),
    }
    assert all(name in plain or name.startswith("hpcdist.layout") for name in names | modules), names | modules


def test_importing_the_package_starts_no_mpi():
    """In a process without a launcher and without its variables. Nor are torch's compiler and DTensor imported, by a
    command neither, which would take as long again as torch."""
    rooms = [module for _, module, *_ in COMMANDS.values()]
    names = [*rooms, *(f"{room}.__main__" for room in rooms), *(f"hpcdist.{_name(p)}" for p in ROOT.glob("commands/*"))]
    commands = sorted({*names} & {f"hpcdist.{_name(path)}" for path in FILES})
    code = f"""
import importlib, sys, hpcdist
print({{"mpi4py.MPI", "h5py", "torch._dynamo"}} & set(sys.modules))
for name in {commands}:
    importlib.import_module(name)
print({{"mpi4py.MPI", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor"}} & set(sys.modules))
"""
    done = run([sys.executable, "-c", code])
    assert len(commands) > 15
    assert (done.out.split(), done.status) == (["set()", "set()"], 0), done


def _reads_environment(path):
    found = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv", "unsetenv"):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [alias.name for alias in node.names if "env" in alias.name]
    return found


def test_only_world_reads_the_environment():
    """And the command that runs without torch, which world needs."""
    readers = {_name(path): _reads_environment(path) for path in FILES}
    assert {name for name, found in readers.items() if found} == {"runtime.world", "tools.stage_env.__main__"}


def test_only_commands_print():
    """But for the reason of an abort, which nobody could tell otherwise."""
    printers = {
        _name(path)
        for path in FILES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    allowed = {
        "process.abort",
        "runtime.cli",
        *(module.removeprefix("hpcdist.") for _, module, *_ in COMMANDS.values()),
    }
    others = {name for name in printers - allowed if not name.startswith(("commands.", "examples."))}
    assert not [name for name in others if not name.endswith("__main__")]


def test_one_room_names_the_kind_of_accelerator():
    """The others ask it; the doctor tells about GPUs also where torch does not know them."""
    named = {path for path in FILES if re.search(r"torch\.cuda|is_cuda|[\"\']cuda\b", path.read_text())}
    rooms = {name for path in named if not (name := _name(path)).startswith("tools.doctor")}
    assert rooms == {"tensors.accelerator"}


_FACTORIES = {"arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "ones", "randn", "tensor", "zeros"}


def test_every_new_tensor_names_its_device():
    """Else it is wherever the user's torch.set_default_device says. The examples are users."""
    found = [
        f"{_name(path)} line {node.lineno}: {ast.unparse(node)}"
        for path in FILES
        if _room(_name(path)) != "examples"
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FACTORIES
        if ast.unparse(node.func.value) == "torch" and "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not found, found


@pytest.mark.parametrize("path", FILES, ids=lambda path: _name(path) or "hpcdist")
def test_lengths(path):
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = node.end_lineno - body[0].lineno + 1 if body else 0
            assert length <= MAX_FUNCTION, f"{path.name}: {node.name} has {length} lines"


def test_every_public_name_is_explained():
    for name in hpcdist.__all__:
        assert getattr(hpcdist, name).__doc__, name
    for path in FILES:
        assert ast.get_docstring(_tree(path)) or not path.read_text().strip(), f"{path} has no docstring"


def test_names_of_test_files_differ():
    """pytest imports them by their name alone."""
    names = [path.name for path in (ROOT.parent / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


_LASTING = {
    "thread": {"threading.Thread", "threading.Timer", "ThreadPoolExecutor", "Worker"},
    "lock": {"threading.Lock", "threading.RLock"},
    "hook": {
        *("os.register_at_fork", "atexit.register", "faulthandler.register", "signal.signal", "signal.set_wakeup_fd"),
        "Replaced",
    },
    "finalizer": {"weakref.finalize"},
}


def test_what_outlives_a_call_is_in_the_table():
    page = (ROOT.parent / "ARCHITECTURE.md").read_text()
    table = {tuple(row) for row in re.findall(r"^\| `([\w.]+)` \| (\w+) \|", page, re.MULTILINE)}
    calls = {(_name(p), ast.unparse(n.func)) for p in FILES for n in ast.walk(_tree(p)) if isinstance(n, ast.Call)}
    lasting = {(module, kind) for module, call in calls for kind, names in _LASTING.items() if call in names}
    assert table == {row for row in lasting if _room(row[0]) not in ("tools", "examples")}
