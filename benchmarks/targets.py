"""The targets, each with its limit and the measurement that decides it. Those of staging: staging_tables.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import results
from results import (
    ALL_GATHER_OBJECT,
    BASELINE,
    BY_HAND,
    DTENSOR,
    GLOO_ONE_BY_ONE,
    GLOO_PADDED,
    HPCDIST_NEW,
    HPCDIST_OUT,
    HPCDIST_SHARED,
    KINDS,
    MPI4PY_NEW,
    PLAN_OUT,
    Record,
    Spread,
)
from tables import table

_MIB = 2**20
_LARGE = 64 * _MIB


class Target(NamedTuple):
    """A target, and how to measure it in a record; `measure` returns None if the record has no such case."""

    what: str
    verb: str
    world_sizes: tuple[int, ...]
    limit: float
    at_most: bool
    unit: str
    measure: Callable[[Record], Spread | None]


def _ratio_of(size: int, skew: str, name: str, other: str) -> Callable[[Record], Spread | None]:
    def measure(record: Record) -> Spread | None:
        case = record.case(size, skew)
        return None if case is None else results.ratio(case, name, other)

    return measure


def _small_difference(name: str) -> Callable[[Record], Spread | None]:
    """Measure the microseconds that a call of 8 bytes a rank takes more than the baseline."""

    def measure(record: Record) -> Spread | None:
        case = record.case(8, "even")
        found = None if case is None else results.difference(case, name)
        return None if found is None else Spread(*(value * 1e6 for value in found))

    return measure


def _peak_of_result(record: Record) -> Spread | None:
    found = [peak.extra / peak.result for peak in record.peaks if peak.name == HPCDIST_NEW]
    return Spread(found[0], found[0], found[0]) if found else None


def _node_of_result(record: Record) -> Spread | None:
    found = [node.extra / node.result for node in record.nodes if node.name == HPCDIST_SHARED]
    return Spread(found[0], found[0], found[0]) if found else None


def _by_best(kind: str) -> Callable[[Record], Spread | None]:
    """Compare hpcdist's plan with the fastest hand-written one of the case; both write to preallocated memory."""

    def measure(record: Record) -> Spread | None:
        case = record.case(_LARGE, kind)
        best = None if case is None else results.best(case, BY_HAND)
        return None if case is None or best is None else results.ratio(case, best, PLAN_OUT)

    return measure


def _slower_than_a_route(record: Record) -> Spread | None:
    """Count the cases in which the plain call takes over 5% and over 20 us longer than with a route named.

    By the lower quartiles: the median of what differs in nothing but noise is above 5% now and then.
    """
    count, seen = 0, False
    for case in record.cases:
        for name in results.ROUTES.values():
            ratio, difference = (f(case, HPCDIST_NEW, name) for f in (results.ratio, results.difference))
            if ratio is not None and difference is not None:
                seen = True
                count += ratio.low > 1.05 and difference.low > 20e-6
    return Spread(count, count, count) if seen else None


def _structures(kind: str, other: str) -> Callable[[Record], Spread | None]:
    def measure(record: Record) -> Spread | None:
        cases = [case for case in record.cases if case.skew == kind and (kind != "many" or case.size == _LARGE)]
        return results.ratio(cases[0], other, HPCDIST_NEW) if cases else None

    return measure


def _redistributed() -> Iterator[Target]:
    """Iterate over the targets of redistribute; tiles need 2 rows of ranks, and DTensor has no ragged shards."""
    for kind, words in KINDS.items():
        what, ranks = f"redistribute, 64 MiB, {words}", (4,) if kind == "tiles" else (2, 4)
        yield Target(f"{what}: best by hand's time", "redistribute", ranks, 0.95, False, "x", _by_best(kind))
        measure = _ratio_of(_LARGE, kind, DTENSOR, HPCDIST_NEW)
        for np in ranks if kind != "ragged" else ():
            limit = {2: 1.5, 4: 2.5}[np]
            yield Target(f"{what}: DTensor on gloo's time", "redistribute", (np,), limit, False, "x", measure)


def _new_memory() -> Iterator[Target]:
    """Iterate over the targets of results in new memory: those of large ones come from the pool."""
    for verb, size in product(("concat", "gather", "split"), (16, 64)):
        measure = _ratio_of(size * _MIB, "even", HPCDIST_NEW, HPCDIST_OUT)
        yield Target(f"{verb}, {size} MiB a rank: time by that with out=", verb, (2, 4), 1.1, True, "x", measure)
    for (kind, words), size in product(KINDS.items(), (16, 64)):
        measure = _ratio_of(size * _MIB, kind, HPCDIST_NEW, HPCDIST_OUT)
        what, ranks = f"redistribute, {size} MiB, {words}: time by that with out=", (4,) if kind == "tiles" else (2, 4)
        yield Target(what, "redistribute", ranks, 1.1, True, "x", measure)


def _small() -> Iterator[Target]:
    """Iterate over the targets of small calls."""
    for (verb, limit), size in product((("concat", 1.0), ("gather", 1.0), ("split", 1.2)), (8, 128)):
        measure = _ratio_of(size, "even", HPCDIST_NEW, MPI4PY_NEW)
        yield Target(f"{verb}, {size} B: time by that of {MPI4PY_NEW}", verb, (2, 4), limit, True, "x", measure)
    for verb in ("concat", "gather", "split"):
        yield Target(f"{verb}, 8 B, plan: over raw mpi4py", verb, (2,), 10, True, "us", _small_difference(PLAN_OUT))


def _routes() -> Iterator[Target]:
    for verb in ("concat", "gather", "split", "redistribute"):
        what = f"{verb}: cases in which a named route is faster by 5% and 20 us, by lower quartiles"
        yield Target(what, verb, (2, 4), 0, True, "cases", _slower_than_a_route)


_AS_RAW = _ratio_of(_LARGE, "even", HPCDIST_OUT, BASELINE)
_SKEWED = _ratio_of(_LARGE, "16:1", GLOO_PADDED, HPCDIST_OUT)
_SHARED = _ratio_of(_LARGE, "even", BASELINE, HPCDIST_SHARED)
_SMALL, _LISTS = _structures("small", GLOO_ONE_BY_ONE), _structures("many", ALL_GATHER_OBJECT)
TARGETS = [
    *(
        Target(f"{v}, 64 MiB a rank: time of raw mpi4py", v, (2, 4), 1.05, True, "x", _AS_RAW)
        for v in ("concat", "gather")
    ),
    *(
        Target(f"{v}, 64 MiB, 16:1: gloo padded's time", v, (2, 4), 8, False, "x", _SKEWED)
        for v in ("concat", "gather")
    ),
    Target("concat, 8 B: over raw mpi4py", "concat", (2,), 25, True, "us", _small_difference(HPCDIST_OUT)),
    Target("concat, dim 0: peak extra memory by the result", "concat", (2, 4), 1.0, True, "x", _peak_of_result),
    Target("send, 1,000 small tensors: gloo one by one's time", "structures", (2, 4), 20, False, "x", _SMALL),
    Target("concat of lists, 64 MiB a rank: all_gather_object's time", "structures", (2, 4), 5, False, "x", _LISTS),
    *_redistributed(),
    *_new_memory(),
    *_small(),
    *_routes(),
    Target("concat, 64 MiB a rank, shared: preallocated Allgatherv's time", "concat", (2,), 2, False, "x", _SHARED),
    Target("concat, 64 MiB a rank, shared: preallocated Allgatherv's time", "concat", (4,), 4, False, "x", _SHARED),
    Target("concat, shared: memory of a node by the result", "ranks", (2, 4, 8), 1.05, True, "x", _node_of_result),
]
_COUNTERS = 0.005  # error of the kernel's memory counters, relative to the result


def target_table(records: Sequence[Record]) -> str:
    """Format targets and measurements, for every MPI and number of ranks."""
    rows = []
    for target in TARGETS:
        limit = f"{'at most' if target.at_most else 'at least'} {target.limit:g} {target.unit}"
        for mpi, np in product(dict.fromkeys(record.mpi for record in records), target.world_sizes):
            mine = [r for r in records if (r.mpi, r.world_size, r.verb) == (mpi, np, target.verb)]
            found = target.measure(mine[0]) if mine else None
            verdict = ["not measured", "-", "-"] if found is None else _verdict(target, found)
            rows.append([target.what, mpi, str(np), limit, *verdict])
    return table(["target", "MPI", "np", "limit", "measured", "IQR", "met"], rows)


def _verdict(target: Target, found: Spread) -> list[str]:
    limit = target.limit + (_COUNTERS if target.measure is _peak_of_result else 0)
    met = found.median <= limit if target.at_most else found.median >= limit
    digits = 0 if target.unit == "cases" else 3 if target.measure in (_peak_of_result, _node_of_result) else 2
    iqr = "-" if found.low == found.high else f"{found.low:.{digits}f} to {found.high:.{digits}f}"
    return [f"{found.median:.{digits}f} {target.unit}", iqr, "yes" if met else "NO"]
