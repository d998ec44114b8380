"""The examples of the pages do what the pages say: the line that ends with the page's code fails, the others work."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from launch import commands

from hpcdist.errors import explain

_COMMAND = re.compile(r"^\$ python -m (hpcdist\.\w+) (.*?)(?:  # (HD\d+))?$")


def _examples(kind):
    """(code, lines) of the pages that have an example."""
    for code in explain.titles():
        found = re.search(rf"^```{kind}\n(.*?)\n```", explain.page(code), re.MULTILINE | re.DOTALL)
        if found:
            yield code, found[1].splitlines()


@pytest.mark.timeout(300)
def test_programs_and_commands(tmp_path):
    """Two ranks, one job for all pages."""
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    np.save(tmp_path / "b.npy", np.zeros((4, 2), np.float32))
    examples = []
    for code, lines in _examples("python"):
        (wrong,) = [i for i, line in enumerate(lines) if line.endswith(f"  # {code}")]
        examples.append((code, "\n".join(lines[: wrong + 1]), "\n".join(lines[wrong + 1 :])))
    assert len(examples) > 5
    program = [Path(__file__).with_name("page_examples.py"), tmp_path, json.dumps(examples)]
    found = [_COMMAND.match(line) for _, lines in _examples("console") for line in lines]
    split = [(match[1], shlex.split(match[2]), match[3]) for match in found if match]
    assert len(split) == len(found) > 3
    first, *jobs = commands(2, program, *([module, *words] for module, words, _ in split), cwd=tmp_path)
    assert (first.status, first.out) == (0, ""), first
    for (*line, code), job in zip(split, jobs, strict=True):
        if code:
            assert job.status == 2 and f"[{code}]" in job.err, (line, job)
        else:
            assert job.status == 0, (line, job)


def test_the_commands_exist():
    root = Path(explain.__file__).parent.parent
    for code in explain.titles():
        for module in re.findall(r"python -m hpcdist(?:\.(\w+))?", explain.page(code)):
            found = root / f"{module}.py" if module else root, root / module / "__main__.py"
            assert any(path.exists() for path in found), f"{code}: {module}"
