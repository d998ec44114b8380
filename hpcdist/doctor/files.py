"""Shared memory, HDF5, and the staging folder: written and read by every node, locked, and shared or not."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcdist.doctor.findings import Facts, Finding, by_node, by_value, each, ranks_text
from hpcdist.errors import reason
from hpcdist.runtime.cli import show_bytes

__all__ = ["PREFIX", "gather", "judge", "look", "put", "try_folder"]

PREFIX = "hpcdist-doctor-"
_SHM = Path("/dev/shm")
_SHM_LEAST = 2**24  # bytes a rank: what an MPI library takes for the messages within a node
_SHM_GOOD = 2**27  # bytes a rank: with room for the batches of a DataLoader's workers
_TRIAL = 2**16  # bytes that are written to the staging folder
_SPACE = 2**30  # bytes: with less, staging is likely to fail
_OFF = ("FALSE", "0")  # of HDF5_USE_FILE_LOCKING
_KNOWN = ("TRUE", "1", *_OFF, "BEST_EFFORT")


def gather() -> Facts:
    """/dev/shm and h5py, as this process sees them."""
    return {"shm": _space(_SHM), "hdf5": _hdf5()}


def _space(folder: Path) -> dict[str, Any]:
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return {"error": reason(error)}
    return {
        "bytes": found.f_blocks * found.f_frsize,
        "free": found.f_bavail * found.f_frsize,
        "writable": os.access(folder, os.W_OK | os.X_OK),
    }


def _hdf5() -> dict[str, Any]:
    try:
        import h5py
    except Exception as error:  # also an h5py that was built for another numpy or MPI
        return {"error": f"h5py cannot be imported: {reason(error)}"}
    return {"h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version, "parallel": bool(h5py.get_config().mpi)}


def try_folder(folder: str) -> dict[str, Any]:
    """Write a file of this node's in the staging folder, lock it and read it."""
    found: dict[str, Any] = {"folder": folder, **_space(Path(folder))}
    data = secrets.token_bytes(_TRIAL)
    try:
        fd, path = tempfile.mkstemp(prefix=PREFIX, dir=folder)
        try:
            found["locks"] = _locks(fd)
            _write_all(fd, data)
            os.fsync(fd)
            if Path(path).read_bytes() != data:
                found["error"] = "what was written is not what is read"
        finally:
            os.close(fd)
            os.unlink(path)
    except OSError as error:
        found["error"] = reason(error)
    return found


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _locks(fd: int) -> str | None:
    """Why a file cannot be locked, as HDF5 does it; None if it can."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        return f"{errno.errorcode.get(error.errno or 0, error.errno)}: {reason(error)}"
    return None


def put(folder: str) -> tuple[str, bytes] | None:
    """A new file that the other nodes are to see, and what is in it; None if it cannot be made."""
    token = secrets.token_bytes(16)
    try:
        fd, path = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    except OSError:
        return None
    try:
        _write_all(fd, token)
        os.fsync(fd)
    except OSError:
        os.unlink(path)
        return None
    finally:
        os.close(fd)
    return path, token


def look(made: tuple[str, bytes] | None) -> bool | None:
    """Whether this rank sees the file that rank 0 has made; None if there is none."""
    if made is None:
        return None
    try:
        return Path(made[0]).read_bytes() == made[1]
    except OSError:
        return False


def judge(ranks: Sequence[Facts]) -> list[Finding]:
    """All findings about memory and files."""
    known = [facts for facts in ranks if "shm" in facts]
    return [*_shm(known), *_h5py(known), *_mpi_io(known), *_folder(known), *_file(known), *_locking(known)]


def _shm(ranks: Sequence[Facts]) -> list[Finding]:
    bigger = "a container: docker run --shm-size=8g or --ipc=host; else mount -o remount,size=8g /dev/shm"
    for node in by_node(ranks).values():
        shm, host, count = node[0]["shm"], node[0]["host"], len(node)
        if "error" in shm or not shm["writable"]:
            text = f"{host}: {shm.get('error', 'not writable')}"
            return [Finding("/dev/shm", "broken", text, f"mount -t tmpfs tmpfs /dev/shm; {bigger}")]
        text = (
            f"{host}: {show_bytes(shm['free'])} free of {show_bytes(shm['bytes'])}, for {count} rank{'s' * (count > 1)}"
        )
        full = f"remove what ended jobs have left (ls -la /dev/shm); {bigger}"
        if shm["free"] < _SHM_LEAST * count:
            return [Finding("/dev/shm", "broken", f"{text}: MPI's messages within a node may not fit", full)]
        if shm["free"] < _SHM_GOOD * count:
            return [Finding("/dev/shm", "warning", f"{text}: little for a DataLoader with workers", full)]
    least = min(ranks, key=lambda facts: facts["shm"]["free"], default=None)
    if least is None:
        return []
    shm = least["shm"]
    return [Finding("/dev/shm", "ok", f"{show_bytes(shm['free'])} free of {show_bytes(shm['bytes'])}")]


def _h5py(ranks: Sequence[Facts]) -> list[Finding]:
    wrong = by_value([f for f in ranks if "error" in f["hdf5"]], lambda facts: str(facts["hdf5"]["error"]))
    if wrong:
        text, where = next(iter(wrong.items()))
        fix = "pip install h5py; README, Install on a cluster, says how it is built for parallel HDF5"
        return [Finding("HDF5", "broken", f"{text} ({ranks_text(where)})", fix)]
    text = each(ranks, lambda facts: _versions(facts["hdf5"]))
    if len(by_value(ranks, lambda facts: _versions(facts["hdf5"]))) > 1:
        return [Finding("HDF5", "broken", text, "the same environment on all nodes")]
    return [Finding("HDF5", "ok", text)] if ranks else []


def _versions(hdf5: dict[str, Any]) -> str:
    kind = "parallel: writer mpio" if hdf5["parallel"] else "serial: every rank writes by itself, writer posix"
    return f"HDF5 {hdf5['hdf5']}, h5py {hdf5['h5py']}, {kind}"


def _mpi_io(ranks: Sequence[Facts]) -> list[Finding]:
    library = ranks[0].get("mpi", {}).get("library") if ranks else None
    if library is None:
        return []
    if not all(facts["hdf5"].get("parallel") for facts in ranks):
        return [Finding("MPI-IO", "ok", "not used: h5py is serial")]
    if "Open MPI" not in library:
        return [Finding("MPI-IO", "ok", "ROMIO")]
    asked = ranks[0]["environ"].get("OMPI_MCA_io")
    text = (
        f"OMPI_MCA_io={asked}"
        if asked
        else "Open MPI's choice: ompio (on Lustre romio); OMPI_MCA_io=romio321 is another"
    )
    return [Finding("MPI-IO", "ok", text)]


def _folder(ranks: Sequence[Facts]) -> list[Finding]:
    tried = [facts for facts in ranks if "staging" in facts]
    if not tried:
        return []
    folder = tried[0]["staging"]["folder"]
    fix = "export HPCDIST_STAGING=FOLDER, or hpcdist.init(staging=...): a folder of the parallel file system"
    wrong = by_value([f for f in tried if "error" in f["staging"]], lambda facts: str(facts["staging"]["error"]))
    if wrong:
        text, where = next(iter(wrong.items()))
        hosts = sorted({facts["host"] for facts in tried if facts["rank"] in where})
        return [Finding("staging folder", "broken", f"{folder} on {', '.join(hosts)}: {text}", fix)]
    blind = [facts for facts in ranks if facts.get("sees") is False]
    if blind:
        hosts = sorted({facts["host"] for facts in blind})
        text = (
            f"{folder}: {', '.join(hosts)} does not see what {ranks[0]['host']} writes: it is not shared by all nodes"
        )
        return [Finding("staging folder", "broken", text, fix)]
    free = min(facts["staging"]["free"] for facts in tried)
    nodes = len(by_node(ranks))
    text = f"{folder}: written and read{f', shared by {nodes} nodes' if nodes > 1 else ''}, {show_bytes(free)} free"
    if free < _SPACE:
        return [Finding("staging folder", "warning", text, f"{fix}; or remove what is no longer needed (df -h)")]
    return [Finding("staging folder", "ok", text)]


def _file(ranks: Sequence[Facts]) -> list[Finding]:
    """The HDF5 file that all ranks have written and read together."""
    tried = ranks[0].get("file") if ranks else None
    if tried is None:
        return []
    if "error" in tried:
        fix = "see staging folder and HDF5 above; staging.save(writer='posix') does without MPI-IO"
        return [Finding("HDF5 file", "broken", str(tried["error"]), fix)]
    text = f"written by all ranks (writer {tried['writer']}) and read again in {tried['seconds'] * 1e3:.0f} ms"
    return [Finding("HDF5 file", "ok", text)]


def _locking(ranks: Sequence[Facts]) -> list[Finding]:
    said = ranks[0]["environ"].get("HDF5_USE_FILE_LOCKING") if ranks else None
    off = "export HDF5_USE_FILE_LOCKING=FALSE"
    if said is not None and said.upper() not in _KNOWN:
        text = f"HDF5_USE_FILE_LOCKING={said}: HDF5 knows {', '.join(_KNOWN)}"
        return [Finding("file locking", "warning", text, f"{off}, or unset it")]
    tried = [facts for facts in ranks if "locks" in facts.get("staging", {})]
    without = next((facts for facts in tried if facts["staging"]["locks"]), None)
    if not tried:
        return []
    if without is None:
        return [Finding("file locking", "ok", "files in the staging folder can be locked")]
    text = f"{without['staging']['folder']}: {without['staging']['locks']}"
    if said is not None and said.upper() in (*_OFF, "BEST_EFFORT"):
        return [Finding("file locking", "ok", f"{text}, and HDF5_USE_FILE_LOCKING={said} does without")]
    if said is not None:
        return [Finding("file locking", "broken", f"{text}, and HDF5_USE_FILE_LOCKING={said} insists on it", off)]
    text += "; hpcdist does without, but h5py.File fails on such files"
    return [Finding("file locking", "warning", text, off)]
