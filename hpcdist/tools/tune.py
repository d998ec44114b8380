"""The command ``mpirun -n N python -m hpcdist tune``: measure algorithms, and write the rules that choose them."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from hpcdist.comm import tuning
from hpcdist.comm.team import Team
from hpcdist.comm.tuning import ALGORITHMS, Place, Rule, Rules, Sample, Tuned
from hpcdist.control import objects
from hpcdist.errors import InputError
from hpcdist.formats.paths import check_target, read_json, write_text
from hpcdist.routes.select import load
from hpcdist.runtime.cli import progress, run, table
from hpcdist.runtime.commandline import Parser, path, plural, show_bytes
from hpcdist.runtime.world import World, team_of
from hpcdist.tensors import accelerator
from hpcdist.tools.compare import Case, forced
from hpcdist.tools.timing import Contender, measure, spread

VERBS = {
    "allgatherv": "concat",
    "gatherv": "gather",
    "scatterv": "split",
    "alltoallv": "redistribute",
    "nccl allgatherv": "concat",  # the only operation of route nccl that has several algorithms
}
TOTALS = [2**14, 2**17, 2**20, 2**23, 2**26]  # bytes
HELD_OUT = [3 * 2**17, 2**22, 2**25]
_SKEWED = 100  # times the data of another rank, which rank 0 has in a check
_SEGMENTS = {"ring": (2**18, 2**20, 2**22)}
_ROUNDS = 20
_GAIN = 0.95  # of the default's time, which a rule must not exceed
_NEAR = 20e-6  # seconds by which a call may be slower than the fastest algorithm, if that is more than 5 %


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
    nccl = load("nccl")
    operations = [name for name in VERBS if nccl.missing(team) is None or not name.startswith("nccl")]
    found: dict[str, list[Rule]] = {operation: [] for operation in operations}
    samples, checks = list[Sample](), list[_Comparison]()
    skewed = team.size + 1
    points = [(*point, False) for point in product(operations, TOTALS, (1, skewed))]
    points += [(*point, True) for point in product(operations, HELD_OUT, (1, _SKEWED))]
    points = [point for point in points if point[0] != "alltoallv" or point[2] == 1]
    for operation, total, times, held_out in progress(points, world, "tune"):
        case, sizes = _case(team, operation, total, times)
        candidates = [rule for rule in _candidates(operation, place) if nccl.usable(team, rule.algorithm, *sizes)]
        usable = {rule.algorithm for rule in candidates}.__contains__
        default = Rules(place, team.size, None).choose(operation, *sizes, usable)
        now = Rules(place, team.size, Tuned("", {place: found}, {})).choose(operation, *sizes, usable)
        named = {rule.label: rule for rule in [default, now, *candidates]}
        contenders = [Contender(name, partial(forced, operation, rule, {})) for name, rule in named.items()]
        timings = {timing.name: timing for timing in measure(contenders, case, _ROUNDS, args.seconds / len(points))}
        medians = {name: timing.seconds.median for name, timing in timings.items()}
        best = min(medians, key=medians.__getitem__)
        if held_out:
            checks.append(_Comparison(operation, total, times, now.label, best, default.label, medians))
            continue
        skew = sizes[1] * team.size / sizes[0]
        us = {name: round(median * 1e6, 1) for name, median in medians.items()}
        samples.append(Sample(operation, sizes[0], int(100 * skew) / 100, us))
        both = zip(timings[best].samples, timings[default.label].samples, strict=True)
        gain = spread([one / other for one, other in both if one and other])
        chosen = named[best] if gain.median < _GAIN and gain.high < 1 else default
        if chosen.label != now.label:
            least = 0 if times == 1 else samples[-1].skew  # even calls are those without more skew
            found[operation].append(Rule(sizes[0], least, chosen.algorithm, chosen.segment))
        del case
    gpu = accelerator.identity(world.device.index) if world.device.type == accelerator.KIND else None
    share = accelerator.shared_gpu(objects.all_gather_object(world.comm, gpu))
    written = json.dumps(tuning.merged(before, place, found, samples), indent=1) + "\n"
    objects.run_on_root(world.comm, "tune", lambda: write_text(args.output, written))
    if world.rank == 0:
        written = f"written: {args.output}; use it by HPCDIST_TUNE={args.output}"
        if share and "nccl allgatherv" in found:
            written += "\nRanks share a GPU here: the rules of nccl allgatherv hold for such jobs alone"
        print(_report(place, found, checks), written, sep="\n\n")
    return 0


class _Comparison(NamedTuple):
    """A call of a size that no rule comes from: seconds by algorithm, and which are chosen.

    Attributes:
        times: how much larger the message of rank 0 is than each other one.
    """

    operation: str
    total: int
    times: int
    chosen: str
    best: str
    default: str
    seconds: dict[str, float]

    def slower(self, name: str) -> str:
        """Return by how much an algorithm is slower than the fastest one."""
        time, best = self.seconds[name], self.seconds[self.best]
        return f"{time / best - 1:.0%} ({1e6 * (time - best):,.0f} us)"

    def near(self, name: str) -> bool:
        time, best = self.seconds[name], self.seconds[self.best]
        return time * _GAIN <= best or time - best <= _NEAR


def _case(team: Team, operation: str, total: int, times: int) -> tuple[Case, tuple[int, int]]:
    """Return the data of a call, and the total and largest bytes by which its algorithm is chosen.

    Rank 0 has `times` the data of each other rank.
    """
    size, width = team.size, 8 * team.size
    if operation == "alltoallv":  # by the bytes of a rank, and of a message
        rows = max(1, total // (8 * width))
        total = 8 * rows * width
        return Case(team.comm, VERBS[operation], torch.int64, [[rows, width]] * size), (total, total // size)
    rest = total // (8 * (times + size - 1))
    shapes = [[total // 8 - rest * (size - 1)], *[[rest]] * (size - 1)]
    device = team.settings.device if operation.startswith("nccl") else "cpu"
    case = Case(team.comm, VERBS[operation], torch.int64, shapes, device)
    return case, (sum(case.nbytes), max(case.nbytes))


def _candidates(operation: str, place: Place) -> list[Rule]:
    names = [name for name in ALGORITHMS[operation] if name != "window" or min(place) > 1]
    return [Rule(0, 0, name, segment) for name in names for segment in _SEGMENTS.get(name, (0,))]


def _before(name: str) -> Any:
    """Return the contents of the file, None without a file; a file of another kind is not replaced."""
    check_target(name, 0)
    return read_json(name, tuning.FORMAT) if os.path.exists(name) else None


def _report(place: Place, found: dict[str, list[Rule]], checks: list[_Comparison]) -> str:
    rules = [
        [operation, show_bytes(rule.total), f"{rule.skew:g}", rule.label]
        for operation, rules in found.items()
        for rule in rules
    ]
    rows = [
        [x.operation, show_bytes(x.total), f"{x.times}:1", x.chosen, x.best, x.slower(x.chosen), x.slower(x.default)]
        for x in checks
    ]
    of_rules = "each from its total and skew on" if rules else "because no algorithm beats the default"
    concats = {(x.total, x.times): x.seconds[x.chosen] for x in checks if x.operation == "allgatherv"}
    skewed = [seconds / concats[total, 1] for (total, times), seconds in concats.items() if times > 1]
    return "\n\n".join(
        [
            f"{place}: {plural(len(rules), 'rule')}, {of_rules}",
            *([table(["operation", "from total", "from skew", "algorithm"], rules)] if rules else []),
            "Other sizes, as a check: by how much a call is slower than the fastest algorithm",
            table(["operation", "total", "shares", "by these rules", "fastest", "slower by", "the default by"], rows),
            f"Within 5 % or 20 us of the fastest: {sum(x.near(x.chosen) for x in checks)} of {len(checks)} by these "
            f"rules, {sum(x.near(x.default) for x in checks)} by the default\n"
            f"An allgatherv of {_SKEWED}:1 takes at most {max(skewed):.2f} times as long as an even one of this total",
        ]
    )


def parser() -> Parser:
    """Return the parser of python -m hpcdist.tools.tune."""
    p = Parser(
        prog="hpcdist tune",
        description="Measure the algorithms of route mpi for concat, gather, split and redistribute, on these ranks, "
        "and of route nccl for concat where it can run, and write rules for HPCDIST_TUNE. A rule replaces the default "
        "only where it is faster by 5 % and beyond the noise. The rules are then tested on other sizes. Rules in "
        "FILE for other numbers of nodes or ranks are kept.",
        epilog="example: mpirun -n 4 python -m hpcdist tune -o tune.json",
    )
    p.add_argument(
        "-o", "--output", type=path, default="tune.json", metavar="FILE", help="file to write (default tune.json)"
    )
    p.add_argument("--seconds", type=int, default=120, help="target duration (default 120)")
    return p


if __name__ == "__main__":
    run(parser(), main)
