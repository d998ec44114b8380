"""Check the versions of the packages that hpcdist needs.

It is imported before the rest of the package, and ends the import with one line if something is missing or too old.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable
from importlib import metadata, util

from hpcdist.errors import coded, hint, refusal
from hpcdist.process.startup import COMMAND

__version__ = "1.0.0rc1"

# As in setup.cfg, which has the reasons. pip checks them when it installs; later installations, PYTHONPATH and a
# cluster's modules do not.
OLDEST = {
    "Python": "3.11",
    "torch": "2.11",
    "mpi4py": "4.1",
    "numpy": "1.24",
    "h5py": "3.9",
    "jinja2": "3.1",
    "psutil": "6.0",
    "safetensors": "0.8",
    "tqdm": "4.60",
    "xxhash": "3.2",
}


def problem(version: Callable[[str], str | None]) -> str | None:
    """Return one line that names the missing or too old packages; None if there are none.

    Args:
        version: returns the version of a package, or of "Python"; None if it is unknown, which is no
            problem, and "" if it is missing.

    Example::

        >>> problem({"torch": "2.7.0"}.get)
        "hpcdist needs torch 2.11 or later, and this is 2.7.0: pip install 'torch>=2.11'"
    """
    found = {name: version(name) for name in OLDEST}
    old = [name for name, known in found.items() if known is not None and _number(known) < _number(OLDEST[name])]
    if not old:
        return None
    needs = "; ".join(
        f"{name} {OLDEST[name]} or later, and " + (f"this is {found[name]}" if found[name] else "it is missing")
        for name in old
    )
    packages = " ".join(f"'{name}>={OLDEST[name]}'" for name in old if name != "Python")
    fix = f"an environment of Python {OLDEST['Python']} or later" if "Python" in old else f"pip install {packages}"
    return f"hpcdist needs {needs}: {fix}"


def require(version: Callable[[str], str | None] | None = None) -> None:
    """Raise an ImportError if :func:`problem` finds one among the installed packages; a command ends with one line."""
    if what := problem(version or _installed):
        if COMMAND and version is None:
            text = coded("HD102", what)
            sys.stderr.write(f"hpcdist: error: {text} (see {hint(text)})\n")
            sys.exit(2)
        raise refusal(ImportError, "HD102", what)


def _installed(name: str) -> str | None:
    if name == "Python":
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None if util.find_spec(name) else ""  # built without pip


def _number(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (2, 11, 0) of "2.11.0a0+git1234"."""
    return tuple(int(part) for part in re.findall(r"\d+", re.match(r"[\d.]*", version)[0]))  # type: ignore[index]


require()
