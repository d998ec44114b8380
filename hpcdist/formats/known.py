"""The formats by suffix, and the format of a file or folder by its name."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from hpcdist.errors import FileError
from hpcdist.formats.contents import Contents, Format, Identity
from hpcdist.formats.hdf5 import HDF5
from hpcdist.formats.numpy_files import NPY, NPZ
from hpcdist.formats.safetensors import INDEX, SAFETENSORS
from hpcdist.formats.torch_files import DCP, METADATA, PT

FORMATS: dict[str, Format] = {".npy": NPY, ".npz": NPZ, ".pt": PT, ".safetensors": SAFETENSORS, ".h5": HDF5}


def format_of(path: str) -> Format:
    """The format of a file by its suffix, else HDF5; of a folder by its contents."""
    if os.path.isdir(path):
        return DCP if os.path.exists(os.path.join(path, METADATA)) else SAFETENSORS
    if path.endswith(INDEX):
        return SAFETENSORS
    return FORMATS.get(Path(path).suffix, HDF5)


def describe(path: str, of: Format | None = None) -> Contents:
    """List what a file or folder holds: see :meth:`Format.describe`. If it was replaced meanwhile, an error may be that
    of a half of each: again, a few times. (The identities in a description are those before it.)

    Args:
        of: its format; None for the one that format_of() finds, each time.
    """
    naps = [0.8, 0.2, 0.05, 0.0]
    while True:
        before = _status(path)
        try:
            return (of or format_of(path)).describe(path)
        except FileError:
            if not naps or _status(path) == before:
                raise
        time.sleep(naps.pop())


def _status(path: str) -> Identity | None:
    with suppress(OSError):
        return Identity.of(os.stat(path))
    return None
