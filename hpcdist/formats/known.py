"""The formats by suffix, and what a file or folder is by its name."""

from __future__ import annotations

import os
from pathlib import Path

from hpcdist.formats.contents import Contents, Format
from hpcdist.formats.dcp_folder import DCP, NAME
from hpcdist.formats.hdf5 import HDF5
from hpcdist.formats.numpy_files import NPY, NPZ
from hpcdist.formats.safetensors import INDEX, SAFETENSORS
from hpcdist.formats.torch_files import PT

__all__ = ["FORMATS", "describe", "format_of"]

FORMATS: dict[str, Format] = {".npy": NPY, ".npz": NPZ, ".pt": PT, ".safetensors": SAFETENSORS, ".h5": HDF5}


def format_of(path: str) -> Format:
    """The format of a file by its suffix, HDF5 if it has another one; of a folder by what is in it."""
    if os.path.isdir(path):
        return DCP if os.path.exists(os.path.join(path, NAME)) else SAFETENSORS
    if path.endswith(INDEX):
        return SAFETENSORS
    return FORMATS.get(Path(path).suffix, HDF5)


def describe(path: str) -> Contents:
    """List what a file or folder holds: see :meth:`Format.describe`."""
    return format_of(path).describe(path)
