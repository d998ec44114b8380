"""The file systems of the environment, the current folder and the staging folder: their types, locks and quotas."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcdist.doctor.findings import Facts
from hpcdist.doctor.topics import Ranks, Section, Verdict, by_node, each, some, topic
from hpcdist.runtime.cli import plural, show_bytes

__all__ = ["describe", "gather", "judge", "local_locks", "mount_of", "space"]

_NETWORK = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "dvs", "fhgfs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"),
        *("ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "virtiofs", "wekafs"),
    }
)  # and those of FUSE, but for the local ones:
_LOCAL_FUSE = ("fuse.fuse-overlayfs", "fuse.squashfuse", "fuse.squashfuse_ll", "fuse.mergerfs", "fuseblk")
_FEW_FILES = 10_000  # inodes; with less, a job that writes many files is likely to fail
_NEARLY = 0.9  # of a quota
_NFS_LOCAL = ("nolock", "local_lock=all", "local_lock=flock")
_TO = "export HPCDIST_STAGING=FOLDER"


def gather() -> Facts:
    """Collect the file systems of the environment, and the current folder."""
    mounts = {"environment": mount_of(sys.prefix)}
    current: dict[str, Any] = {}
    with suppress(OSError):  # the current folder has been removed
        current["folder"] = os.getcwd()
        current.update(space(Path(current["folder"])))
        mounts["current"] = mount_of(current["folder"])
    return {"mounts": {name: mount for name, mount in mounts.items() if mount}, "current": current}


def space(folder: Path) -> dict[str, Any]:
    """Return the space and the inodes of a folder's file system; no inodes if it has no fixed number of them.

    Raises:
        OSError: if there is no such folder.
    """
    found = os.statvfs(folder)
    return {
        "bytes": found.f_blocks * found.f_frsize,
        "free": found.f_bavail * found.f_frsize,
        "inodes": found.f_favail if found.f_files else None,
        "writable": os.access(folder, os.W_OK | os.X_OK),
    }


def mount_of(folder: str) -> dict[str, Any] | None:
    """Return the mount that holds a folder, see :func:`_parsed`; None if it cannot be found."""
    try:
        fd = os.open(folder, os.O_PATH)
    except OSError:
        return None
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        number = next((line.split()[1] for line in lines if line.startswith("mnt_id:")), "")
        return _parsed(number, Path("/proc/self/mountinfo").read_text())
    except OSError:  # not Linux's /proc
        return None
    finally:
        os.close(fd)


def _parsed(number: str, text: str) -> dict[str, Any] | None:
    """Return point, type, source and options of a mount, and whether it is one of the network, from mountinfo."""
    for line in text.splitlines():
        words, _, rest = line.partition(" - ")
        own, of_system = words.split(), rest.split()
        if own[0] == number and len(of_system) >= 2:
            kind = of_system[0]
            fuse = kind.startswith("fuse") and kind not in _LOCAL_FUSE
            return {
                "point": re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), own[4]),
                "type": kind,
                "source": of_system[1],
                "options": sorted({*own[5].split(","), *(of_system[2].split(",") if len(of_system) > 2 else ())}),
                "network": kind in _NETWORK or fuse,
            }
    return None


def describe(mount: dict[str, Any]) -> str:
    """Return a mount as text, such as "lustre at /scratch"."""
    return f"{mount['type']} at {mount['point']}"


def local_locks(mount: dict[str, Any] | None) -> str | None:
    """Return the mount option by which a lock holds on one node only; None if there is no such option."""
    kind = mount["type"] if mount else ""
    names = ("localflock",) if kind == "lustre" else _NFS_LOCAL if kind.startswith("nfs") else ()
    return next((name for name in names if mount and name in mount["options"]), None)


@topic("file systems", "mounts")
def _systems(ranks: Ranks) -> Verdict:
    text = each(ranks, _mount_text)
    staging = ranks[0].get("staging", {})
    if staging.get("mount"):
        text += f"; staging folder {staging['folder']} ({describe(staging['mount'])})"
    unwritable = sorted({f["host"] for f in ranks if f["current"] and not f["current"].get("writable")})
    gone = sorted({facts["host"] for facts in ranks if not facts["current"]})
    if gone:
        return "broken", f"the current folder is not there on {', '.join(gone)}", "cd to a folder that all nodes have"
    if unwritable:
        folder = ranks[0]["current"].get("folder")
        return "warning", f"the current folder {folder} cannot be written to on {', '.join(unwritable)}", "cd $SCRATCH"
    return "ok", text


def _mount_text(facts: Facts) -> str:
    folders = [
        ("environment", facts.get("prefix", ""), facts["mounts"].get("environment")),
        ("current folder", facts["current"].get("folder", ""), facts["mounts"].get("current")),
    ]
    return ", ".join(f"{name} {path} ({describe(mount)})" for name, path, mount in folders if mount)


@topic("current folder", "current.folder")
def _current(ranks: Ranks) -> Verdict:
    """Judge whether all nodes share the current folder, which only matters if it is the staging folder, too."""
    if len(by_node(ranks)) == 1 or not any("sees_current" in facts for facts in ranks):
        return None
    folder = ranks[0]["current"]["folder"]
    blind = sorted({facts["host"] for facts in ranks if facts.get("sees_current") is False})
    if blind:
        return (
            "ok",
            f"{folder} is not shared with {', '.join(blind)}, which is no fault: the staging folder is elsewhere",
        )
    return "ok", f"{folder} is shared by all nodes"


@topic("inodes", "current")
def _inodes(ranks: Ranks) -> Verdict:
    few = []
    for facts in ranks:
        for found in (facts["current"], facts.get("staging", {})):
            if found.get("inodes") is not None and found["inodes"] < _FEW_FILES:
                few.append(f"{found['folder']} on {facts['host']}: {plural(found['inodes'], 'more file')}")
    if few:
        fix = f"remove files that are no longer needed (df -i; find . -xdev | wc -l); or {_TO}"
        return "warning", some(list(dict.fromkeys(few)), 4, "folders"), fix
    return "ok", "enough for more files in the current folder and the staging folder"


@topic("quota", "quotas")
def _quotas(ranks: Ranks) -> Verdict:
    near, texts = [], []
    for facts in ranks:
        for row in facts["quotas"]:
            for used, most, show in (
                (row["bytes"], row["most_bytes"], show_bytes),
                (row["files"], row["most_files"], str),
            ):
                text = f"{row['folder']}: the {row['of']} has {show(used)} of {show(most)}"
                text += " files" if show is str else ""
                texts += [text] if most else []
                near += [(used / most, f"{text}", row["command"])] if most and used > _NEARLY * most else []
    if near:
        share, text, command = max(near)
        fix = f"{command} shows it; remove what is no longer needed, or {_TO}"
        return "broken" if share >= 1 else "warning", text, fix
    return "ok", some(texts, 2, "quotas") if texts else "none that a command of this system reports"


judge = Section("folders", _systems, _current, _inodes, _quotas)
