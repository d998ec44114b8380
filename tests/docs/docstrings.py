"""The examples in the docstrings that docs/reference shows, as runs of pages.py: the first rank's output is compared.

In an output, comments (``# on rank 0; None on rank 1``) are for the reader; a statement with ``# on rank R`` is R's.
What an example takes as given is in ``GIVEN``.
"""

import doctest
import importlib
import inspect
import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from types import FunctionType

from pages import Page, Run, matches

HERE = str(Path(__file__).parent)
_RANKS = re.compile(r"on (?:rank \d+ of )?(\d+)(?: ranks)?")
_COMMENT = re.compile(r" *# .*")
_NETWORK = "model = torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
_DCP = "import torch.distributed.checkpoint as dcp\nfrom hpcdist.staging.dcp import HDF5Reader, HDF5Writer\n"
_SAMPLES = "hd.staging.save('train-0.h5', {'x': torch.zeros(300, 2), 'y': torch.arange(300)}, dim=None)"
GIVEN = {
    "hpcdist.collectives.plans.plan": "x = torch.zeros(256)",
    "hpcdist.data.dataset.open": _SAMPLES,
    "hpcdist.data.loader.Loader": f"{_SAMPLES}\ndata = hd.data.open('train-*.h5', fields=['x', 'y'])",
    "hpcdist.tensors.dtensor.layout_of": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2, 2))
x = distribute_tensor(torch.arange(16).view(4, 4), mesh, [Shard(0), Shard(1)])
""",
    "hpcdist.p2p.sendrecv.send": "w1, w2 = torch.ones(2), torch.ones(3)",
    "hpcdist.runtime.background.Handle": "x, compute = torch.ones(2), int",
    "hpcdist.staging.dcp.HDF5Reader": _DCP + _NETWORK + "dcp.save({'model': model.state_dict()}, "
    "storage_writer=HDF5Writer('model.h5'))",
    "hpcdist.staging.dcp.HDF5Writer": _DCP + _NETWORK,
    "hpcdist.staging.load.load": "model = torch.nn.Linear(4, 3)\n"
    "hd.staging.save('hf_folder', dict(model.state_dict()), dim=None)\n"
    "hd.staging.save('x.h5', torch.arange(10).view(5, 2), dim=None)",
    "hpcdist.staging.piecewise.open": "compute = lambda row: torch.zeros(1, 64)",
    "hpcdist.staging.save.save": "import h5py",
    "hpcdist.tensors.pool.memory_stats": "x = torch.zeros(2**23)",
}
NOT_RUN = {
    "hpcdist.staging.drivers.active": "shows a machine's own versions",
}


def find(path):
    """Return the object of this name."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
            break
        except ImportError:
            continue
    for part in parts[i:]:
        found = getattr(found, part)
    return found


def shown(folder):
    """Yield the names of the objects that the reference shows, members of classes included."""
    for page in sorted(folder.glob("*.md")):
        for path in re.findall(r"^<!-- object: \S+ = (\S+) -->$", page.read_text(), re.MULTILINE):
            yield path
            if inspect.isclass(found := find(path)):
                members = {name: member for name, member in vars(found).items() if not name.startswith("_")}
                yield from (f"{path}.{name}" for name in members if isinstance(members[name], (FunctionType, property)))


def pages(folder):
    """Return a page for each docstring with examples, on as many ranks as its title says."""
    found = []
    for path in shown(folder):
        text = inspect.getdoc(find(path)) or ""
        if ">>>" in text and path not in NOT_RUN:
            title = next(line for line in text[: text.index(">>>")].splitlines()[::-1] if line.strip())
            ranks = _RANKS.search(title)
            np = int(ranks[1]) if ranks else 2
            code = f"import sys\nsys.path.append({HERE!r})\nimport docstrings\n{GIVEN.get(path, '')}"
            code += f"\ndocstrings.check({path!r}, globals())"
            found.append(Page(path, {}, [Run(path, 1, np, code=code, fresh=True)]))
    return found


def check(path, space):
    """Run the examples of a docstring in a namespace.

    Raises:
        AssertionError: something else was printed.
    """
    found = find(path)
    space.update(vars(importlib.import_module(getattr(found, "__module__", None) or path.rpartition(".")[0])))
    text = inspect.getdoc(found) or ""
    one = re.search(r"on rank (\d+) of", text)
    compared = int(one[1]) if one else 0
    for example in doctest.DocTestParser().get_examples(text):
        only = re.search(r"# on rank (\d+)$", example.source.strip())
        if only and int(only[1]) != space["rank"]:
            continue
        printed = io.StringIO()
        with redirect_stdout(printed):
            try:
                exec(compile(example.source, path, "single"), space)
            except Exception as error:
                print(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", []), sep="\n")
        if space["rank"] == compared and example.want:
            want = "\n".join(_COMMENT.sub("", line) for line in example.want.splitlines())
            assert matches(_words(want), _words(printed.getvalue())), f"{path}: {example.source}{printed.getvalue()}"
        assert example.want or "Error: " not in printed.getvalue(), f"{path}: {printed.getvalue()}"


def _words(text):
    """Return a text without regard to where its lines end."""
    return re.sub(r"\s+", " ", re.sub(r"(?<=[\[(,]) +|\n +(?=\[)", " ", text)).replace("[ ", "[").replace("( ", "(")
