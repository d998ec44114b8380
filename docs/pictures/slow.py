"""Draw slow.svg: who waits for whom, as the report of a real job shows it; and print the report.

python docs/pictures/slow.py        in an environment with hpcdist and mpirun
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).parents[1] / "tune" / "slow.md"


def main() -> None:
    (program,) = re.findall(r"```python\n(# train.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(program)
        mpirun = [str(Path(sys.executable).with_name("mpirun")), "-n", "4", sys.executable, "train.py"]
        env = os.environ | {"HPCDIST_TRACE": "traces"}
        subprocess.run(mpirun, cwd=folder, env=env, timeout=120, check=True)
        subprocess.run([sys.executable, "-m", "hpcdist", "trace", "traces"], cwd=folder, timeout=120, check=True)
        page = Path(folder, "traces", "report.html").read_text()
    (picture,) = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    style = '<svg font-family="sans-serif" font-size="11" fill="#52606f" '
    Path(__file__).with_suffix(".svg").write_text(picture.replace("<svg ", style, 1) + "\n")


if __name__ == "__main__":
    main()
