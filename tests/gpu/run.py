"""All GPU checks: tests/gpu/run.sh [--python PYTHON] [--mpirun MPIRUN] [--record] [STEP ...]

It needs torch for CUDA, mpi4py, psutil, pytest and pytest-mpi, and takes 4 minutes on one GPU beside 16 cores, of which
steps that measure nothing share 4 at a time. Ranks that share a GPU run over MPI, gloo and HDF5, and from NCCL 2.30.3
on over NCCL, too. --record writes the table of results to benchmarks/MEASUREMENTS.md. Steps are named by the beginning
of their names. Without a GPU, the CPU and gloo stand in for GPU and NCCL: that checks the checks.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from hangs import end_job, free_port
from settings import ROOT, ROOT_AND_MORE

from hpcdist.tensors.accelerator import library_version

GPUS = torch.cuda.device_count()
NCCL = library_version() if GPUS else ""
SHARE = {}
if GPUS and tuple(map(int, NCCL.split(".")[:3])) >= (2, 30, 3):
    SHARE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
CORES = os.cpu_count() or 1
OWN = max(1, GPUS)  # ranks with a GPU each
SLOWER = 1 if GPUS else 6  # a machine of CI runs other tests beside these
PYTEST = ("-m", "pytest", "-q", "--color=no", "-s", "--with-mpi", "-pno:cacheprovider", "-m", "mpi and gpu")
PAGE = ROOT / "benchmarks" / "MEASUREMENTS.md"
BEGIN, END = "<!-- results of tests/gpu/run.sh -->\n", "<!-- end of the results of tests/gpu/run.sh -->\n"
SHAPES = """concat int64 4096
concat int64 8192 4096
concat int64 33554432
concat int64 33554432 16777216
"""


class Step(NamedTuple):
    """A job: its ranks (0: none, it starts jobs itself), the arguments of Python, and what its output must have.

    `what` is shown of its output; `share` says whether its ranks share a GPU, if NCCL lets them; `alone`, whether no
    other step runs beside it.
    """

    name: str
    seconds: int
    ranks: int
    arguments: tuple[str, ...]
    must: str = ""
    what: str = ""
    share: bool = False
    alone: bool = False
    variables: tuple[tuple[str, str], ...] = ()


def hang(reason):
    """A rank that does not reach a call over MPI."""
    must = r"rank 1 \(.*(has not reached|is stopped)"
    arguments, variables = ("tests/watch/hanging.py", f"1:{reason}", "concat"), (("BACKEND", "gloo"), ("LIMIT", "5"))
    return Step(f"hang over MPI: {reason}", 60, 2, arguments, must, must, variables=variables)


def steps(folder, mpirun):
    """All steps."""
    shapes = [x for x in SHAPES.splitlines(True) if len(x.split()) == 2 + OWN]
    (folder / "shapes.txt").write_text("".join(shapes if GPUS else shapes[:1]))
    size, device = ("1G", ("--device", "cuda")) if GPUS else ("1M", ())
    save = ("benchmarks/once.py", "async_save", *device, "--sizes", size, "--rounds", "3", "--folder", "/dev/shm")
    shapes, found = str(folder / "shapes.txt"), str(folder / "found.json")
    compare = ("-m", "hpcdist", "compare", "--seconds", "10", "--shapes", shapes, "-o", found)
    hangs = ("tests/gpu/hangs.py", mpirun, *(("20", str(max(1, CORES * 3 // 4))) if GPUS else ("2",)))
    passed = r"^.*\d+ passed.*$"
    return [
        Step("worlds one after the other", 60, OWN, ("tests/gpu/worlds.py",), "right"),
        Step("worlds, 2 ranks that share a GPU", 60, 2, ("tests/gpu/worlds.py",), "right", share=True),
        Step("doctor", 60, OWN, ("-m", "hpcdist", "doctor"), r"\b0 broken", r"^.*\bbroken.*$"),
        hang("sleep"),
        hang("stop"),
        Step("train_ddp", 60, OWN, ("-m", "hpcdist.examples.train_ddp")),
        Step("train_fsdp", 60, OWN, ("-m", "hpcdist.examples.train_fsdp")),
        Step("save in the background", 60, OWN, save, "", r"save, async_op=True.*$", alone=True),
        Step("compare", 90, OWN, compare, alone=True),
        Step("hangs on NCCL", 180, 0, hangs, "", r"^.* hangs: .*$", share=True, alone=True),
        Step("tests, a GPU for each rank", 120, OWN, (*PYTEST, "tests/gpu"), passed, passed),
        Step("tests, 2 ranks that share a GPU", 150, 2, (*PYTEST, "tests/gpu"), passed, passed, share=True),
        Step("torch's tests, 4 ranks", 90, 4, (*PYTEST, "tests/gpu/test_gpu_torch.py"), passed, passed),
    ]


def ended(job, seconds):
    """Wait for a job, and end it if it takes longer; return whether it did not."""
    try:
        job.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        end_job(job, show=True)
        return False


def execute(step, *, python, mpirun, folder):
    """Run a step; return its row: its name, its result, its seconds."""
    example = step.name.startswith("train")
    command = [*([mpirun, "-n", str(step.ranks)] if step.ranks else []), python, *step.arguments]
    environ = {"HPCDIST_TIMEOUT": "40", "PYTHONFAULTHANDLER": "1", "NCCL_RAS_ADDR": f"localhost:{free_port()}"}
    environ |= dict(step.variables) | (SHARE if step.share else {}) | ({} if GPUS else {"HPCDIST_TEST_GPU": "stand-in"})
    begin = time.monotonic()
    log = folder / step.name
    with log.open("w") as out:
        how = {"stdout": out, "stderr": out, "start_new_session": True, "cwd": folder if example else ROOT}
        job = subprocess.Popen(command, env={**ROOT_AND_MORE, **os.environ, **environ}, **how)
        late = not ended(job, SLOWER * step.seconds)
    out = log.read_text(errors="replace")
    seconds = time.monotonic() - begin
    status = job.returncode if step.variables == () else 0  # a hang ends its job
    found = re.findall(step.must, out, re.MULTILINE) if step.must else [""]
    shown = re.search(step.what, out, re.MULTILINE) if step.what else None
    good = not late and status == 0 and found and not (step.must == "right" and len(found) < step.ranks)
    result = "" if good else f"not done after {SLOWER * step.seconds} s" if late else f"FAILED ({status})"
    short = "passed" if shown is None else " ".join(shown.group().replace("|", " ").split()).strip("= ")[:90]
    text = f"{result} {'' if result and shown is None else short}".strip()
    print(f"== {step.name}, {step.ranks or 2} ranks: {text} ({seconds:.0f} s)", flush=True)
    if not good:
        print("\n".join(out.splitlines()[-100:]), flush=True)
    return f"| {step.name} | {step.ranks or 2} | {text} | {seconds:.0f} |", bool(good)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("step", nargs="*")
    args = parser.parse_args()
    if (mpirun := shutil.which(args.mpirun)) is None:
        parser.error(f"{args.mpirun}: no such command")
    args.mpirun = str(Path(mpirun).absolute())
    if args.record and (args.step or not GPUS):
        parser.error("--record needs a GPU, and all steps")
    begin = time.monotonic()
    gpu = torch.cuda.get_device_name() if GPUS else "no GPU: the CPU and gloo stand in"
    about = f"{time.strftime('%Y-%m-%d')}, {gpu}, torch {torch.__version__}, NCCL {NCCL or 'none'}"
    print(about, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        chosen = [x for x in steps(folder, args.mpirun) if not args.step or x.name.startswith(tuple(args.step))]
        if not chosen:
            parser.error(f"no step is named {' or '.join(args.step)}")
        chosen = [step for step in chosen if not step.share or SHARE or not GPUS]
        run = partial(execute, python=args.python, mpirun=args.mpirun, folder=folder)
        with ThreadPoolExecutor(min(4, 1 + CORES // 4)) as pool:  # those that may take longest first
            beside = sorted((step for step in chosen if not step.alone), key=lambda step: -step.seconds)
            rows = list(pool.map(run, beside))
        rows += [run(step) for step in chosen if step.alone]
    table = [about + ":\n", "| what | ranks | result | s |", "|---|--:|---|--:|", *(row for row, _ in rows)]
    print("\n".join(table), f"{time.monotonic() - begin:.0f} s in all", sep="\n", flush=True)
    if args.record:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text("".join([before, BEGIN, "\n".join(["", *table, ""]) + "\n", END, rest.partition(END)[2]]))
    sys.exit(not all(good for _, good in rows))


main()
