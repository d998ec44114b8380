"""The examples of the pages do what the pages say: those of programs in one job, and the commands in another."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launch import commands, mpirun

from hpcdist import catalogue

pytestmark = pytest.mark.once

_BLOCK = re.compile(r"(?:^(Before|After|Example):\n\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ (?:mpirun -n 2 )?python -m (hpcdist\.\w+)(.*)$", re.MULTILINE)


def _blocks(kind: str) -> Iterator[tuple[str, dict[str, str]]]:
    """(code, {"Before", "After" or "Example": the example}) of the pages that have one."""
    for code in catalogue.titles():
        found = {label: text for label, lang, text in _BLOCK.findall(catalogue.page(code)) if label and lang == kind}
        if found:
            yield code, found


@pytest.mark.timeout(300)
def test_programs(tmp_path: Path) -> None:
    """Two ranks, one job for all pages."""
    examples = [
        (code, found.get("Before", ""), found.get("After", found.get("Example", "")))
        for code, found in _blocks("python")
    ]
    assert len(examples) > 30
    program = str(Path(__file__).with_name("page_examples.py"))
    job = mpirun(2, program, str(tmp_path), json.dumps(examples))
    assert (job.status, job.out) == (0, ""), job.err


@pytest.mark.timeout(300)
def test_commands(tmp_path: Path) -> None:
    """Two ranks, one job for all commands: each page's first one ends with its code, and the other one well."""
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    np.save(tmp_path / "b.npy", np.zeros((4, 2), np.float32))
    np.save(tmp_path / "double.npy", np.zeros((4, 2), np.float64))
    np.save(tmp_path / "text.npy", np.array(["a", "b"]))
    np.savez(tmp_path / "two.npz", x=np.zeros(3), y=np.zeros(4))
    lines, expected = [], []
    for code, found in _blocks("console"):
        for label, text in found.items():
            for module, words in _COMMAND.findall(text):
                lines.append([module, *shlex.split(words)])
                expected.append(f"[{code}]" if label == "Before" else "")
    assert len(lines) > 15
    for line, code, job in zip(lines, expected, commands(2, *lines, cwd=tmp_path), strict=True):
        if code:
            assert job.status == 2 and code in job.err, (line, job)
        else:
            assert job.status == 0, (line, job)


def test_every_program_compiles() -> None:
    """Also those that show a part of one, and are not run."""
    for code in catalogue.titles():
        for _, lang, text in _BLOCK.findall(catalogue.page(code)):
            if lang == "python":
                compile(text, code, "exec")


def test_the_commands_exist() -> None:
    root = Path(catalogue.__file__).parent.parent
    for code in catalogue.titles():
        for module in re.findall(r"python -m hpcdist(?:\.(\w+))?", catalogue.page(code)):
            assert (root / module / "__main__.py").exists(), f"{code}: {module}"
