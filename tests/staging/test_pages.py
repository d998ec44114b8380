"""No two ranks write the same page: each has a copy of the file of its own here, and one page is one rank's."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from collective import Findings

import hpcdist as hd
from hpcdist import layout
from hpcdist.files.raw import Ints, page_size
from hpcdist.layout import run_boxes, whole
from hpcdist.staging.pages import Edges, Pages

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


@pytest.mark.mpi
@pytest.mark.parametrize("seed", range(30))
def test_each_page_is_written_by_one_rank(seed: int, world: hd.World, tmp_path: Path) -> None:
    """Arrays anywhere, in pieces of any length, with gaps or without: all bytes arrive, from one rank a page."""
    draw, findings, size = random.Random(seed), Findings(world.comm), world.world_size
    places, pieces, end = [], [], draw.choice((0, 13, PAGE))
    for _ in range(draw.randrange(1, 6)):
        cuts = [draw.choice((0, 1, 7, PAGE, 3 * PAGE, draw.randrange(300))) for _cut in range(draw.randrange(1, 9))]
        places.append((end, sum(cuts)))
        owners = sorted(draw.randrange(size) for _ in cuts)
        pieces.append((np.array(layout.displs(cuts)), cuts, np.array(owners)))
        end += sum(cuts) + draw.choice((0, 0, 5, 2 * PAGE))

    def owner(i: int, at: Ints) -> Ints:
        starts, _, owners = pieces[i]
        found: Ints = owners[np.searchsorted(starts, at, "right") - 1]
        return found

    pages, copy = Pages(PAGE, places, owner), _Copy(end + PAGE)
    edges = Edges(tmp_path, draw.choice((0, 50, 10**6)))
    expected = np.zeros(end + PAGE, np.uint8)
    for (place, _), (starts, cuts, owners) in zip(places, pieces, strict=True):
        for start, length, rank in zip(starts.tolist(), cuts, owners.tolist(), strict=True):
            data = np.frombuffer(draw.randbytes(length), np.uint8)
            expected[place + start : place + start + length] = data
            if rank == world.rank:
                pages.write(rank, place + start, data.data, copy.write, edges)
    findings.check(edges.settle(world.team, copy.write) is None, "settle")
    _compare(world, findings, copy, expected)


@pytest.mark.mpi
@pytest.mark.parametrize("length", [1, 7, PAGE - 1])
def test_short_runs(length: int, world: hd.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' rows in turn, each less than a page: several turns of them, and more than memory is to hold."""
    monkeypatch.setattr("hpcdist.staging.pages._ROUND", 500)
    findings, size, rows = Findings(world.comm), world.world_size, 200
    expected = np.random.default_rng(length).integers(0, 256, 5 + rows * length * size, np.uint8)
    expected[:5] = 0
    places = 5 + (np.arange(rows) * size + world.rank) * length
    pages = Pages(PAGE, [(5, rows * length * size)], lambda i, at: at // PAGE % size)
    copy, edges = _Copy(len(expected)), Edges(tmp_path, 100)
    data = np.concatenate([expected[at : at + length] for at in places])
    pages.keep(places, length, data.data, edges)
    findings.check(edges.settle(world.team, copy.write) is None, "settle")
    _compare(world, findings, copy, expected)


def _compare(world: hd.World, findings: Findings, copy: _Copy, expected: np.ndarray) -> None:  # type: ignore[type-arg]
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
def test_a_write_of_edges_that_fails(world: hd.World, tmp_path: Path) -> None:
    """The error is that rank's; the others get what is for them."""
    findings = Findings(world.comm)
    pages = Pages(PAGE, [(0, 2 * PAGE)], lambda i, at: at // PAGE)  # the first page is rank 0's, the second rank 1's
    edges, copy = Edges(tmp_path, 100), _Copy(2 * PAGE)

    def write(place: int, data: memoryview, digest: object = None) -> None:
        if world.rank == 0:
            raise OSError("made up")
        copy.write(place, data)

    if world.rank == world.world_size - 1:
        edges.add(np.array([[3, 2, 0], [PAGE + 1, 2, 1]]), memoryview(b"abcd"))
    problem = edges.settle(world.team, write)
    findings.check(isinstance(problem, OSError) == (world.rank == 0), f"{problem}")
    findings.check(world.rank != 1 or copy.content[PAGE + 1 : PAGE + 3] == b"cd", copy.content)
    findings.check(pages.owners(np.array([0, PAGE, 2 * PAGE])).tolist() == [0, 1, 0], "owners")
    findings.settle()


def test_page_size(tmp_path: Path) -> None:
    size = page_size(tmp_path)
    assert size >= 4096
    assert size % 4096 == 0


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 5, 1, 2)])
def test_runs_as_boxes(shape: tuple[int, ...]) -> None:
    """Of any run of a tensor: boxes in order, each of them a run, which together are it."""
    n = whole(shape).size()
    for start in range(n):
        for end in range(start, n + 1):
            at = start
            for box in run_boxes(shape, start, end):
                length, count, starts = layout.runs(box, shape)
                assert (count, next(starts)) == (1, at)
                at += length
            assert at == end
