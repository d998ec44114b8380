"""Text in the attributes of HDF5 files. HDF5 keeps strings of any length in its global heap, which has no checksums."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.errors import refusal

__all__ = ["attributes", "fixed_length"]


def fixed_length(value: Any) -> Any:
    """Text as strings of a fixed length; other values as they are."""
    import h5py

    if not isinstance(value, str | bytes | list | tuple) and getattr(value, "dtype", None) != np.dtype(object):
        return value
    held = np.array(value, object)
    if not held.size or not all(isinstance(text, str | bytes) for text in held.flat):
        return value
    encoded = [text.encode() if isinstance(text, str) else bytes(text) for text in held.flat]
    if any(b"\0" in text for text in encoded):
        raise refusal(ValueError, "HD418", "an attribute's text cannot hold NUL")
    encoding = "utf-8" if any(isinstance(text, str) for text in held.flat) else "ascii"
    length = max(1, *map(len, encoded))
    return np.array(encoded, h5py.string_dtype(encoding, length)).reshape(held.shape)


def attributes(held: Any) -> dict[str, Any]:
    """The attributes of an object of h5py's; text that fixed_length() has encoded, as text."""
    import h5py

    found = {}
    for name, value in held.attrs.items():
        kind = h5py.check_string_dtype(held.attrs.get_id(name).dtype)
        if kind is not None and kind.encoding == "utf-8" and kind.length is not None and np.size(value):
            texts = np.array([text.decode(errors="surrogateescape") for text in np.ravel(value).tolist()], object)
            value = texts.reshape(np.shape(value)) if np.ndim(value) else texts[0]
        found[name] = value
    return found
