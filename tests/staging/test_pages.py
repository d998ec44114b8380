"""No two ranks write the same page: each has a copy of the file of its own here, and one page is one rank's."""

from __future__ import annotations

import random
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
from hpcdist.staging.pages import Edges, Pages
from hpcdist.staging.writer import PartFile, RankWriter, SaveOptions

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


def _part(world: hd.World, folder: Path, pages: Pages, limit: int, end: int) -> tuple[PartFile, _Copy]:
    copy: Any = _Copy(end)
    return PartFile(str(folder / "x.h5"), FileMap("x", [0], PAGE), copy, world.rank, pages, limit), copy


@pytest.mark.mpi
@pytest.mark.parametrize("seed", range(30))
def test_each_page_is_written_by_one_rank(seed: int, world: hd.World, tmp_path: Path) -> None:
    """Arrays anywhere, in pieces of any length, with gaps or without: all bytes arrive, from one rank a page."""
    draw, size = random.Random(seed), world.world_size
    places, pieces, end = [], [], draw.choice((0, 13, PAGE))
    for _ in range(draw.randrange(1, 6)):
        cuts = [draw.choice((0, 1, 7, PAGE, 3 * PAGE, draw.randrange(300))) for _cut in range(draw.randrange(1, 9))]
        places.append((end, sum(cuts)))
        pieces.append((layout.displs(cuts), cuts, np.array(sorted(draw.randrange(size) for _ in cuts))))
        end += sum(cuts) + draw.choice((0, 0, 5, 2 * PAGE))
    pages = Pages(PAGE, places, lambda i, at: pieces[i][2][np.searchsorted(pieces[i][0], at, "right") - 1])
    file, copy = _part(world, tmp_path, pages, draw.choice((0, 50, 10**6)), end + PAGE)
    expected = np.zeros(end + PAGE, np.uint8)
    for (place, _), (starts, cuts, owners) in zip(places, pieces, strict=True):
        for start, length, rank in zip(starts, cuts, owners.tolist(), strict=True):
            data = np.frombuffer(draw.randbytes(length), np.uint8)
            expected[place + start : place + start + length] = data
            if rank == world.rank:
                file.write(place + start, data.data)
    _compare(world, file, copy, expected)


@pytest.mark.mpi
@pytest.mark.parametrize("length", [1, 7, PAGE - 1])
def test_short_runs(length: int, world: hd.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' rows in turn, each less than a page: several turns of them, and more than memory is to hold."""
    monkeypatch.setattr("hpcdist.staging.pages._ROUND", 500)
    size, rows = world.world_size, 200
    expected = np.random.default_rng(length).integers(0, 256, 5 + rows * length * size, np.uint8)
    expected[:5] = 0
    pages = Pages(PAGE, [(5, rows * length * size)], lambda i, at: at // PAGE % size)
    file, copy = _part(world, tmp_path, pages, 100, len(expected))
    one = RankWriter([file], [Dataset("x", (rows, size * length), torch.uint8)], [(file, 5)], SaveOptions())
    whole, left = expected[5:].reshape(rows, size * length), world.rank * length
    data = memoryview(whole[:, left : left + length].tobytes())
    one.write(0, Box((0, left), (rows, length)), data)
    _compare(world, file, copy, expected)


def _compare(world: hd.World, file: PartFile, copy: _Copy, expected: np.ndarray[Any, Any]) -> None:
    findings = Findings(world.comm)
    findings.check(file.edges.settle(world._context.team, copy.write) is None, "settle")
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
    copy, rank = _Copy(2 * PAGE), world.rank
    edges = Edges(tmp_path, 100)  # the first page is rank 0's, the second rank 1's
    if rank == world.world_size - 1:
        edges.add(np.array([[3, 2, 0], [PAGE + 1, 2, 1]]), memoryview(b"abcd"))
    problem = edges.settle(world._context.team, copy.write if rank else lambda *_: 1 / 0)
    findings.check(isinstance(problem, ZeroDivisionError) == (rank == 0), problem)
    findings.check(rank != 1 or copy.content[PAGE + 1 : PAGE + 3] == b"cd", copy.content)


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
