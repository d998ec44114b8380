"""The first module of the package that runs: find the command of this process, and check the versions of packages.

Importing it lets Ctrl-C end a command without a traceback of imports.
"""

from __future__ import annotations

import platform
import re
import signal
import sys
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

from hpcdist.errors import coded, hint, refusal

__version__ = "1.0.0rc2"

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


def command() -> str:
    """Return the command of hpcdist that this process was started as, while its package is imported.

    Returns:
        "gather" of ``python -m hpcdist.gather``, ``python -m hpcdist gather`` and ``hpcdist gather``; "hpcdist" of
        ``hpcdist`` alone; "" of other programs. The examples are programs, as a user's.
    """
    argv = getattr(sys, "argv", [""])  # absent where a program embeds Python
    module, name = _module(argv), ""
    if module == "hpcdist" or (not module and argv and Path(argv[0]).name == "hpcdist"):
        name = argv[1] if len(argv) > 1 else "hpcdist"
    elif module.startswith("hpcdist.") and module.count(".") == 1:
        name = module.removeprefix("hpcdist.")
    return name.replace("_", "-")


def _module(argv: list[str]) -> str:
    """Return the module that ``python -m`` is about to run, while the packages that it lies in are imported; else "".

    Until it runs, sys.argv[0] is "-m"; what else is in sys.argv follows the module's name on the command line.
    """
    if argv[:1] != ["-m"] or len(sys.orig_argv) < len(argv):
        return ""
    word = sys.orig_argv[-len(argv)]
    return word[word.find("m") + 1 :] if word.startswith("-") else word  # -mNAME, -ImNAME


COMMAND = command()
if COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else SIGINT is ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # streams.printing() ends it


def problem(version: Callable[[str], str | None]) -> str | None:
    """Return one line that names the missing or too old packages; None if there are none.

    Args:
        version: returns the version of a package, or of "Python"; None if it is unknown, which is no
            problem, and "" if it is missing.

    Example::

        >>> problem({"torch": "2.7.0"}.get)
        "hpcdist needs torch 2.11 or later, and this is 2.7.0: pip install 'torch>=2.11'"
    """
    versions = {name: version(name) for name in OLDEST}
    old = [name for name, known in versions.items() if known is not None and _number(known) < _number(OLDEST[name])]
    if not old:
        return None
    needs = "; ".join(
        f"{name} {OLDEST[name]} or later, and " + (f"this is {versions[name]}" if versions[name] else "it is missing")
        for name in old
    )
    packages = " ".join(f"'{name}>={OLDEST[name]}'" for name in old if name != "Python")
    fix = f"an environment of Python {OLDEST['Python']} or later" if "Python" in old else f"pip install {packages}"
    return f"hpcdist needs {needs}: {fix}"


def require() -> None:
    """Raise an ImportError if :func:`problem` finds one among the installed packages; a command ends with one line."""
    if what := problem(_installed):
        if COMMAND:
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
