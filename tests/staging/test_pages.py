"""No two ranks write the same page: each has a copy of the file of its own here, and one page is one rank's."""

import random
import sys

import numpy as np
import pytest
import torch

from hpcdist.formats.contents import Dataset, FileMap
from hpcdist.layout import Box
from hpcdist.runtime.world import team_of
from hpcdist.staging.drivers import PartFile
from hpcdist.staging.writer import RankWriter, SaveOptions

PAGE = 64


class _Copy:
    """The file as one client holds it: what it has written, and which pages."""

    def __init__(self, nbytes):
        self.content = bytearray(nbytes)
        self.pages = set()

    def write(self, place, data, digest=None):
        assert data.nbytes
        self.content[place : place + len(data)] = data
        self.pages.update(range(place // PAGE, -(-(place + len(data)) // PAGE)))


@pytest.mark.parametrize("seed", range(30))
def test_each_page_is_written_by_one_rank(seed, world, size, findings, tmp_path, monkeypatch):
    """Arrays anywhere, in pieces of any length, with gaps or without: all bytes arrive, from one rank a page; what is
    not only data comes from rank 0. More than memory is to hold, and than is sent at a time."""
    draw = random.Random(seed)
    monkeypatch.setattr(sys.modules["hpcdist.staging.drivers"], "ROUND", draw.choice((100, 2**20)))
    arrays, runs, end = [], [], draw.choice((0, 13, PAGE))
    for _ in range(draw.randrange(1, 6)):
        start = end
        for _cut in range(draw.choice((3, 9, 60))):
            length = draw.choice((0, 1, 7, PAGE - 1, PAGE, 3 * PAGE, draw.randrange(300)))
            runs.append((end, length, draw.randrange(size)))
            end += length
        arrays.append((start, end))
        end += draw.choice((0, 0, 5, 2 * PAGE))
    end += PAGE
    expected, copy, dataset = np.zeros(end, np.uint8), _Copy(end), Dataset("x", (end,), torch.uint8)
    file = PartFile(str(tmp_path / "x.h5"), FileMap("x", [0], PAGE), draw.choice((0, 50, 10**6)))
    file.write = copy.write
    one = RankWriter([file], [dataset], [(file, 0, 0)], SaveOptions(), 0)
    for place, length, rank in runs:
        expected[place : place + length] = np.frombuffer(draw.randbytes(length), np.uint8)
        if rank == world.rank:
            one.write(0, Box((place,), (length,)), expected[place : place + length].data)
    findings.check(one.files[0].edges.settle(team_of(), arrays, copy.write) is None, "settle")
    written = world.comm.allgather({n: bytes(copy.content[n * PAGE : (n + 1) * PAGE]) for n in copy.pages})
    pages = {n: page for of_rank in written for n, page in of_rank.items()}
    findings.check(sum(map(len, written)) == len(pages), "a page of two ranks")
    found = bytearray(end)
    for n, page in pages.items():
        found[n * PAGE : n * PAGE + len(page)] = page
    findings.check(found == expected.tobytes(), "the file's contents")
    mixed = {page for page in copy.pages if not any(a <= page * PAGE and (page + 1) * PAGE <= b for a, b in arrays)}
    findings.check(not mixed or world.rank == 0, mixed)
