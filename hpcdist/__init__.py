"""MPI-launched PyTorch: start torch.distributed from an MPI job; gather, concat, split and stage ragged tensors.

Importing this package neither starts MPI nor reads the environment; :func:`init` does.
"""

from hpcdist.process.startup import COMMAND, __version__, require  # noqa: F401

# Commands that run where torch is missing, or spare a shared file system its import. All others get all names at once:
# an import of this package registers its backend with torch.
if COMMAND not in ("explain", "restarts", "stage-env"):
    require()  # before other imports trip over what is too old

    from hpcdist import data, layout, staging, torch_names
    from hpcdist.collectives.all_to_all import all_to_all
    from hpcdist.collectives.plans import plan
    from hpcdist.collectives.redistribute import balance, local, redistribute
    from hpcdist.collectives.reduce import all_reduce, reduce, reduce_scatter
    from hpcdist.concat import concat
    from hpcdist.errors import FileError, HangError, HpcdistError, LaunchError, RankError
    from hpcdist.gather import gather
    from hpcdist.layout import Block, Boxes, Replicate, Split
    from hpcdist.p2p.sendrecv import irecv, isend, recv, send
    from hpcdist.runtime.background import Handle
    from hpcdist.runtime.plan import Plan
    from hpcdist.runtime.world import World, current, finalize, init
    from hpcdist.split import split
    from hpcdist.tensors import memory

    __all__ = [
        "Block", "Boxes", "FileError", "Handle", "HangError", "HpcdistError", "LaunchError", "Plan",
        "RankError", "Replicate", "Split", "World", "all_reduce", "all_to_all", "balance", "concat", "current", "data",
        "finalize", "gather", "init", "irecv", "isend", "layout", "local", "memory", "plan", "recv",
        "redistribute", "reduce", "reduce_scatter", "send", "split", "staging",
    ]  # fmt: skip

    torch_names.not_compiled(globals()[name] for name in __all__)
