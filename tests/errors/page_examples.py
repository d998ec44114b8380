"""``page_examples.py EXAMPLES``: run the examples of the pages on all ranks, and print what is wrong with them.

EXAMPLES is JSON: (code, what fails, what works after it). The first one must raise an error with the code on some rank,
the second one none on any.
"""

import json
import os
import sys

import torch
from mpi4py import MPI

import hpcdist as hd
import hpcdist.horovod as hvd


def _error(source, names):
    try:
        exec(compile(source, "<example>", "exec"), names)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder, examples):
    """Each page has a world and a folder of its own."""
    comm = MPI.COMM_WORLD
    for code, fails, works in json.loads(examples):
        here = os.path.join(folder, code)
        os.makedirs(here, exist_ok=True)
        os.chdir(here)
        names = {"hd": hd, "hvd": hvd, "torch": torch, "world": hd.init()}
        said = comm.allgather(_error(fails, names))
        if not any(f"[{code}]" in text for text in said):
            print(f"{code}: rank {comm.rank}: fails: {said[comm.rank]!r}", flush=True)
        said = comm.allgather(_error(works, names))
        if any(said):
            print(f"{code}: rank {comm.rank}: works: {said[comm.rank]!r}", flush=True)
        names.clear()
        hd.finalize()


if __name__ == "__main__":
    main(*sys.argv[1:])
