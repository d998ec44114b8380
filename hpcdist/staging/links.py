"""Only the file that is named is read: what in an HDF5 file would lead to other files is found before it is opened.

Three things do: a link into another file, a dataset with external storage, whose bytes are in any file that it names,
and a virtual dataset, which is put together from datasets of other files. Whoever gives a user such a file could have
it read whatever the user may read.
"""

from __future__ import annotations

from typing import Any

from hpcdist.errors import FileError

__all__ = ["elsewhere", "hard_path"]

_MOST = 40  # soft links on the way to one thing, as in Linux


def elsewhere(dataset: Any) -> str | None:
    """Why the data of a dataset are not read; None of one that has them in its own file."""
    from h5py import h5d

    made = dataset.id.get_create_plist()
    if made.get_layout() == h5d.VIRTUAL:  # its shape may be that of other files
        return "is a virtual dataset: it is made of other datasets, which are read only where they are"
    if made.get_external_count() > 0:
        return f"has its data in another file ({_text(made.get_external(0)[0])}), which is not read"
    return None


def hard_path(path: str, file: Any, name: str) -> str | None:
    """Where a name in the file leads, without links on the way; None if there is nothing.

    Raises:
        FileError: it leads into another file.
    """
    import h5py

    left, at, soft = [part for part in name.split("/") if part][::-1], "", 0
    group, step = file["/"], ""  # what is open on the way, and the next step from there
    while left:
        part = left.pop()
        group, step = group[step] if step else group, ""
        try:
            link = group.get(part, getlink=True) if isinstance(group, h5py.Group) else None
        except TypeError:  # of a kind that somebody has defined
            link = h5py.ExternalLink("?", "?")
        if isinstance(link, h5py.ExternalLink):
            raise FileError(f"{path}: {name} is a link into another file ({_text(link.filename)}), which is not read")
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


def _text(name: str | bytes) -> str:
    return name.decode(errors="backslashreplace") if isinstance(name, bytes) else name
