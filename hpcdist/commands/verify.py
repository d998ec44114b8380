"""Compare results with the inputs, read again by the libraries of their formats and not as the commands read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcdist import layout
from hpcdist.commands import sources
from hpcdist.commands.inputs import Inputs, equal, sha256
from hpcdist.commands.sources import Source
from hpcdist.control import objects
from hpcdist.files.raw import memory
from hpcdist.layout import Box
from hpcdist.runtime.world import World
from hpcdist.staging.reader import Reader

__all__ = ["verify_files", "verify_tensors"]


def verify_tensors(world: World, data: Inputs, result: Tensor | None, output: str | None, root: int) -> dict[str, Any]:
    """Compare the result of `root`, and its output file, with the inputs. Collective over the world.

    Args:
        result: the whole on this rank, or None; those of other ranks are compared with the root's, by SHA-256.

    Returns:
        "verified", and the "sha256" of the root's result and of the inputs, the latter only for dim 0.
    """

    def check() -> tuple[bool, str | None]:
        assert result is not None
        held = [result.cpu()] + ([sources.load(output, by_library=True)] if output else [])
        return data.verify(held, world)

    right, serial = objects.broadcast(world.team.comm, "verify", check, root)
    digests = objects.all_gather_object(world.team.comm, None if result is None else sha256(result))
    own = digests[root]
    same = {digest for digest in digests if digest is not None} == {own} and serial in (None, own)
    return {"sha256": own, "serial_sha256": serial, "verified": right and same}


def verify_files(data: Inputs, parts: Sequence[tuple[str, Box]], window: int) -> dict[str, Any]:
    """Compare files with these boxes of the inputs' array, bit by bit, on this rank alone and within a window.

    Returns:
        "verified", and the "sha256" of the bytes of the files' arrays, one after the other.
    """
    right, digest = True, hashlib.sha256()
    size = max(window // 4, 16)  # an element of any dtype
    one, other = (torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(2))  # new ones fragment the heap
    for spec, whole in parts:
        with sources.open_array(spec, by_library=True) as held:
            right = right and held.shape == whole.shape and held.dtype == data.dtype
            for source, box in zip(data.sources, data.boxes(), strict=True) if right else ():
                right = right and _same(data, source, box, held, whole, one, other)
            for box in _blocks(layout.whole(held.shape), held.dtype, one.nbytes):
                digest.update(memory(_read(held, box, held.dtype, one)))
    return {"verified": right, "sha256": digest.hexdigest()}


def _same(data: Inputs, source: Source, box: Box, held: Reader, whole: Box, one: Tensor, other: Tensor) -> bool:
    """Compare a file, which holds `whole` of the array, with an input, which is `box` of it, where they intersect, in
    two buffers of the same size."""
    common = box.intersect(whole)
    if common.size() == 0:
        return True
    with data.open(source, by_library=True) as array:
        if array.shape != source.shape or array.dtype != source.dtype:
            return False
        for part in _blocks(common, data.dtype, one.nbytes):
            got = _read(held, part.relative_to(whole.offset), data.dtype, one)
            inner = part.relative_to(box.offset) if source.shape else Box((), ())  # 0-d: one row of the whole
            if not equal(got, _read(array, inner, data.dtype, other).view(part.shape)):
                return False
    return True


def _read(array: Reader, box: Box, dtype: torch.dtype, buffer: Tensor) -> Tensor:
    """Read a box of an array into the first bytes of a buffer, which bounds what the array's reader may use as well."""
    x = buffer[: box.size() * dtype.itemsize].view(dtype).view(box.shape)
    array.read(box, x, buffer.nbytes)
    return x


def _blocks(box: Box, dtype: torch.dtype, nbytes: int) -> Iterator[Box]:
    return layout.boxes(box, max(1, nbytes // dtype.itemsize))
