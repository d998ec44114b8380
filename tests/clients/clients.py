"""The programs of docs/clients, which torchrun would start, and what they compute: see tests/clients.

Tests of them run in the environment `libraries`, which has the libraries and no MPI: jobs take those of `mpich` and
`openmpi`.
"""

import atexit
import functools
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from launch import python, run
from pages import parse
from settings import ROOT

SHOWN = {
    name: text
    for page in sorted((ROOT / "docs" / "clients").glob("*.md"))
    for name, text in parse(page.name, page.read_text()).programs.items()
}
DATA = {name: text for name, text in SHOWN.items() if name.endswith("_data.py")}  # with hpcdist's loader
PROGRAMS = {name: text for name, text in SHOWN.items() if name not in DATA}
MPIS = {"mpich": "libmpi.so.12", "openmpi": "libmpi.so.40"}
_ABORT = "terminate called without an active exception"
_folder = Path(tempfile.mkdtemp(prefix="hpcdist-clients-", dir="/var/tmp"))  # which all hosts share
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
ENV = {
    "HPCDIST_TIMEOUT": "60",
    # DeepSpeed compiles a module unless it is here, and waits for ever for a lock that a killed process has left.
    # So each session has a copy of its own. DeepSpeed looks for ninja.
    "TORCH_EXTENSIONS_DIR": str(_folder / "extensions"),
    "PATH": f"{os.environ['PATH']}:{Path(sys.executable).parent}",
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
}
shutil.copytree(Path(sys.prefix) / "extensions", ENV["TORCH_EXTENSIONS_DIR"])


@functools.cache
def programs():
    """Return a folder with all programs."""
    folder = _folder / "programs"
    folder.mkdir()
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text)
    return folder


def ended(start):
    """Start a job until torch 2.13's gloo does not abort it, which happens now and then, also under torchrun: the
    destructor of a group may run before the end of its threads."""
    for _ in range(4):
        job = start()
        if _ABORT not in job.err:
            break
        warnings.warn(f"torch aborted; the job is started again:\n{job.err}", stacklevel=2)
    assert job.status == 0, job.out + job.err


@functools.cache
def by_torchrun(name, np, resume=False):
    """Return the folder that a program leaves under torchrun with gloo, on `np` ranks; `resume`: it begins with the
    checkpoint of a run before."""
    folder = _folder / f"{name}-{np}-{resume}"
    if resume:
        shutil.copytree(by_torchrun(name, np), folder)
    else:
        folder.mkdir()
    torchrun = [*python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={np}", "--no-python"]
    options = ["--resume"] if resume else []
    ended(lambda: run([*torchrun, *python(), str(programs() / name), str(folder), *options], folder, ENV))
    return folder


def mpirun_of(mpi, *args, cwd, imports=False):
    """Run ``python *args`` on 2 ranks of an MPI; `imports`: in true processes, which import the
    libraries when torchrun's variables are there already."""
    home, env = ROOT / ".venv" / mpi, ENV
    own = home / "bin" / "mpirun"
    if own.exists():  # else it is Debian's
        env = {**ENV, "MPI4PY_LIBMPI": str(home / "lib" / MPIS[mpi])}
    mpirun = [str(own) if own.exists() else "mpirun", "-n", "2"]
    return run([*mpirun, *([sys.executable] if imports else python()), *args], cwd, env)


def difference(ours, theirs):
    """Return by how much the values of two runs differ, in parts of the largest of all."""
    found, expected = (_flat(torch.load(folder / "end.pt")) for folder in (ours, theirs))
    assert {name: value.shape for name, value in found.items()} == {name: x.shape for name, x in expected.items()}
    found, expected = (torch.cat([value.flatten() for value in values.values()]) for values in (found, expected))
    return float((found - expected).abs().max() / expected.abs().max())


def _flat(values, name=""):
    if isinstance(values, dict):
        return {key: value for part in values for key, value in _flat(values[part], f"{name}.{part}").items()}
    return {name: torch.as_tensor(values, dtype=torch.float64)}
