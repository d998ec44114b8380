"""The page pytorch-suites.md, from the results of suites.py."""

import re
from collections import Counter, defaultdict

OUTCOMES = ("passed", "failed", "skipped")
HEAD = """# PyTorch's own test suites

PyTorch has tests for its process groups. This page compares the results of this backend with those of gloo.
[suites.py](suites.py) writes it, and names the sources of the suites. It
runs both backends in the same way. Every rank is a process of one MPI job, and each test has a deadline. A test that
fails runs once more, alone in a new job. If a suite asks for a backend's features, this backend reports gloo's, and
those that gloo lacks: uneven all_gather, PREMUL_SUM, messages whose handle is dropped.

DistributedTest skips tests by the backend's name. Both backends run the tests that PyTorch has for gloo. The rows
"for MPI" are the other tests that PyTorch has for its MPI backend, such as all_to_all and groups of fewer than 8 ranks.
The profiler has no events such as "gloo:all_reduce" for this backend, only torch's own "c10d::allreduce_". The tests do
not look for such events, as with any backend that is not PyTorch's own.

Until 2.13, torch calls a group in Python without its dispatcher. hpcdist adds the profiler's events and the results
under FakeTensorMode. Other dispatch modes do not see the calls there: `CommDebugMode` counts none, so FSDP2's
`test_manual_reshard` finds 0 collectives in place of 1. From 2.14 on, the dispatcher makes the calls, and all modes see
them.
"""
# Why a test fails, by its name, where the end of its error does not say it.
_NAME = "until torch 2.14, torch.distributed.monitored_barrier asks for gloo by name; a deadline ends the job here"
CAUSES = {
    "test_all_to_all_single_invalid_split_sizes": "its tensors fit 2 ranks, so no backend can pass it on 4",
    "test_barrier_timeout_full_group": "a deadline ends the job here, with a table of all ranks",
    "test_monitored_barrier_gloo": _NAME,
    "test_ddp_logging_data_cpu": 'DDP\'s log names every backend from outside torch "custom"',
    "test_monitored_barrier_gloo_subgroup": _NAME,
    "test_noncontiguous_all_to_all_error": "expects an error for strided tensors, which work here",
    "test_split_group": "torch cannot split a Python backend's group if a rank is left out; the error says so",
}


def page(top, titles, columns, causes, entries, fold=sum):
    """The text, and the tests that pass in the first column and not in another one, of those of all columns."""
    table = defaultdict(dict)
    skips = defaultdict(lambda: defaultdict(int))
    for cells, label, place, column, results in entries:
        table[cells, label, place][column] = results
        skipped = Counter(_kind(brief(one["reason"])) for one in results.values() if one["outcome"] == "skipped")
        for reason, count in skipped.items():
            skips[reason][column] = fold((skips[reason][column], count))
    lines = [*top, *_head(*titles, *(f"{name}: {', '.join(OUTCOMES)}" for name in columns))]
    found = {False: defaultdict(list), True: defaultdict(list)}
    worse = []
    for (cells, label, place), of in sorted(table.items(), key=str):
        counts = {name: Counter(one["outcome"] for one in results.values()) for name, results in of.items()}
        told = (", ".join(str(counts[c][kind]) for kind in OUTCOMES) if c in of else "did not run" for c in columns)
        lines.append(_row(*cells, *told))
        if len(of) < len(columns):
            continue
        for name in sorted(set.intersection(*map(set, of.values()))):
            ones = [of[column][name] for column in columns]
            outcomes = [one["outcome"] for one in ones]
            if len(set(outcomes)) > 1 or "failed" in outcomes:
                short = name.rpartition(".")[2]
                why = causes.get(short) or next((brief(one["reason"]) for one in ones if one["reason"]), "")
                found[set(outcomes) == {"failed"}][label, short, *outcomes, why].append(place)
            if outcomes[0] == "passed" and "failed" in outcomes:
                worse.append(f"{label} {name}, {place}")
    for title, rows in (("Where they differ", found[False]), ("Failures of all", found[True])):
        lines += ["", f"## {title}", "", *(_head("of", "test", *columns, "why", "where") if rows else ["Nothing."])]
        lines += [_row(*cells, ", ".join(where)) for cells, where in rows.items()]
    lines += [
        "",
        "## Why tests are skipped",
        "",
        "The largest number in one row above.",
        "",
        *_head("reason", *columns),
    ]
    order = sorted(skips.items(), key=lambda item: (-max(item[1].values()), item[0]))
    return "\n".join([*lines, *(_row(reason, *(of[name] for name in columns)) for reason, of in order)]) + "\n", worse


def _kind(reason):
    return re.sub(r"^(gloo|mpi|mpi4py) ", "", reason)


def page_of_suites(runs):
    """The text of pytorch-suites.md, and the tests that gloo passes and another backend does not."""
    entries = []
    for run in runs:
        for of in ("gloo", "mpi"):
            results = {
                name: one for name, one in run["results"].items() if (one.get("tests_of") == "mpi") == (of == "mpi")
            }
            suite, place = run["suite"] + ", for MPI" * (of == "mpi"), f"torch {run['torch']} np {run['np']}"
            if results:
                entries.append(((run["torch"], suite, run["np"]), suite, place, run["backend"], results))
    top = [HEAD, f"MPI: {', '.join(sorted({run['mpi'] for run in runs}))}.", ""]
    return page(top, ["torch", "suite", "ranks"], sorted({run["backend"] for run in runs}), CAUSES, entries, max)


def _row(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def _head(*cells):
    return [_row(*cells), _row(*["---"] * len(cells))]


def brief(reason):
    """The line of a traceback or of a job's output that says what happened, fit for a table."""
    lines = [line.strip() for line in reason.splitlines() if line.strip() and not line.startswith(" ")]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    text = (errors or lines or [""])[-1] if errors else (lines or [""])[0]
    return re.sub(r"\s+", " ", text.replace("|", "\\|"))[:160]
