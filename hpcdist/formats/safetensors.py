"""The format of the safetensors library, in one file, or in several with an index, as Hugging Face's libraries do.

A file is 8 bytes of the header's length, the header as JSON, and the tensors' bytes. The header follows from names,
shapes and dtypes alone, so that every rank can write its part of the data at its place.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcdist.errors import FileError, listed, reason, refusal
from hpcdist.formats.contents import Contents, Dataset, FileMap, Format, Identity, Slices, Stored, identity
from hpcdist.formats.paths import check_unicode, file_errors, sync, utf8_path, write_text
from hpcdist.formats.plain import Raw
from hpcdist.layout import Box
from hpcdist.tensors.storage import BARE, DTYPES

SUFFIX = ".safetensors"
INDEX = f"{SUFFIX}.index.json"  # the end of the name of an index
METADATA = "__metadata__"  # in the header, text by name; no tensor may have this name
_PARTS = "DCP_SHARDING_INFO"  # in the text of files that torch's HuggingFaceStorageWriter has not consolidated
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")  # a file of several
_MOST = 100_000_000  # bytes of a header, in the library
_ALIGNMENT = 4096  # bytes: the data begin with a page, so that large tensors are written, and mapped, in whole pages


class _Safetensors(Format):
    dtypes = frozenset(set(DTYPES) - {torch.complex128, torch.complex32, *BARE})  # that torch can save and load

    def describe(self, path: str) -> Contents:
        """As :meth:`Format.describe`, of a file, an index, or a folder of files with or without an index."""
        if path.endswith(SUFFIX) and not os.path.lexists(path) and os.path.exists(index_of(path)):
            path = index_of(path)  # of several files
        several = os.path.isdir(path) or path.endswith(INDEX)
        files, where, index = _files(path) if several else ([path], None, {})
        identities = {file: identity(file) for file in files}  # before they are described
        tensors: dict[str, Stored] = {}
        text: dict[str, str] = {}
        left_out: dict[str, str] = {}
        seen: set[str] = set()
        for file in files:
            held, own = _header(file)
            text |= own
            for key, raw in held.items():
                if where is not None and where.get(key) != file:
                    left_out[key] = f"in {os.path.basename(file)}, where the index does not look for it"
                    continue
                if key in seen:
                    raise FileError("HD510", f"{file}: {key} is in another file of the folder, too")
                seen.add(key)
                if isinstance(raw, str):
                    left_out[key] = raw
                else:
                    tensors[key] = Stored(key, raw.shape, raw.dtype, raw)
        if gone := next((key for key in where or () if key not in seen), None):
            what = f"{gone} is not in {os.path.basename((where or {})[gone])}, where the index says"
            raise FileError("HD510", f"{path}: incomplete: {what}")
        kind = "safetensors file" if where is None and files == [path] else "safetensors folder"
        # The index comes last: it is removed before the first of its files is replaced.
        return Contents(path, kind, tensors, identities | index, {}, left_out, text)

    def by_library(self, path: str, stored: Stored) -> Slices:
        from safetensors import safe_open

        def read(box: Box) -> Tensor:
            # Opened for each box, since what the library has mapped stays in memory; it takes memory on the default
            # device, which is the user's.
            with utf8_path(path) as known, torch.device("cpu"), safe_open(known, framework="pt") as file:
                x: Tensor = file.get_slice(stored.name)[box.slices()] if box.shape else file.get_tensor(stored.name)
                return x

        return read

    def create(self, path: Path, datasets: Sequence[Dataset], attrs: Mapping[str, Any]) -> FileMap:
        """As :meth:`Format.create`; a ValueError if there are too many tensors for the format.

        Those with larger elements come first, so that every element is aligned.
        """
        check([dataset.name for dataset in datasets], attrs)
        order = sorted(range(len(datasets)), key=lambda i: -datasets[i].dtype.itemsize)
        kinds = _names_of_dtypes(frozenset(dataset.dtype for dataset in datasets))
        header: dict[str, Any] = {METADATA: {"format": "pt", **attrs}}
        starts, end = {}, 0
        for i in order:
            d = datasets[i]
            starts[i], end = end, end + d.nbytes()
            header[d.name] = {"dtype": kinds[d.dtype], "shape": list(d.shape), "data_offsets": [starts[i], end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        if len(text) > _MOST:
            what = f"the header has {len(text):,} bytes, more than the format's {_MOST:,}: there are too many names"
            raise refusal(ValueError, "HD418", what)
        os.truncate(path, 8 + len(text) + end)  # raises, if the file system has a limit on the size of files
        with path.open("r+b") as file:
            file.write(len(text).to_bytes(8, "little") + text)
        return FileMap.of(path, (8 + len(text) + starts[i] for i in range(len(datasets))))


SAFETENSORS = _Safetensors()


def check(names: Iterable[str], text: Mapping[str, str]) -> None:
    """Raise a ValueError for names of tensors and text that a file cannot hold: before it is written, and as it is
    read."""
    for value in (*names, *text, *text.values()):
        check_unicode(value)
    if METADATA in names:
        raise refusal(ValueError, "HD418", f"{METADATA!r} cannot be the name of a tensor in a {SUFFIX} file")
    if _PARTS in text:
        what = "says that it holds parts of tensors, which torch's consolidate_safetensors_files() joins"
        raise refusal(ValueError, "HD511", f"the text {_PARTS} {what}")


def _header(path: str) -> tuple[dict[str, Raw | str], dict[str, str]]:
    """The place of each tensor of a file, or why it is not read, by name in the order of the data; and the file's own
    text, by name."""
    from safetensors import safe_open

    with file_errors(path), open(path, "rb") as file, utf8_path(path) as known:
        size = int.from_bytes(file.read(8), "little")
        text_of_header = file.read(min(size, _MOST))  # first: of a cold file, the library's map reads MiB for it
        with safe_open(known, framework="pt"):  # checks it
            header = json.loads(text_of_header)
        text = header.pop(METADATA, {})
        check(header, text)
    dtypes = {name: dtype for dtype, name in _names_of_dtypes(SAFETENSORS.dtypes).items()}
    found: dict[str, Raw | str] = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in dtypes:
            found[name] = f"dtype {entry['dtype']}, which is not supported"
            continue
        start = 8 + size + entry["data_offsets"][0]
        found[name] = Raw(path, start, tuple(entry["shape"]), dtypes[entry["dtype"]])
    return found, text


@cache
def _names_of_dtypes(dtypes: frozenset[torch.dtype]) -> dict[torch.dtype, str]:
    """The names that the format has for dtypes: the library tells them only in a file."""
    from safetensors.torch import save

    found = {}
    for dtype in dtypes:
        small = save({"data": torch.empty(1, dtype=dtype, device="cpu")})
        found[dtype] = json.loads(small[8 : 8 + int.from_bytes(small[:8], "little")])["data"]["dtype"]
    return found


def _files(path: str) -> tuple[list[str], dict[str, str] | None, dict[str, Identity]]:
    """The .safetensors files of a folder or an index; and where there is an index, which holds each tensor, and the
    identity of the index."""
    if path.endswith(INDEX):
        return _read_index(path)
    names = sorted(os.listdir(path))
    indices = [name for name in names if name.endswith(INDEX)]
    if len(indices) > 1:
        raise FileError("HD510", f"{path}: holds several checkpoints; name one of them: {listed(indices)}")
    if indices:
        return _read_index(os.path.join(path, indices[0]))
    found = [os.path.join(path, name) for name in names if name.endswith(SUFFIX)]
    if not found:
        kinds = f".metadata of torch's DCP, {INDEX} or {SUFFIX} files"
        what = "is a folder without a complete checkpoint"
        raise FileError("HD510", f"{path}: {what}: there is no {kinds}")
    if shard := next((name for name in names if _SHARD.search(name)), None):
        what = "is one of several files, whose index is missing: a save is under way, or was killed"
        raise FileError("HD510", f"{path}: {shard} {what}")
    return found, None, {}


def _read_index(path: str) -> tuple[list[str], dict[str, str], dict[str, Identity]]:
    """The files that an index names, the path of the one that holds each tensor, and the identity of the index."""
    at = identity(path)
    with file_errors(path):
        where = {str(name): str(file) for name, file in json.loads(Path(path).read_bytes())["weight_map"].items()}
    odd = next((file for file in where.values() if os.path.basename(file) != file), None)
    if odd is not None:
        raise FileError("HD510", f"{path}: names a file outside the folder: {odd}")
    where = {name: str(Path(path).with_name(file)) for name, file in where.items()}
    return list(dict.fromkeys(where.values())), where, {path: at}


def index_of(path: str) -> str:
    """Return the name of the index of a save to `path`."""
    return path.removesuffix(SUFFIX) + INDEX


def divide(path: str, sizes: Sequence[int], limit: int | None) -> list[tuple[str, list[int]]]:
    """Divide tensors of so many bytes among files of at most `limit` bytes, in their order; a larger one has its own.

    Args:
        limit: None for one file.

    Returns:
        The path of each file, and the numbers of its tensors: `path` itself if all are in one, else
        ``NAME-00001-of-00002.safetensors`` and so on.
    """
    files: list[list[int]] = [[]]
    nbytes = 0
    for i, size in enumerate(sizes):
        if limit is not None and files[-1] and nbytes + size > limit:
            files.append([])
            nbytes = 0
        files[-1].append(i)
        nbytes += size
    if len(files) == 1:
        return [(path, files[0])]
    stem = path.removesuffix(SUFFIX)
    return [(f"{stem}-{k:05d}-of-{len(files):05d}{SUFFIX}", rows) for k, rows in enumerate(files, 1)]


def write_index(path: str, datasets: Sequence[Dataset], files: Sequence[tuple[str, Sequence[int]]]) -> None:
    """Write ``NAME.safetensors.index.json``: which file holds each tensor. A FileError if it cannot be written."""
    names = {datasets[i].name: Path(file).name for file, rows in files for i in rows}
    index = {"metadata": {"total_size": sum(dataset.nbytes() for dataset in datasets)}, "weight_map": names}
    write_text(index_of(path), json.dumps(index, indent=2) + "\n")


def replace_form(name: str) -> None:
    """Remove an earlier save in another form: the index of several files, or the single file.

    Readers take the file before the index, or the index before the file: of both, one would be the old one. And an
    index may name files of an earlier save, of which some are about to be replaced. The files that it names stay.

    Raises:
        FileError: it cannot be removed.
    """
    try:
        os.unlink(name)
        sync(Path(name).parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise FileError("HD410", f"{name}: is of an earlier save, and cannot be removed: {reason(error)}") from error
