"""Draw compare.svg: the picture of hpcdist.tools.compare, for the shapes of the page; and print the report.

python docs/pictures/compare.py        in an environment with hpcdist and mpirun, on a machine that does nothing else
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).parents[1] / "tune" / "compare.md"


def main() -> None:
    (shapes,) = re.findall(r"```text\n(# a verb.*?)```", PAGE.read_text(), re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "shapes.txt").write_text(shapes)
        mpirun = [str(Path(sys.executable).with_name("mpirun")), "-n", "2", sys.executable, "-m", "hpcdist", "compare"]
        subprocess.run([*mpirun, "--shapes", "shapes.txt"], cwd=folder, timeout=300, check=True)
        page = Path(folder, "compare.html").read_text()
    (picture,) = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    style = '<svg font-family="sans-serif" font-size="11" fill="#52606f" '
    Path(__file__).with_suffix(".svg").write_text(picture.replace("<svg ", style, 1) + "\n")


if __name__ == "__main__":
    main()
