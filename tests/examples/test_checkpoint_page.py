"""The commands in the table of docs/do/checkpoints.md run as they stand; its programs: tests/docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import mpirun

DOC = (Path(__file__).parents[2] / "docs" / "do" / "checkpoints.md").read_text()


@pytest.mark.once
def test_the_conversions_of_the_page(tmp_path: Path) -> None:
    """In an order in which the files are there."""
    lines = re.findall(r"\| `mpirun -n 8 python (-m hpcdist convert [^`]*)` \|", DOC)
    assert len(lines) == 4
    code = """
        import torch, hpcdist as hd
        import torch.distributed.checkpoint as dcp
        from hpcdist import staging
        with hd.init(device="cpu"):
            dcp.save({"w": torch.ones(2, 3)}, checkpoint_id="dir")
            staging.save("x.h5", {"w": torch.ones(2, 3), "b": torch.ones(2)})
        torch.save({"w": torch.ones(2, 3)}, "x.pt")
    """
    assert mpirun(2, code=code, cwd=tmp_path).status == 0
    (tmp_path / "hf_dir").mkdir()
    for line in (lines[2], lines[1], lines[0], lines[3]):
        job = mpirun(2, *line.split(), cwd=tmp_path)
        assert job.status == 0, job.err
