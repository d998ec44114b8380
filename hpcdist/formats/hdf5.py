"""The HDF5 format: ordinary datasets, and in files of hpcdist a small group with records of them.

    /NAME              each tensor: one contiguous dataset without fill, so that its bytes lie at a known place
      @torch_dtype     of a dtype that HDF5 does not have: its name; the dataset holds the raw bits
    /_hpcdist          attribute version: 1
      pieces           uint8[n]: a table for each tensor of the plan, of its pieces: offset, shape, checksum, rank, and
                       the row's own checksum; ranks write them, each its own rows
      plan             uint8[n]: the tensors, as JSON, against which readers hold what HDF5 says
      checkpoint       uint8[n]: what a checkpoint holds besides tensors, as JSON; only in those that
                       torch.distributed.checkpoint has written, see hpcdist.staging.dcp
      state            uint8[8]: the checksum of plan and checkpoint

HDF5's own structures are those of version 1.10, which have checksums; nothing is in its global heap, which has none.

The tensors and their tables are laid out before the first data are written, and the rest is added when all data are
there: a file without a state is incomplete. Ranks write data and tables, and rank 0 the rest.

Only the file that is named is read. Three things in an HDF5 file refer to other files: a link into another file, a
dataset with external storage, and a virtual dataset. Somebody who hands a user such a file could make the user's job
read any file that the user may read, so all three are found before anything is opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.errors import FileError, listed, reason, refusal
from hpcdist.formats.contents import (
    UNREADABLE,
    Contents,
    Dataset,
    FileMap,
    Format,
    Identity,
    PieceTable,
    Slices,
    Stored,
    identity,
    row_dtype,
)
from hpcdist.formats.paths import check_unicode, file_errors
from hpcdist.formats.plain import Raw, digest
from hpcdist.layout import Box
from hpcdist.process.limit import ended_at_deadline
from hpcdist.tensors.storage import BARE, DTYPES

GROUP = "_hpcdist"
DTYPE_ATTRIBUTE = "torch_dtype"
VERSION = 1
ALIGNMENT = 2**20  # bytes: datasets of this size and more begin at a multiple of it, or of the file system's block
NUMPY = frozenset(
    {d for d in DTYPES if not d.is_floating_point or d in (torch.float64, torch.float32, torch.float16)}
    - {torch.complex32, *BARE}
)
_NEW = {"libver": "v110", "locking": False}  # the oldest format of HDF5's structures in which they have checksums
_RAW_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # itemsize -> what the raw bits are stored as
_ELEMENT = 16  # bytes: of the largest dtype
_PLAN, _CHECKPOINT, _STATE = "plan", "checkpoint", "state"
_PIECES = f"{GROUP}/pieces"
_CHUNK = 2**26  # bytes of a chunk, which HDF5 reads whole, that are always allowed
LACKING = ", which torch does not have"
_DEEPEST = 1000  # groups within each other
_CHANGED = f"it is damaged, or another program has changed it and left /{GROUP}"


def stored_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype in which a tensor is stored: numpy's own, or raw bits."""
    if dtype in NUMPY:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    return np.dtype(_RAW_BITS[dtype.itemsize])


def table_of(datasets: Sequence[Dataset]) -> Dataset:
    """The tables of the pieces of these tensors, one after the other, as a dataset of their file."""
    return Dataset(_PIECES, (sum(d.count * row_dtype(len(d.shape)).itemsize for d in datasets),), torch.uint8)


class _HDF5(Format):
    dtypes = frozenset(DTYPES)
    checksums = True

    def describe(self, path: str) -> Contents:
        at = identity(path)
        with file_errors(path), opened(path) as file:
            return _contents(path, file, at)

    def by_library(self, path: str, stored: Stored) -> Slices:
        def read(box: Box) -> Tensor:
            with opened(path) as file:
                dataset = file[stored.name] if _is_hard(file, stored.name) else None
                if dataset is None or _external(dataset.id.get_create_plist()) is not None:
                    raise FileError("HD413", f"{path}: has changed while it was read")
                chunk = prod(dataset.chunks or ()) * dataset.dtype.itemsize
                if chunk > max(_CHUNK, 2 * box.size() * stored.dtype.itemsize):
                    what = f"is stored in chunks of {chunk:,} bytes, which HDF5 reads whole: more than window"
                    raise FileError("HD511", f"{path}: {stored.name}: {what}")
                array = np.asarray(dataset[box.slices()]).astype(stored_dtype(stored.dtype), copy=False)
            return torch.from_numpy(np.ascontiguousarray(array)).view(stored.dtype).view(box.shape)

        return read

    def create(self, path: Path, datasets: Sequence[Dataset], attrs: Mapping[str, Any]) -> FileMap:
        import h5py

        align = max(ALIGNMENT, os.stat(path.parent).st_blksize)  # on Lustre, the stripe
        # HDF5 does not survive a write that fails: let a limit on file sizes show before it is used.
        os.truncate(path, sum(d.nbytes() + (align if d.nbytes() >= align else 0) for d in datasets))
        large = [d for d in datasets if d.nbytes() >= align and d.name != _PIECES]  # which is the last: of any size
        places: dict[str, int] = {}
        if large:
            with h5py.File(path, "w", alignment_threshold=align, alignment_interval=align, **_NEW) as file:
                places = {dataset.name: _create(file, dataset) for dataset in large}
        # All others begin where any dtype's elements may: a border between pages is then one between elements.
        mode = "r+" if large else "w"
        with h5py.File(path, mode, alignment_threshold=1, alignment_interval=_ELEMENT, **_NEW) as file:
            _set(file, "/", attrs)
            for dataset in datasets:
                if dataset.name not in places:
                    places[dataset.name] = _create(file, dataset)
                _set(file, dataset.name, dataset.attrs)
                if dataset.dtype not in NUMPY:
                    _set(file, dataset.name, {DTYPE_ATTRIBUTE: str(dataset.dtype).removeprefix("torch.").encode()})
            file.require_group(GROUP).attrs["version"] = VERSION
        return FileMap.of(path, (places[d.name] for d in datasets))

    def complete(self, path: Path, datasets: Sequence[Dataset], checksum: int, checkpoint: bytes | None) -> None:
        import h5py

        entries = [
            {"name": d.name, "shape": list(d.shape), "dtype": str(d.dtype), "pieces": d.count, "runs": d.runs}
            for d in datasets
            if d.name != _PIECES
        ]
        parts = {_PLAN: json.dumps({"datasets": entries, "checksum": checksum}).encode()}
        if checkpoint is not None:
            parts[_CHECKPOINT] = checkpoint
        with h5py.File(path, "r+", **_NEW) as file:
            for name, content in (*parts.items(), (_STATE, seal(parts))):
                made = _create_plain(file, f"{GROUP}/{name}", (len(content),), np.dtype("u1"))
                made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.frombuffer(content, np.uint8))


HDF5 = _HDF5()


def add_table(path: Path, table: Dataset) -> int:
    """Replace the table of a file whose pieces were not known before; return its place."""
    import h5py

    with h5py.File(path, "r+", **_NEW) as file:
        del file[_PIECES]
        return _create(file, table)


def seal(parts: Mapping[str, bytes]) -> bytes:
    """The state of a file with these records."""
    made = digest()
    for name in (_PLAN, _CHECKPOINT):
        made.update(parts.get(name, b""))
    return int(made.intdigest()).to_bytes(8, "little")


def _set(file: Any, name: str, attrs: Mapping[str, Any]) -> None:
    if odd := [key for key in attrs if not key or "\0" in key]:
        raise refusal(ValueError, "HD418", f"an attribute's name cannot be empty or hold NUL: {odd[0]!r}")
    if attrs:  # h5py takes a while to open an object
        file[name].attrs.update({key: _fixed_length(value) for key, value in attrs.items()})


def _create(file: Any, dataset: Dataset) -> int:
    """Create a dataset; return its place."""
    made = _create_plain(file, dataset.name, dataset.shape, stored_dtype(dataset.dtype))
    return made.get_offset() or 0  # None of an empty one


def _create_plain(file: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """A contiguous dataset, as HDF5's object, whose place is known at once, and which HDF5 fills with nothing."""
    from h5py import h5d, h5p, h5s, h5t

    made = h5p.create(h5p.DATASET_CREATE)
    made.set_layout(h5d.CONTIGUOUS)
    made.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    made.set_fill_time(h5d.FILL_TIME_NEVER)
    links = h5p.create(h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    space = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
    return h5d.create(file.id, name.encode(), h5t.py_create(dtype, logical=True), space, made, links)


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """Open an HDF5 file for reading.

    HDF5 may read a damaged one for ever, and h5py holds Python's lock meanwhile: no thread of Python's could end that.
    Other ranks see it at the deadline; a rank without others ends itself.
    """
    import h5py

    with ended_at_deadline():
        # HDF5 2.0 does not open a descriptor's path once the file has another name, or none; h5py reads one by Python.
        by_fd = path.startswith("/proc/self/fd/")
        with open(path, "rb", buffering=0) if by_fd else nullcontext(path) as source:
            try:
                file = h5py.File(source, "r", locking="best-effort")
            except OSError as error:
                text = reason(error)
                if "truncated" in text:
                    raise FileError("HD404", f"{path}: truncated ({text})") from error
                if not h5py.is_hdf5(path):
                    raise FileError("HD402", f"{path}: not an HDF5 file") from error
                raise
            with file:
                yield file


def _contents(path: str, file: Any, at: Identity) -> Contents:
    names, others = _dataset_names(path, file)
    end = at.size
    tensors = [name for name in names if not name.startswith(f"{GROUP}/")]
    version = file[GROUP].attrs.get("version") if _is_hard(file, GROUP) else None
    if version is None:  # of another tool
        found, external, left_out = _stored(path, file, tensors, {}, end)
        return Contents(path, "HDF5 file", found, {path: at}, external, others | left_out)
    if version != VERSION:
        raise FileError("HD402", f"{path}: is in version {version} of the format, and this hpcdist reads {VERSION}")
    own, _, _ = _stored(path, file, [name for name in names if name.startswith(f"{GROUP}/")], {}, end)
    places = {name.removeprefix(f"{GROUP}/"): stored.raw for name, stored in own.items() if stored.raw is not None}
    if _STATE not in places:
        raise FileError("HD404", f"{path}: incomplete: the job that wrote it ended before it was done")
    with open(path, "rb") as content:
        parts = {
            name: os.pread(content.fileno(), places[name].nbytes(), places[name].offset)
            for name in (_PLAN, _CHECKPOINT, _STATE)
            if name in places
        }
    if _PLAN not in parts or parts[_STATE] != seal(parts):
        raise FileError("HD404", f"{path}: its plan or values differ from their checksum: {_CHANGED}")
    planned = _tables(path, json.loads(parts[_PLAN]), places.get(_PIECES.removeprefix(f"{GROUP}/")))
    unlisted = planned.keys() - set(names)
    if lost := [name for name in planned if name in unlisted and not _is_hard(file, name)]:
        raise FileError("HD404", f"{path}: holds no {listed(lost)}, which its plan has: {_CHANGED}")
    # Those in a group with another hard link, which h5py makes of file["b"] = file["a"], are listed in one of the two.
    found, external, left_out = _stored(path, file, dict.fromkeys([*tensors, *planned]), planned, end)
    at = replace(at, at=places[_STATE].offset, mark=parts[_STATE])
    values = json.loads(parts.get(_CHECKPOINT, b"{}"))
    left_out |= others | dict.fromkeys(values.get("values", ()), "a value")
    return Contents(path, "HDF5 file", found, {path: at}, external, left_out, checked=True, checkpoint=values)


def _tables(path: str, plan: Mapping[str, Any], raw: Raw | None) -> dict[str, tuple[dict[str, Any], PieceTable]]:
    """By name, each tensor of the plan and where the table of its pieces lies; a FileError if they cannot be there."""
    at, found = 0 if raw is None else raw.offset, {}
    for d in plan["datasets"]:
        found[d["name"]] = d, PieceTable(path, at, d["pieces"], d["runs"], tuple(d["shape"]))
        at += d["pieces"] * row_dtype(len(d["shape"])).itemsize
    if at != (0 if raw is None else raw.offset + raw.nbytes()):  # no place of an empty one
        raise FileError("HD404", f"{path}: its tables of pieces are damaged")
    return found


def _stored(
    path: str, file: Any, names: Iterable[str], planned: Mapping[str, tuple[Mapping[str, Any], PieceTable]], end: int
) -> tuple[dict[str, Stored], dict[str, str], dict[str, str]]:
    """The datasets of these names, each of which is opened once; why some are not read; and what is no tensor.

    Args:
        planned: by name, the tensor's entry in the plan, which it must fit, and the table of its pieces.
        end: the length of the file.
    """
    from h5py import h5d

    found, external, others = {}, {}, {}
    for name in names:
        try:
            dataset = h5d.open(file.id, name.encode())
            made = dataset.get_create_plist()
            if (why := _external(made)) is not None:  # before its shape, which may be that of other files
                external[name] = why
                continue
            shape, dtype = dataset.shape, _dtype_of(dataset)
            if (lacking := _lacking(dataset, made)) is not None:
                raise LookupError(lacking)
        except Exception as error:  # each kind of damage has its own
            others[name] = f"{UNREADABLE}: {reason(error)}"
            if name in planned:
                raise FileError("HD404", f"{path}: {name}: {others[name]}: {_CHANGED}") from error
            continue
        table = None
        chunks = made.get_chunk() if made.get_layout() == h5d.CHUNKED else None
        if name in planned:
            entry, table = planned[name]
            now = None if shape is None else list(shape)
            named = getattr(torch, entry["dtype"].removeprefix("torch."), None)
            # Of a dtype of another torch, the integers are read.
            alike = named not in DTYPES or (dtype == named and dataset.get_type() == _type_of(named))
            if not alike or chunks is not None or now != entry["shape"]:
                what = f"is {_type_text(dataset)}, shape {now}, chunks {chunks}"
                was = f"{entry['dtype']} of shape {entry['shape']} was written"
                raise FileError("HD404", f"{path}: {name} {what}, where {was}: {_CHANGED}")
        if dtype not in DTYPES or shape is None:
            others[name] = _type_text(dataset) + ("" if shape is None else LACKING)
            continue
        where, start = None, dataset.get_offset()
        if start is not None:
            size = dataset.get_storage_size()
            if size != prod(shape) * dataset.get_type().get_size():
                what = f"is damaged: it has {size:,} bytes, which are not those of shape {list(shape)}"
                raise FileError("HD404", f"{path}: {name}: {what}")
            if start + size > end:
                raise FileError("HD404", f"{path}: truncated: {name} ends after the end of the file")
            if dataset.get_type() == _type_of(dtype):
                where = Raw(path, start, shape, dtype)
        found[name] = Stored(name, shape, dtype, where, None, table, chunks[0] if chunks else 1)
    return found, external, others


@cache
def _type_of(dtype: torch.dtype) -> Any:
    """HDF5's type of a tensor's elements as hpcdist stores them."""
    from h5py import h5t

    return h5t.py_create(stored_dtype(dtype), logical=True)


def _dtype_of(dataset: Any) -> torch.dtype | None:
    """The dtype of a dataset, HDF5's object, as a tensor; None if torch has no such dtype."""
    import h5py
    from h5py import h5a

    kept = None
    if h5a.exists(dataset, DTYPE_ATTRIBUTE.encode()):
        held = h5py.Dataset(dataset).attrs
        kept = held[DTYPE_ATTRIBUTE] if held.get_id(DTYPE_ATTRIBUTE).shape == () else None
    kept = kept.decode() if isinstance(kept, bytes) else kept
    named: torch.dtype | None = getattr(torch, kept, None) if isinstance(kept, str) else None
    try:
        stored = dataset.dtype
    except (TypeError, ValueError, LookupError):  # h5py has all three for types that numpy does not have
        return None
    if named in DTYPES and named not in NUMPY and stored == stored_dtype(named):
        return named
    return tensor_dtype(stored)


def tensor_dtype(stored: np.dtype[Any]) -> torch.dtype | None:
    """The dtype of a tensor of these elements, in native byte order; None if torch has none."""
    try:  # if each element is an array, numpy would make more dims of it
        empty = np.empty(0, stored.newbyteorder("="))
        return torch.from_numpy(empty).dtype if stored.subdtype is None else None
    except TypeError:
        return None


def _type_text(dataset: Any) -> str:
    """Describe a dataset that no tensor can hold."""
    if dataset.shape is None:
        return "without a value"
    try:
        return type_text(dataset.dtype)
    except (TypeError, ValueError, LookupError):
        return "a type that numpy does not have"


def type_text(stored: np.dtype[Any]) -> str:
    """Describe elements that no tensor can hold."""
    return "text, references or objects" if stored.hasobject else f"dtype {stored}"


def _external(made: Any) -> str | None:
    """Why the data of a dataset, made with these properties, are not read; None if they are in its own file."""
    from h5py import h5d

    if made.get_layout() == h5d.VIRTUAL:  # its shape may be that of other files
        return "is a virtual dataset: it is made of other datasets, which are read only where they are"
    if made.get_external_count() > 0:
        return f"has its data in another file ({_text(made.get_external(0)[0])}), which is not read"
    return None


def _lacking(dataset: Any, made: Any) -> str | None:
    """Which filter of a dataset, made with these properties, this HDF5 does not have; None if its data can be read."""
    from h5py import h5z

    for i in range(made.get_nfilters()):
        code, _, _, name = made.get_filter(i)
        if (
            not h5z.filter_avail(code)
            and dataset.get_num_chunks()
            and not dataset.get_chunk_info(0).filter_mask >> i & 1
        ):
            return f"it is packed by filter {code} ({_text(name)}), which this HDF5 library does not have"
    return None


def _is_hard(file: Any, name: str) -> bool:
    """Whether a name is there, by hard links only, which stay in the file."""
    import h5py

    above = accumulate(name.split("/"), "{}/{}".format)
    try:
        return all(isinstance(file.get(at, getlink=True), h5py.HardLink) for at in above)
    except TypeError:  # a user-defined kind
        return False


def _dataset_names(path: str, file: Any) -> tuple[list[str], dict[str, str]]:
    """The names of all datasets, sorted, by hard links only; and of what is not read, the reason."""
    from h5py import h5, h5g, h5o

    names: list[str] = []
    others: dict[str, str] = {}
    groups = [(b"", file["/"].id)]
    seen = {h5o.get_info(groups[0][1]).addr}  # a group may hold itself
    for prefix, group in groups:  # HDF5's own visit resolves each path from the root
        links: list[bytes] = []
        try:
            # For any other order HDF5 makes a list, and 1.10 ends the process where a flipped bit keeps it from filling
            # it.
            group.links.iterate(links.append, order=h5.ITER_NATIVE)
        except Exception as error:
            if not prefix:
                raise
            others[_text(prefix[:-1])] = f"{UNREADABLE}: {reason(error)}"
        for name in sorted(links):
            text = _text(prefix + name)
            try:
                if (why := _not_followed(group, name)) is not None:
                    others[text] = why
                    continue
                check_name(text)
                info = h5o.get_info(group, name)
                if info.type == h5o.TYPE_GROUP and info.addr not in seen:
                    seen.add(info.addr)
                    groups.append((prefix + name + b"/", h5g.open(group, name)))
                elif info.type == h5o.TYPE_DATASET:
                    names.append(text)
            except Exception as error:  # each kind of damage has its own
                others[text] = f"{UNREADABLE}: {reason(error)}"
    return sorted(names), others


def check_name(name: str) -> None:
    """Raise a ValueError for the name of a dataset or group that a file cannot have: before it is written, and as it
    is read."""
    check_unicode(name)
    parts = name.split("/")
    if not all(parts) or "." in parts or ".." in parts or "\0" in name:
        raise refusal(ValueError, "HD418", f"{name!r} cannot be a name in an HDF5 file")
    if len(parts) > _DEEPEST:  # HDF5 holds the whole path of each that is open
        raise refusal(ValueError, "HD418", f"{name[:40]!r}... has more than {_DEEPEST:,} groups within each other")


def _not_followed(group: Any, name: bytes) -> str | None:
    """Why a link is not followed; None of a hard one."""
    from h5py import h5l

    kind = group.links.get_info(name).type
    if kind == h5l.TYPE_HARD:
        return None
    where = f" into another file ({_text(group.links.get_val(name)[0])})" if kind == h5l.TYPE_EXTERNAL else ""
    return f"a link{where}, which is not followed"


def _text(name: bytes) -> str:
    return name.decode(errors="surrogateescape")


@contextmanager
def rows_of_lengths(path: str, name: str) -> Iterator[tuple[int, torch.dtype, Callable[[int, int], list[Any]]]]:
    """A dataset of HDF5's variable length: its rows, their dtype, and what reads some of them, each a numpy array.

    Raises:
        FileError: it is not such a dataset, or not one of numbers.
    """
    import h5py

    with file_errors(f"{path}: {name}"), opened(path) as file:
        dataset = file[name] if _is_hard(file, name) else None
        base = None if dataset is None else h5py.check_vlen_dtype(dataset.dtype)
        dtype = None if base is None else tensor_dtype(np.dtype(base))
        if dataset is None or dtype is None or len(dataset.shape) != 1:
            raise FileError("HD408", f"{path}: holds no tensor {name!r}, nor numbers of variable length")
        if (why := _external(dataset.id.get_create_plist())) is not None:
            raise FileError("HD511", f"{path}: {name} {why}")
        yield (
            len(dataset),
            dtype,
            lambda start, stop: [np.asarray(row, stored_dtype(dtype)) for row in dataset[start:stop]],
        )


def attributes(path: str, name: str) -> dict[str, Any]:
    """The attributes of a tensor or a group of a file; of the file itself for "". Text comes as text."""
    import h5py

    with file_errors(path), opened(path) as file:
        if name and not _is_hard(file, name):
            raise FileError("HD408", f"{path}: holds no {name!r}")
        held, found = file[name or "/"].attrs, {}
        for key, value in held.items():
            kind = h5py.check_string_dtype(held.get_id(key).dtype)
            if kind is not None and kind.encoding == "utf-8" and kind.length is not None and np.size(value):
                value = np.char.decode(value, "utf-8", "surrogateescape").astype(object)[()]
            found[key] = value
    found.pop(DTYPE_ATTRIBUTE, None)
    return found


def _fixed_length(value: Any) -> Any:
    """Text as strings of a fixed length; other values as they are. HDF5 keeps strings of any length in its global heap,
    which has no checksums."""
    import h5py

    held = np.array(value, object)
    encoded = [text.encode() if isinstance(text, str) else text for text in held.flat]
    if not encoded or not all(isinstance(text, bytes) for text in encoded):
        return value
    if any(b"\0" in text for text in encoded):
        raise refusal(ValueError, "HD418", "an attribute's text cannot hold NUL")
    encoding = "utf-8" if any(isinstance(text, str) for text in held.flat) else "ascii"
    return np.array(encoded, h5py.string_dtype(encoding, max(1, *map(len, encoded)))).reshape(held.shape)
