"""The page docs/pytorch-suites.md, from the results of suites.py."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

Results = dict[str, dict[str, Any]]
OUTCOMES = ("passed", "failed", "skipped")
HEAD = """# PyTorch's own test suites

PyTorch has tests for its process groups. This page compares the results of this backend with those of gloo.
[tests/pytorch_suites/suites.py](../tests/pytorch_suites/suites.py) writes it, and names the sources of the suites. It
runs both backends in the same way. Every rank is a process of one MPI job, and each test has a deadline. A test that
fails runs once more, alone in a new job. If a suite asks for a backend's features, this backend reports gloo's, and
those that gloo lacks: uneven all_gather, PREMUL_SUM, messages whose handle is dropped.

DistributedTest skips tests by the backend's name. Both backends run the tests that PyTorch has for gloo. The rows
"for MPI" are the other tests that PyTorch has for its MPI backend, such as all_to_all and groups of fewer than 8 ranks.
The profiler has no events such as "gloo:all_reduce" for this backend, only torch's own "c10d::allreduce_". The tests do
not look for such events, as with any backend that is not PyTorch's own.
"""
# Why a test fails, by its name, where the end of its error does not say it.
_NAME = "until torch 2.14, torch.distributed.monitored_barrier asks for gloo by name; a deadline ends the job here"
CAUSES: dict[str, str] = {
    "test_all_to_all_single_invalid_split_sizes": "its tensors fit 2 ranks, so no backend can pass it on 4",
    "test_barrier_timeout_full_group": "a deadline ends the job here, with a table of all ranks",
    "test_monitored_barrier_gloo": _NAME,
    "test_ddp_logging_data_cpu": 'DDP\'s log names every backend from outside torch "custom"',
    "test_monitored_barrier_gloo_subgroup": _NAME,
    "test_noncontiguous_all_to_all_error": "expects an error for strided tensors, which work here",
    "test_split_group": "torch cannot split a Python backend's group if a rank is left out; the error says so",
}


def page(runs: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """The text, and the tests that gloo passes and another backend does not."""
    table: dict[tuple[str, str, int], dict[str, Results]] = defaultdict(dict)
    for run in runs:
        for tests_of in ("gloo", "mpi"):
            results = {
                name: one
                for name, one in run["results"].items()
                if ("mpi" if one.get("tests_of") == "mpi" else "gloo") == tests_of
            }
            suite = run["suite"] + ", for MPI" * (tests_of == "mpi")
            if results:
                table[run["torch"], suite, run["np"]][run["backend"]] = results
    backends = sorted({run["backend"] for run in runs})
    mpis = sorted({run["mpi"] for run in runs})
    lines = [HEAD, f"MPI: {', '.join(mpis)}.", "", *_counts(table, backends)]
    differs, same, worse = _failures(table, backends)
    lines += ["", "## Where they differ", "", *(differs or ["Nowhere."])]
    lines += ["", "## Failures of all backends", "", *(same or ["Nothing."])]
    lines += ["", "## Why tests are skipped", "", *_skips(table, backends)]
    return "\n".join(lines) + "\n", worse


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: str) -> list[str]:
    return [row(*cells), row(*["---"] * len(cells))]


def _counts(table: dict[Any, dict[str, Results]], backends: list[str]) -> list[str]:
    lines = head("torch", "suite", "ranks", *(f"{name}: passed, failed, skipped" for name in backends))
    for (torch, suite, np), of in sorted(table.items()):
        cells = []
        for backend in backends:
            outcomes = [one["outcome"] for one in of.get(backend, {}).values()]
            cells.append(", ".join(str(outcomes.count(kind)) for kind in OUTCOMES) if outcomes else "did not run")
        lines.append(row(torch, suite, np, *cells))
    return lines


def _failures(table: dict[Any, dict[str, Results]], backends: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Rows of tests whose outcomes differ, and of those that fail with all; the tests that only gloo passes.

    Of those that all backends have run."""
    differ: dict[tuple[str, ...], list[str]] = defaultdict(list)
    same: dict[tuple[str, ...], list[str]] = defaultdict(list)
    worse = []
    for (torch, suite, np), of in sorted(table.items()):
        if len(of) < len(backends):
            continue
        for name in sorted(set.intersection(*(set(results) for results in of.values()))):
            ones = [of[backend][name] for backend in backends]
            outcomes = [one["outcome"] for one in ones]
            if len(set(outcomes)) == 1 and "failed" not in outcomes:
                continue
            why = CAUSES.get(name) or next((brief(one["reason"]) for one in ones if one["reason"]), "")
            target = same if set(outcomes) == {"failed"} else differ
            target[suite, name, *outcomes, why].append(f"{torch} np {np}")
            if dict(zip(backends, outcomes, strict=True)).get("gloo") == "passed" and "failed" in outcomes:
                worse.append(f"{suite} {name}, torch {torch}, np {np}")
    tables = []
    for rows in (differ, same):
        body = [row(*cells[:-1], cells[-1], ", ".join(where)) for cells, where in rows.items()]
        tables.append([*head("suite", "test", *backends, "why", "torch, ranks"), *body] if body else [])
    return tables[0], tables[1], worse


def _skips(table: dict[Any, dict[str, Results]], backends: list[str]) -> list[str]:
    reasons: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for of in table.values():
        for backend, results in of.items():
            counts: dict[str, int] = defaultdict(int)
            for one in results.values():
                if one["outcome"] == "skipped":
                    counts[re.sub(r"^(gloo|mpi|mpi4py) ", "", brief(one["reason"]))] += 1
            for reason, count in counts.items():
                reasons[reason][backend] = max(reasons[reason][backend], count)
    lines = [
        "The largest number in one run of a suite; of a test that is skipped for MPI as well, that reason.",
        "",
        *head("reason", *backends),
    ]
    order = sorted(reasons.items(), key=lambda item: (-max(item[1].values()), item[0]))
    return [*lines, *(row(reason, *(counts[backend] for backend in backends)) for reason, counts in order)]


def brief(reason: str) -> str:
    """The line of a traceback or of a job's output that says what happened, fit for a table."""
    lines = [line.strip() for line in reason.splitlines() if line.strip() and not line.startswith(" ")]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    text = (errors or lines or [""])[-1] if errors else (lines or [""])[0]
    return re.sub(r"\s+", " ", text.replace("|", "\\|"))[:160]
