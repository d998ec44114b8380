"""Zip archives, which .npz and .pt files are: their members, held against the whole file."""

from __future__ import annotations

import struct
from zipfile import ZipFile, ZipInfo

from hpcdist.errors import FileError

_LOCAL = struct.Struct("<4s2xH18xHH")  # a member's own header: its signature, its flags, the lengths of name and extra
_DESCRIPTOR = 24  # bytes at most between a member's data and what follows


def members(path: str, archive: ZipFile) -> list[tuple[ZipInfo, int]]:
    """The members in the order of the file, each with the first byte of its data.

    Raises:
        FileError: the directory and the file differ. Nobody would miss a member that the directory has lost.
    """
    found, end, file = [], 0, archive.fp
    assert file is not None
    for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
        what, begin = f"{path}: {info.filename}: is damaged", info.header_offset
        file.seek(begin)
        local = file.read(_LOCAL.size)
        mark, flags, *lengths = _LOCAL.unpack(local) if len(local) == _LOCAL.size else (b"", 0, 0, 0)
        name = file.read(lengths[0]).decode("utf-8" if flags & 2**11 else "cp437", "replace")
        if mark != b"PK\3\4" or name != info.orig_filename or not 0 <= begin - end <= _DESCRIPTOR:
            raise FileError("HD404", f"{what}: the directory of the archive differs from the file")
        if not info.compress_type and info.file_size != info.compress_size:
            raise FileError("HD404", f"{what}: it has two sizes")
        start = begin + _LOCAL.size + sum(lengths)
        found.append((info, start))
        end = start + info.compress_size
    if end > archive.start_dir:
        raise FileError("HD404", f"{path}: cannot be read: it ends in the middle of its data")
    if (lost := archive.start_dir - end) > _DESCRIPTOR:
        raise FileError("HD404", f"{path}: is damaged: its directory does not list {lost:,} of its bytes")
    return found
