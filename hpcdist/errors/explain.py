"""The command ``hpcdist explain``: print what error codes mean, and what to do.

One Markdown page a code is in ``hpcdist/errors/pages``. The command needs neither torch nor MPI.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hpcdist.errors import codes

FOLDER = Path(__file__).parent / "pages"

GROUPS = {
    "HD1": "launch and init",
    "HD2": "arguments of a call",
    "HD3": "disagreement between the ranks",
    "HD4": "files and staging",
    "HD5": "inputs and options of the commands",
    "HD6": "hangs and deaths",
    "HD7": "the backend of torch.distributed, and the names of Horovod",
    "HD8": "job scripts",
    "HD9": "errors of hpcdist itself",
}
"""The subject of the codes that begin so."""

_CODE = re.compile(r"HD[0-9]{3}")
_NOT_FOUND, _BAD_INPUT = 1, 2  # exit status


@cache
def titles() -> dict[str, str]:
    """Return the title of each code's page, in the order of the codes."""
    pages = sorted(FOLDER.glob("HD*.md"))
    return {path.stem: path.read_text().partition("\n")[0].removeprefix(f"# {path.stem}: ") for path in pages}


def page(code: str) -> str:
    """Return the page of a code, as Markdown.

    Raises:
        KeyError: if there is no such code.
    """
    if code not in titles():
        raise KeyError(code)
    return (FOLDER / f"{code}.md").read_text()


def main(argv: Sequence[str]) -> int:
    """Print the pages that are asked for, on this process alone; return the exit status.

    Args:
        argv: the codes; "-" to find them in the text on standard input; nothing to list all.
    """
    parser = argparse.ArgumentParser(
        prog="hpcdist explain",
        description="Explain the code of an error, such as [HD204], and name the remedy. Without a "
        "code, list all codes.",
        epilog="example: mpirun -n 4 python program.py 2>&1 | hpcdist explain -",
    )
    parser.add_argument(
        "code", nargs="*", metavar="CODE", help="such as HD204; - finds the codes in a program's output"
    )
    given = parser.parse_args(argv).code
    if given == ["-"]:
        text = _of_log(sys.stdin.buffer.read().decode(errors="replace"))
        if not text:
            sys.stderr.write("hpcdist explain: no error code of hpcdist, such as [HD204], in the text\n")
            return _NOT_FOUND
    else:
        wanted = [code.upper().strip("[]") for code in given]
        for code in wanted:
            if code not in titles():
                what = "there is no such code" if _CODE.fullmatch(code) else "expected a code such as HD204, or - alone"
                sys.stderr.write(f"hpcdist explain: error: {code}: {what}; without a code, all are listed\n")
                return _BAD_INPUT
        text = "\n\n".join(page(code).rstrip() for code in dict.fromkeys(wanted)) or _list()
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:  # into head, or a pager that was left
        sys.stderr.close()  # else Python reports that standard output cannot be flushed
    return 0


def _list() -> str:
    lines = []
    for group, what in GROUPS.items():
        lines += [
            f"{group}xx: {what}",
            *(f"  {code}  {title}" for code, title in titles().items() if code[:3] == group),
        ]
    return "\n".join([*lines, "hpcdist explain CODE prints a page"])


def _of_log(text: str) -> str:
    """Return the pages of the codes in a program's output, each after the first line that has it."""
    first: dict[str, str] = {}
    for line in text.splitlines():
        for code in codes(line):
            first.setdefault(code, line.strip())
    return "\n\n".join(
        f"> {line}\n\n{page(code).rstrip() if code in titles() else f'{code} is not a code of this hpcdist'}"
        for code, line in first.items()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
