"""MPI-launched PyTorch: start torch.distributed from an MPI job; gather, concat, split and stage ragged tensors.

Importing this package neither starts MPI nor reads the environment; :func:`init` does.
"""

import signal
import sys

from hpcdist.activity.procstat import started_module

_MODULE = started_module()
_COMMAND = _MODULE.split(".")[0] == "hpcdist" and _MODULE.count(".") < 2  # examples are programs, as a user's
if _COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where SIGINT is ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C prints no traceback of imports; until streams.printing()

if _MODULE == "hpcdist.explain":  # Python imports this first: it explains where torch is not found
    from hpcdist.explain.command import main

    sys.exit(main(sys.argv[1:]))

# The command that spares a shared file system the import of torch, on every node, must not begin with it. All else
# gets all names at once: an import of this package registers its backend with torch.
if _MODULE != "hpcdist.stage_env":
    from hpcdist.process.versions import __version__  # noqa: F401  # before other imports trip over what is too old

    # isort: split
    from hpcdist import layout, memory, staging
    from hpcdist.collectives.own_part import balance, local
    from hpcdist.collectives.plans import plan
    from hpcdist.collectives.redistribute import redistribute
    from hpcdist.concat import concat
    from hpcdist.errors import FileError, HangError, HpcdistError, LaunchError, RankError
    from hpcdist.gather import gather
    from hpcdist.layout import Block, Boxes, Replicate, Split
    from hpcdist.p2p.sendrecv import irecv, isend, recv, send
    from hpcdist.runtime.background import Handle
    from hpcdist.runtime.plan import Plan
    from hpcdist.runtime.world import World, current, finalize, init
    from hpcdist.split import split
    from hpcdist.staging.checkpointable import checkpointable
    from hpcdist.tensors import eager

    __all__ = [
        "Block", "Boxes", "FileError", "Handle", "HangError", "HpcdistError", "LaunchError", "Plan", "RankError",
        "Replicate", "Split", "World", "balance", "checkpointable", "concat", "current", "finalize", "gather", "init",
        "irecv", "isend", "layout", "local", "memory", "plan", "recv", "redistribute", "send", "split", "staging",
    ]  # fmt: skip

    eager.not_compiled([balance, checkpointable, concat, current, finalize, gather, init, irecv, isend, local, recv])
    eager.not_compiled([redistribute, send, split, plan, Handle, Plan, World, memory.empty_cache, memory.memory_stats])
    eager.not_compiled(vars(staging)[name] for name in staging.__all__)
