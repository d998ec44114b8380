"""The programs and commands in docs/checkpoints.md run as they stand, and print what it says."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from launch import mpirun
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

DOC = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()


def test_the_programs_of_the_page(tmp_path: Path) -> None:
    for name, text in re.findall(r"```python\n# (\S+)\n(.*?)```", DOC, re.DOTALL):
        (tmp_path / name).write_text(text)
    runs = []
    for console in re.findall(r"```console\n(.*?)```", DOC, re.DOTALL):
        runs += re.findall(r"^\$ mpirun -n (\d) python ([^\n#]*)[^\n]*\n((?:[^$].*\n)*)", console, re.MULTILINE)
    assert len(runs) == 4
    for np, words, printed in runs:
        job = mpirun(int(np), *words.split(), cwd=tmp_path)
        assert job.status == 0, job.err
        if "hpcdist" in words:
            assert job.out.startswith("gather: HDF5 file training.h5: 8 tensors, "), job.out
        else:
            assert job.out == printed, words
    dcp_to_torch_save(tmp_path / "training", tmp_path / "whole.pt")
    assert torch.load(tmp_path / "whole.pt")["model.weight"].shape == (3, 4)


def test_the_conversions_of_the_page(tmp_path: Path) -> None:
    """In an order in which the files are there."""
    lines = re.findall(r"\| `mpirun -n 8 python (-m hpcdist\.gather [^`]*)` \|", DOC)
    assert len(lines) == 5
    torch.manual_seed(0)
    code = """
        import torch, hpcdist as hd
        from hpcdist import staging
        with hd.init(device="cpu"):
            staging.save("x.h5", {"w": torch.ones(2, 3), "b": torch.ones(2)})
    """
    assert mpirun(2, code=code, cwd=tmp_path).status == 0
    (tmp_path / "hf_dir").mkdir()
    for line in (lines[2], lines[0], lines[3], lines[1], lines[4]):
        job = mpirun(2, *line.split(), cwd=tmp_path)
        assert job.status == 0, job.err
    assert (tmp_path / "dir" / ".metadata").exists()
