"""Encode small values as JSON. No pickle: decoding cannot run any code.

None, booleans, numbers and strings are encoded as JSON does; everything else as a list that begins with a kind:

    ["l", ...] a list     ["t", ...] a tuple     ["d", [key, value], ...] a dict     ["b", base64] bytes
    ["y", name] a torch dtype     ["v", name] a device     ["f", path] a path
    ["a", dtype, shape, base64] a numpy array; one without dims arrives as a numpy scalar
    ["c", module, name, [field, value], ...] a dataclass or named tuple of this package
"""

from __future__ import annotations

import dataclasses
import json
import sys
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

_PACKAGE = __name__.partition(".")[0]


def encode(value: Any) -> bytes:
    """Encode a value.

    Raises:
        TypeError: if it, or a part of it, is of a kind that is not listed above.
    """
    return json.dumps(_to_json(value), separators=(",", ":")).encode()


def decode(text: bytes | bytearray) -> Any:
    """Decode what :func:`encode` returned.

    Raises:
        ValueError: if the text is anything else.
    """
    try:
        return _from_json(json.loads(text))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a value that a rank has encoded: {error}") from error


def _to_json(value: Any) -> Any:
    kind = type(value)
    torch, np = sys.modules.get("torch"), sys.modules.get("numpy")  # whose values these are has imported them
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return ["l" if kind is list else "t", *map(_to_json, value)]
    if kind is dict:
        return ["d", *([_to_json(key), _to_json(item)] for key, item in value.items())]
    if kind in (bytes, bytearray):
        return ["b", b64encode(value).decode()]
    if torch is not None and kind is torch.dtype:
        return ["y", str(value).removeprefix("torch.")]
    if torch is not None and kind is torch.device:
        return ["v", str(value)]
    if isinstance(value, Path):
        return ["f", str(value)]
    if np is not None and isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        descr = value.dtype.str if value.dtype.names is None else value.dtype.descr
        return ["a", _to_json(descr), list(value.shape), b64encode(value.tobytes()).decode()]
    if kind.__module__.partition(".")[0] == _PACKAGE and (names := _fields(kind)) is not None:
        return ["c", kind.__module__, kind.__name__, *([name, _to_json(getattr(value, name))] for name in names)]
    for base in (str, int, float):
        if isinstance(value, base):  # a subclass, such as torch's version or an IntEnum, arrives as the base
            return base(value)
    raise TypeError(f"{kind.__name__} cannot be sent to other ranks")


def _fields(kind: type) -> list[str] | None:
    """Return the field names of a dataclass or named tuple; None for anything else."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind._fields) if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def _from_json(item: Any) -> Any:
    if not isinstance(item, list):
        return item
    kind, *rest = item
    if kind in ("l", "t"):
        found = map(_from_json, rest)
        return list(found) if kind == "l" else tuple(found)
    if kind == "d":
        return {_from_json(key): _from_json(item) for key, item in rest}
    if kind == "b":
        return b64decode(rest[0])
    if kind == "y":
        import torch

        dtype = getattr(torch, rest[0])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{rest[0]} is not a dtype")
        return dtype
    if kind == "v":
        import torch

        return torch.device(rest[0])
    if kind == "f":
        return Path(rest[0])
    if kind == "a":
        import numpy as np

        array = np.frombuffer(b64decode(rest[2]), np.dtype(_from_json(rest[0]))).reshape(rest[1])
        return array.copy() if rest[1] else array[()]
    if kind == "c":
        return _instance(*rest)
    raise ValueError(f"kind {kind!r}")


def _instance(module: str, name: str, *items: list[Any]) -> Any:
    """Make a dataclass or named tuple of this package, from a module that is already imported."""
    if module.partition(".")[0] != _PACKAGE:
        raise ValueError(f"{module} is not of this package")
    kind = vars(sys.modules[module])[name]
    values = {field: _from_json(item) for field, item in items}
    if not isinstance(kind, type) or _fields(kind) != list(values):
        raise ValueError(f"{module}.{name} has other fields than {list(values)}")
    if issubclass(kind, tuple):
        return kind(**values)
    made = object.__new__(kind)
    for field, item in values.items():
        object.__setattr__(made, field, item)
    return made
