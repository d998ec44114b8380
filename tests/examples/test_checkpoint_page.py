"""The commands in the table of docs/do/checkpoints.md run as they stand; its programs: tests/docs."""

import re
from pathlib import Path

from launch import commands

DOC = (Path(__file__).parents[2] / "docs" / "do" / "checkpoints.md").read_text()


def test_the_conversions_of_the_page(tmp_path):
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
    (tmp_path / "hf_dir").mkdir()
    words = [lines[i].removeprefix("-m ").split() for i in (2, 1, 0, 3)]
    assert [job.status for job in commands(2, ["-c", code], *words, cwd=tmp_path)] == [0] * 5
