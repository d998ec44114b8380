"""Several .safetensors files and their index, as Hugging Face's libraries name and read them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcdist.files.commit import Commit
from hpcdist.files.h5 import Dataset
from hpcdist.files.safetensors import SUFFIX
from hpcdist.validation.local import WrongError

__all__ = ["divide", "shard_size", "write_index"]

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
        raise WrongError(f"max_shard_size is for {SUFFIX} files")
    found = re.fullmatch(r"(\d+) ?([A-Za-z]*)", str(value))
    size = int(found[1]) * _UNITS.get(found[2].upper(), 0) if found else 0
    if size < 1:
        raise WrongError(f"max_shard_size is {value!r}, expected a number of bytes or text such as '5GB'")
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


def write_index(path: str, datasets: Sequence[Dataset], files: Sequence[tuple[str, Sequence[int]]]) -> None:
    """Write ``NAME.safetensors.index.json``: which file holds each tensor. A FileError if it cannot be written."""
    names = {datasets[i].name: Path(file).name for file, rows in files for i in rows}
    index = {"metadata": {"total_size": sum(dataset.nbytes() for dataset in datasets)}, "weight_map": names}
    commit = Commit(f"{path}.index.json")
    try:
        commit.part.write_text(json.dumps(index, indent=2) + "\n")
        commit.finish()
    finally:
        commit.discard()  # does nothing after finish()
