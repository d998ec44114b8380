"""Find the command of this process. Importing this module lets Ctrl-C end a command without a traceback of imports."""

from __future__ import annotations

import signal
import sys
from pathlib import Path


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
if COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where SIGINT is ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until streams.printing()
