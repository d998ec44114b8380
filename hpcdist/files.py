"""Tensors in files: .npy, .npz, .pt, .safetensors and .h5, chosen by the suffix. One process, no communication."""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.buffers import DTYPES
from hpcdist.errors import InputError

__all__ = ["Source", "check_output", "describe", "expand", "load", "save"]

DTYPE_ATTRIBUTE = "torch_dtype"  # of an HDF5 dataset that holds the raw bits of a dtype that HDF5 does not have

_RAW = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}  # itemsize -> what raw bits are stored as
_NUMPY = {d for d in DTYPES if not d.is_floating_point or d in (torch.float64, torch.float32, torch.float16)}
_NUMPY -= {torch.complex32}
_SAFETENSORS = set(DTYPES) - {torch.complex128, torch.complex32}
_NAMED = re.compile(r"(?P<path>.*\.(?:npz|pt|safetensors|h5)):(?P<name>.+)", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """One array in one file, as its header describes it.

    Attributes:
        spec: what the user calls it: the path, and behind a colon the array's name where the file may hold several.
        shape, dtype: of the array.
    """

    spec: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def expand(inputs: Sequence[str]) -> list[str]:
    """The files that the given names and patterns stand for, sorted; a name behind a colon goes with each file.

    Raises:
        InputError: a pattern that matches nothing, or a file that is named twice.
    """
    specs: list[str] = []
    for given in inputs:
        path, name = _split(given)
        paths = [path] if os.path.lexists(path) else glob.glob(path, recursive=True)
        if not paths:
            raise InputError(f"{path}: no such file" + (", and no file matches" if glob.has_magic(path) else ""))
        specs += [p if name is None else f"{p}:{name}" for p in paths]
    specs.sort()
    for one, other in pairwise(specs):
        if one == other:
            raise InputError(f"{one}: named twice")
    return specs


def describe(spec: str) -> Source:
    """Read what an array is, without its data where the format allows that.

    Raises:
        InputError: no such file or array, not readable, not of its format, or of a dtype torch does not have.
    """
    with _opened(spec) as (shape, dtype, _):
        return Source(spec, shape, dtype)


def load(spec: str) -> Tensor:
    """Read an array as a CPU tensor, of native byte order. An .npy file is mapped, copy on write."""
    with _opened(spec) as (_, _, read):
        return read()


def check_output(path: str, dtype: torch.dtype, nbytes: int, inputs: Sequence[str] = ()) -> None:
    """Find before any data move what would keep a tensor from being written to `path`.

    `inputs` are files that must survive; `path` must be none of them.

    Raises:
        InputError: unknown suffix, no such folder, not writable, no space for `nbytes`, or a format without `dtype`.
    """
    target = Path(path)
    writer = _WRITERS.get(target.suffix)
    if writer is None:
        raise InputError(f"{path}: unknown suffix {target.suffix!r}; expected one of {', '.join(_WRITERS)}")
    if dtype not in writer.dtypes:
        others = [suffix for suffix, other in _WRITERS.items() if dtype in other.dtypes]
        raise InputError(f"{path}: a {target.suffix} file cannot hold {dtype}; use one of {', '.join(others)}")
    if not target.parent.is_dir():
        raise InputError(f"{path}: no such folder: {target.parent}")
    if target.is_dir():
        raise InputError(f"{path}: is a folder")
    for spec in inputs:
        if target.exists() and os.path.samefile(target, _split(spec)[0]):
            raise InputError(f"{path}: is also an input, which it would replace")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"{path}: the folder is not writable")
    free = shutil.disk_usage(target.parent).free
    if free < nbytes:
        raise InputError(f"{path}: no space for the output: {nbytes:,} bytes needed, {free:,} free")


def save(x: Tensor, path: str) -> None:
    """Write a tensor to a new file beside `path`, then rename it: `path` holds the old file or the complete new one.

    Raises:
        InputError: the file cannot be written; nothing is left behind.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.touch()  # with the mode that the user's umask gives; not every library takes that
        mode = part.stat().st_mode
        _WRITERS[target.suffix].write(x.cpu(), part)
        part.chmod(mode)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(part, target)
    except Exception as error:
        part.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {_reason(error)}") from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


_Opened = tuple[tuple[int, ...], torch.dtype, Callable[[], Tensor]]


@contextmanager
def _opened(spec: str) -> Iterator[_Opened]:
    """(shape, dtype, a function that reads) of an array in an open file; every failure is an InputError."""
    path, name = _split(spec)
    opener = _READERS.get(Path(path).suffix)
    if opener is None:
        raise InputError(f"{path}: unknown suffix {Path(path).suffix!r}; expected one of {', '.join(_READERS)}")
    try:
        if not os.path.exists(path):
            raise InputError(f"{path}: no such file")
        with opener(path, name) as opened:
            yield opened
    except InputError:
        raise
    except Exception as error:  # each library has its own way to say that a file is damaged
        raise InputError(f"{path}: cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = text.strip().splitlines() or [""]
    return lines[0] or type(error).__name__


def _split(spec: str) -> tuple[str, str | None]:
    match = _NAMED.fullmatch(spec)
    return (spec, None) if match is None or os.path.exists(spec) else (match["path"], match["name"])


def _pick(path: str, name: str | None, names: Sequence[str]) -> str:
    """The array that is meant: the one that is named, or the only one."""
    shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    if name is not None:
        if name not in names:
            raise InputError(f"{path}: holds no array {name!r}; it has: {shown}")
        return name
    if len(names) != 1:
        raise InputError(f"{path}: holds {len(names)} arrays; name one as {path}:NAME; it has: {shown}")
    return names[0]


def _of_numpy(path: str, dtype: np.dtype[Any]) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        raise InputError(f"{path}: holds dtype {dtype}, which torch does not have") from None


def _to_torch(array: np.ndarray[Any, Any]) -> Tensor:
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(native)


def _array(path: str, array: np.ndarray[Any, Any]) -> _Opened:
    return array.shape, _of_numpy(path, array.dtype), lambda: _to_torch(array)


def _tensor(x: Tensor) -> _Opened:
    return tuple(x.shape), x.dtype, lambda: x


@contextmanager
def _read_npy(path: str, name: str | None) -> Iterator[_Opened]:
    with open(path, "rb") as file:
        magic = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if magic == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
    empty = 0 in shape or dtype.hasobject  # there is nothing to map; or numpy is to say why not
    yield _array(path, np.load(path, mmap_mode=None if empty else "c"))


@contextmanager
def _read_npz(path: str, name: str | None) -> Iterator[_Opened]:
    with np.load(path) as archive:
        yield _array(path, archive[_pick(path, name, archive.files)])


@contextmanager
def _read_pt(path: str, name: str | None) -> Iterator[_Opened]:
    with open(path, "rb") as file:
        zipped = file.read(2) == b"PK"  # torch's older format cannot be mapped
    held = torch.load(path, weights_only=True, map_location="cpu", mmap=zipped)
    if isinstance(held, Tensor) and name is None:
        yield _tensor(held)
    elif isinstance(held, dict):
        tensors = {str(key): value for key, value in held.items() if isinstance(value, Tensor)}
        yield _tensor(tensors[_pick(path, name, list(tensors))])
    else:
        raise InputError(f"{path}: holds {type(held).__name__}, expected a tensor" + (" dict" if name else ""))


@contextmanager
def _read_safetensors(path: str, name: str | None) -> Iterator[_Opened]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        key = _pick(path, name, sorted(file.keys()))
        part = file.get_slice(key)
        # The dtype's name is the format's own; an empty slice gives it as torch's.
        shape = tuple(part.get_shape())
        dtype = (part[:0] if shape else file.get_tensor(key)).dtype
        yield shape, dtype, lambda: file.get_tensor(key)


@contextmanager
def _read_h5(path: str, name: str | None) -> Iterator[_Opened]:
    import h5py

    with h5py.File(path, "r") as file:
        datasets: list[str] = []
        file.visititems(lambda key, item: datasets.append(key) if isinstance(item, h5py.Dataset) else None)
        dataset = file[_pick(path, name and name.strip("/"), datasets)]
        if dataset.shape is None:
            raise InputError(f"{path}: dataset {dataset.name} is empty, without a shape")
        kept = dataset.attrs.get(DTYPE_ATTRIBUTE)
        dtype = _of_numpy(path, dataset.dtype)
        if kept is None:
            yield dataset.shape, dtype, lambda: _to_torch(np.asarray(dataset[()]))
        else:
            dtype = getattr(torch, str(kept))
            yield dataset.shape, dtype, lambda: _to_torch(np.asarray(dataset[()])).view(dtype)


_READERS = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".pt": _read_pt,
    ".safetensors": _read_safetensors,
    ".h5": _read_h5,
}


def _write_npy(x: Tensor, path: Path) -> None:
    with path.open("wb") as file:  # np.save adds a suffix of its own to a name
        np.save(file, x.numpy(), allow_pickle=False)


def _write_safetensors(x: Tensor, path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"data": x.contiguous()}, path)


def _write_h5(x: Tensor, path: Path) -> None:
    import h5py

    with path.open("wb") as file:  # HDF5 does not survive a write that fails: let a limit show before it is used
        file.truncate(x.nbytes)
    with h5py.File(path, "w") as file:
        raw = x if x.dtype in _NUMPY else x.contiguous().view(_RAW[x.dtype.itemsize])
        dataset = file.create_dataset("data", data=raw.numpy())
        if raw is not x:
            dataset.attrs[DTYPE_ATTRIBUTE] = str(x.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class _Writer:
    write: Callable[[Tensor, Path], None]
    dtypes: set[torch.dtype]


_WRITERS = {
    ".npy": _Writer(_write_npy, _NUMPY),
    ".pt": _Writer(lambda x, path: torch.save(x, path), set(DTYPES)),
    ".safetensors": _Writer(_write_safetensors, _SAFETENSORS),
    ".h5": _Writer(_write_h5, set(DTYPES)),
}
