"""A block of memory without a name, and what a process sees of it."""

import os

import pytest

from hpcdist.comm import node_memory
from hpcdist.comm.node_memory import SharedBlock


def test_a_block_that_cannot_be_mapped_leaves_nothing_open():
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"memory|large|argument"):
        SharedBlock(2**62)
    assert os.listdir("/proc/self/fd") == before


def test_memory_is_taken_in_pieces(monkeypatch):
    """Older kernels begin anew after a signal: one call for many gigabytes would never end beside a profiler."""
    monkeypatch.setattr(node_memory, "PIECE", 2 * 4096)
    taken = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, start, length: taken.append((start, length)))
    block = SharedBlock(6 * 4096)
    block.allocate(4096, 5 * 4096)
    block.allocate(4096, 0)
    assert taken == [(4096, 2 * 4096), (3 * 4096, 2 * 4096), (5 * 4096, 4096)]
    block.close()
