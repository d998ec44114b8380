"""No two ranks write the same page: each has a copy of the file of its own here, and one page is one rank's."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collective import Findings

import hpcdist as hd
from hpcdist import layout
from hpcdist.formats.contents import Dataset, FileMap
from hpcdist.formats.plain import page_size
from hpcdist.layout import Box, run_boxes, whole
from hpcdist.staging.drivers import Edges, PartFile
from hpcdist.staging.writer import RankWriter, SaveOptions

PAGE = 64


class _Copy:
    """The file as one client holds it: what it has written, and which pages."""

    def __init__(self, nbytes: int) -> None:
        self.content = bytearray(nbytes)
        self.pages: set[int] = set()

    def write(self, place: int, data: memoryview, digest: object = None) -> None:
        assert data.nbytes
        self.content[place : place + len(data)] = data
        self.pages.update(range(place // PAGE, -(-(place + len(data)) // PAGE)))


def _writer(world: hd.World, folder: Path, dataset: Dataset, at: int, limit: int, copy: Any) -> RankWriter:
    file = PartFile(str(folder / "x.h5"), FileMap("x", [at], PAGE), limit)
    file.write = copy.write  # type: ignore[method-assign]
    return RankWriter([file], [dataset], [(file, at)], SaveOptions())


@pytest.mark.mpi
@pytest.mark.parametrize("seed", range(30))
def test_each_page_is_written_by_one_rank(seed: int, world: hd.World, tmp_path: Path) -> None:
    """Arrays anywhere, in pieces of any length, with gaps or without: all bytes arrive, from one rank a page; what is
    not only data comes from rank 0."""
    draw, size = random.Random(seed), world.world_size
    arrays, runs, end = [], [], draw.choice((0, 13, PAGE))
    for _ in range(draw.randrange(1, 6)):
        start = end
        for _cut in range(draw.randrange(1, 9)):
            length = draw.choice((0, 1, 7, PAGE, 3 * PAGE, draw.randrange(300)))
            runs.append((end, length, draw.randrange(size)))
            end += length
        arrays.append((start, end))
        end += draw.choice((0, 0, 5, 2 * PAGE))
    copy, expected = _Copy(end + PAGE), np.zeros(end + PAGE, np.uint8)
    one = _writer(world, tmp_path, Dataset("x", (end + PAGE,), torch.uint8), 0, draw.choice((0, 50, 10**6)), copy)
    for place, length, rank in runs:
        expected[place : place + length] = np.frombuffer(draw.randbytes(length), np.uint8)
        if rank == world.rank:
            one.write(0, Box((place,), (length,)), expected[place : place + length].data)
    _compare(world, one, arrays, copy, expected)
    mixed = {page for page in copy.pages if not any(a <= page * PAGE and (page + 1) * PAGE <= b for a, b in arrays)}
    assert not mixed or world.rank == 0


@pytest.mark.mpi
@pytest.mark.parametrize("length", [1, 7, PAGE - 1])
def test_short_runs(length: int, world: hd.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' rows in turn, each less than a page: several turns of them, and more than memory is to hold."""
    monkeypatch.setattr(sys.modules["hpcdist.staging.drivers"], "_ROUND", 500)
    size, rows = world.world_size, 200
    expected = np.random.default_rng(length).integers(0, 256, 5 + rows * length * size, np.uint8)
    expected[:5] = 0
    copy = _Copy(len(expected))
    one = _writer(world, tmp_path, Dataset("x", (rows, size * length), torch.uint8), 5, 100, copy)
    whole, left = expected[5:].reshape(rows, size * length), world.rank * length
    data = memoryview(whole[:, left : left + length].tobytes())
    one.write(0, Box((0, left), (rows, length)), data)
    _compare(world, one, [(5, len(expected))], copy, expected)


def _compare(
    world: hd.World, one: RankWriter, arrays: list[tuple[int, int]], copy: _Copy, expected: np.ndarray[Any, Any]
) -> None:
    findings = Findings(world.comm)
    findings.check(one.files[0].edges.settle(world._context.team, arrays, copy.write) is None, "settle")
    written = world.comm.allgather(sorted(copy.pages))
    flat = [page for pages in written for page in pages]
    findings.check(len(set(flat)) == len(flat), f"pages by rank: {written}")
    contents = world.comm.allgather(bytes(copy.content))
    found = bytearray(len(expected))
    for pages, content in zip(written, contents, strict=True):
        for page in pages:
            found[page * PAGE : (page + 1) * PAGE] = content[page * PAGE : (page + 1) * PAGE]
    findings.check(bytes(found[: len(expected)]) == expected.tobytes(), "the file's contents")
    findings.settle()


@pytest.mark.mpi(min_size=2)
def test_a_write_of_edges_that_fails(findings: Findings, world: hd.World, tmp_path: Path) -> None:
    """The error is that rank's; the others get what is for them."""
    copy, rank = _Copy(20 * PAGE), world.rank
    edges, there = Edges(PAGE, tmp_path, 100), 16 * PAGE + 1  # the first pages are rank 0's, these rank 1's
    if rank == world.world_size - 1:
        edges.add(np.array([[3, 5, 5, 5], [there, there + 2, there + 2, there + 2]]), memoryview(b"abcd"))
    write = copy.write if rank else lambda *_: 1 / 0
    problem = edges.settle(world._context.team, [(0, 20 * PAGE)], write)
    findings.check(isinstance(problem, ZeroDivisionError) == (rank == 0), problem)
    findings.check(rank != 1 or copy.content[there : there + 2] == b"cd", copy.content)


def test_page_size(tmp_path: Path) -> None:
    assert page_size(tmp_path) in range(4096, 2**16 + 1, 4096)


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 5, 1, 2)])
def test_runs_as_boxes(shape: tuple[int, ...]) -> None:
    """Of any run of a tensor: boxes in order, each of them a run, which together are it."""
    n = whole(shape).size()
    for start in range(n):
        for end in range(start, n + 1):
            at = start
            for box in run_boxes(shape, start, end):
                length, count = layout.runs(box, shape)
                assert (count, layout.run_starts(box, shape).tolist()) == (1, [at])
                at += length
            assert at == end
