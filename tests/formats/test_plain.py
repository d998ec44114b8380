"""Arrays as plain bytes in a file: any box, into any strides, with windows of any size."""

import hashlib
import itertools
import os
import random

import pytest
import torch
from cases import same_bits, whole_of

from hpcdist.formats import plain
from hpcdist.formats.plain import Raw
from hpcdist.layout import Box


def random_box(draw, shape):
    offset = tuple(draw.randrange(extent + 1) for extent in shape)
    return Box(offset, tuple(draw.randrange(extent - o + 1) for o, extent in zip(offset, shape, strict=True)))


def random_shape(draw):
    return tuple(draw.randrange(1, 7) for _ in range(draw.randrange(1, 5)))


def test_any_box_into_any_strides(tmp_path, monkeypatch):
    draw, path = random.Random(5), tmp_path / "x"
    for turn in range(180):
        monkeypatch.setattr(plain, "NEAR", (0, 16, 4096)[turn % 3])
        monkeypatch.setattr(plain, "_TOGETHER", (40, 2**20)[turn % 2])
        shape = random_shape(draw)
        dtype = draw.choice((torch.int16, torch.float64, torch.complex64, torch.uint8))
        whole, box = whole_of(shape, dtype, salt=turn), random_box(draw, shape)
        path.write_bytes(b"head" + whole.numpy().tobytes())
        with path.open("rb") as file:
            for step, window in itertools.product((1, 2), (1, 50, 10**6)):
                out = torch.zeros((*box.shape[:-1], step * box.shape[-1]), dtype=dtype)[..., ::step]
                Raw("", 4, shape, dtype).read(file.fileno(), box, out, window)
                assert same_bits(out, whole[box.slices()]), (shape, box, step, window)


def test_blocks_and_their_checksum(tmp_path, monkeypatch):
    """Each goes on where the last one ended, also if the system took a part of it; the checksum is of all in order."""
    pwrite, blocks = os.pwrite, []

    def part(fd, block, offset):
        blocks.append(len(block))
        return pwrite(fd, block[:5], offset)

    monkeypatch.setattr(plain, "BLOCK", 7)
    monkeypatch.setattr(os, "pwrite", part)
    data, into, written, read = bytes(range(100)), bytearray(90), hashlib.sha256(), hashlib.sha256()
    with (tmp_path / "x").open("w+b") as file:
        plain.write_at(file.fileno(), 3, memoryview(data), written)
        plain.read_at(file.fileno(), 13, memoryview(into), read)
        assert (os.pread(file.fileno(), 999, 3), into) == (data, data[10:])
        with pytest.raises(EOFError, match="the file ends at byte 103"):
            plain.read_at(file.fileno(), 14, memoryview(into))
    assert {*blocks} == {7, 5}  # the last one is what is left
    for digest, of in ((written, data), (read, data[10:])):
        assert digest.digest() == hashlib.sha256(of).digest()


def test_short_runs_are_read_together(tmp_path, monkeypatch):
    """A column of many rows takes a few system calls, not one a row; and no more memory than the window."""
    whole, preadv, calls = whole_of((1000, 8), torch.int64), os.preadv, []
    (tmp_path / "x").write_bytes(whole.numpy().tobytes())

    def counted(fd, buffers, offset):
        calls.append(len(buffers[0]))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    out = torch.zeros(1000, 1, dtype=torch.int64)
    with open(tmp_path / "x", "rb") as file:
        Raw("", 0, (1000, 8), torch.int64).read(file.fileno(), Box((0, 3), (1000, 1)), out, 16_000)
    assert torch.equal(out, whole[:, 3:4])
    assert (len(calls), max(calls)) == (4, 16_000)
