"""What checkpoints.py runs: one of PyTorch's test files of torch.distributed.checkpoint, over a storage.

Usage: python checkpoint_tests.py PLAN     a JSON file

The plan has the storage, "files" for torch's own FileSystemWriter and FileSystemReader, or "hdf5": then these names are
classes of hpcdist.staging.dcp, in torch and therefore in the test files; the paths of the test files; the names of
tests that have run; and a folder, whose rank-0.jsonl gets a JSON line for each test that starts or ends.

PyTorch's test cases start a process for each rank, which imports torch anew. Without GPUs, they are forks of this
process here, which has imported it: that takes seconds less a test; and tests that want several GPUs run as well, on
CPUs.
"""

import importlib
import json
import os
import sys
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

from hpcdist.staging.dcp import HDF5Reader, HDF5Writer

NAME = "checkpoint.h5"


def _file(path):
    """The file for what a test calls a folder."""
    folder = os.fsdecode(path)
    os.makedirs(folder, exist_ok=True)
    return os.path.join(folder, NAME)


class _Folder:
    """Called like torch's own: with a folder; options of the files that it gets have no effect."""

    def reset(self, checkpoint_id=None):
        super().reset(_file(checkpoint_id) if checkpoint_id else None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return filesystem.FileSystem.validate_checkpoint_id(checkpoint_id)


class Writer(_Folder, HDF5Writer):
    def __init__(self, path, *args, **options):
        super().__init__(_file(path))


class Reader(_Folder, HDF5Reader):
    """It loads any pickle, as FileSystemReader does."""

    def __init__(self, path, *args, **options):
        super().__init__(_file(path), allow_pickle=True)


class Result(unittest.TextTestResult):
    """Notes every test that starts or ends."""

    notes: Any

    def _note(self, **what):
        self.notes.write(json.dumps(what) + "\n")

    def _end(self, test, outcome, reason=""):
        self._note(end=test.id(), outcome=outcome, reason=reason)

    def startTest(self, test):  # noqa: N802
        super().startTest(test)
        self._note(start=test.id())

    def addSuccess(self, test):  # noqa: N802
        super().addSuccess(test)
        self._end(test, "passed")

    def addSkip(self, test, reason):  # noqa: N802
        super().addSkip(test, reason)
        self._end(test, "skipped", reason)

    def addError(self, test, err):  # noqa: N802
        super().addError(test, err)
        self._end(test, "failed", str(self._exc_info_to_string(err, test))[-6000:])

    addFailure = addError  # noqa: N815


def _once(backend):
    """What a test names for the CPU and for "the device", which is the CPU here, once."""
    return backend and ",".join(dict.fromkeys(backend.split(",")))


def _replace(theirs, ours):
    """Put our class in the place of theirs in all of torch, and make sure that theirs is used nowhere."""

    def refuse(*args, **options):
        raise AssertionError(f"torch's {theirs.__name__} is used")

    for name, module in list(sys.modules.items()):
        if name.startswith(dcp.__name__) and getattr(module, theirs.__name__, None) is theirs:
            setattr(module, theirs.__name__, ours)
    theirs.__init__ = refuse


def prepare(storage):
    """Replace what torch's tests use, before one of them is imported."""
    from torch.testing._internal import common_distributed as common

    if storage == "hdf5":
        _replace(filesystem.FileSystemWriter, Writer)
        _replace(filesystem.FileSystemReader, Reader)
    if not torch.cuda.is_available():
        torch.multiprocessing.set_start_method("fork")
        fork = torch.multiprocessing.get_context("fork").Process
        common.MultiProcessTestCase._spawn_processes = lambda case: case._start_processes(fork)
        common.skip_if_lt_x_gpu = lambda count, **options: lambda test: test
        init = dist.init_process_group
        dist.init_process_group = lambda backend=None, **options: init(_once(backend), **options)


def _tests(suite):
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from _tests(one)
        else:
            yield one


def main():
    """Run the tests of a plan; the exit status says nothing of them."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    prepare(plan["storage"])
    # PyTorch's processes find the classes above by this name: those that torch starts for async_save import them anew
    sys.modules["checkpoint_tests"] = sys.modules["__main__"]
    Writer.__module__ = Reader.__module__ = "checkpoint_tests"
    with (Path(plan["folder"]) / "rank-0.jsonl").open("w", buffering=1) as Result.notes:
        Result.notes.write(json.dumps({"pid": os.getpid()}) + "\n")
        for path in map(Path, plan["files"]):
            sys.path.insert(0, str(path.parent))
            module = importlib.import_module(path.stem)
            loaded = unittest.defaultTestLoader.loadTestsFromModule(module)
            suite = unittest.TestSuite(test for test in _tests(loaded) if test.id() not in plan["done"])
            unittest.TextTestRunner(resultclass=Result, verbosity=2).run(suite)
        Result.notes.write(json.dumps({"done": True}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
