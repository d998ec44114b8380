"""What the ranks tell each other while they set a call up <-> JSON. No pickle: reading it cannot run any code.

A value is what JSON has for None, booleans, numbers and strings; all else is a list that begins with a kind:

    ["l", ...] a list     ["t", ...] a tuple     ["d", [key, value], ...] a dict     ["b", base64] bytes
    ["y", name] a dtype of torch's, ["v", name] a device, ["f", path] a path
    ["a", dtype, shape, base64] a numpy array, ["s", ...] the same, of a numpy number
    ["c", module, name, [field, value], ...] a dataclass or named tuple of this package
"""

from __future__ import annotations

import dataclasses
import json
import sys
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["decode", "encode"]

_PACKAGE = __name__.partition(".")[0]


def encode(value: Any) -> bytes:
    """The value as text.

    Raises:
        TypeError: it, or something in it, is of another kind.
    """
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode(text: bytes | bytearray) -> Any:
    """The value that was encoded.

    Raises:
        ValueError: the text is none.
    """
    try:
        return _value(json.loads(text))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"not what another rank can have said: {error}") from error


def _plain(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return ["l", *map(_plain, value)]
    if kind is tuple:
        return ["t", *map(_plain, value)]
    if kind is dict:
        return ["d", *([_plain(key), _plain(item)] for key, item in value.items())]
    if kind in (bytes, bytearray):
        return ["b", b64encode(value).decode()]
    if kind is torch.dtype:
        return ["y", str(value).removeprefix("torch.")]
    if kind is torch.device:
        return ["v", str(value)]
    if isinstance(value, Path):
        return ["f", str(value)]
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        descr = value.dtype.str if value.dtype.names is None else value.dtype.descr
        tag = "a" if isinstance(value, np.ndarray) else "s"
        return [tag, _plain(descr), list(value.shape), b64encode(value.tobytes()).decode()]
    if kind.__module__.partition(".")[0] == _PACKAGE and (names := _fields(kind)) is not None:
        return ["c", kind.__module__, kind.__name__, *([name, _plain(getattr(value, name))] for name in names)]
    for base in (str, int, float):
        if isinstance(value, base):  # such as torch's version, or an IntEnum: arrives as a plain one
            return base(value)
    raise TypeError(f"{kind.__name__} is not told to other ranks")


def _fields(kind: type) -> list[str] | None:
    """The fields of a dataclass or a named tuple; None of anything else."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind._fields) if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def _value(said: Any) -> Any:
    if not isinstance(said, list):
        return said
    kind, *rest = said
    if kind == "l":
        return [_value(item) for item in rest]
    if kind == "t":
        return tuple(_value(item) for item in rest)
    if kind == "d":
        return {_value(key): _value(item) for key, item in rest}
    if kind == "b":
        return b64decode(rest[0])
    if kind == "y":
        dtype = getattr(torch, rest[0])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{rest[0]} is no dtype")
        return dtype
    if kind == "v":
        return torch.device(rest[0])
    if kind == "f":
        return Path(rest[0])
    if kind in ("a", "s"):
        array = np.frombuffer(b64decode(rest[2]), np.dtype(_value(rest[0]))).reshape(rest[1])
        return array.copy() if kind == "a" else array[()]
    if kind == "c":
        return _instance(*rest)
    raise ValueError(f"not what another rank can have said: {kind!r}")


def _instance(module: str, name: str, *items: list[Any]) -> Any:
    """A dataclass or named tuple of this package, in a module that is already imported."""
    if module.partition(".")[0] != _PACKAGE:
        raise ValueError(f"{module} is not of this package")
    kind = vars(sys.modules[module])[name]
    values = {field: _value(item) for field, item in items}
    if not isinstance(kind, type) or _fields(kind) != list(values):
        raise ValueError(f"{module}.{name} has other fields than {list(values)}")
    if issubclass(kind, tuple):
        return kind(**values)
    made = object.__new__(kind)
    for field, item in values.items():
        object.__setattr__(made, field, item)
    return made
