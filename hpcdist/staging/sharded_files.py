"""Several .safetensors files and their index, as Hugging Face's libraries name and read them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdist.errors import FileError, listed, reason
from hpcdist.files.h5 import Dataset
from hpcdist.files.regular import check_regular
from hpcdist.files.safetensors import SUFFIX
from hpcdist.files.text import write_text
from hpcdist.validation.local import WrongError

__all__ = [
    "INDEX",
    "PARTS",
    "check_index",
    "divide",
    "files_of",
    "index_of",
    "is_sharded",
    "read_index",
    "shard_size",
    "write_index",
]

INDEX = f"{SUFFIX}.index.json"  # the end of the name of an index
PARTS = "DCP_SHARDING_INFO"  # in the text of files that torch's HuggingFaceStorageWriter has not consolidated
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def shard_size(value: Any, path: str) -> int | None:
    """The number of bytes that ``max_shard_size`` says; None stays None, which stands for one file.

    Example::

        >>> shard_size("5GB", "model.safetensors")
        5000000000
    """
    if value is None:
        return None
    if not path.endswith(SUFFIX):
        raise WrongError("HD419", f"max_shard_size is for {SUFFIX} files")
    found = re.fullmatch(r"(\d+) ?([A-Za-z]*)", str(value))
    size = int(found[1]) * _UNITS.get(found[2].upper(), 0) if found else 0
    if size < 1:
        raise WrongError("HD419", f"max_shard_size is {value!r}, expected a number of bytes or text such as '5GB'")
    return size


def divide(path: str, datasets: Sequence[Dataset], limit: int | None) -> list[tuple[str, list[int]]]:
    """Divide tensors among files of at most `limit` bytes of data, in their order; a larger tensor has its own.

    Returns:
        The path of each file, and the numbers of its tensors: `path` itself if all are in one, else
        ``NAME-00001-of-00002.safetensors`` and so on.
    """
    files: list[list[int]] = [[]]
    nbytes = 0
    for i, dataset in enumerate(datasets):
        if limit is not None and files[-1] and nbytes + dataset.nbytes() > limit:
            files.append([])
            nbytes = 0
        files[-1].append(i)
        nbytes += dataset.nbytes()
    if len(files) == 1:
        return [(path, files[0])]
    stem = path.removesuffix(SUFFIX)
    return [(f"{stem}-{k:05d}-of-{len(files):05d}{SUFFIX}", rows) for k, rows in enumerate(files, 1)]


def index_of(path: str) -> str:
    """Return the name of the index of a save to `path`."""
    return path.removesuffix(SUFFIX) + INDEX


def write_index(path: str, datasets: Sequence[Dataset], files: Sequence[tuple[str, Sequence[int]]]) -> None:
    """Write ``NAME.safetensors.index.json``: which file holds each tensor. A FileError if it cannot be written."""
    names = {datasets[i].name: Path(file).name for file, rows in files for i in rows}
    index = {"metadata": {"total_size": sum(dataset.nbytes() for dataset in datasets)}, "weight_map": names}
    write_text(index_of(path), json.dumps(index, indent=2) + "\n")


def is_sharded(path: str) -> bool:
    """Whether a name can only be that of several files: a folder, or an index."""
    return path.endswith(INDEX) or os.path.isdir(path)


def files_of(path: str) -> tuple[list[str], dict[str, str] | None]:
    """Return the .safetensors files of a folder or an index, and where there is an index, which holds each tensor.

    Raises:
        FileError: there are none, or several indices, or the index is damaged.
    """
    if path.endswith(INDEX):
        return read_index(path)
    names = sorted(os.listdir(path))
    indices = [name for name in names if name.endswith(INDEX)]
    if len(indices) > 1:
        raise FileError("HD509", f"{path}: holds several checkpoints; name one of them: {listed(indices)}")
    if indices:
        return read_index(os.path.join(path, indices[0]))
    found = [os.path.join(path, name) for name in names if name.endswith(SUFFIX)]
    if not found:
        kinds = f".metadata of torch's DCP, {INDEX} or {SUFFIX} files"
        raise FileError(
            "HD509", f"{path}: is a folder that holds no checkpoint, or an incomplete one: there is no {kinds}"
        )
    return found, None


def check_index(path: str, where: Mapping[str, str] | None, found: Container[str]) -> None:
    """Raise a FileError if an index names a tensor that is not among those `found` in its files."""
    gone = next((name for name in where or () if name not in found), None)
    if where is not None and gone is not None:
        raise FileError(
            "HD510", f"{path}: incomplete: {gone} is not in {os.path.basename(where[gone])}, where the index says"
        )


def read_index(path: str) -> tuple[list[str], dict[str, str]]:
    """Return the files that an index names, and the path of the one that holds each tensor, by its name."""
    check_regular(path)
    try:
        where = {str(name): str(file) for name, file in json.loads(Path(path).read_bytes())["weight_map"].items()}
    except Exception as error:
        raise FileError("HD402", f"{path}: cannot be read: {reason(error)}") from error
    odd = next((file for file in where.values() if os.path.basename(file) != file), None)
    if odd is not None:
        raise FileError("HD510", f"{path}: names a file outside the folder: {odd}")
    where = {name: str(Path(path).with_name(file)) for name, file in where.items()}
    return list(dict.fromkeys(where.values())), where
