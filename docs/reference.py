"""``python docs/reference.py``: fill the parts of docs/reference/ that come from the package: docstrings, ``--help``,
the doctor's checks and the error codes. They are committed, so that a code host shows them; tests/docs compares them.

A comment names what follows it, up to the next one: ``<!-- object: hd.gather = hpcdist.collectives.join.gather -->``
(with ``hd.Split()``, a class that programs call), ``<!-- help: hpcdist run -->``, ``<!-- checks: job -->``,
``<!-- codes -->``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

PAGES = Path(__file__).with_name("reference")
CODES = "../../hpcdist/errors/pages"
WIDTH = 96  # of signatures and of what --help prints
OBJECT = re.compile(r"^<!-- object: (\S+) = (\S+) -->$", re.MULTILINE)
NOT_SHOWN = ("team", "context", "heard", "samples", "batch", "leave", "blocks", "begin")  # for the package's own use
_MARK = re.compile(r"(^<!-- (?:(object|help|checks): ([^\n]+?)|(codes)) -->\n).*?(?=^<!-- )", re.MULTILINE | re.DOTALL)
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc):`~?([^`]+)`")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):\n((?:    .*\n|\n)+)", re.MULTILINE)
_EXAMPLE = re.compile(r"^(\S.*)::\n\n((?:    .*\n|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*(?:\n +.*|\n(?=\n ))*)", re.MULTILINE)
TITLES = {"Args": "Arguments", "Attributes": "Attributes", "Returns": "Returns", "Raises": "Raises"}


def found(path: str) -> Any:
    """Return the object of this name."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            value = importlib.import_module(".".join(parts[:i]))
            for part in parts[i:]:
                value = getattr(value, part)
            return value
    raise ValueError(path)


def members(cls: type) -> dict[str, Any]:
    """Return the methods and properties of a class that have docstrings, in the order of the source."""
    own = {name: value for name, value in vars(cls).items() if name[0] != "_" and name not in NOT_SHOWN}
    return {n: v for n, v in own.items() if isinstance(v, (FunctionType, property)) and inspect.getdoc(v)}


def _object(text: str) -> str:
    shown, path = text.split(" = ")
    value, name = found(path), shown.removesuffix("()")
    parts = [f"## {name}\n"]
    if shown != name or not inspect.isclass(value):
        parts.append(signature(name, value))
    parts.append(markdown(inspect.getdoc(value) or ""))
    for member, of in members(value).items() if inspect.isclass(value) else ():
        called = name.rpartition(".")[2] + "." + member
        parts += [f"### {called}\n", *([] if isinstance(of, property) else [signature(called, of)])]
        parts.append(markdown(inspect.getdoc(of.fget if isinstance(of, property) else of) or ""))
    return "\n" + "\n".join(parts)


def signature(name: str, value: Any) -> str:
    """Return a call of a function or class as a block of code: arguments, types and defaults."""
    described = inspect.signature(value)
    given = [p for p in described.parameters.values() if p.name != "self"]
    shown: list[str] = []
    for i, p in enumerate(given):
        if p.kind is p.KEYWORD_ONLY and not any(q.kind in (q.KEYWORD_ONLY, q.VAR_POSITIONAL) for q in given[:i]):
            shown.append("*")
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        kind = "" if p.annotation in (p.empty, "Any") else f": {p.annotation}"
        default = f"{p.default:_}" if type(p.default) is int else repr(p.default)
        if p.default is not p.empty:
            kind += f" = {default}" if kind else f"={default}"
        shown.append(star + p.name + kind)
    back = described.return_annotation
    end = ")" if inspect.isclass(value) or back in (described.empty, "Any") else f") -> {back}"
    line = f"{name}({', '.join(shown)}{end}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {text},\n" for text in shown) + end
    return f"```python\n{line}\n```\n"


def markdown(text: str) -> str:
    """Return a docstring in Markdown."""
    text = re.sub(r"``([^`]+)``", r"`\1`", _ROLE.sub(r"`\1`", text + "\n"))
    return _EXAMPLE.sub(_example, _SECTION.sub(_section, text)).rstrip("\n") + "\n"


def _section(match: re.Match[str]) -> str:
    title, body = match[1], inspect.cleandoc("\n" + match[2])
    if title != "Returns":
        entries = [
            (", ".join(f"`{n}`" for n in m[1].split(", ")), " ".join(m[2].split())) for m in _ENTRY.finditer(body)
        ]
        body = "\n".join(f"- {names}: {said}" for names, said in entries)
    return f"**{TITLES[title]}**\n\n{body}\n\n"


def _example(match: re.Match[str]) -> str:
    kind = "pycon" if ">>>" in match[2] else "python"
    return f"**{match[1]}**\n\n```{kind}\n{inspect.cleandoc(chr(10) + match[2])}\n```\n\n"


@functools.cache
def _helps() -> dict[str, str]:
    """Return what each command prints with ``--help``: all in one process, which imports torch once."""
    code = (
        "import contextlib, io, json, runpy, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    sys.argv, out = [*name.split(), '--help'], io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):\n"
        "        runpy.run_module('hpcdist', run_name='__main__', alter_sys=True)\n"
        "    found[name] = out.getvalue()\n"
        "print(json.dumps(found))\n"
    )
    names = re.findall(r"^<!-- help: (.+) -->$", (PAGES / "commands.md").read_text(), re.MULTILINE)
    environ = {**os.environ, "COLUMNS": str(WIDTH), "PYTHONPATH": str(PAGES.parents[1])}
    command = [sys.executable, "-c", code, *names]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, env=environ, check=True).stdout))


def _help(command: str) -> str:
    return f"\n## {command}\n\n```console\n$ python -m {command} --help\n{_helps()[command].rstrip()}\n```\n"


def _checks(section: str) -> str:
    from hpcdist.tools.doctor.checks import CHECKS, STEPS

    rows = [(name, *STEPS[name]) for name in STEPS] if section == "steps" else []
    for check in CHECKS:
        if check.section == section:
            meaning, fix = " ".join((check.judge.__doc__ or "").split()), filter(None, (check.fix, check.alike))
            rows.append((check.name, meaning, "; ".join(fix)))
    table = "".join(f"| `{name}` | {meaning} | {fix} |\n" for name, meaning, fix in rows)
    return f"\n| finding | meaning if not ok | what to do |\n|---|---|---|\n{table}"


def _codes(_: str) -> str:
    titles = [path.read_text().splitlines()[0] for path in sorted((PAGES / CODES).glob("HD*.md"))]
    rows = [title.removeprefix("# ").split(": ", 1) for title in titles]
    return "\n| code | meaning |\n|---|---|\n" + "".join(f"| [{c}]({CODES}/{c}.md) | {said} |\n" for c, said in rows)


KINDS = {"object": _object, "help": _help, "checks": _checks, "codes": _codes}


def filled(text: str) -> str:
    """Return a page with what its comments name."""
    return _MARK.sub(lambda mark: f"{mark[1]}{KINDS[mark[2] or mark[4]](mark[3])}\n", text)


if __name__ == "__main__":
    sys.path.insert(0, str(PAGES.parents[1]))
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(filled(page.read_text()))
