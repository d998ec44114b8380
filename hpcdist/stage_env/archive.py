"""The archive that is sent: an uncompressed tar, packed once and kept beside the environment, or one file in such form.

``NAME.stage_env.json`` beside ``NAME.stage_env.tar`` says what was packed, when that was changed last, and the checksum
of each window of the archive.
"""

from __future__ import annotations

import json
import os
import stat
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from hpcdist.errors import FileError, InputError, listed, reason
from hpcdist.formats.atomic import lock, write_text
from hpcdist.formats.paths import check_regular, kind
from hpcdist.stage_env import environment, trees
from hpcdist.stage_env.environment import BASE, Environment
from hpcdist.stage_env.packer import WINDOW, Packed
from hpcdist.stage_env.trees import Tree

__all__ = ["Request", "Source", "prepare"]

_FORMAT = 2  # of the archive and its description: another one is packed again
_NAP = 0.5  # seconds between two looks whether another job has packed the archive
_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class Request:
    """What the user asks for: a folder or file, its archive ("" for the default), what is to come along, and whether
    an archive is taken as it is, without a look at what has changed."""

    source: str
    archive: str = ""
    with_base: bool = False
    also: tuple[str, ...] = ()
    scan: bool = True


@dataclass(frozen=True)
class Source:
    """What is sent.

    Attributes:
        path: the file that is read.
        size, written: size of that, in bytes, and when it was written, in seconds: not every client of a
            file system knows more.
        head, nbytes: bytes that are sent before it, and size of all that is sent, in bytes.
        window, sums: size of the parts of it, and the checksum of each, as far as they are known.
        digest: of its contents; of a file, of its name, size and time.
        state: digest of the names, sizes and times of what was packed.
        name: name of the environment, or file, in the copy.
        origin: its path.
        prefixes: old path -> name in the copy.
        base: prefix of the base interpreter if it is in the copy.
        also: paths of the other folders in the copy.
        outside: paths that the copy still leads to.
        packed: seconds that it took to pack the archive; None if it was there.
        files: number of files, links and folders.
    """

    path: str
    size: int
    written: int
    head: bytes
    nbytes: int
    window: int
    sums: tuple[str, ...]
    digest: str
    state: str
    name: str
    origin: str
    prefixes: tuple[tuple[str, str], ...]
    base: str
    also: tuple[str, ...]
    outside: tuple[str, ...]
    packed: float | None
    files: int


def prepare(
    request: Request,
    moved: Callable[[], object],
    note: Callable[[str], None],
    fits: Callable[[int], object] = lambda nbytes: None,
) -> Source:
    """Return what is to be sent for a request; packs it if there is no archive of its present state.

    Args:
        moved: called whenever a part of the work is done.
        note: prints what takes a while.
        fits: called before it is packed, with the bytes that a node needs; raises if one has not so much space.

    Raises:
        FileError, InputError: the source cannot be read, or the archive not written.
    """
    origin = os.path.abspath(request.source)
    try:
        mode = os.stat(origin).st_mode
    except OSError as error:
        raise FileError("HD402", f"{request.source}: {reason(error)}") from error
    if not stat.S_ISDIR(mode):
        if request.with_base or request.also:
            raise InputError("HD505", f"{request.source}: is a {kind(mode) or 'file'}, to which nothing can be added")
        return _single(origin)
    return _folder(origin, request, moved, note, fits)


def _single(origin: str) -> Source:
    """One file, such as a container image: it is sent as it is, in the form of a tar, which is not written."""
    found = check_regular(origin)
    info = tarfile.TarInfo(os.path.basename(origin))
    info.size, info.mtime, info.mode = found.st_size, int(found.st_mtime), stat.S_IMODE(found.st_mode)
    head = info.tobuf(tarfile.GNU_FORMAT, errors="surrogateescape")
    padding = -found.st_size % _BLOCK + 2 * _BLOCK
    key = repr((origin, found.st_size, found.st_mtime_ns)).encode(errors="surrogateescape")
    digest = xxhash.xxh3_128_hexdigest(key)
    nbytes = len(head) + found.st_size + padding
    return Source(
        path=origin,
        size=found.st_size,
        written=int(found.st_mtime),
        head=head,
        nbytes=nbytes,
        window=WINDOW,
        sums=(),
        digest=digest,
        state=digest,
        name=info.name,
        origin=origin,
        prefixes=(),
        base="",
        also=(),
        outside=(),
        packed=None,
        files=1,
    )


def _folder(
    origin: str,
    request: Request,
    moved: Callable[[], object],
    note: Callable[[str], None],
    fits: Callable[[int], object],
) -> Source:
    archive = Path(request.archive or f"{origin}.stage_env.tar")
    if not request.scan:
        known = _described(archive, None)
        if known is None:
            raise FileError(
                "HD401", f"{archive}: there is no archive, or it is damaged: without --no-scan it is packed"
            )
        _check_holds(archive, known, origin, request)
        return known
    here = environment.described(origin)
    all_ = _trees(origin, request, here)
    real = os.path.realpath(archive)
    if any(real.startswith(os.path.realpath(tree.root) + "/") for tree in all_):
        raise InputError("HD505", f"{archive}: the archive cannot lie in a folder that is packed")
    entries = trees.scan(all_)
    moved()
    state = trees.digest(entries)
    known = _described(archive, state)
    if known is not None:
        return known
    fits(trees.nbytes(entries))
    with _alone(archive, moved, note):
        known = _described(archive, state)  # another job has packed it meanwhile
        if known is not None:
            return known
        note(f"{origin}: packing {len(entries):,} files and folders into {archive}")
        packed = Packed(archive, all_, entries, here, moved)
        if trees.digest(trees.scan(all_)) != state:
            raise FileError("HD407", f"{origin}: was changed while it was packed: try again")
        return _describe(archive, packed, origin, request, here, state)


def _check_holds(archive: Path, known: Source, origin: str, request: Request) -> None:
    """Raise an InputError if an archive that is taken as it is does not hold what is asked for."""
    also = tuple(map(os.path.abspath, request.also))
    if os.path.realpath(known.origin) != os.path.realpath(origin):
        text = f"it holds {known.origin}, not {origin}"
    elif request.with_base and not known.base:
        text = "it holds no base interpreter"
    elif known.also[: len(also)] != also:  # the place in this list is part of the path in the copy
        text = f"--with {listed(also)}: it holds {listed(known.also)}"
    else:
        return
    raise InputError("HD505", f"{archive}: {text}: without --no-scan it is packed again")


def _trees(origin: str, request: Request, here: Environment) -> list[Tree]:
    name = os.path.basename(origin)
    found = [Tree(origin, name)]
    if request.with_base:
        found.append(environment.base_tree(request.source, here))
    for number, path in enumerate(request.also):
        root = os.path.abspath(path)
        if not os.path.isdir(root):
            raise InputError("HD409", f"{path}: no such folder")
        found.append(Tree(root, f"with-{number}-{os.path.basename(root)}"))
    if len({tree.at for tree in found}) < len(found) or (name.startswith(".") and name[1:] == "stage_env") or not name:
        raise InputError("HD505", f"{request.source}: its name, {name!r}, is one that the copy has for something else")
    return found


def _description(archive: Path) -> Path:
    return archive.with_name(archive.name.removesuffix(".tar") + ".json")


def _described(archive: Path, state: str | None) -> Source | None:
    """The archive of a state, or of any, as it is described; None if it is another one's, or there is none."""
    try:
        known = json.loads(_description(archive).read_text())
        found = os.stat(archive)
        if known.pop("format") != _FORMAT or state not in (None, known["state"]):
            return None
        if [found.st_size, int(found.st_mtime)] != [known["size"], known["written"]]:
            return None
        for name in ("sums", "also", "outside"):
            known[name] = tuple(known[name])
        known["prefixes"] = tuple((old, at) for old, at in known["prefixes"])
        return Source(**known, path=str(archive), head=b"", packed=None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, or not one of this version's
        return None


@contextmanager
def _alone(archive: Path, moved: Callable[[], object], note: Callable[[str], None]) -> Iterator[None]:
    """A context in which no other job packs the archive, where the file system has locks."""
    path = archive.with_name(f".{archive.name}.lock")
    try:
        fd = _opened(path)
    except OSError as error:
        text = f"{archive}: cannot be written: {reason(error)}: --archive names another place for it"
        raise FileError("HD402", text) from error
    try:
        if not lock(fd):
            note(f"{archive}: another job is packing it")
            while not lock(fd):
                moved()
                time.sleep(_NAP)
        yield
    finally:
        os.close(fd)


def _opened(path: Path) -> int:
    """Open a file to be locked; a colleague's may be readable only."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except PermissionError:
        if not path.exists():
            raise
        return os.open(path, os.O_RDONLY | flags)


def _describe(archive: Path, packed: Packed, origin: str, request: Request, here: Environment, state: str) -> Source:
    """Write the description of an archive, and return what is to be sent."""
    prefixes = [(old, packed.trees[0].at) for old in here.prefixes]
    if prefixes:
        prefixes += [(root, tree.at) for tree in packed.trees[1:] if tree.at != BASE for root in tree.roots]
    base = here.base if request.with_base else ""
    outside = list(packed.outside)
    if here.base and not base:
        within = (f"{here.base}/", f"{os.path.realpath(here.base)}/")
        outside = [here.base, *(path for path in outside if not path.startswith(within))]
    source = Source(
        path=str(archive),
        size=packed.nbytes,
        written=int(os.stat(archive).st_mtime),
        head=b"",
        nbytes=packed.nbytes,
        window=WINDOW,
        sums=packed.sums,
        digest=xxhash.xxh3_128_hexdigest(repr((packed.sums, prefixes, base)).encode(errors="surrogateescape")),
        state=state,
        name=packed.trees[0].at,
        origin=origin,
        prefixes=tuple(prefixes),
        base=base,
        also=tuple(tree.root for tree in packed.trees if tree.at not in (packed.trees[0].at, BASE)),
        outside=tuple(outside),
        packed=packed.seconds,
        files=packed.files,
    )
    known = {name: value for name, value in asdict(source).items() if name not in ("path", "head", "packed")}
    write_text(_description(archive), json.dumps({"format": _FORMAT, **known}))
    return source
