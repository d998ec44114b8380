"""Messages of tensors of any number, shape and dtype: a header, the small ones packed, each large one by itself.

A header is checked before memory is allocated for what it announces.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import chain
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdist.errors import HpcdistError, refusal
from hpcdist.layout import limits
from hpcdist.process import machine
from hpcdist.tensors import pool
from hpcdist.tensors.storage import BARE, DTYPES, as_bytes, bits, copyable, of_bytes
from hpcdist.tensors.tree import Tree

SMALL = 2**16  # bytes: smaller tensors are packed, since a copy costs less than a message
_ALIGN = 16  # bytes, for the largest dtype
_ASKED = 2**24  # bytes from which the memory of the host is asked for
_CODES = {code: dtype for dtype, code in DTYPES.items()}


class Meta(NamedTuple):
    """The dtype, shape and kind of memory of a tensor."""

    dtype: torch.dtype
    on_gpu: bool
    shape: tuple[int, ...]


class MessageContents:
    """The tensors of a message; those of `small` bytes and more are sent by themselves.

    Attributes:
        metas: metadata of the tensors, by number.
        nbytes: size of each tensor.
        large: numbers of the tensors that are sent by themselves.
    """

    def __init__(self, metas: list[Meta], small: float) -> None:
        self.metas = metas
        sizes = {dtype: dtype.itemsize for dtype in {meta[0] for meta in metas}}
        self.nbytes = [prod(shape) * sizes[dtype] for dtype, _, shape in metas]
        self.large = [i for i, nbytes in enumerate(self.nbytes) if nbytes >= small]

    @staticmethod
    def of(tensors: Sequence[Tensor], small: float | None = None) -> MessageContents:
        dtypes, on_gpu = tuple([x.dtype for x in tensors]), tuple([not x.is_cpu for x in tensors])
        return _contents(SMALL if small is None else small, dtypes, on_gpu, tuple([x.shape for x in tensors]))

    @cached_property
    def sections(self) -> list[tuple[torch.dtype, list[int]]]:
        """Numbers of the small tensors of each dtype, the largest items first, so that all are aligned."""
        numbers: dict[torch.dtype, list[int]] = {}
        large = set(self.large)
        for i, (dtype, _, _) in enumerate(self.metas):
            if i not in large:
                numbers.setdefault(dtype, []).append(i)
        return sorted(numbers.items(), key=lambda item: (-item[0].itemsize, DTYPES[item[0]]))

    @cached_property
    def packed(self) -> int:
        """Size of all small tensors packed: a multiple of 16, so that what follows is aligned for any dtype."""
        return -(-(sum(self.nbytes) - sum(self.nbytes[i] for i in self.large)) // _ALIGN) * _ALIGN

    def large_of(self, on_gpu: bool) -> list[int]:
        """Return the numbers of the large tensors in one kind of memory."""
        return [i for i in self.large if self.metas[i].on_gpu == on_gpu]

    def unpack(self, packed: Tensor, device: torch.device) -> dict[int, Tensor]:
        """Copy the small tensors into memory of their own: those from a GPU on `device`, the others on the host."""
        tensors, start = {}, 0
        for dtype, numbers in self.sections:
            itemsize = dtype.itemsize
            sizes = [self.nbytes[i] // itemsize for i in numbers]
            end = start + sum(sizes) * itemsize
            section = copyable(packed[start:end].view(dtype))
            # It returns the parts, contrary to torch's annotation.
            parts: Any = torch.split_with_sizes_copy(section, sizes)  # type: ignore[func-returns-value]
            if section.dtype != dtype:
                parts = [part.view(dtype) for part in parts]
            for i, part in zip(numbers, parts, strict=True):
                _, on_gpu, shape = self.metas[i]
                x = part if len(shape) == 1 else part.view(shape)
                tensors[i] = x.to(device) if on_gpu else x
            start = end
        return tensors

    def recv_buffer(self, i: int, device: torch.device) -> Tensor:
        """Allocate memory for a tensor."""
        meta = self.metas[i]
        return pool.empty(meta.shape, meta.dtype, device if meta.on_gpu else "cpu")


@lru_cache(maxsize=8)  # programs send structures like the last one
def _contents(
    small: float, dtypes: tuple[torch.dtype, ...], on_gpu: tuple[bool, ...], shapes: tuple[tuple[int, ...], ...]
) -> MessageContents:
    """Return the contents of tensors with these facts."""
    return MessageContents(list(map(Meta._make, zip(dtypes, on_gpu, shapes, strict=True))), small)


def encode(spec: Any, contents: MessageContents) -> bytes:
    """Encode the header of a structure."""
    metas = contents.metas
    tensors = [DTYPES[meta[0]] for meta in metas], [meta[1] for meta in metas], [meta[2] for meta in metas]
    return json.dumps({"spec": spec, "tensors": tensors}, separators=(",", ":")).encode()


class MessageHeader(MessageContents):
    """The header of a message.

    Attributes:
        spec: description of the structure.

    Raises:
        HpcdistError: if it is damaged.
    """

    def __init__(self, text: bytes, small: float) -> None:
        try:
            content = json.loads(text)
            self.spec: Any = content["spec"]
            metas = _metas(*content["tensors"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise HpcdistError(
                "HD901", f"the header of a message is damaged: {type(error).__name__}: {error}"
            ) from error
        super().__init__(metas, small)

    @staticmethod
    def read(text: bytes) -> MessageHeader:
        """Read a header, and check the memory for what it announces; see :func:`check_memory`."""
        header = _header(SMALL, text)
        check_memory(sum(header.nbytes))
        return header


@lru_cache(maxsize=8)  # programs receive structures like the last one
def _header(small: float, text: bytes) -> MessageHeader:
    """Return the header with this text; `small` as above."""
    return MessageHeader(text, small)


def check_memory(nbytes: int) -> None:
    """Check that this host has memory for tensors that a message announces, before it is allocated.

    Raises:
        HpcdistError: if it has not.
    """
    if nbytes > _ASKED and nbytes > (most := machine.capacity()[0]):
        raise HpcdistError(
            "HD310", f"{nbytes} bytes of tensors are announced, more than the memory of this host ({most})"
        )


def _metas(codes: list[int], on_gpu: list[bool], shapes: list[list[int]]) -> list[Meta]:
    """Parse the tensors of a header: for each the number of its dtype, whether it is on a GPU, and its shape.

    Raises:
        ValueError, KeyError, TypeError: if no such tensors can exist.
    """
    extents = list(chain.from_iterable(shapes))
    kinds = set(map(type, codes)), set(map(type, on_gpu)), set(map(type, extents))
    if not (kinds[0] <= {int} and kinds[1] <= {bool} and kinds[2] <= {int}):
        raise refusal(TypeError, "HD901", "the description of a tensor contains something other than numbers")
    if min(extents, default=0) < 0 or max(extents, default=0) >= 2**63:
        raise refusal(ValueError, "HD901", "a tensor has an impossible extent")
    if max(map(len, shapes), default=0) > limits.MAX_DIMS:
        raise refusal(ValueError, "HD901", f"a tensor has more than {limits.MAX_DIMS} dims")
    dtypes = [_CODES[code] for code in codes]
    return list(map(Meta._make, zip(dtypes, on_gpu, map(tuple, shapes), strict=True)))


def pack(tensors: Sequence[Tensor], contents: MessageContents) -> Tensor:
    """Pack the small tensors into one buffer of bytes in host memory."""
    sections = []
    for dtype, numbers in contents.sections:
        section = [bits(tensors[i]) if dtype in BARE else tensors[i] for i in numbers]
        if any(not x.is_cpu for x in section):
            section = _to_host(section)
        sections.append(as_bytes(_flat(section)))
    rest = contents.packed - sum(map(len, sections))
    return torch.cat([*sections, torch.zeros(rest, dtype=torch.uint8, device="cpu")])


def _flat(tensors: list[Tensor]) -> Tensor:
    """Copy the elements of tensors of one dtype into one flat tensor."""
    return torch.cat([x.reshape(-1) for x in tensors])


def _to_host(tensors: list[Tensor]) -> list[Tensor]:
    """Copy the tensors on a GPU to the host, all in one copy."""
    on_gpu = [x for x in tensors if not x.is_cpu]
    flat = _flat(on_gpu).cpu()
    parts = iter(torch.split(flat, [x.numel() for x in on_gpu]))
    return [x if x.is_cpu else next(parts) for x in tensors]


def join(tensors: Sequence[Tensor], contents: MessageContents, text: bytes) -> Tensor:
    """Return one message of the length of a header, the header, and the small tensors."""
    start = _small_start(len(text))
    whole = torch.zeros(start + contents.packed, dtype=torch.uint8, device="cpu")
    begin = len(text).to_bytes(8, "little") + text
    whole[: len(begin)] = of_bytes(begin)
    whole[start:] = pack(tensors, contents)
    return whole


def whole(tree: Tree) -> Tensor:
    """Return one message of a structure and all of its tensors, for parse() with `small` as inf."""
    contents = MessageContents.of(tree.tensors, inf)
    return join(tree.tensors, contents, encode(tree.spec, contents))


def parse(message: Tensor, small: float | None = None) -> tuple[MessageHeader, Tensor]:
    """Parse what join() returns: return the header, and the packed small tensors; `small` as that of the contents.

    Raises:
        HpcdistError: if it is damaged. The sizes in the header are not checked yet.
    """
    length = int.from_bytes(message[:8].numpy().tobytes(), "little")
    if length > message.numel() - 8:
        raise HpcdistError("HD901", f"a message is damaged: {length} bytes of header in {message.numel()}")
    header = _header(SMALL if small is None else small, message[8 : 8 + length].numpy().tobytes())
    packed = message[_small_start(length) :]
    if packed.numel() != header.packed:
        raise HpcdistError(
            "HD901", f"a message is damaged: {packed.numel()} bytes of small tensors, {header.packed} announced"
        )
    return header, packed


def _small_start(length: int) -> int:
    """Return the aligned offset of the small tensors after a header of this length."""
    return -(-(8 + length) // _ALIGN) * _ALIGN
