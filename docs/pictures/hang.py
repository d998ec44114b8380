"""Draw hang.svg: what a job prints that hangs. A real job: rank 2 reads a file that never gets its data.
hang-table.svg has three columns of its table, for README, where a phone shows it.

python docs/pictures/hang.py        in an environment with hpcdist and mpirun
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

PROGRAM = """\
import torch
import hpcdist as hd

def load(step, rank):
    if (step, rank) == (3, 2):
        open("part-2.npy", "rb").read()
    return torch.ones(step + rank)

with hd.init(timeout=5) as world:
    for step in range(100):
        whole = hd.concat(load(step, world.rank))
"""
COLUMN, LINE, MARGIN = 7.3, 18, 16  # pixels
NBSP = "\N{NO-BREAK SPACE}"  # viewers differ in what they do with several spaces
INK, MARKED = "#d8dee9", "#ffcb6b"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="data-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(PROGRAM)
        os.mkfifo(folder / "part-2.npy")
        writer = os.open(folder / "part-2.npy", os.O_RDWR)  # so that the reader waits
        mpirun = [str(Path(sys.executable).with_name("mpirun")), "-n", "4", sys.executable, "train.py"]
        job = subprocess.run(mpirun, cwd=folder, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
        os.close(writer)
    printed = table(job.stderr)
    Path(__file__).with_suffix(".svg").write_text(drawn(["$ mpirun -n 4 python train.py", *printed]))
    Path(__file__).with_name("hang-table.svg").write_text(drawn(narrow(printed)))


def table(text: str) -> list[str]:
    """Return what the rank printed that has the table, without the number before each line, and up to the stack."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if "HangError" in line and "its deadline" in line)
    rank = lines[start].split(" ")[0]
    mine = [line.removeprefix(f"{rank} ") for line in lines[start:] if line.startswith(f"{rank} ")]
    return [mine[0].removeprefix("hpcdist.errors."), *mine[1:]]


def narrow(lines: list[str]) -> list[str]:
    """Return the columns rank, is in, and what it does of the table; a long text continues on the next line."""
    head = next(line for line in lines if line.startswith("rank  "))
    call, lasts, does = (head.index(name) for name in ("is in", "for ", "what it does"))
    rows, first = [], lines.index(head)
    for line in lines[first : first + 5]:
        said = re.sub(r"/\S+/", "", line[does:])  # a file without its folder
        start = line[:6] + line[call:lasts]
        first_part, found, rest = said.partition(", at ")
        rows.append(start + first_part + found[:1])
        rows += [" " * len(start) + found[2:] + rest] if rest else []
    return rows


def drawn(lines: list[str]) -> str:
    """Return a picture of a terminal with these lines."""
    width, height = max(map(len, lines)) * COLUMN + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    texts = [
        f'<text x="{MARGIN}" y="{MARGIN + LINE * i + 13}" textLength="{len(line) * COLUMN:.0f}" '
        f'lengthAdjust="spacingAndGlyphs" fill="{MARKED if "has not reached" in line or "no call" in line else INK}">'
        f"{escape(line).replace(' ', NBSP)}</text>"
        for i, line in enumerate(lines)
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}">'
    style = 'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="12.5"'
    back = '<rect width="100%" height="100%" rx="8" fill="#22272e"/>'
    return "\n".join([head, back, f"<g {style}>", *texts, "</g>", "</svg>", ""])


if __name__ == "__main__":
    main()
