"""What every rank runs for suites.py: tests of one of PyTorch's suites, one by one, in this process.

Usage: python ranks.py --list SUITE FOLDER     the names of its tests, on standard output
       mpirun -n NP python ranks.py PLAN       the tests of the plan, a JSON file; results in its folder

PyTorch's MultiProcessTestCase starts a process for each rank and runs the test in it. Here the processes are there
already, started by mpirun, and each calls the method that PyTorch's child process runs, `_run`, with the rank, a file
for the store and a pipe for the traceback, and takes the exit status, by which PyTorch's tests say that they are
skipped.
"""

import faulthandler
import importlib
import json
import logging
import multiprocessing
import os
import sys
import time
import traceback
import unittest
from pathlib import Path

DISTRIBUTED = "distributed_test"  # the suite that is in torch's wheel
C10D = ("test_c10d_collectives", "test_c10d_p2p", "test_c10d_process_group")


def load(suite, folder, backend, world_size, tests_of="gloo"):
    """The test case of a suite, for `backend` on `world_size` ranks, with the tests that PyTorch has for `tests_of`."""
    if backend != "gloo":
        importlib.import_module("hpcdist")  # registers it
    os.environ["WORLD_SIZE"] = str(world_size)
    return (
        _load_distributed(backend, tests_of) if suite == DISTRIBUTED else _load_c10d(suite, folder, backend, world_size)
    )


def _load_distributed(backend, tests_of):
    """Most tests are skipped by decorators, which look at BACKEND as the module is read: `tests_of`. What the tests
    look at when they run is `backend`, but for the number of ranks that they want: BACKEND in the environment.
    """
    from torch.testing._internal.common_distributed import DistTestCases

    os.environ["BACKEND"] = tests_of
    os.environ.setdefault("TEMP_DIR", "/nowhere")  # each test has its own
    for backends in DistTestCases.backend_feature.values():
        backends.add("mpi")
    module = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    module.BACKEND = backend
    if backend != "gloo":  # as for any backend that PyTorch does not bring: no look at the profiler's events of it
        for backends in (module.PROFILING_SUPPORTED_BACKENDS, module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
            backends[:] = [name for name in backends if name != "mpi"]
    return type("TestDistBackendWithRanks", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})


def _load_c10d(suite, folder, backend, world_size):
    sys.path.insert(0, folder)
    common = importlib.import_module("c10d_backend_common")
    (gloo,) = (config for config in common.C10D_BACKENDS if config.name == "gloo")
    config = gloo
    if backend != "gloo":  # and what gloo lacks
        import torch

        has = {
            "supports_dropped_p2p_work": True,
            "supports_uneven_all_gather": True,
            "premul_sum_dtypes": (torch.float16, torch.float32, torch.float64, torch.bfloat16),
        }
        known = {name: value for name, value in has.items() if hasattr(gloo, name)}
        name = "mpi4py" if backend == "mpi" else backend  # torch says of "mpi" that it is not available
        config = type(gloo)(**{**vars(gloo), "name": name, **known})
    common.C10D_BACKENDS = (config,)
    common.C10dBackendTest.world_size = property(lambda self: world_size)
    module = importlib.import_module(suite)
    (case,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and getattr(value, "backend_name", None) == config.name
    )
    return case


class _Reason(logging.Handler):
    """Keeps why PyTorch's runner skips a test: it only logs it."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.text = ""

    def emit(self, record):
        if "skipping test" in record.msg and isinstance(record.args, tuple):
            self.text = str(record.args[-1])


def run_test(case, name, rank, folder):
    """Run one test: passed, failed or skipped, and why."""
    from torch.testing._internal import common_distributed as common

    for holder in (case, getattr(case, name)):
        if getattr(holder, "__unittest_skip__", False):
            return "skipped", str(holder.__unittest_skip_why__)
    reason = _Reason()
    common.logger.addHandler(reason)
    common.logger.setLevel(logging.INFO)
    ours, theirs = multiprocessing.Pipe()
    try:
        case._run(rank, name, str(folder / "store"), theirs)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except BaseException:  # a failed initialisation among them
        return "failed", traceback.format_exc()
    finally:
        common.logger.removeHandler(reason)
    if status == 0:
        return "passed", ""
    for skip in common.TEST_SKIPS.values():
        if status == skip.exit_code:
            return "skipped", reason.text or skip.message
    return "failed", ours.recv() if ours.poll() else f"exit status {status}"


def _prepare(case, folder):
    """What PyTorch's parent process does before a test of DistributedTest."""
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(folder)
    os.environ["INIT_METHOD"] = f"file://{folder}/init_dir/shared_init_file"
    module = sys.modules[case.__mro__[1].__module__]
    if hasattr(module, "Barrier"):
        module.Barrier.barrier_id = 0
        os.environ["MASTER_ADDR"] = str(module.MASTER_ADDR)


def _sum(comm, *numbers):
    """The sums over all ranks, without a busy wait: the ranks may be more than the cores."""
    import numpy as np

    ours, sums = np.array(numbers, "i"), np.zeros(len(numbers), "i")
    request = comm.Iallreduce(ours, sums)
    while not request.Test():
        time.sleep(0.002)
    return [int(one) for one in sums]


def main(plan):
    """Run the tests of a plan until one fails on some ranks and not on all."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    folder = Path(plan["folder"])
    log = (folder / f"rank-{comm.rank}.jsonl").open("w", buffering=1)
    stacks = (folder / f"rank-{comm.rank}.stacks").open("w")

    def note(**what):
        log.write(json.dumps(what) + "\n")

    note(pid=os.getpid())
    case = load(plan["suite"], plan["tests"], plan["backend"], comm.size, plan["tests_of"])
    import torch.distributed as dist

    for number, name in enumerate(plan["names"]):
        own = folder / str(number)
        _prepare(case, own)
        _sum(comm, 0)
        note(start=name)
        faulthandler.dump_traceback_later(plan["deadline"], file=stacks)
        outcome, reason = run_test(case, name, comm.rank, own)
        note(end=name, outcome=outcome, reason=reason[-6000:])
        failed, passed = _sum(comm, outcome == "failed", outcome == "passed")
        if 0 < failed < comm.size or 0 < passed < comm.size:
            os._exit(1)  # the ranks no longer agree on where they are
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
    comm.Free()
    note(done=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--list":
        loaded = load(sys.argv[2], sys.argv[3], "gloo", 2)
        print("\n".join(unittest.TestLoader().getTestCaseNames(loaded)))
        sys.exit(0)
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text())))
