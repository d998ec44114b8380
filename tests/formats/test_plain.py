"""Arrays as plain bytes in a file: any box, into any strides, with windows of any size."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import same_bits, whole_of

from hpcdist import layout
from hpcdist.formats import plain
from hpcdist.formats.plain import Raw
from hpcdist.layout import Box
from hpcdist.layout.box import grid


def random_box(draw: random.Random, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw.randrange(extent + 1) for extent in shape)
    return Box(offset, tuple(draw.randrange(extent - o + 1) for o, extent in zip(offset, shape, strict=True)))


def test_any_box_into_any_strides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    for turn in range(180):
        monkeypatch.setattr(plain, "NEAR", (0, 16, 4096)[turn % 3])
        monkeypatch.setattr(plain, "_TOGETHER", (40, 2**20)[turn % 2])
        shape = tuple(draw.randrange(1, 7) for _ in range(draw.randrange(1, 5)))
        dtype = draw.choice((torch.int16, torch.float64, torch.complex64, torch.uint8))
        whole, box = whole_of(shape, dtype, salt=turn), random_box(draw, shape)
        (tmp_path / "x").write_bytes(b"head" + whole.numpy().tobytes())
        where = Raw(str(tmp_path / "x"), 4, shape, dtype)
        with open(where.path, "rb") as file:
            for step, window in itertools.product((1, 2), (1, 50, 10**6)):
                out = torch.zeros((*box.shape[:-1], step * box.shape[-1]), dtype=dtype)[..., ::step]
                where.read(file.fileno(), box, out, window)
                assert same_bits(out, whole[box.slices()]), (shape, box, step, window)


def test_blocks_and_their_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes on where the last one ended, also if the system took a part of it; the checksum is of all in order."""
    pwrite, blocks = os.pwrite, []

    def part(fd: int, block: memoryview, offset: int) -> int:
        blocks.append(len(block))
        return pwrite(fd, block[:5], offset)

    monkeypatch.setattr(plain, "BLOCK", 7)
    monkeypatch.setattr(os, "pwrite", part)
    data, into, written, read = bytes(range(100)), bytearray(90), hashlib.sha256(), hashlib.sha256()
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    plain.write_at(fd, 3, memoryview(data), written)
    plain.read_at(fd, 13, memoryview(into), read)
    assert (tmp_path / "x").read_bytes()[3:] == data
    assert bytes(into) == data[10:]
    assert set(blocks) == {7, 5}  # the last one is what is left
    assert written.digest() == hashlib.sha256(data).digest()
    assert read.digest() == hashlib.sha256(data[10:]).digest()
    with pytest.raises(EOFError, match="the file ends at byte 103"):
        plain.read_at(fd, 14, memoryview(into))
    os.close(fd)


def test_short_runs_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of many rows takes a few system calls, not one a row; and no more memory than the window."""
    whole, preadv, calls = whole_of((1000, 8), torch.int64), os.preadv, list[int]()
    (tmp_path / "x").write_bytes(whole.numpy().tobytes())

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(len(buffers[0]))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    out = torch.zeros(1000, 1, dtype=torch.int64)
    with open(tmp_path / "x", "rb") as file:
        Raw("", 0, (1000, 8), torch.int64).read(file.fileno(), Box((0, 3), (1000, 1)), out, 16_000)
    assert torch.equal(out, whole[:, 3:4])
    assert (len(calls), max(calls)) == (4, 16_000)


@pytest.mark.parametrize("limit", [1, 2, 5, 12, 1000])
def test_boxes_cover_everything_once_in_order(limit: int) -> None:
    for shape in ((4, 3, 5), (7,), (1, 9), (2, 0, 3), (), (1, 1, 1), (3, 1, 4)):
        index = np.arange(int(np.prod(shape))).reshape(shape)
        cut = list(layout.boxes(layout.whole(shape), limit))
        got = np.concatenate([index[b.slices()].reshape(-1) for b in cut]) if cut else np.empty(0)
        assert got.tolist() == index.reshape(-1).tolist(), (shape, limit)  # each is one run, one after the other
        assert all(b.size() <= limit for b in cut)
        cells = list(grid(shape, limit)) if shape and 0 not in shape else []
        seen = np.zeros(shape, int)
        for b in cells:
            seen[b.slices()] += 1
        assert not cells or (seen == 1).all()


def test_boxes_meet_in_runs() -> None:
    draw = random.Random(7)
    for _ in range(200):
        shape = tuple(draw.randrange(1, 6) for _ in range(draw.randrange(1, 4)))
        one, other, index = random_box(draw, shape), random_box(draw, shape), np.arange(np.prod(shape)).reshape(shape)
        both = np.intersect1d(index[one.slices()], index[other.slices()])
        met = one.intersect(other)
        assert met.size() == len(both)
        assert not met.size() or index[met.slices()].reshape(-1).tolist() == both.tolist()
        (length, count), first = layout.runs(one, shape), layout.run_starts(one, shape).tolist()
        if one.size():
            got = [i for start in first for i in range(start, start + length)]
            assert got == index[one.slices()].reshape(-1).tolist()
            assert length * count == one.size()
