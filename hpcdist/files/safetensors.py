"""The format of the safetensors library: 8 bytes of the header's length, the header as JSON, and the tensors' bytes.

The header follows from names, shapes and dtypes alone, so that every rank can write its part of the data at its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hpcdist.errors import FileError, reason, refusal
from hpcdist.files.h5 import Dataset
from hpcdist.files.raw import Raw
from hpcdist.files.regular import check_regular, utf8_path
from hpcdist.tensors.storage import BARE, DTYPES

__all__ = ["KINDS", "METADATA", "SUFFIX", "header_of", "lay_out", "tensors_in"]

SUFFIX = ".safetensors"
METADATA = "__metadata__"  # in the header, text by name; no tensor may have this name
KINDS = set(DTYPES) - {torch.complex128, torch.complex32, *BARE}
"""The dtypes that the format has, and torch can save and load."""
_MOST = 100_000_000  # bytes of a header, in the library
_ALIGNMENT = 4096  # bytes: the data begin with a page, so that large tensors are written, and mapped, in whole pages


def header_of(path: str) -> tuple[int, dict[str, Any]]:
    """The position of the data in a file, and its header, as it is there."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))


def tensors_in(path: str) -> tuple[dict[str, Raw], dict[str, str]]:
    """The position of each tensor of a file, by name in the order of the data; and the file's own text, by name.

    Raises:
        FileError: no such file, or it cannot be read, or holds a dtype that torch does not have.
    """
    from safetensors import safe_open

    check_regular(path)
    try:
        with utf8_path(path) as known, safe_open(known, framework="pt"):  # checks the whole header
            start, header = header_of(path)
    except Exception as error:  # the library's own
        raise FileError("HD402", f"{path}: cannot be read: {reason(error)}") from error
    text = header.pop(METADATA, {})
    dtypes, found = _dtypes_by_name(), {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in dtypes:
            raise FileError("HD503", f"{path}: {name}: holds dtype {entry['dtype']}, which cannot be moved")
        shape = tuple(entry["shape"])
        found[name] = Raw(path, start + entry["data_offsets"][0], shape, dtypes[entry["dtype"]])
    return found, text


@cache
def _dtypes_by_name() -> dict[str, torch.dtype]:
    return {name: dtype for dtype, name in _names_of_dtypes(KINDS).items()}


def lay_out(path: Path, datasets: Sequence[Dataset], metadata: Mapping[str, str] | None = None) -> list[int]:
    """Write all but the data of a file, which gets its full size. Again, it changes nothing.

    Returns:
        The first byte of each dataset. Those with larger elements come first, so that every element is aligned.

    Raises:
        ValueError: too many tensors for the format.
    """
    order = sorted(range(len(datasets)), key=lambda i: -datasets[i].dtype.itemsize)
    kinds = _names_of_dtypes({dataset.dtype for dataset in datasets})
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    ends, end = {}, 0
    for i in order:
        dataset = datasets[i]
        start, end = end, end + dataset.nbytes()
        ends[i] = start
        entry = {"dtype": kinds[dataset.dtype], "shape": list(dataset.shape), "data_offsets": [start, end]}
        header[dataset.name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > _MOST:
        raise refusal(
            ValueError,
            "HD418",
            f"the header has {len(text):,} bytes, {_MOST:,} at most are possible: names are too many",
        )
    with path.open("r+b") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return [8 + len(text) + ends[i] for i in range(len(datasets))]


def _names_of_dtypes(dtypes: set[torch.dtype]) -> dict[torch.dtype, str]:
    """The names that the format has for dtypes: the library tells them only in a file."""
    from safetensors.torch import save

    found = {}
    for dtype in dtypes:
        small = save({"data": torch.empty(1, dtype=dtype, device="cpu")})
        found[dtype] = json.loads(small[8 : 8 + int.from_bytes(small[:8], "little")])["data"]["dtype"]
    return found
