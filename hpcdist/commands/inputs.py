"""The arrays that a command reads: find them, check that they fit together, and read any box of them, joined."""

from __future__ import annotations

import glob
import os
import re
import resource
import sysconfig
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hpcdist import host_memory, layout
from hpcdist.control import objects
from hpcdist.errors import FileError, InputError, listed, reason
from hpcdist.formats.contents import Contents, Slices, Stored, identity
from hpcdist.formats.paths import shown
from hpcdist.formats.plain import Raw
from hpcdist.formats.table import FORMATS, format_of
from hpcdist.layout import Box
from hpcdist.runtime.cli import progress
from hpcdist.runtime.world import World
from hpcdist.staging.pieces import shard_boxes
from hpcdist.staging.reader import OpenFiles, TensorReader
from hpcdist.staging.writer import WINDOW

__all__ = ["Inputs", "Source", "check_memory", "find", "open_array", "path_of", "slices_of"]

_NAMED = re.compile(r"\.(?:npz|pt|safetensors|h5)(?P<colon>:)(?=.)", re.DOTALL)
_MAX_OPEN = 32  # input files kept open
_SPARE = 16  # file descriptors left to everything else


@dataclass(frozen=True)
class Source:
    """One array in one file, as its header describes it.

    Attributes:
        spec: the user's name for it: the path, and after a colon the array's name where the file may hold several.
        shape, dtype: of the array.
        name: name of the array in the file, given or not.
        text: whether it is any file, as an array of its bytes.
    """

    spec: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = field(default="", compare=False)
    text: bool = False

    def extent(self, dim: int) -> int:
        """Its length along `dim`; a 0-d array counts as one row."""
        return self.shape[dim] if self.shape else 1


@dataclass(frozen=True)
class Inputs:
    """The arrays that the ranks read together, as one joined array.

    Attributes:
        sources: all arrays, in order; rank r reads ``sources[bounds[r]:bounds[r + 1]]``.
        shape, dtype: of all of them, joined.
        dim: dimension along which they are joined, >= 0.
        demo: whether they are the source files of Python's standard library, as uint8.
    """

    sources: list[Source]
    bounds: list[int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    demo: bool

    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def nbytes_by_rank(self) -> list[int]:
        """The bytes of the arrays that each rank reads."""
        row = self.nbytes() // self.shape[self.dim] if self.shape[self.dim] else 0
        rows = [source.extent(self.dim) for source in self.sources]
        return [row * sum(rows[start:end]) for start, end in pairwise(self.bounds)]

    @cached_property
    def boxes(self) -> list[Box]:
        """The box of each array in the whole."""
        return shard_boxes(self.shape, self.dim, [source.extent(self.dim) for source in self.sources])

    def shard(self, world: World) -> Tensor:
        """Read this rank's arrays and join them; no rows if it has none. Collective: errors are raised on all ranks."""
        start, end = self.bounds[world.rank : world.rank + 2]
        shape = list(self.shape)
        shape[self.dim] = sum(source.extent(self.dim) for source in self.sources[start:end])
        x = torch.empty(shape, dtype=self.dtype, device="cpu")

        def read() -> None:
            at = 0
            with Joined(self, WINDOW) as joined:
                for box in progress(self.boxes[start:end], world, "read"):
                    joined.read(box, x.narrow(self.dim, at, box.shape[self.dim]))
                    at += box.shape[self.dim]

        objects.all_gather(world.team.comm, "read", read)
        return x


class Joined:
    """The joined array of the inputs, of which any box can be read, for a ``with`` block, which closes the files."""

    def __init__(self, data: Inputs, window: int) -> None:
        self._data, self._window = data, window
        self._starts = list(accumulate((source.extent(data.dim) for source in data.sources), initial=0))
        self._open: dict[int, TensorReader] = {}
        free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
        self._most = max(1, min(_MAX_OPEN, (free - _SPARE) // 2))  # a library may open one, too

    def read(self, box: Box, out: Tensor) -> None:
        """Fill `out`, a CPU tensor of the box's shape.

        Raises:
            InputError: a file cannot be read, or its header has changed.
        """
        dim = self._data.dim
        row, end = box.offset[dim], box.offset[dim] + box.shape[dim]
        i = max(0, bisect_right(self._starts, row) - 1)
        while row < end:
            stop = min(end, self._starts[i + 1])
            if row < stop:
                source = self._data.sources[i]
                part = out.narrow(dim, row - box.offset[dim], stop - row)
                at = (*box.offset[:dim], row - self._starts[i], *box.offset[dim + 1 :])
                want = Box(at, tuple(part.shape)) if source.shape else Box((), ())
                try:
                    reader = self._reader(i, source)
                    reader.read(want, part if source.shape else part.view(()), self._window)
                except InputError:
                    raise
                except Exception as error:  # each library has its own errors for a damaged file
                    raise InputError("HD402", f"{source.spec}: cannot be read: {reason(error)}") from error
                row = stop
            i += 1

    def _reader(self, i: int, source: Source) -> TensorReader:
        if i not in self._open:
            if len(self._open) >= self._most:
                self._open.pop(next(iter(self._open))).files.close()
            # Every piece of which something is read is compared with its checksum, once.
            self._open[i] = open_array(source)
        return self._open[i]

    def __enter__(self) -> Joined:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._open.values():
            reader.files.close()


def open_array(source: Source) -> TensorReader:
    """Open an array; its files must be closed. An InputError if it is not as it was described."""
    contents, stored = _described(source.spec, source.text)
    if (stored.shape, stored.dtype) != (source.shape, source.dtype):
        raise InputError("HD407", f"{source.spec}: has changed while it was read")
    return TensorReader(OpenFiles(contents), stored, verify=True)


def slices_of(spec: str, text: bool = False) -> tuple[Stored, Slices]:
    """An array, and boxes of it as its format's own library reads them."""
    contents, stored = _described(spec, text)
    if text:
        return stored, lambda box: torch.frombuffer(bytearray(Path(spec).read_bytes()), dtype=torch.uint8)[box.slices()]
    return stored, format_of(contents.path).by_library(contents.path, stored)


def _described(spec: str, text: bool = False) -> tuple[Contents, Stored]:
    """What a file holds, and the array in it that is named, or the only one; every failure becomes an InputError."""
    path, name = _split(spec)
    if text:
        stored = Stored("", (os.path.getsize(path),), torch.uint8, Raw(path, 0, (os.path.getsize(path),), torch.uint8))
        return Contents(path, "file", {"": stored}, {path: identity(path)}), stored
    if Path(path).suffix not in FORMATS:
        raise InputError("HD501", f"{path}: unknown suffix {Path(path).suffix!r}; expected one of {', '.join(FORMATS)}")
    try:
        key = name and name.strip("/")
        contents = FORMATS[Path(path).suffix].describe(path)
        found = _pick(contents, key, [*contents.tensors, *contents.external, *contents.left_out])
        return contents, contents.chosen(found).tensors[found]
    except InputError:
        raise
    except FileError as error:
        raise InputError("HD402", str(error)) from error
    except Exception as error:  # each library has errors of its own for a damaged file
        raise InputError("HD402", f"{path}: cannot be read: {reason(error)}") from error


def _pick(contents: Contents, name: str | None, names: Sequence[str]) -> str:
    """Choose the array that is named, or the only one.

    Raises:
        InputError: there is no such array, or there are several, or none.
    """
    path = contents.path
    if name is not None:
        if names == [""]:
            raise InputError("HD408", f"{path}: holds an array without a name, and no array {name!r}")
        if name not in names:
            raise InputError("HD408", f"{path}: holds no array {name!r}; it has: {listed(names)}")
        return name
    known = list(contents.tensors) or names
    if not known:
        raise InputError("HD502", f"{path}: holds no array")
    if len(known) > 1:
        one = f"name one as {path}:NAME; it has: {listed(known)}; hpcdist.convert copies all"
        raise InputError("HD502", f"{path}: holds {len(known)} arrays; {one}")
    return known[0]


def path_of(spec: str) -> str:
    """The path of the file that holds an array."""
    return _split(spec)[0]


def _split(spec: str) -> tuple[str, str | None]:
    """Split into path and name: a file named by the whole text comes first, then the longest path that exists."""
    colons = [match.start("colon") for match in _NAMED.finditer(spec)][::-1]
    if not colons or os.path.lexists(spec):
        return spec, None
    at = next((i for i in colons if os.path.lexists(spec[:i])), colons[0])
    return spec[:at], spec[at + 1 :]


def find(world: World, given: Sequence[str], dim: int, output: str | None) -> Inputs:
    """Find the inputs that `given` names, in that order; by default, the files of Python's standard library.

    Collective. With an `output` something must be given: an empty variable of a script must not fill a file.

    Raises:
        RankError, InputError: on all ranks, if one of them cannot be read or they do not fit together along `dim`.
    """
    if output and not given:
        raise InputError("HD505", f"{shown(output)}: no INPUT is given, and without one nothing is written")
    comm = world.team.comm
    specs = objects.broadcast(comm, "inputs", (lambda: _expand(given)) if given else _demo)
    bounds = [*layout.displs(layout.block(len(specs), world.world_size)), len(specs)]
    mine = specs[bounds[world.rank] : bounds[world.rank + 1]]

    def describe(spec: str) -> Source:
        stored = _described(spec, not given)[1]
        return Source(spec, stored.shape, stored.dtype, stored.name, not given)

    described = objects.all_gather(comm, "inputs", lambda: [describe(spec) for spec in progress(mine, world, "look")])
    sources = [source for part in described for source in part]
    if given:
        objects.broadcast(comm, "inputs", lambda: _check_once(sources))  # one rank's numbers of files and devices
    dim = _check(sources, dim)
    total = sum(source.extent(dim) for source in sources)
    shape = sources[0].shape
    return Inputs(sources, bounds, (*shape[:dim], total, *shape[dim + 1 :]), sources[0].dtype, dim, demo=not given)


def _expand(inputs: Sequence[str]) -> list[str]:
    """Expand names and patterns into files; a name after a colon is applied to each file.

    They come in the order given; the files that a pattern matches in natural order, s2 before s10.

    Raises:
        InputError: a pattern that matches nothing.
    """
    specs: list[str] = []
    for given in inputs:
        path, name = _split(given)
        paths = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True), key=_natural)
        if not paths:
            more = ", and no file matches" if glob.has_magic(path) else ""
            raise InputError("HD401", f"{path}: no such file{more}")
        specs += [p if name is None else f"{p}:{name}" for p in paths]
    return specs


def _natural(path: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers within names as numbers."""
    return [(int(part) if i % 2 else -1, part) for i, part in enumerate(re.split("([0-9]+)", path))]


def _demo() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(str(path) for path in root.rglob("*.py") if "site-packages" not in path.parts and path.is_file())


def _check_once(sources: Sequence[Source]) -> None:
    """Check that no array is named twice, under whatever names the file has; an InputError if one is."""
    seen: dict[tuple[int, int, str], str] = {}
    for source in sources:
        path = path_of(source.spec)
        try:
            found = os.stat(path)
        except OSError as error:
            raise InputError("HD402", f"{path}: cannot be read: {reason(error)}") from error
        other = seen.setdefault((found.st_dev, found.st_ino, source.name), source.spec)
        if other is not source.spec:
            also = f", also as {other}" if other != source.spec else ""
            raise InputError("HD507", f"{source.spec}: named twice{also}")


def _check(sources: Sequence[Source], dim: int) -> int:
    """Check that the arrays can be joined along dim, which is returned non-negative."""
    first = sources[0]
    ndim = len(first.shape) or 1
    if not -ndim <= dim < ndim:
        what = f"{first.spec} has {len(first.shape)} dims, expected {-ndim} to {ndim - 1}"
        raise InputError("HD508", f"--dim {dim}: {what}")
    dim %= ndim
    besides: Callable[[Source], object] = lambda s: (len(s.shape), *s.shape[:dim], *s.shape[dim + 1 :])  # noqa: E731
    for source in sources:
        if source.dtype != first.dtype:
            raise InputError("HD513", f"{source.spec}: dtype {source.dtype}, but {first.spec} has {first.dtype}")
        if besides(source) != besides(first):
            what = f"shape {source.shape} does not fit {first.shape} of {first.spec} along dim {dim}"
            raise InputError("HD513", f"{source.spec}: {what}")
    return dim


def check_memory(world: World, data: Inputs, everywhere: bool, root: int) -> None:
    """Check before anything is read that each node has memory for its ranks' inputs and results. Collective.

    Raises:
        InputError: on all ranks, if one has not.
    """
    own = data.nbytes_by_rank()[world.rank]
    need = own + (data.nbytes() if everywhere or world.rank == root else 0)
    nodes = objects.all_gather_object(world.team.comm, (world.node, need, host_memory.available()))
    for node in range(world.nodes):
        total = sum(bytes_ for where, bytes_, _ in nodes if where == node)
        free = min(free for where, _, free in nodes if where == node)
        if total > free:
            where = f"node {node}" if world.nodes > 1 else "this host"
            raise InputError(
                "HD504",
                f"the inputs and the result need {total:,} bytes of memory on {where}, and {free:,} are available: "
                "with -o FILE, and without --all, --compare and --route, they are streamed through a window of it",
            )
