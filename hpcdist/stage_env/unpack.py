"""Unpack a tar as it arrives: nothing outside of the folder is touched, and what was unpacked before stays.

A journal says how far it is, so that another process can go on in the middle of a file. A manifest has size, time and
checksum of each file as it was written.
"""

from __future__ import annotations

import json
import os
import stat
import tarfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Protocol

import xxhash

from hpcdist.errors import FileError, reason
from hpcdist.formats.paths import shown
from hpcdist.stage_env.environment import Relocation
from hpcdist.stage_env.trees import compiled

__all__ = ["Journal", "Unpacker", "changed"]

_CHUNK = 2**20  # bytes of a large file that are written at once
_MANIFEST, _JOURNAL = "manifest", "journal"


class Stream(Protocol):
    """The bytes of the archive as they arrive: read() returns fewer than asked for at its end alone.

    tell() is the position in the archive, and seek() goes forward only.
    """

    def read(self, size: int, /) -> bytes: ...
    def tell(self) -> int: ...
    def seek(self, offset: int, /) -> object: ...


@dataclass
class Journal:
    """How far the unpacking is.

    Attributes:
        offset: the next byte of the archive that is needed.
        manifest: size of the manifest, in bytes.
        name, mode, mtime, size: the file that is being written; "" for no file.
        left: how many bytes of it are missing.
    """

    offset: int = 0
    manifest: int = 0
    name: str = ""
    mode: int = 0
    mtime: int = 0
    size: int = 0
    left: int = 0

    @staticmethod
    def read(folder: Path) -> Journal:
        """The journal in a folder; a new one if there is no complete one."""
        try:
            return Journal(**json.loads((folder / _JOURNAL).read_text()))
        except (OSError, ValueError, TypeError):
            return Journal()

    def write(self, folder: Path) -> None:
        part = folder / f"{_JOURNAL}.part"
        part.write_text(json.dumps(asdict(self)))
        os.replace(part, folder / _JOURNAL)


class Unpacker:
    """Unpacks an archive into `root`; `notes` is the folder for the journal and the manifest.

    Args:
        relocation: corrects files as they are written.
        step: bytes of the archive after which the journal is written.
    """

    def __init__(self, root: Path, notes: Path, relocation: Relocation, step: int) -> None:
        self._root, self._notes, self._relocation, self._step = root, notes, relocation, step
        self.journal = Journal.read(notes)
        self._noted = self.journal.offset
        self._real = {""}  # folders of which it is known that they are none but ours
        self._manifest: IO[bytes] = open(notes / _MANIFEST, "ab")  # noqa: SIM115
        self._manifest.truncate(self.journal.manifest)

    def run(self, stream: Stream) -> None:
        """Unpack `stream`, which begins at journal.offset, to its end.

        Raises:
            FileError: something cannot be written, or must not be unpacked.
        """
        try:
            if self.journal.name:
                self._go_on(stream)
            # Not mode "r|", which copies all that it has read ahead for each header.
            with tarfile.TarFile(fileobj=stream) as tar:  # type: ignore[arg-type]
                while (member := tar.next()) is not None:
                    self._take(stream, member)
                    tar.members.clear()  # type: ignore[attr-defined]  # else all are kept in memory
            while stream.read(_CHUNK):  # the end of a tar has any length
                pass
            self._note()
        except tarfile.TarError as error:
            raise FileError("HD404", f"the archive is damaged: {reason(error)}") from error
        except OSError as error:
            raise FileError("HD410", f"{error.filename or self._root}: {reason(error)}") from error
        finally:
            self._manifest.close()

    def _note(self) -> None:
        self._manifest.flush()
        self.journal.manifest = self._manifest.tell()
        self.journal.write(self._notes)
        self._noted = self.journal.offset

    def _take(self, stream: Stream, member: tarfile.TarInfo) -> None:
        """Write a member of the archive; `stream` is where its data begin."""
        name = _checked(member.name)
        path = self._inside(name)
        end = member.offset_data
        if member.isdir():
            self._folder(name)
            os.chmod(path, member.mode & 0o777 | 0o700)  # a folder that its owner cannot change could not be removed
            os.utime(path, (member.mtime, member.mtime))
        elif member.issym():
            _remove(path)
            os.symlink(member.linkname, path)
            self._list(name, None, None, member.linkname)
        elif member.islnk():
            other = self._inside(_checked(member.linkname))
            if not stat.S_ISREG(os.lstat(other).st_mode):
                raise FileError("HD511", f"the archive holds {shown(name)}, a hard link to what is no file")
            _remove(path)
            os.link(other, path, follow_symlinks=False)
            found = os.lstat(path)
            self._list(name, found.st_size, int(found.st_mtime), "")
        elif member.isreg():
            self._file(name, stream, member)
            end += member.size + -member.size % tarfile.BLOCKSIZE
        else:
            raise FileError(
                "HD511", f"the archive holds {shown(name)}, which is neither a file nor a folder nor a link"
            )
        self.journal.offset = end
        if end - self._noted >= self._step:
            self._note()

    def _inside(self, name: str) -> Path:
        """The path of a name, whose folders are made, and are no links to elsewhere."""
        self._folder(name.rpartition("/")[0])
        return self._root / name

    def _folder(self, name: str) -> None:
        if name in self._real:
            return
        self._folder(name.rpartition("/")[0])
        path = self._root / name
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise FileError(
                    "HD511", f"the archive holds {shown(name)} as a folder, and as something else"
                ) from None
        self._real.add(name)

    def _file(self, name: str, stream: Stream, member: tarfile.TarInfo) -> None:
        """Write a file; one that may have to be corrected is held in memory."""
        path = self._root / name
        _remove(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            mtime = int(member.mtime)
            if self._relocation.concerns(name, member.size):
                text = stream.read(member.size)
                new = self._relocation.corrected(name, text)
                if new is not text:
                    mtime = int(os.fstat(fd).st_mtime)  # else what was compiled of it would count as up to date
                _write(fd, memoryview(new))
                self._end(fd, name, member.mode, mtime, xxhash.xxh3_64(new))
            else:
                size = member.size
                self.journal = Journal(member.offset_data, 0, name, member.mode, mtime, size, size)
                self._copy(fd, stream, xxhash.xxh3_64())
        finally:
            os.close(fd)

    def _go_on(self, stream: Stream) -> None:
        """Complete the file in the middle of which the unpacking stopped."""
        journal = self.journal
        path = self._inside(_checked(journal.name))
        if stat.S_ISREG(os.lstat(path).st_mode):  # it may have been complete, and read-only
            os.chmod(path, 0o600)
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            digest, done, written = xxhash.xxh3_64(), 0, journal.size - journal.left
            while done < written:
                got = os.pread(fd, min(_CHUNK, written - done), done)
                if not got:
                    raise FileError("HD407", f"{path}: was changed since it was unpacked in part")
                digest.update(got)
                done += len(got)
            os.lseek(fd, done, os.SEEK_SET)
            self._copy(fd, stream, digest)
        finally:
            os.close(fd)
        journal.offset += len(stream.read(-journal.size % tarfile.BLOCKSIZE))

    def _copy(self, fd: int, stream: Stream, digest: xxhash.xxh3_64) -> None:
        """Write what is missing of the journal's file."""
        journal = self.journal
        while journal.left:
            data = stream.read(min(_CHUNK, journal.left))
            if not data:
                raise FileError("HD404", "the archive ends in the middle of a file")
            _write(fd, memoryview(data))
            digest.update(data)
            journal.left -= len(data)
            journal.offset += len(data)
            if journal.offset - self._noted >= self._step:
                self._note()
        self._end(fd, journal.name, journal.mode, journal.mtime, digest)
        journal.name = ""

    def _end(self, fd: int, name: str, mode: int, mtime: int, digest: xxhash.xxh3_64) -> None:
        os.fchmod(fd, mode & 0o777)
        os.utime(fd, (mtime, mtime))
        self._list(name, os.fstat(fd).st_size, mtime, digest.hexdigest())

    def _list(self, name: str, size: int | None, mtime: int | None, content: str) -> None:
        """Add an entry to the manifest; `content` is the checksum of a file, "" if another name of it has that, or what
        a link holds."""
        if not compiled(name):
            self._manifest.write(json.dumps([name, size, mtime, content]).encode() + b"\n")


def _checked(name: str) -> str:
    """The name of a member, if it stays within the folder."""
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise FileError("HD511", f"the archive holds {shown(name)}, which would lie elsewhere: it is not unpacked")
    return name


def _remove(path: Path) -> None:
    """Remove what an earlier try has left."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def changed(root: Path, notes: Path, read: bool, moved: Callable[[], object]) -> str | None:
    """Return the name of a file that is no longer as it was unpacked; None if all are, by their sizes and times.

    Args:
        read: also read all of them, from the disk if it has them already, and compare the checksums.
        moved: called after each file.
    """
    try:
        lines = (notes / _MANIFEST).read_text().splitlines()
    except OSError:
        return _MANIFEST
    for name, size, mtime, content in map(json.loads, lines):
        path = root / name
        try:
            if size is None:
                same = os.readlink(path) == content
            else:
                found = os.lstat(path)
                same = stat.S_ISREG(found.st_mode) and (found.st_size, int(found.st_mtime)) == (size, mtime)
                same = same and not (read and content and _digest(path) != content)
        except OSError:
            same = False
        if not same:
            return str(name)
        moved()
    return None


def _digest(path: Path) -> str:
    made = xxhash.xxh3_64()
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while data := file.read(_CHUNK):
            made.update(data)
    return made.hexdigest()
