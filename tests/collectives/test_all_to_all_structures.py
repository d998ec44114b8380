"""all_to_all of structures: each rank gets what every rank has sent it, whose values encode source and destination."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from collective import goes_on, refused, several_ranks

import hpcdist as hd

pytestmark = pytest.mark.mpi


@dataclass
class Edges:
    at: torch.Tensor
    kind: str


def _for(source, dest, rows):
    """A structure of ragged tensors, strided, 0-d, bf16 and empty ones, an array, and single values."""
    number = 10 * source + dest
    return {
        "x": torch.full((3, rows * (source + dest)), float(number)).t(),
        "more": [torch.tensor(number), torch.full((dest,), number, dtype=torch.bfloat16), torch.empty(0, 2)],
        "array": np.arange(source, dtype=np.int16) + number,
        "edges": Edges(torch.arange(dest + 1) * number, f"{source} to {dest}"),
        "n": None if dest > source else 2**70 + number,
    }


def _same(a, b):
    if isinstance(b, dict):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in b)
    if isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(b, Edges):
        return type(a) is Edges and _same(a.at, b.at) and a.kind == b.kind
    if isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return np.array_equal(a, b) and a.dtype == b.dtype if isinstance(b, np.ndarray) else a == b and type(a) is type(b)


@pytest.mark.parametrize("route", ["auto", "gloo", "hdf5"])
def test_each_rank_gets_its_own(findings, world, rank, size, route):
    """Small ones, and ones of which tensors would be sent by themselves elsewhere; twice, and in the background."""
    for rows in (1, 20_000, 1):
        sent = [_for(rank, dest, rows) for dest in range(size)]
        for later in (False, True):
            got = hd.all_to_all(sent, route=route, async_op=later)
            got = got.wait(60) if later else got
            good = len(got) == size and all(_same(x, _for(source, rank, rows)) for source, x in enumerate(got))
            findings.check(good and all(x["x"].is_contiguous() for x in got), f"{rows} rows, async_op={later}: {got}")
        findings.check(all(_same(x, _for(rank, dest, rows)) for dest, x in enumerate(sent)), "x has changed")


def test_of_some_ranks_and_by_pickle(findings, world, rank, size):
    same = world.comm.Split(rank % 2)
    got = hd.all_to_all([{"of": rank, "to": dest} for dest in range(same.size)], group=same)
    findings.check(got == [{"of": r, "to": same.rank} for r in range(rank % 2, size, 2)], got)
    got = hd.all_to_all([{rank, dest + 100} for dest in range(size)], allow_pickle=True)
    findings.check(got == [{r, rank + 100} for r in range(size)], got)


@several_ranks
def test_what_is_wrong_on_one_rank(rank, size):
    """The same error on every rank, and the job goes on."""
    last, good = rank == size - 1, [{"x": torch.ones(rank)}] * size
    for text, x, options in (
        ("[HD303]", [torch.ones(2)] * size if last else good, {}),
        ("[HD202]", [{"x": object()}] * size if last else good, {}),
        ("[HD213]", good[:-1] if last else good, {}),
        ("[HD303]", good, {"allow_pickle": last}),
        ("[HD211]", good, {"counts": [1] * size} if last else {}),
        ("[HD204]", good, {"dim": 1} if last else {}),
    ):
        refused(text, hd.all_to_all, x, what=f"{text} {options}", **options)
    goes_on()
