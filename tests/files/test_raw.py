"""Arrays as plain bytes in a file: any box, into any strides, either byte order, with windows of any size."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import whole_of

from hpcdist import layout
from hpcdist.files import raw
from hpcdist.files.raw import Raw
from hpcdist.layout import Box


def random_box(draw: random.Random, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw.randrange(extent + 1) for extent in shape)
    return Box(offset, tuple(draw.randrange(extent - o + 1) for o, extent in zip(offset, shape, strict=True)))


@pytest.mark.parametrize("short", [1, 16, 4096])
@pytest.mark.parametrize("kind", ["plain", "swapped", "fortran"])
def test_any_box_into_any_strides(kind: str, short: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "SHORT", short)
    draw = random.Random(5)
    for turn in range(60):
        shape = tuple(draw.randrange(1, 7) for _ in range(draw.randrange(1, 5)))
        dtype = draw.choice((torch.int16, torch.float64, torch.complex64, torch.uint8))
        whole = whole_of(shape, dtype, salt=turn)
        stored = whole.permute(*reversed(range(whole.dim()))).contiguous() if kind == "fortran" else whole
        array = stored.numpy().byteswap() if kind == "swapped" else stored.numpy()
        path = tmp_path / "x"
        path.write_bytes(b"head" + array.tobytes())
        where = Raw(str(path), 4, shape, dtype, kind == "swapped", kind == "fortran")
        box = random_box(draw, shape)
        for strided, window in itertools.product((False, True), (1, 50, 10**6)):
            out = torch.zeros((*box.shape[:-1], 2 * box.shape[-1]), dtype=dtype)[..., ::2] if strided else None
            out = torch.zeros(box.shape, dtype=dtype) if out is None else out
            fd = os.open(path, os.O_RDONLY)
            where.read(partial(raw.read_at, fd), box, out, window)
            os.close(fd)
            got, expected = np.asarray(out), np.asarray(whole[box.slices()])
            assert got.tobytes() == expected.tobytes(), (kind, shape, box, strided, window)


def test_a_checksum_is_of_the_bytes_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "BLOCK", 7)
    data = bytes(range(100))
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    written, read, into = hashlib.sha256(), hashlib.sha256(), bytearray(90)
    raw.write_at(fd, 3, memoryview(data), written)
    raw.read_at(fd, 13, memoryview(into), read)
    assert bytes(into) == data[10:]
    assert written.digest() == hashlib.sha256(data).digest()
    assert read.digest() == hashlib.sha256(data[10:]).digest()
    with pytest.raises(EOFError, match="the file ends at byte 103"):
        raw.read_at(fd, 14, memoryview(into))
    os.close(fd)


@pytest.mark.parametrize("digest", [None, hashlib.sha256()], ids=["no checksum", "checksum"])
def test_files_are_written_in_blocks(digest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes on where the last one ended, also if the system took a part of it."""
    pwrite, blocks = os.pwrite, []

    def part(fd: int, block: memoryview, offset: int) -> int:
        blocks.append(len(block))
        return pwrite(fd, block[:5], offset)

    monkeypatch.setattr(raw, "BLOCK", 7)
    monkeypatch.setattr(os, "pwrite", part)
    data, fd = bytes(range(100)), os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    raw.write_at(fd, 3, memoryview(data), digest)
    os.close(fd)
    assert (tmp_path / "x").read_bytes()[3:] == data
    assert set(blocks) == {7, 5}  # the last one is what is left


def test_short_runs_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of many rows takes a few system calls, not one a row; and no more memory than the window."""
    whole = whole_of((1000, 8), torch.int64)
    (tmp_path / "x").write_bytes(whole.numpy().tobytes())
    calls: list[int] = []

    def fetch(offset: int, into: memoryview) -> None:
        calls.append(len(into))
        into[:] = (tmp_path / "x").read_bytes()[offset : offset + len(into)]

    out = torch.zeros(1000, 1, dtype=torch.int64)
    Raw("", 0, (1000, 8), torch.int64).read(fetch, Box((0, 3), (1000, 1)), out, 16_000)
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
        grid = list(layout.grid_boxes(shape, tuple(2 for _ in shape), limit)) if shape and 0 not in shape else []
        seen = np.zeros(shape, int)
        for b in grid:
            seen[b.slices()] += 1
            assert all(o % 2 == 0 for o in b.offset)
        assert not grid or (seen == 1).all()


def test_meet_runs_and_shares() -> None:
    draw = random.Random(7)
    for _ in range(200):
        shape = tuple(draw.randrange(1, 6) for _ in range(draw.randrange(1, 4)))
        one, other, index = random_box(draw, shape), random_box(draw, shape), np.arange(np.prod(shape)).reshape(shape)
        both = np.intersect1d(index[one.slices()], index[other.slices()])
        met = one.intersect(other)
        assert met.size() == len(both)
        assert not met.size() or index[met.slices()].reshape(-1).tolist() == both.tolist()
        length, count, first = layout.runs(one, shape)
        if one.size():
            got = [i for start in first for i in range(start, start + length)]
            assert got == index[one.slices()].reshape(-1).tolist()
            assert length * count == one.size()
    for extent, parts in itertools.product((0, 1, 7), (1, 2, 5)):
        for owners in range(1, parts + 1):
            cut = layout.block_ranges(extent, parts, owners)
            assert [i for first, end in cut for i in range(first, end)] == list(range(extent))
            assert sum(end > first for first, end in cut) == min(owners, extent)
