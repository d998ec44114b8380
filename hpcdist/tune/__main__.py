"""The command ``mpirun -n N python -m hpcdist.tune``: measure algorithms, and write the rules that choose them."""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from functools import partial
from itertools import product
from typing import Any

import torch

from hpcdist.comm import tuning
from hpcdist.comm.team import Team
from hpcdist.comm.tuning import ALGORITHMS, Place, Rule, Rules, Sample, Tuned
from hpcdist.compare.byhand import Case, ours
from hpcdist.compare.timing import Contender, measure, ratio
from hpcdist.control import objects
from hpcdist.errors import InputError
from hpcdist.formats.paths import check_target, read_json, write_text
from hpcdist.runtime.cli import progress, run, table
from hpcdist.runtime.commandline import Parser, path, plural, show_bytes
from hpcdist.runtime.world import World, team_of

_VERBS = {"allgatherv": "concat", "gatherv": "gather", "scatterv": "split", "alltoallv": "redistribute"}
_TOTALS = [2**14, 2**17, 2**20, 2**23, 2**26]  # bytes
_HELD_OUT = [3 * 2**17, 2**22, 2**25]
_SEGMENTS = {"ring": (2**18, 2**20, 2**22)}
_ROUNDS = 20
_GAIN = 0.95  # of the default's time, which a rule must not exceed


def main(world: World, args: argparse.Namespace) -> int:
    """Measure, write the file, and print the rules, and how well they do at other sizes. Collective.

    Returns:
        The exit status.
    """
    team = team_of()
    if team.size == 1:
        raise InputError("HD505", "expected two ranks or more: mpirun -n 2")
    place = team.rules.place
    before = objects.run_on_root(world.comm, "tune", lambda: _before(args.output))
    found: dict[str, list[Rule]] = {operation: [] for operation in _VERBS}
    samples, held_out = list[Sample](), defaultdict[str, list[tuple[float, float]]](list)
    points = [(*point, False) for point in product(_VERBS, _TOTALS, (False, True))]
    points += [(*point, True) for point in product(_VERBS, _HELD_OUT, (False, True))]
    points = [point for point in points if point[0] != "alltoallv" or not point[2]]
    for operation, total, skewed, checks in progress(points, world, "tune"):
        case, sizes = _case(team, operation, total, skewed)
        default = Rules(place, team.size, None).choose(operation, *sizes)
        now = Rules(place, team.size, Tuned("", {place: found}, {})).choose(operation, *sizes)
        named = {rule.label: rule for rule in [default, now, *_candidates(operation, place)]}
        contenders = [Contender(name, partial(_forced, team, operation, rule)) for name, rule in named.items()]
        timings = {timing.name: timing for timing in measure(contenders, case, _ROUNDS, args.seconds / len(points))}
        medians = {name: timing.seconds.median for name, timing in timings.items()}
        best = min(medians, key=medians.__getitem__)
        if checks:
            held_out[operation].append((medians[now.label] / medians[best], medians[default.label] / medians[best]))
            continue
        skew = sizes[1] * team.size / sizes[0]
        us = {name: round(median * 1e6, 1) for name, median in medians.items()}
        samples.append(Sample(operation, sizes[0], int(100 * skew) / 100, us))
        gain = ratio(timings[best], timings[default.label])
        chosen = named[best] if gain is not None and gain.median < _GAIN and gain.high < 1 else default
        if chosen.label != now.label:
            least = samples[-1].skew if skewed else 0  # even calls are those without more skew
            found[operation].append(Rule(sizes[0], least, chosen.algorithm, chosen.segment))
        del case
    objects.run_on_root(world.comm, "tune", lambda: _write(args.output, tuning.merged(before, place, found, samples)))
    if world.rank == 0:
        print(
            _report(place, found, held_out), f"written: {args.output}; use it by HPCDIST_TUNE={args.output}", sep="\n\n"
        )
    return 0


def _case(team: Team, operation: str, total: int, skewed: bool) -> tuple[Case, tuple[int, int]]:
    """Return the data of a call, and the total and largest bytes by which its algorithm is chosen.

    In a skewed one, rank 0 holds half of what makes it differ from one that holds all.
    """
    size, width = team.size, 8 * team.size
    if operation == "alltoallv":  # by the bytes of a rank, and of a message
        rows = max(1, total // (8 * width))
        total = 8 * rows * width
        return Case(team.comm, _VERBS[operation], torch.int64, [[rows, width]] * size), (total, total // size)
    largest = total * (1 + size) // (2 * size) if skewed else total // size
    rest = (total - largest) // (size - 1)
    case = Case(team.comm, _VERBS[operation], torch.int64, [[largest // 8], *[[rest // 8]] * (size - 1)])
    return case, (sum(case.nbytes), max(case.nbytes))


def _candidates(operation: str, place: Place) -> list[Rule]:
    names = [name for name in ALGORITHMS[operation] if name != "window" or min(place) > 1]
    return [Rule(0, 0, name, segment) for name in names for segment in _SEGMENTS.get(name, (0,))]


def _forced(team: Team, operation: str, rule: Rule, case: Case) -> Any:
    with tuning.forced(team, operation, rule.algorithm, rule.segment):
        return ours(case, out=case.out)


def _before(name: str) -> Any:
    """Return the contents of the file, None without a file; a file of another kind is not replaced."""
    check_target(name, 0)
    return read_json(name, tuning.FORMAT) if os.path.exists(name) else None


def _write(name: str, contents: dict[str, Any]) -> None:
    """Write a row a line. The file appears when it is complete."""

    def rows(found: list[Any]) -> str:
        return "[" + ",".join(f"\n  {json.dumps(row)}" for row in found) + "\n ]"

    rules = ",\n ".join(f'"{operation}": {rows(found)}' for operation, found in contents["rules"].items())
    head = f'"format": "{contents["format"]}",\n"fingerprint": {json.dumps(contents["fingerprint"])}'
    write_text(name, f'{{{head},\n"rules": {{\n {rules}\n}},\n"samples": {rows(contents["samples"])}\n}}\n')


def _report(place: Place, found: dict[str, list[Rule]], held_out: dict[str, list[tuple[float, float]]]) -> str:
    rules = [
        [operation, show_bytes(rule.total), f"{rule.skew:g}", rule.label]
        for operation, rules in found.items()
        for rule in rules
    ]
    checks = [
        [operation, len(ratios), *(f"{max(over) - 1:.0%}" for over in zip(*ratios, strict=True))]
        for operation, ratios in held_out.items()
    ]
    return "\n\n".join(
        [
            f"{place}: {plural(len(rules), 'rule')}, each from its total and skew on",
            *([table(["operation", "from total", "from skew", "algorithm"], rules)] if rules else []),
            "Other sizes, as a check: by how much a call is slower than the fastest algorithm, at most",
            table(["operation", "sizes", "by these rules", "by the default"], checks),
        ]
    )


def parser() -> Parser:
    """Return the parser of python -m hpcdist.tune."""
    p = Parser(
        prog="hpcdist tune",
        description="Measure the algorithms of route mpi for concat, gather, split and redistribute, on these ranks, "
        "and write rules for HPCDIST_TUNE. A rule replaces the default only where it is faster by 5 % and beyond the "
        "noise. Other sizes check the rules. Rules of other numbers of nodes and ranks in the file stay.",
        epilog="example: mpirun -n 4 python -m hpcdist.tune -o tune.json",
    )
    p.add_argument(
        "-o", "--output", type=path, default="tune.json", metavar="FILE", help="file to write (default tune.json)"
    )
    p.add_argument("--seconds", type=int, default=120, help="target duration (default 120)")
    return p


if __name__ == "__main__":
    run(parser(), main)
