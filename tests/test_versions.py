"""The versions that setup.cfg declares are those that are looked at, those that CI tests, and those that it says."""

import configparser
import re
import sys
from pathlib import Path

import pytest
from launch import run

from hpcdist.process import startup
from hpcdist.process.startup import OLDEST, problem, require

ROOT = Path(__file__).resolve().parent.parent


def _declared():
    """Name -> lower bound, of setup.cfg."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    packages = config["options"]["install_requires"].split()
    bounds = dict(one.split(">=") for one in packages)
    return {"Python": config["options"]["python_requires"].removeprefix(">="), **bounds}


def _pinned(path):
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def test_the_bounds_are_those_of_setup_cfg():
    assert _declared() == OLDEST


def test_the_floor_is_the_lower_bounds():
    pinned = _pinned(ROOT / ".ci" / "floor.txt")
    declared = _declared()
    del declared["Python"]
    assert set(declared) <= set(pinned)
    assert {name: f"{bound}.0" for name, bound in declared.items()} == {name: pinned[name] for name in declared}


def test_what_ci_installs_is_in_range():
    pinned = _pinned(ROOT / ".ci" / "constraints.txt")
    assert problem({name: pinned.get(name, "3.11") for name in OLDEST}.get) is None


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("torch", "2.7.0", "hpcdist needs torch 2.11 or later, and this is 2.7.0: pip install 'torch>=2.11'"),
        ("torch", "2.10.0+cu128", "torch 2.11 or later, and this is 2.10.0+cu128: pip install 'torch>=2.11'"),
        ("torch", "2.9.0a0+git1234", "this is 2.9.0a0+git1234"),
        ("mpi4py", "4.0.3", "mpi4py 4.1 or later, and this is 4.0.3"),
        ("safetensors", "0.7.0", "pip install 'safetensors>=0.8'"),
        ("Python", "3.10.13", "Python 3.11 or later, and this is 3.10.13: an environment of Python 3.11 or later"),
    ],
)
def test_what_is_too_old_is_said_in_one_line(name, version, said, monkeypatch):
    found = {**OLDEST, name: version}
    text = problem(found.get)
    assert said in text
    assert "\n" not in text
    monkeypatch.setattr(startup, "_installed", found.get)
    with pytest.raises(ImportError, match=re.escape(text)):
        require()
    both = problem({**found, "h5py": "3.8.0"}.get) or ""
    assert f"{name} {OLDEST[name]} or later" in both and "h5py 3.9 or later, and this is 3.8.0" in both


@pytest.mark.parametrize("version", [None, "2.11", "2.11.0a0+git1234", "2.11.0+cpu", "2.100.1", "3.0"])
def test_the_bound_itself_and_what_is_newer_or_not_known_is_let_through(version):
    assert problem({"torch": version}.get) is None


@pytest.mark.parametrize("module", ["hpcdist", "hpcdist.gather"])
def test_the_import_ends_with_that_line(module, tmp_path):
    """Before anything of torch's that an old one lacks is imported: here, all of it."""
    (tmp_path / "torch-2.7.0.dist-info").mkdir()
    (tmp_path / "torch-2.7.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.7.0\n")
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')\n")
    path = f"{tmp_path}:{ROOT}"
    done = run([sys.executable, "-c", f"import {module}"], env={"PYTHONPATH": path})
    assert done.status == 1
    wanted = "ImportError: hpcdist needs torch 2.11 or later, and this is 2.7.0: pip install 'torch>=2.11'"
    assert done.err.splitlines()[-2:] == [f"{wanted} [HD102]", "python -m hpcdist explain HD102"]


def test_a_command_without_what_it_needs_ends_with_one_line():
    done = run([sys.executable, "-S", "-m", "hpcdist", "ls", "x.h5"], env={"PYTHONPATH": str(ROOT)})
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1), done.err
    assert done.err.startswith("hpcdist: error: hpcdist needs torch 2.11 or later, and it is missing; mpi4py ")
    assert done.err.endswith(" [HD102] (see python -m hpcdist explain HD102)\n")
