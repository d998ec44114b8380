"""A block of memory without a name, and what a process sees of it."""

import os

import pytest

from hpcdist.comm import node_memory
from hpcdist.comm.node_memory import SharedBlock


def _written_in_place(block):
    return node_memory._has_private_pages(block._address, block.nbytes)


def test_a_private_view_follows_the_block_but_for_pages_written_in_place():
    block = SharedBlock(5 * 4096)
    block.allocate(0, 5 * 4096)
    assert os.fstat(block.fd).st_blocks * 512 == 5 * 4096
    shared, private = block.shared(), block.private()
    shared.fill_(1)
    assert private.min() == 1
    assert not _written_in_place(block)
    private[4096] = 9
    assert _written_in_place(block)
    shared.fill_(2)
    assert (private[0], private[4096], private[4097], private[-1]) == (2, 9, 1, 2)
    block.drop_private_pages()
    assert (private == 2).all() and shared[4096] == 2
    block.close()
    assert (private == 2).all(), "unmapped below an array"


def test_pages_of_its_own_are_found_on_every_kernel(monkeypatch):
    monkeypatch.setattr(node_memory, "_CHUNK", 16)
    block = SharedBlock(7 * 4096)
    private = block.private()
    assert not _written_in_place(block)
    assert private.max() == 0
    assert not _written_in_place(block)
    private[6 * 4096] = 1
    assert _written_in_place(block)
    monkeypatch.setattr(node_memory, "_PAGEMAP", "/nowhere")
    block.drop_private_pages()
    assert private.max() == 0
    block.close()


def test_a_block_that_cannot_be_mapped_leaves_nothing_open():
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"memory|large|argument"):
        SharedBlock(2**62)
    assert os.listdir("/proc/self/fd") == before


def test_memory_is_taken_in_pieces(monkeypatch):
    """Older kernels begin anew after a signal: one call for many gigabytes would never end beside a profiler."""
    monkeypatch.setattr(node_memory, "_PIECE", 2 * 4096)
    taken = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, start, length: taken.append((start, length)))
    block = SharedBlock(6 * 4096)
    block.allocate(4096, 5 * 4096)
    block.allocate(4096, 0)
    assert taken == [(4096, 2 * 4096), (3 * 4096, 2 * 4096), (5 * 4096, 4096)]
    block.close()
