"""Run PyTorch's own tests of torch.distributed.checkpoint over HDF5Writer and HDF5Reader, and over torch's own files.

Usage: python benchmarks/suites/checkpoints.py --tests FOLDER --of VERSION

FOLDER is test/distributed/checkpoint of PyTorch's repository, github.com/pytorch/pytorch, and VERSION the torch that it
is of. Nothing of it is in this repository. The FILES below save and load through a storage; the others of the folder do
not, or test one of torch's own. PyTorch's tests need the package expecttest: pip install expecttest.

Every test has a deadline; one that passes it fails, and the next process goes on after it. It runs what
build/pytorch-suites/checkpoints has no result of yet, a JSON file for each torch, version of the tests and storage.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from suites import HERE, ROOT, run
from table import page as table_page

RESULTS = ROOT / "build" / "pytorch-suites" / "checkpoints"
PAGE = Path(__file__).with_name("pytorch-checkpoints.md")
STORAGES = ("files", "hdf5")
FILES = (
    "test_checkpoint.py", "test_compatibility.py", "test_dtensor_checkpoint.py", "test_dtensor_resharding.py",
    "test_file_system_checkpoint.py", "test_file_system_checkpoint_cpu.py", "test_format_utils.py",
    "test_fsdp_model_state.py", "test_fsdp_optim_state.py", "test_fsdp_tp_checkpoint_conversion.py",
    "test_hsdp_checkpoint.py", "test_planner.py", "test_save_load_api.py", "test_tp_checkpoint.py",
    "e2e/test_e2e_save_and_load.py", "e2e/test_fine_tuning.py", "e2e/test_fsdp_ep.py", "e2e/test_pipeline.py",
    "fsdp/test_fsdp_dsd.py",
)  # fmt: skip
NO_GPU = "not compiled with CUDA|ccelerator device"  # in an error
HEAD = """# PyTorch's own tests of checkpoints

PyTorch's tests of `torch.distributed.checkpoint` save and load through a storage. This page compares `HDF5Writer` and
`HDF5Reader` ("hdf5") with torch's own `FileSystemWriter` and `FileSystemReader` ("files").
[checkpoints.py](checkpoints.py) writes it, and names the sources of the
tests. It replaces the storage without a change in a test. A test starts a process for each of its 2 or 4 ranks. They
use gloo, without MPI. Pickles are allowed, as in torch's reader.

There was no GPU. Tests for several GPUs run on CPUs. Those that cannot, such as all of FSDP's first version, count as
skipped. If the tests of a torch version were not available, those of an older one run. "2.15, adapted" is a file of
2.15, changed for torch 2.13: its class for 2.15's new test base is merged into the old test class.
"""
# Why a test fails over HDF5, by its name, where its error does not say it.
CAUSES = {
    "test_storage_meta": "expects the folder's name; this writer's checkpoint is a file in the folder",
    "test_dcp_to_torch_save": "starts torch's command, which reads folders of torch's own format",
    "test_torch_save_to_dcp": "starts torch's command, which writes folders of torch's own format",
    "test_overwrite": "FileSystemWriter's option overwrite=False: here, a save always replaces the file at its end",
}


def page(runs):
    """The text, and the tests that pass over torch's files and not over HDF5."""
    entries = []
    for one in runs:
        files = defaultdict(dict)
        for name, result in one["results"].items():
            needs_gpu = result["outcome"] == "failed" and re.search(NO_GPU, result["reason"])
            file, _, test = name.partition(".")
            files[file][test] = {"outcome": "skipped", "reason": "needs a GPU"} if needs_gpu else result
        for file, results in files.items():
            entries.append(((one["torch"], one["of"], file), file, f"torch {one['torch']}", one["storage"], results))
    return table_page([HEAD], ["torch", "tests of", "file"], list(STORAGES), CAUSES, entries)


def main():
    """The exit status: 1 if a test has failed over HDF5 that passes over torch's files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, help="the folder with PyTorch's test files")
    parser.add_argument("--of", default="?", help="the version of torch that they are of")
    parser.add_argument("--deadline", type=int, default=120, help="seconds for a test")
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    command = [options.python, "-c", "import torch; print(torch.__version__)"]
    version = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    files = [str(path) for name in FILES if (path := options.tests / name).exists()]
    for storage in STORAGES:
        path, results, whole = RESULTS / f"{version}-{options.of}-{storage}.json", dict[str, Any](), False
        while not (whole or path.exists()):
            plan = {"storage": storage, "files": files, "done": list(results)}
            new, whole = run([options.python, str(HERE / "checkpoint_tests.py")], plan, options.deadline)
            results |= new
            print(storage, dict(Counter(one["outcome"] for one in results.values())), flush=True)
        if whole:
            about = {"torch": version, "of": options.of, "storage": storage, "results": results}
            path.write_text(json.dumps(about, indent=1))
    text, worse = page([json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))])
    PAGE.write_text(text)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
