"""An extension of griffe, which reads the docstrings for the site: their Sphinx notation, in Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc):`~?([^`]+)`")
_CODE = re.compile(r"``([^`]+)``")
# "Example, on 3 ranks::" and the lines below it that are indented further.
_LITERAL = re.compile(r"^( *)(\S.*):\n\n((?:\1 +.*\n|\n)+)", re.MULTILINE)
# "src, dst: text" in a list of arguments, and the lines that belong to it.
_SEVERAL = re.compile(r"^( +)([a-z_]\w*(?:, [a-z_]\w*)+): (.*(?:\n\1 +\S.*)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Changes every docstring when its object is known."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Return a docstring with Markdown's code instead of Sphinx's roles and literal blocks."""
    text = _CODE.sub(r"`\1`", _ROLE.sub(r"`\1`", text + "\n"))
    text = _SEVERAL.sub(lambda found: "\n".join(f"{found[1]}{name}: {found[3]}" for name in found[2].split(", ")), text)
    return _LITERAL.sub(_fenced, text).rstrip("\n")


def _fenced(found: re.Match[str]) -> str:
    indent, title, block = found.groups()
    if not title.endswith(":"):
        return found[0]
    lines = block.rstrip("\n").splitlines()
    depth = min(len(line) - len(line.lstrip()) for line in lines if line)
    code = "\n".join(indent + line[depth:] for line in lines)
    kind = "pycon" if code.lstrip().startswith(">>>") else "python"
    return f"{indent}**{title.rstrip(':')}:**\n\n{indent}```{kind}\n{code}\n{indent}```\n\n"
