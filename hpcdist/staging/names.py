"""Nested dicts of tensors, and the names of their tensors in a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hpcdist.errors import listed, refusal
from hpcdist.files import safetensors
from hpcdist.files.h5 import DTYPE_ATTRIBUTE, GROUP
from hpcdist.validation.local import WrongError

__all__ = ["SINGLE", "check_attrs", "check_safetensors", "flatten", "nest"]

SINGLE = "data"  # the name of a tensor that is saved without one


def flatten(tensors: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested dict by their path, ``{"a": {"b": x}}`` -> ``{"a/b": x}``; a single leaf is named SINGLE.

    Raises:
        ValueError, TypeError: a name that a file cannot have, or that two leaves have.
    """
    if not isinstance(tensors, Mapping):
        return {prefix or SINGLE: tensors}
    flat: dict[str, Any] = {}
    for key, value in tensors.items():
        if not isinstance(key, str):
            raise refusal(TypeError, "HD418", f"names must be strings, got {key!r}")
        parts = key.split("/")
        if not all(parts) or "." in parts or ".." in parts or "\0" in key:
            raise refusal(ValueError, "HD418", f"{key!r} cannot be a name in an HDF5 file")
        name = f"{prefix}/{key}" if prefix else key
        if name.split("/")[0] == GROUP:
            raise refusal(ValueError, "HD418", f"{name!r}: names that begin with {GROUP} are hpcdist's own")
        for leaf, tensor in flatten(value, name).items():
            if leaf in flat:
                raise refusal(ValueError, "HD418", f"two tensors have the name {leaf!r}")
            flat[leaf] = tensor
    for leaf in flat:
        ends = [i for i, letter in enumerate(leaf) if letter == "/"]
        above = next((leaf[:end] for end in ends if leaf[:end] in flat), None)
        if above is not None:
            raise refusal(ValueError, "HD418", f"{above!r} cannot be a tensor and hold {leaf!r}")
    return flat


def nest(flat: Mapping[str, Tensor], prefix: str = "") -> Any:
    """The nested dict of these paths, without `prefix`; the tensor itself, if its name is `prefix`."""
    if prefix in flat:
        return flat[prefix]
    tree: dict[str, Any] = {}
    for name, tensor in flat.items():
        *groups, last = name.removeprefix(prefix).strip("/").split("/")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[last] = tensor
    return tree


def check_attrs(attrs: Any, given: Mapping[str, Any]) -> None:
    """Raise a WrongError for attributes of unknown tensors, or with a name of our own."""
    for name, values in (attrs or {}).items():
        if name and name not in given:
            raise WrongError("HD419", f"attrs has {name!r}, which is not one of the tensors: {listed(given)}")
        if not isinstance(values, Mapping):
            raise WrongError("HD419", f"attrs of {name!r} must be a dict, got {type(values).__name__}")
        if DTYPE_ATTRIBUTE in values:
            raise WrongError("HD418", f"attrs of {name!r}: {DTYPE_ATTRIBUTE} is hpcdist's own")


def check_safetensors(tensors: Mapping[str, Tensor], attrs: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise a WrongError for what a .safetensors file cannot hold.

    Args:
        attrs: by name of a tensor, and "" for the file.
        options: of save(), by name.
    """
    for option in ("compression", "chunks", "align", "hints"):
        if options[option]:
            raise WrongError("HD419", f"{option} is given, which a {safetensors.SUFFIX} file does not have")
    if options["writer"] == "mpio":
        raise WrongError("HD421", f"writer mpio writes HDF5: a {safetensors.SUFFIX} file needs auto or posix")
    if safetensors.METADATA in tensors:
        raise WrongError(
            "HD418", f"{safetensors.METADATA!r} cannot be the name of a tensor in a {safetensors.SUFFIX} file"
        )
    for name, x in tensors.items():
        if x.dtype not in safetensors.KINDS:
            raise WrongError("HD418", f"{name!r} has dtype {x.dtype}, which a {safetensors.SUFFIX} file cannot hold")
    for name, values in attrs.items():
        if name and values:
            raise WrongError(
                "HD419", f"attrs of {name!r}: a {safetensors.SUFFIX} file has them only for the file, with name ''"
            )
        if any(type(part) is not str for item in values.items() for part in item):
            raise WrongError("HD419", f"attrs of a {safetensors.SUFFIX} file must be text, got {dict(values)}")
