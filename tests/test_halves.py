"""The two halves of the tests, of which most runs of tests/run.py have one, are all of the tests."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import backend_versions
import forks
import pytest
import run as run_tests
from halves import half_of
from settings import HALF


@dataclass(eq=False)
class Case:
    """What of a pytest.Item is looked at; one without values is of a test without parameters."""

    test: str
    values: tuple[str, ...] = ()
    once: bool = False
    nodeid: str = field(init=False)

    def __post_init__(self) -> None:
        self.nodeid = f"{self.test}[{'-'.join(self.values)}]" if self.values else self.test
        if self.values:
            self.callspec = type("CallSpec", (), {"_idlist": self.values})

    def get_closest_marker(self, name: str) -> bool:
        return name == "once" and self.once


def halves(cases: list[Case]) -> list[list[Case]]:
    items: Any = cases
    return [half_of(items, half) for half in (0, 1)]


def test_each_value_is_in_both_halves_and_each_two_in_one() -> None:
    cases = [Case("test_x", values) for values in itertools.product("abc", "defg", "h")]
    even, odd = halves(cases)
    assert set(even) | set(odd) == set(cases) and not set(even) & set(odd)
    for half in (even, odd):
        assert [set(values) for values in zip(*(case.values for case in half), strict=True)] == [
            *(set("abc"), set("defg"), set("h"))
        ]


@pytest.mark.parametrize(
    "cases",
    [
        [Case("test_x")],
        [Case("test_x", ("a",)), Case("test_y", ("a",))],
        [Case("test_x", (name,), once=True) for name in "abc"],
        [Case("test_x", ("a",)), *(Case("test_x", (name,), once=True) for name in "bcd")],
        [Case("test_x", (route, "a")) for route in ("hdf5", "mpio")],
    ],
)
def test_what_cannot_be_divided_is_in_both(cases: list[Case]) -> None:
    assert halves(cases) == [cases, cases]


def test_what_runs_once_is_not_counted() -> None:
    cases = [Case("test_x", (name,), once=name in "bd") for name in "abcde"]
    assert ["".join(*zip(*(case.values for case in half), strict=True)) for half in halves(cases)] == ["abde", "bcd"]


def test_other_tests_with_the_same_values_count_by_themselves() -> None:
    even, odd = halves([Case("test_x", ("a",)), Case("test_x", ("b",)), Case("test_y", ("b",)), Case("test_y", ("c",))])
    assert [case.nodeid for case in even] == ["test_x[a]", "test_y[b]"]
    assert [case.nodeid for case in odd] == ["test_x[b]", "test_y[c]"]


def test_both_halves_are_run() -> None:
    """Of what runs on several ranks, with the newest libraries; what does not is whole under Open MPI."""
    on_ranks = [run for run in run_tests.RUNS if run.np > 1 and run.mpi != "floor" and not run.on]
    everything = [run for run in on_ranks if set(run.paths) <= {*run_tests.COMPILED, *run_tests.LEAKS}]
    assert {run.half for run in everything} >= {0, 1}
    assert all(run.half is None for run in run_tests.RUNS if run.mpi == "openmpi" and not run.np)


def test_every_run_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "serve", lambda executable, environ: [executable, "folder of servers"])
    for run in (*run_tests.RUNS, backend_versions.BackendRun("mpich", 0, python="python")):
        assert "pytest" in run.command()
        half = None if run_tests.ALL or run.half is None else str(run.half)
        assert run.environ().get(HALF) == half
