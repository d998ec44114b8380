"""What a checkpoint holds besides tensors, as JSON: values such as numbers, strings and lists, and the planner's data.

DCP hands a value over as a pickle. It is stored as :mod:`hpcdist.control.codec` encodes it, ``["json", ...]``, if it
consists of Python's own types; any other as the pickle, ``["pickle", base64]``, which is read only if torch finds it
safe, or the caller asks for it.
"""

from __future__ import annotations

import io
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpcdist.control import codec
from hpcdist.errors import FileError, reason

__all__ = ["Item", "Record", "bytes_of", "item_of", "item_of_bytes", "value_of"]

Item = list[Any]  # a value as it is stored

_VERSION = 1
_SCALARS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)
_ADVICE = "HDF5Reader(..., allow_pickle=True) loads it, which can run any code: only for files that you trust"


@dataclass(frozen=True)
class Record:
    """Everything in a checkpoint but its tensors.

    Attributes:
        values: by name, values that are not tensors.
        planner_data: what DCP's planner keeps, such as the path of each name in a nested state.
    """

    values: Mapping[str, Item]
    planner_data: Item

    def encode(self) -> bytes:
        content = {"version": _VERSION, "values": dict(self.values), "planner_data": self.planner_data}
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, path: str, text: bytes) -> Record:
        """Raises FileError: written by a newer hpcdist, or not a record."""
        try:
            content = json.loads(text)
            version, record = content["version"], cls(content["values"], content["planner_data"])
        except (ValueError, KeyError, TypeError) as error:
            raise FileError(
                "HD402", f"{path}: what it holds besides tensors cannot be read: {reason(error)}"
            ) from error
        if version > _VERSION:
            raise FileError("HD406", f"{path}: written by a newer hpcdist (version {version} of checkpoints)")
        return record


def item_of(value: Any) -> Item:
    """A value in the form in which it is stored."""
    try:
        if _is_plain(value):
            return ["json", json.loads(codec.encode(value))]
    except (TypeError, ValueError, RecursionError):  # such as a list that holds itself
        pass
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return ["pickle", b64encode(buffer.getbuffer()).decode()]


def item_of_bytes(data: bytes) -> Item:
    """The bytes that a planner has made of a value, in the form in which they are stored."""
    try:
        value = torch.load(io.BytesIO(data), weights_only=True)
    except Exception:  # a planner's own format, or a class that torch does not load without being asked
        value = None
        plain = False
    else:
        plain = True
    item = item_of(value) if plain else []
    return item if item and item[0] == "json" else ["pickle", b64encode(data).decode()]


def value_of(path: str, name: str, item: Item, allow_pickle: bool) -> Any:
    """The value that was stored; a FileError if it is a pickle that is not safe, unless `allow_pickle`."""
    return torch.load(bytes_of(path, name, item, allow_pickle), weights_only=False)


def bytes_of(path: str, name: str, item: Item, allow_pickle: bool) -> io.BytesIO:
    """A stored value as bytes that ``torch.load`` reads, or as its planner has made them.

    Raises:
        FileError: damaged; or a pickle of more than torch's own safe types, unless `allow_pickle`.
    """
    try:
        kind, content = item
        if kind == "pickle":
            data = io.BytesIO(b64decode(content, validate=True))
        else:
            value = codec.decode(json.dumps(content).encode())
            if kind != "json" or not _is_plain(value):
                raise ValueError(f"kind {kind!r}")
            data = io.BytesIO()
            torch.save(value, data)
    except (ValueError, TypeError, RecursionError) as error:
        raise FileError("HD402", f"{path}: {name}: cannot be read: {reason(error)}") from error
    if kind == "pickle" and not allow_pickle:
        try:
            torch.load(data, weights_only=True)
        except Exception as error:
            raise FileError(
                "HD511", f"{path}: {name} is stored as a pickle of more than plain values: {_ADVICE}"
            ) from error
    data.seek(0)
    return data


def _is_plain(value: Any) -> bool:
    """Check that a value consists of Python's own types, which JSON brings back as they were."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in _SCALARS
