"""The files of torch.save. torch itself finds the tensors, without their data and without running code in the file.

Each dense tensor of a zip archive is then read from its place a box at a time. What cannot be found there is read whole
by torch: its older format, and archives that are compressed or of the other byte order.
"""

from __future__ import annotations

import io
import os
import re
import warnings
import zipfile
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from hpcdist.errors import FileError, reason
from hpcdist.formats.contents import Contents, Dataset, FileMap, Format, Slices, Stored, identity
from hpcdist.formats.paths import utf8_path
from hpcdist.formats.plain import Raw
from hpcdist.layout import Box
from hpcdist.process import host_memory
from hpcdist.tensors.storage import BARE, DTYPES

__all__ = ["PT", "load", "members_of", "raw_of"]

_MOST = 2**28  # bytes of a description: more than any real one has, and what a forged one cannot exceed
_MOST_NAMES = 2**18
_LOCAL = 30  # bytes of a member's own header, before its name and its extra field


class _Pt(Format):
    dtypes = frozenset(d for d in DTYPES if d not in BARE or not re.fullmatch(r"torch\.u?int\d", str(d)))

    def describe(self, path: str) -> Contents:
        at, members = identity(path), _members_of(path)
        held = None
        if members is not None:
            with suppress(NotImplementedError):  # of a tensor that cannot be on "meta"
                held = load(path, members.bare, map_location="meta")
        found = _tensors(path, _whole(path, members is not None) if held is None else held)
        tensors, others = {}, {}
        for key, x in found.items():
            kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
            if kind != "strided":
                others[key] = f"a {kind} tensor"
                continue
            raw = None if held is None or members is None else raw_of(path, x, members)
            tensors[key] = Stored(key, tuple(x.shape), x.dtype, raw)
        return Contents(path, ".pt file", tensors, {path: at}, left_out=others)

    def by_library(self, path: str, stored: Stored) -> Slices:
        mapped = _members_of(path) is not None

        def find() -> Tensor:
            return _tensors(path, _whole(path, mapped))[stored.name]

        x = None if mapped else find()

        def read(box: Box) -> Tensor:  # loaded for each box where it is mapped, since what was read stays in memory
            some = (find() if x is None else x)[box.slices()]
            return some.resolve_conj().resolve_neg().contiguous()

        return read

    def create(self, path: Path, datasets: Sequence[Dataset], attrs: Mapping[str, Any]) -> FileMap:
        from torch._subclasses.fake_tensor import FakeTensorMode

        (array,) = datasets
        os.truncate(path, array.nbytes())  # raises, if the file system has a limit on the size of files
        with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):  # all but the data
            torch.save(torch.empty(array.shape, dtype=array.dtype, device="cpu"), path)
        made = load(str(path), map_location="meta")
        return FileMap.of(path, [made.untyped_storage()._checkpoint_offset or 0])


PT = _Pt()


def load(path: str, file: IO[bytes] | None = None, **how: Any) -> Any:
    """Load a file with torch, without running code that is in it; a FileError if there is some, or it is damaged.

    Args:
        file: what is read in its place.
    """
    try:
        with warnings.catch_warnings(), utf8_path(path) as known:
            warnings.simplefilter("ignore")  # of a pickle that torch did not write
            if file is not None:
                file.seek(0)
            return torch.load(file or known, weights_only=True, **how)
    except (NotImplementedError, FileError):
        raise
    except UnpicklingError as error:  # torch advises to run the code
        found = re.search(r"GLOBAL (\S+) (?:was not|whose)", str(error))
        what = f"it holds Python objects ({found[1]}), which are not loaded" if found else "its description is damaged"
        raise FileError("HD402", f"{path}: cannot be read: {what}") from error
    except Exception as error:  # torch has many for a damaged file
        raise FileError("HD402", f"{path}: cannot be read: {reason(error)}") from error


def _whole(path: str, mapped: bool) -> Any:
    """What a file holds, its data mapped, or read if memory can hold them."""
    if not mapped:
        host_memory.require(path, max(os.path.getsize(path), _unpacked(path)))
    return load(path, map_location="cpu", mmap=mapped)


def _unpacked(path: str) -> int:
    if not zipfile.is_zipfile(path):
        return 0
    with zipfile.ZipFile(path) as archive:
        return sum(info.file_size for info in archive.infolist())


class Members(NamedTuple):
    """The members of an archive.

    Attributes:
        bare: the archive without data: where those of a storage lie, torch finds in what it is given, or calculates it
            from what torch.save writes, which is wrong if the archive was packed again.
        places: first byte of a member in `bare` -> first byte in the archive, bytes.
    """

    bare: IO[bytes]
    places: dict[int, tuple[int, int]]


def _members_of(path: str) -> Members | None:
    """As members_of(), of a file; None also of one that is no archive."""
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            return None
        return members_of(path, file, file.fileno(), 0, os.fstat(file.fileno()).st_size)


def members_of(path: str, file: IO[bytes], fd: int, base: int, nbytes: int) -> Members | None:
    """The members of an archive; None if their data are not there as they are in memory.

    Args:
        file: the archive, which has so many bytes, from `base` on, of the file that is open as `fd`.

    Raises:
        FileError: not an archive of torch.save.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
            described = [info for info in infos if "/data/" not in info.filename]
            if sum(info.file_size for info in described) > _MOST:
                raise FileError("HD402", f"{path}: cannot be read: its description is longer than {_MOST:,} bytes")
            if len({info.filename for info in infos}) < len(infos):
                raise FileError("HD402", f"{path}: cannot be read: not an archive of torch.save")
            texts = {info.filename: archive.read(info) for info in described}
    except FileError:
        raise
    except Exception as error:  # zipfile's own
        raise FileError("HD402", f"{path}: cannot be read: {reason(error)}") from error
    orders = [text for name, text in texts.items() if name.endswith("/byteorder")]
    if orders not in ([], [b"little"]) or any(info.compress_type or info.flag_bits & 1 for info in infos):
        return None
    found = Members(io.BytesIO(), {})
    with zipfile.ZipFile(found.bare, "w") as bare:
        for info in infos:
            head = os.pread(fd, _LOCAL, base + info.header_offset)
            start = info.header_offset + _LOCAL + sum(int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
            if start + info.file_size > nbytes:
                raise FileError("HD404", f"{path}: cannot be read: it ends in the middle of its data")
            if not info.filename.endswith("/.format_version"):  # with which torch calculates
                bare.writestr(info.filename, texts.get(info.filename, b""))
                made = bare.infolist()[-1]
                found.places[made.header_offset + len(made.FileHeader())] = start, info.file_size
    return found


def raw_of(path: str, x: Tensor, members: Members, base: int = 0) -> Raw | None:
    """Where the bytes of a tensor lie that was loaded on "meta" from an archive that is bare; None if only torch can
    read it, such as one with strides.

    Args:
        base: first byte of the archive in the file.
    """
    place = getattr(x.untyped_storage(), "_checkpoint_offset", None)
    if place is None or not x.is_contiguous() or x.is_conj() or x.is_neg():
        return None
    first, (start, size) = int(x.storage_offset()) * x.itemsize, members.places.get(place, (0, 0))
    if first + x.numel() * x.itemsize > size:
        raise FileError("HD404", f"{path}: cannot be read: a tensor is larger than its data")
    return Raw(path, base + start + first, tuple(x.shape), x.dtype)


def _tensors(path: str, held: object) -> dict[str, Tensor]:
    """The tensors of nested dicts by their path: ``{"model": {"w": x}}`` -> ``{"model/w": x}``; of one alone, by ""."""
    if isinstance(held, Tensor):
        return {"": held.detach()}
    if not isinstance(held, dict):
        raise FileError("HD408", f"{path}: holds {type(held).__name__}, expected a tensor or a dict of tensors")
    found: dict[str, Tensor] = {}
    seen = set()
    left: deque[tuple[str, dict[Any, Any]]] = deque([("", held)])
    while left:
        if len(found) + len(left) > _MOST_NAMES:  # a forged one may hold the next dict twice, and so on
            raise FileError("HD402", f"{path}: cannot be read: it holds more than {_MOST_NAMES:,} dicts and tensors")
        prefix, part = left.popleft()
        seen.add(id(part))
        for key, value in part.items():
            name = f"{prefix}{key}"
            if isinstance(value, Tensor):
                if name in found:
                    raise FileError("HD402", f"{path}: cannot be read: two of its tensors have the name {name!r}")
                found[name] = value.detach()
            elif isinstance(value, dict) and id(value) not in seen:  # a forged one may hold itself
                left.append((f"{name}/", value))
    return found
