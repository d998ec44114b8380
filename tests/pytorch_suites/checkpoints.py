"""Run PyTorch's own tests of torch.distributed.checkpoint over HDF5Writer and HDF5Reader, and over torch's own files.

Usage: python tests/pytorch_suites/checkpoints.py --tests FOLDER --of VERSION [--storage NAME ...] [--file NAME ...]
       python tests/pytorch_suites/checkpoints.py --table   only docs/pytorch-checkpoints.md, from the results there are

FOLDER is test/distributed/checkpoint of PyTorch's repository, github.com/pytorch/pytorch, and VERSION the torch that it
is of. Nothing of it is in this repository. The FILES below save and load through a storage; the others of the folder do
not, or test one of torch's own. PyTorch's tests need the package expecttest: pip install expecttest.

Every test has a deadline; one that passes it fails, and the next process goes on after it. It runs what
build/pytorch-suites/checkpoints has no result of yet, a JSON file for each torch, version of the tests and storage.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(1, str(HERE))

from table import OUTCOMES, brief, head, row  # noqa: E402

RESULTS = ROOT / "build" / "pytorch-suites" / "checkpoints"
PAGE = ROOT / "docs" / "pytorch-checkpoints.md"
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
GRACE = 30  # seconds that a process has to end a test at its deadline by itself
START = 300  # seconds until the first test starts
HEAD = """# PyTorch's own tests of checkpoints

PyTorch's tests of `torch.distributed.checkpoint` save and load through a storage. This page compares `HDF5Writer` and
`HDF5Reader` ("hdf5") with torch's own `FileSystemWriter` and `FileSystemReader` ("files").
[tests/pytorch_suites/checkpoints.py](../tests/pytorch_suites/checkpoints.py) writes it, and names the sources of the
tests. It replaces the storage without a change in a test. A test starts a process for each of its 2 or 4 ranks. They
use gloo, without MPI. Pickles are allowed, as in torch's reader.

There was no GPU. Tests for several GPUs run on CPUs. Those that cannot, such as all of FSDP's first version, count as
skipped. If the tests of a torch version were not available, those of an older one run. "2.15, adapted" is a file of
2.15, changed for torch 2.13: its class for 2.15's new test base is merged into the old test class.
"""
# Why a test fails over HDF5, by its name, where its error does not say it.
CAUSES: dict[str, str] = {
    "test_storage_meta": "expects the folder's name; this writer's checkpoint is a file in the folder",
    "test_dcp_to_torch_save": "starts torch's command, which reads folders of torch's own format",
    "test_torch_save_to_dcp": "starts torch's command, which writes folders of torch's own format",
    "test_overwrite": "FileSystemWriter's option overwrite=False: here, a save always replaces the file at its end",
}


def run(storage: str, done: list[str], options: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], bool]:
    """Run the tests that are not done in one process, up to one that hangs or ends it.

    Returns:
        Results by name, and whether all have run.
    """
    with tempfile.TemporaryDirectory(prefix="pytorch-checkpoints-") as folder:
        plan, notes, log = (Path(folder) / name for name in ("plan.json", "notes", "output"))
        files = [str(path) for name in options.file if (path := Path(options.tests) / name).exists()]
        plan.write_text(json.dumps({"storage": storage, "files": files, "done": done, "notes": str(notes)}))
        given = {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": folder,
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(options.deadline),
        }  # fmt: skip
        with log.open("wb") as output:
            process = subprocess.Popen(
                [options.python, str(HERE / "checkpoint_tests.py"), str(plan)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | given,
                start_new_session=True,
            )
            try:
                ending = _watch(process, notes, options.deadline)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return _results(notes, f"{ending}\n{log.read_text(errors='replace')[-3000:]}")


def _watch(process: subprocess.Popen[bytes], notes: Path, deadline: int) -> str:
    """Wait for the end; returns why it came."""
    since, seen = time.monotonic(), 0
    while process.poll() is None:
        time.sleep(0.2)
        size = notes.stat().st_size if notes.exists() else 0
        if size != seen:
            since, seen = time.monotonic(), size
        if time.monotonic() - since > (deadline + GRACE if seen else START):
            return f"no answer after {deadline} s"
    return f"the process ended with status {process.returncode}"


def _results(notes: Path, ending: str) -> tuple[dict[str, dict[str, Any]], bool]:
    lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    results = {one["name"]: {key: one[key] for key in ("outcome", "reason")} for one in lines if "outcome" in one}
    if any("done" in one for one in lines):
        return results, True
    left = [one["name"] for one in lines if "name" in one and one["name"] not in results]
    if not left:
        raise SystemExit(f"no test has run: {ending}")
    return results | {left[-1]: {"outcome": "failed", "reason": ending}}, False


def run_storage(storage: str, version: str, options: argparse.Namespace) -> None:
    """Run what there is no result of, and note the results."""
    path = RESULTS / f"{version}-{options.of}-{storage}.json"
    state: dict[str, Any] = {"torch": version, "of": options.of, "storage": storage, "results": {}}
    if path.exists() and not options.again:
        state = json.loads(path.read_text())
    whole = False
    while not whole:
        results, whole = run(storage, list(state["results"]), options)
        state["results"] |= results
        path.write_text(json.dumps(state, indent=1))
        count = Counter(one["outcome"] for one in state["results"].values())
        print(f"torch {version}, tests of {options.of}, {storage}: {dict(count)}", flush=True)


def page(runs: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """The text, and the tests that pass over torch's files and not over HDF5."""
    tests: dict[tuple[str, str, str, str], dict[str, dict[str, str]]] = defaultdict(dict)
    for one in runs:
        for name, result in one["results"].items():
            file, _, test = name.partition(".")
            needs_gpu = result["outcome"] == "failed" and re.search(NO_GPU, result["reason"])
            result = {"outcome": "skipped", "reason": "needs a GPU"} if needs_gpu else result
            tests[one["torch"], one["of"], file, test][one["storage"]] = result
    counts: dict[tuple[str, str, str], dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    differ, same, skipped, worse = [], [], defaultdict(Counter), []
    for (torch, of, file, test), results in sorted(tests.items()):
        outcomes = [results.get(storage, {"outcome": "did not run"})["outcome"] for storage in STORAGES]
        for storage, result in results.items():
            counts[torch, of, file][storage][result["outcome"]] += 1
            if result["outcome"] == "skipped":
                skipped[brief(result["reason"])][storage] += 1
        why = CAUSES.get(test.rpartition(".")[2]) or next(
            (brief(one["reason"]) for one in results.values() if one["outcome"] == "failed"), ""
        )
        if len(set(outcomes)) > 1:
            differ.append(row(torch, file, test.rpartition(".")[2], *outcomes, why))
        elif outcomes[0] == "failed":
            same.append(row(torch, file, test.rpartition(".")[2], why))
        if outcomes == ["passed", "failed"]:
            worse.append(f"{file} {test}, torch {torch}")
    title = ["torch", "tests of", "file", *(f"{name}: passed, failed, skipped" for name in STORAGES)]
    rows = [row(*key, *(", ".join(str(of[name][kind]) for kind in OUTCOMES) for name in STORAGES))
            for key, of in sorted(counts.items())]  # fmt: skip
    lines = [HEAD, *head(*title), *rows, "", "## Where they differ", ""]
    lines += [*head("torch", "file", "test", *STORAGES, "why"), *differ] if differ else ["Nowhere."]
    lines += ["", "## Failures of both storages", ""]
    lines += [*head("torch", "file", "test", "why"), *same] if same else ["Nothing."]
    lines += ["", "## Why tests are skipped", "", *head("reason", *STORAGES)]
    lines += [row(reason, *(of[name] for name in STORAGES)) for reason, of in sorted(skipped.items())]
    return "\n".join(lines) + "\n", worse


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", help="the folder with PyTorch's test files")
    parser.add_argument("--of", default="?", help="the version of torch that they are of")
    parser.add_argument("--storage", nargs="+", choices=STORAGES, default=STORAGES)
    parser.add_argument("--file", nargs="+", default=FILES)
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    parser.add_argument("--deadline", type=int, default=120, help="seconds for a test")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--table", action="store_true", help="only write the page")
    options = parser.parse_args()
    if not options.table and not options.tests:
        parser.error("--tests is missing")
    return options


def main() -> int:
    """The exit status: 1 if a test has failed over HDF5 that passes over torch's files."""
    options = _arguments()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not options.table:
        command = [options.python, "-c", "import torch; print(torch.__version__)"]
        version = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        for storage in options.storage:
            run_storage(storage, version, options)
    text, worse = page([json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))])
    PAGE.write_text(text)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
