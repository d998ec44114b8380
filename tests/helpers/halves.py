"""Half of the cases of the tests with parameters: most runs of tests/run.py have one half, and others the other one."""

from __future__ import annotations

import pytest

_PARALLEL_HDF5 = {"hdf5", "over hdf5", "mpio"}


def half_of(items: list[pytest.Item], half: int) -> list[pytest.Item]:
    """Of a test with parameters, the cases whose places in the parameters' lists add up to an even number (half 0), or
    to an odd one (half 1): of several parameters each value is in both halves, and each two values are in one. What is
    in both: tests without parameters, or with cases of one half alone; what is marked `once`; and what depends on
    parallel HDF5, which not every environment has."""
    places: dict[tuple[str, int], list[str]] = {}  # of a test's parameter: the names of its values, in their order
    halves: dict[pytest.Item, int] = {}
    for item in items:
        if not hasattr(item, "callspec") or item.get_closest_marker("once"):
            continue
        total, values = 0, item.callspec._idlist
        if _PARALLEL_HDF5.intersection(values):
            continue
        for number, name in enumerate(values):
            names = places.setdefault((_test(item), number), [])
            names += [] if name in names else [name]
            total += names.index(name)
        halves[item] = total % 2
    divided = {_test(item) for item in halves if halves[item] == half}
    divided &= {_test(item) for item in halves if halves[item] != half}
    return [item for item in items if halves.get(item, half) == half or _test(item) not in divided]


def _test(item: pytest.Item) -> str:
    """Its name without the parameters."""
    return item.nodeid.partition("[")[0]
