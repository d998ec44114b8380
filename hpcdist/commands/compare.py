"""Time every route that can run here on the same data, and show them in one table."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hpcdist.control import objects
from hpcdist.errors import RankError
from hpcdist.routes.select import ROUTES
from hpcdist.runtime.cli import placed, progress, table, timed
from hpcdist.runtime.world import World
from hpcdist.tensors.storage import as_bytes, row_major

__all__ = ["ROUNDS", "Move", "compare", "equal", "route_table"]

ROUNDS = 5  # timed runs of each route, after a warm-up that is not counted
Move = Callable[[Tensor, str, Tensor | None], Tensor | None]  # (shard, route, out) -> result


def compare(world: World, shard: Tensor, move: Move, nbytes: int) -> tuple[list[dict[str, Any]], Tensor | None]:
    """Time `move` on each route in turn, with results in existing memory. Collective.

    Returns:
        rows of the table, one for each route, on every rank; and the result of route mpi.
    """
    inputs: dict[str, Tensor] = {}
    results: dict[str, Tensor | None] = {}
    times: dict[str, list[float]] = {}
    refused: list[dict[str, Any]] = []
    for route in ROUTES:
        x = placed(world, shard, route)
        try:
            results[route] = move(x, route, None)
            inputs[route], times[route] = x, []
        except RankError as error:
            refused.append({"route": route, "refused": next(iter(error.problems.values()))})
    for _ in progress(range(ROUNDS), world, "compare"):
        for route, runs in times.items():
            runs.append(timed(world, lambda r=route: move(inputs[r], r, results[r]))[0])  # type: ignore[misc]
    right = objects.all_gather_object(
        world.team.comm, {route: _same(out, results["mpi"]) for route, out in results.items()}
    )
    best = min(median(runs) for runs in times.values())
    rows: list[dict[str, Any]] = [
        {
            "route": route,
            "seconds": median(runs),
            "gigabytes_per_second": nbytes / max(median(runs), 1e-9) / 1e9,
            "ratio_to_best": median(runs) / best,
            "same_result": all(rank[route] for rank in right),
        }
        for route, runs in times.items()
    ]
    return rows + refused, results["mpi"]


def equal(x: Tensor, y: Tensor) -> bool:
    """Compare the shapes, dtypes and bits of two tensors."""
    same = x.shape == y.shape and x.dtype == y.dtype
    return same and torch.equal(as_bytes(row_major(x)), as_bytes(row_major(y)))


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    return x is y or (x is not None and y is not None and equal(x.cpu(), y))


def route_table(routes: list[dict[str, Any]], bytes_sent: int) -> str:
    """Return the rows of compare() as text."""
    head = ["route", "time (ms)", "GB/s", "bytes sent", "ratio to best", "same result"]
    rows = [
        [
            row["route"],
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['gigabytes_per_second']:.2f}",
            f"{bytes_sent:,}",
            f"{row['ratio_to_best']:.2f}",
            "yes" if row["same_result"] else "NO",
        ]
        for row in routes
        if "refused" not in row
    ]
    refused = [f"{row['route']}: not run: {row['refused']}" for row in routes if "refused" in row]
    return "\n".join([table(head, rows), *refused])
