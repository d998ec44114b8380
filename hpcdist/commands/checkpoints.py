"""The files of torch.save: which tensors a file holds, and where their bytes are.

torch itself reads the description of a zip archive, from a copy of the archive without the data. Each tensor is then
read from its member of the archive a box at a time: stored or deflated, of either byte order, of any strides, with the
lazy conjugate and negative bits. What cannot be described without data is read whole: torch's older format, and files
that hold a quantized or nested tensor.
"""

from __future__ import annotations

import io
import os
import re
import warnings
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pickle import UnpicklingError
from typing import Any, cast

import torch
from torch import Tensor

from hpcdist import memory
from hpcdist.errors import InputError, listed
from hpcdist.files.raw import Fetch, Raw, read_at, read_from, read_strided
from hpcdist.files.regular import open_regular
from hpcdist.layout import Box
from hpcdist.staging.reader import Reader
from hpcdist.tensors.storage import bits

__all__ = ["load", "open_array", "open_part", "pick"]

_MOST = 2**28  # bytes of a description: more than any real one has, and what a forged one cannot exceed
_MOST_NAMES = 2**18
_SMALL, _MOST_KEPT = 2**12, 256  # bytes of a description that is kept, and how many are
_LOCAL = 30  # bytes of a member's own header, before its name and its extra field
_UNSWAPPED = {torch.uint16, torch.uint32, torch.uint64, torch.complex32}  # torch.load leaves these as they are


@contextmanager
def open_array(path: str, name: str | None) -> Iterator[Reader]:
    """Open a tensor of a file: by its name, the only one, or one that was saved alone.

    Raises:
        InputError: the file, or the tensor, is not of a kind that can be read.
    """
    with open(path, "rb") as file:
        zipped = file.read(2) == b"PK"
    if zipped:
        with zipfile.ZipFile(path) as archive:
            described = _Description(path, archive)
            held = described.held
            if held is not None:
                with described.open_tensor(*_pick_tensor(path, held, name)) as array:
                    yield array
                return
    nbytes, free = os.path.getsize(path), memory.available()
    if nbytes > free:
        raise InputError(
            "HD504", f"{path}: can only be read whole: {nbytes:,} bytes of memory needed, {free:,} available"
        )
    key, x = load(path, name)

    def read(box: Box, out: Tensor, window: int) -> None:
        bits(out).copy_(bits(x[box.slices()]))

    yield Reader(key, tuple(x.shape), x.dtype, read)


@contextmanager
def open_part(path: str, fd: int, start: int, nbytes: int) -> Iterator[Reader]:
    """Open the tensor in an archive of torch.save that is a part of an open file, as torch's DCP writes them."""
    with zipfile.ZipFile(io.BufferedReader(_Part(fd, start, nbytes))) as archive:
        described = _Description(path, archive, fd, start)
        if not isinstance(described.held, Tensor):
            raise InputError(
                "HD402", f"{path}: cannot be read: its part at {start:,} is not a tensor that can be moved"
            )
        with described.open_tensor("", _dense(path, described.held.detach())) as array:
            yield array


class _Part(io.RawIOBase):
    """A part of an open file, as a file to read."""

    def __init__(self, fd: int, start: int, nbytes: int) -> None:
        self._fd, self._start, self._end, self._at = fd, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._end)[whence]
        if self._at < 0:
            raise OSError("before the beginning")
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self._fd, [memoryview(buffer)[: max(0, self._end - self._at)]], self._start + self._at)
        self._at += count
        return count


def load(path: str, name: str | None, mmap: bool = False) -> tuple[str, Tensor]:
    """Read a tensor of a file with torch.load, with the lazy bits resolved, on the host; and its name."""
    key, x = _pick_tensor(path, _loaded(path, path, map_location="cpu", mmap=mmap), name)
    return key, x.resolve_conj().resolve_neg()


def _loaded(path: str, source: str | io.BytesIO, **how: Any) -> Any:
    """Load a file with torch, without running code that is in it; an InputError if there is some, or it is damaged."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle that torch did not write
            return torch.load(source, weights_only=True, **how)
    except UnpicklingError as error:  # torch advises to run the code
        found = re.search(r"GLOBAL (\S+) (?:was not|whose)", str(error))
        what = f"it holds Python objects ({found[1]}), which are not loaded" if found else "its description is damaged"
        raise InputError("HD402", f"{path}: cannot be read: {what}") from error


def pick(path: str, name: str | None, names: Sequence[str]) -> str:
    """Choose the array that is named, or the only one.

    Raises:
        InputError: there is no such array, or there are several, or none.
    """
    if name is not None:
        if name not in names:
            raise InputError("HD408", f"{path}: holds no array {name!r}; it has: {listed(names)}")
        return name
    if not names:
        raise InputError("HD502", f"{path}: holds no array")
    if len(names) > 1:
        every = "; hpcdist.gather --tensors copies all" if path.endswith((".safetensors", ".h5")) else ""
        one = f"name one as {path}:NAME; it has: {listed(names)}{every}"
        raise InputError("HD502", f"{path}: holds {len(names)} arrays; {one}")
    return names[0]


def _pick_tensor(path: str, held: object, name: str | None) -> tuple[str, Tensor]:
    """Choose the tensor that `name` refers to, of what a file holds; and its name."""
    if isinstance(held, Tensor):
        if name is not None:
            raise InputError("HD408", f"{path}: holds a tensor without a name, and no array {name!r}")
        return "", _dense(path, held.detach())
    if not isinstance(held, dict):
        raise InputError("HD502", f"{path}: holds {type(held).__name__}, expected a tensor or a dict of tensors")
    found = _tensors(path, held)
    key = pick(path, name, list(found))
    return key, _dense(path, found[key].detach())


def _tensors(path: str, held: dict[Any, Any]) -> dict[str, Tensor]:
    """The tensors of nested dicts by their path: ``{"model": {"w": x}}`` -> ``{"model/w": x}``."""
    found: dict[str, Tensor] = {}
    seen = set()
    left: deque[tuple[str, dict[Any, Any]]] = deque([("", held)])
    while left:
        if len(found) + len(left) > _MOST_NAMES:  # a forged one may hold the next dict twice, and so on
            raise InputError("HD402", f"{path}: cannot be read: it holds more than {_MOST_NAMES:,} dicts and tensors")
        prefix, part = left.popleft()
        seen.add(id(part))
        for key, value in part.items():
            name = f"{prefix}{key}"
            if isinstance(value, Tensor):
                if name in found:
                    raise InputError("HD402", f"{path}: cannot be read: two of its tensors have the name {name!r}")
                found[name] = value
            elif isinstance(value, dict) and id(value) not in seen:  # a forged one may hold itself
                left.append((f"{name}/", value))
    return found


def _dense(path: str, x: Tensor) -> Tensor:
    kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
    if kind != "strided":
        raise InputError("HD503", f"{path}: holds a {kind} tensor, expected a dense one")
    return x


class _Description:
    """What an archive of torch.save holds: a file, or from `base` on a part of the file that is open as `fd`.

    Attributes:
        held: the object that was saved, its tensors on the device "meta"; None if it cannot be described without data.
    """

    def __init__(self, path: str, archive: zipfile.ZipFile, fd: int | None = None, base: int = 0) -> None:
        self._path, self._archive = path, archive
        self._fd, self._base = fd, base
        names = archive.namelist()
        roots = [name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(roots) != 1 or len(set(names)) < len(names):
            raise InputError("HD402", f"{path}: cannot be read: not an archive of torch.save")
        self._root = roots[0]
        order = archive.read(f"{self._root}byteorder") if f"{self._root}byteorder" in names else b"little"
        if order not in (b"little", b"big"):
            raise InputError("HD402", f"{path}: cannot be read: its byte order is {order[:20]!r}")
        self._swapped = order == b"big"
        self.held: object | None
        members = self._without_data()
        if members in _described:
            self.held, self._names = _described[members]
            return
        copy, self._names = _copied(members)
        try:
            self.held = _loaded(path, copy, map_location="meta")
        except NotImplementedError:  # torch cannot make one on "meta"
            self.held = None
        if sum(len(content) for _, content in members) < _SMALL and len(_described) < _MOST_KEPT:
            _described[members] = self.held, self._names

    def _without_data(self) -> tuple[tuple[str, bytes], ...]:
        """The members of the archive, without data, byte order, and what differs between archives of the same."""
        data, leave = f"{self._root}data/", ("byteorder", ".format_version", ".data/serialization_id")
        own = [f"{self._root}{name}" for name in leave]
        if sum(i.file_size for i in self._archive.infolist() if not i.filename.startswith(data)) > _MOST:
            raise InputError("HD402", f"{self._path}: cannot be read: its description is longer than {_MOST:,} bytes")
        return tuple(
            (name, b"" if name.startswith(data) else self._archive.read(name))
            for name in self._archive.namelist()
            if name not in own
        )

    @contextmanager
    def open_tensor(self, key: str, x: Tensor) -> Iterator[Reader]:
        """Open a tensor of the description."""
        info, start = self._member(x)
        size = x.itemsize
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
        if (x.storage_offset() + last + 1) * size > info.file_size:
            raise InputError("HD404", f"{self._path}: cannot be read: a tensor is larger than its data")
        if self._swapped and x.dtype in _UNSWAPPED:
            raise InputError(
                "HD402", f"{self._path}: cannot be read: big-endian {x.dtype}, which torch itself misreads"
            )
        where = Raw(self._path, (start or 0) + int(x.storage_offset()) * size, tuple(x.shape), x.dtype, self._swapped)
        if start is None:
            with self._archive.open(info) as file:
                yield Reader(key, where.shape, where.dtype, _reads(x, where, partial(read_from, file)))
        else:
            with open_regular(self._path) if self._fd is None else nullcontext(self._fd) as fd:
                yield Reader(key, where.shape, where.dtype, _reads(x, where, partial(read_at, fd)))

    def _member(self, x: Tensor) -> tuple[zipfile.ZipInfo, int | None]:
        """The member of the archive that holds a storage, and its position in the file if it is not compressed."""
        offset = getattr(x.untyped_storage(), "_checkpoint_offset", None)
        if offset is None:
            raise InputError("HD503", f"{self._path}: holds a tensor without data")
        info = self._archive.getinfo(self._names[offset])
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            return info, None
        begin = self._base + info.header_offset
        with open_regular(self._path) if self._fd is None else nullcontext(self._fd) as fd:
            head = os.pread(fd, _LOCAL, begin)
            size = os.fstat(fd).st_size
        if len(head) < _LOCAL or head[:4] != b"PK\3\4":
            raise InputError("HD402", f"{self._path}: cannot be read: {info.filename} is not where the archive says")
        start = begin + _LOCAL + int.from_bytes(head[26:28], "little")
        start += int.from_bytes(head[28:30], "little")
        if start + info.file_size > size:
            raise InputError("HD404", f"{self._path}: cannot be read: it ends in the middle of its data")
        return info, start


_described: dict[tuple[tuple[str, bytes], ...], tuple[object | None, dict[int, str]]] = {}
"""By its members without data, what an archive holds: thousands of a DCP folder differ in their data only."""


def _copied(members: Sequence[tuple[str, bytes]]) -> tuple[io.BytesIO, dict[int, str]]:
    """An archive of these members, and which of them begins at which offset."""
    copy = io.BytesIO()
    with zipfile.ZipFile(copy, "w") as bare:
        for name, content in members:
            bare.writestr(name, content)
        starts = {info.header_offset + len(info.FileHeader()): info.filename for info in bare.infolist()}
    copy.seek(0)
    return copy, starts


def _reads(x: Tensor, where: Raw, fetch: Fetch) -> Callable[[Box, Tensor, int], None]:
    """A function that reads boxes of a tensor: by its strides, and with the bits that make it conjugate or negative."""
    strides = None if x.is_contiguous() else x.stride()
    conj, neg = x.is_conj(), x.is_neg()

    def read(box: Box, out: Tensor, window: int) -> None:
        if strides is None:
            where.read(fetch, box, out, window)
        else:
            read_strided(where, strides, fetch, box, out, window)
        if conj:
            torch.view_as_real(out)[..., 1].neg_()
        if neg:
            out.neg_()

    return cast(Callable[[Box, Tensor, int], None], read)
