"""Only the file that is named is read: whatever in an HDF5 file refers to other files is found before it is opened.

Three things do: a link into another file, a dataset with external storage, whose bytes are in any file that it names,
and a virtual dataset, which is composed of datasets of other files. Somebody who hands a user such a file could make
the user's job read any file that the user may read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcdist.errors import FileError, listed
from hpcdist.files.h5 import GROUP, opened

__all__ = ["dataset_names", "external_data", "hard_path", "not_tensors"]

_DEEPEST = 1000  # groups within each other
_MOST = 40  # soft links in one path, as in Linux


def external_data(made: Any) -> str | None:
    """Why the data of a dataset, made with these properties, are not read; None if they are in its own file."""
    from h5py import h5d

    if made.get_layout() == h5d.VIRTUAL:  # its shape may be that of other files
        return "is a virtual dataset: it is made of other datasets, which are read only where they are"
    if made.get_external_count() > 0:
        return f"has its data in another file ({_text(made.get_external(0)[0])}), which is not read"
    return None


def hard_path(path: str, file: Any, name: str) -> str | None:
    """The path of a name in the file, with all links resolved; None if there is nothing.

    Raises:
        FileError: it leads into another file.
    """
    import h5py

    left, at, soft = [part for part in name.split("/") if part][::-1], "", 0
    group, step = file["/"], ""  # what is open so far, and the next step from there
    while left:
        part = left.pop()
        group, step = group[step] if step else group, ""
        try:
            link = group.get(part, getlink=True) if isinstance(group, h5py.Group) else None
        except TypeError:  # a user-defined kind
            link = h5py.ExternalLink("?", "?")
        if isinstance(link, h5py.ExternalLink):
            raise FileError(
                "HD415", f"{path}: {name} is a link into another file ({_text(link.filename)}), which is not read"
            )
        if link is None or soft > _MOST:
            return None
        if isinstance(link, h5py.SoftLink):
            soft += 1
            if link.path.startswith("/"):
                group, at = file["/"], ""
            left += [part for part in link.path.split("/") if part not in ("", ".")][::-1]
        else:
            at, step = f"{at}/{part}".strip("/"), part
    return at


def dataset_names(path: str, file: Any) -> tuple[list[str], dict[str, str]]:
    """The names of all datasets, by hard links only; and of those that h5py cannot open, the reason."""
    from h5py import h5g, h5l, h5o

    names: list[str] = []
    others: dict[str, str] = {}
    root = file["/"].id
    seen = {h5o.get_info(root).addr}  # a group may hold itself
    groups = [(b"", root, _link_names(root))]
    while groups:  # HDF5's own visit resolves each path from the root
        prefix, group, links = groups[-1]
        name = next(links, None)
        if name is None:
            groups.pop()
            continue
        if group.links.get_info(name).type != h5l.TYPE_HARD:
            continue
        info = h5o.get_info(group, name)
        if info.addr in seen:
            continue
        seen.add(info.addr)
        if info.type == h5o.TYPE_GROUP:
            inner = h5g.open(group, name)
            groups.append((prefix + name + b"/", inner, _link_names(inner)))
            if len(groups) > _DEEPEST:  # HDF5 holds the whole path of each that is open
                raise FileError(
                    "HD402", f"{path}: cannot be read: it has more than {_DEEPEST:,} groups within each other"
                )
        elif info.type == h5o.TYPE_DATASET:
            try:
                names.append((prefix + name).decode())
            except UnicodeDecodeError:
                others[(prefix + name).decode(errors="surrogateescape")] = "has a name that is not UTF-8"
    return names, others


def _link_names(group: Any) -> Iterator[bytes]:
    """The names of a group's links, in its order."""
    from h5py import h5

    if group.get_create_plist().get_link_creation_order():
        return iter(group)
    names: list[bytes] = []
    # For any other order HDF5 makes a list, and 1.10 ends the process where a flipped bit keeps it from filling that.
    group.links.iterate(names.append, order=h5.ITER_NATIVE)
    return iter(sorted(names))


def not_tensors(path: str, name: str) -> str:
    """Describe the datasets of a file, of this name or in this group ("": all), as what no tensor can hold."""
    found = []
    with opened(path) as file:
        for key in dataset_names(path, file)[0]:
            if not key.startswith(f"{GROUP}/") and (name in ("", key) or key.startswith(f"{name}/")):
                found.append(f"{key} ({_dtype_text(file, key)})")
    return listed(found) if found else ""


def _dtype_text(file: Any, name: str) -> str:
    from h5py import h5d

    dataset = h5d.open(file.id, name.encode())
    if dataset.shape is None:
        return "without a value"
    try:
        return "text or references" if dataset.dtype.hasobject else f"dtype {dataset.dtype}"
    except TypeError:
        return "a type that numpy does not have"


def _text(name: str | bytes) -> str:
    return name.decode(errors="backslashreplace") if isinstance(name, bytes) else name
