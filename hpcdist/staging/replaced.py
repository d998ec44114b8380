"""What an earlier save has left under a name that is now that of one .safetensors file, or of several and an index.

Readers take the file before the index, or the index before the file: of both, one would be the old one. And the files
that an index names may be those of an earlier save, of which some have been replaced.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hpcdist.errors import FileError, reason
from hpcdist.files.commit import sync
from hpcdist.files.safetensors import SUFFIX
from hpcdist.staging.sharded_files import index_of

__all__ = ["remove_old_form", "withdraw_index"]


def withdraw_index(path: str, files: Sequence[str]) -> None:
    """Remove the index of an earlier save, if one of `files`, which are complete, replaces one of its own: whatever
    dies before the new index is there, no index names old and new ones. A FileError if it cannot be removed."""
    if len(files) > 1 and any(map(os.path.lexists, files)):
        _remove(index_of(path))


def remove_old_form(path: str, files: Sequence[str]) -> None:
    """After a save: of several files, remove the single one that had the name; of a single one, the index of several.

    The several files that such an index names stay. A FileError if it cannot be removed.
    """
    if path.endswith(SUFFIX):
        _remove(path if len(files) > 1 else index_of(path))


def _remove(name: str) -> None:
    try:
        os.unlink(name)
        sync(Path(name).parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise FileError("HD410", f"{name}: is of an earlier save, and cannot be removed: {reason(error)}") from error
