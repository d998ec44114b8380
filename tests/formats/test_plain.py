"""Arrays as plain bytes in a file: blocks, short runs; any box into any strides: tests/staging/test_save_load.py."""

import hashlib
import os

import pytest

from hpcdist.formats import plain


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
