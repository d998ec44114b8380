"""Arrays as each format's own library reads them, with which --verify compares.

Nothing here is shared with the readers of the commands, except the choice of the array and, for .h5, what is refused.
Files that a library maps are opened again for each part, so that what has been read is not kept in memory.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist import layout, memory
from hpcdist.commands import checkpoints
from hpcdist.commands.checkpoints import pick
from hpcdist.commands.formats import stored_in
from hpcdist.errors import InputError
from hpcdist.files.regular import utf8_path
from hpcdist.layout import Box
from hpcdist.staging.reader import Reader, read_box
from hpcdist.tensors.storage import bits

__all__ = ["open_array"]

Part = Callable[[Box], Tensor]  # the values of a box
Found = tuple[str, tuple[int, ...], torch.dtype, Part]  # name, shape and dtype of an array


@contextmanager
def open_array(path: str, name: str | None) -> Iterator[Reader]:
    """Open an array of a file."""
    if Path(path).suffix == ".h5":
        stored = stored_in(path, name)
        yield Reader(stored.place, stored.shape, stored.dtype, partial(read_box, path, stored.place))
        return
    key, shape, dtype, part = _LIBRARIES[Path(path).suffix](path, name)

    def read(box: Box, out: Tensor, window: int) -> None:
        bits(out).copy_(bits(part(box)))

    yield Reader(key, shape, dtype, read)


def _numpy(key: str, held: Callable[[], Any]) -> Found:
    def part(box: Box) -> Tensor:
        some = held()[box.slices()]
        return torch.from_numpy(np.array(some, some.dtype.newbyteorder("="), order="C"))

    array = held()
    return key, tuple(array.shape), part(layout.whole((0,) * array.ndim)).dtype, part


def _npy(path: str, name: str | None) -> Found:
    def held() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it was written by Python 2
            return np.load(path, mmap_mode="r", allow_pickle=False)

    return _numpy("", held)


def _npz(path: str, name: str | None) -> Found:
    with np.load(path, allow_pickle=False) as held, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was written by Python 2
        key = pick(path, name, list(dict.fromkeys(held.files)))
        _fits(path, held.zip.getinfo(f"{key}.npy").file_size)
        array = held[key]
    return _numpy(key, lambda: array)


def _pt(path: str, name: str | None) -> Found:
    if not _as_in_memory(path):  # torch would map what it has to change
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                _fits(path, sum(info.file_size for info in archive.infolist()))
        key, x = checkpoints.load(path, name)
        return key, tuple(x.shape), x.dtype, lambda box: x[box.slices()]

    def part(box: Box) -> Tensor:
        with utf8_path(path) as known:
            return checkpoints.load(known, name, mmap=True)[1][box.slices()].clone()

    with utf8_path(path) as known:
        key, x = checkpoints.load(known, name, mmap=True)

    return key, tuple(x.shape), x.dtype, part


def _fits(path: str, nbytes: int) -> None:
    """Check that memory can hold what a library reads whole: a few bytes may unpack to any number of them."""
    free = memory.available()
    if nbytes > free:
        raise InputError(
            "HD504", f"{path}: can only be verified whole: {nbytes:,} bytes of memory needed, {free:,} available"
        )


def _as_in_memory(path: str) -> bool:
    """Check that a file of torch.save holds its data as they are in memory."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        orders = [archive.read(info) for info in archive.infolist() if info.filename.endswith("/byteorder")]
        return orders in ([], [b"little"]) and not any(info.compress_type for info in archive.infolist())


def _safetensors(path: str, name: str | None) -> Found:
    from safetensors import safe_open

    def part(box: Box) -> Tensor:
        # The library takes memory on the default device, which is the user's.
        with utf8_path(path) as known, torch.device("cpu"), safe_open(known, framework="pt") as file:
            x: Tensor = file.get_slice(key)[box.slices()]
            return x

    with utf8_path(path) as known, safe_open(known, framework="pt") as file:
        key = pick(path, name, sorted(file.keys()))
        shape = tuple(file.get_slice(key).get_shape())
    return key, shape, part(layout.whole((0,) * len(shape))).dtype, part


_LIBRARIES = {".npy": _npy, ".npz": _npz, ".pt": _pt, ".safetensors": _safetensors}
