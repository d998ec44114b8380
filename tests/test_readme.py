"""The README's program prints what the README says, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from launch import mpirun

from hpcdist.commands.formats import FORMATS
from hpcdist.tensors.storage import DTYPES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_program_prints_what_the_readme_says(tmp_path: Path) -> None:
    program = re.search(r"```python\n(# shards\.py\n.*?)```", README, re.DOTALL)
    output = re.search(r"\$ mpirun -n 3 python shards\.py\n(.*?)```", README, re.DOTALL)
    assert program is not None
    assert output is not None
    (tmp_path / "shards.py").write_text(program[1])
    job = mpirun(3, "shards.py", cwd=tmp_path)
    assert job.status == 0, job.err
    assert job.out == output[1]


def test_the_programs_length() -> None:
    program = re.search(r"```python\n# shards\.py\n(.*?)```", README, re.DOTALL)
    assert program is not None
    assert len([line for line in program[1].splitlines() if line.strip()]) <= 12


def test_the_table_of_dtypes_says_what_the_code_does() -> None:
    """Each dtype once, whether this torch has it or not; and what each file format can hold."""
    page = (ROOT / "docs" / "guide" / "dtypes.md").read_text()
    rows = re.findall(r"^\| (`[a-z]+\d.*?) \| (yes|no) \| (yes|no) \| (yes|no) \| (yes|no) \|$", page, re.MULTILINE)
    told = {name: row[1:] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert sum(len(re.findall(r"`\w+`", row[0])) for row in rows) == len(told), "a dtype is named twice"
    every = {
        str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
    }
    assert set(every) <= set(told)
    assert set(told) - set(every) <= {"bcomplex32"}, "which came with torch 2.15"
    for name, dtype in every.items():
        holders = [DTYPES.keys(), *(FORMATS[suffix].dtypes for suffix in (".npy", ".pt", ".safetensors"))]
        assert told[name] == tuple("yes" if dtype in holder else "no" for holder in holders), name
    assert FORMATS[".h5"].dtypes == set(DTYPES)


def test_what_it_names_is_there() -> None:
    """It has no links, which a package index could not follow: files and commands are named."""
    files = set(re.findall(r"`((?:benchmarks|hpcdist|jobscripts|tests)/[^\s`]*|\w+\.md|setup\.cfg)`", README))
    assert len(files) > 4
    assert {name for name in files if not (ROOT / name).exists()} == set()
    modules = {found.replace(".", "/") for found in re.findall(r"python -m (hpcdist[.\w]*)", README)}
    assert len(modules) > 8
    for module in modules:
        assert (ROOT / f"{module}.py").exists() or (ROOT / module / "__main__.py").exists(), module
