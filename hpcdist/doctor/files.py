"""Shared memory, HDF5, and the staging folder: whether every node can write, read and lock files, and shares them."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

from hpcdist.doctor import filesystems
from hpcdist.doctor.filesystems import describe, local_locks
from hpcdist.doctor.findings import Facts
from hpcdist.doctor.topics import Ranks, Section, Verdict, agree, by_node, each, error_of, topic
from hpcdist.errors import reason
from hpcdist.runtime.cli import plural, ranks_text, show_bytes

__all__ = ["PREFIX", "before_mpi", "gather", "hold", "judge", "look", "put", "sees_lock", "try_folder"]

PREFIX = "hpcdist-doctor-"
_SHM = Path("/dev/shm")
_MIN_SHM = 2**24  # bytes a rank, for the messages of an MPI library within a node
_GOOD_SHM = 2**27  # bytes a rank, enough for the batches of a DataLoader's workers as well
_TRIAL = 2**16  # bytes written to a folder
_MIN_SPACE = 2**30  # bytes; with less, staging is likely to fail
_OFF = ("FALSE", "0")  # of HDF5_USE_FILE_LOCKING; HDF5 ignores any other value, such as "false"
_KNOWN = ("TRUE", "1", *_OFF, "BEST_EFFORT")


def before_mpi(temporary: str) -> Facts:
    """Collect the state of /dev/shm and of the folder for temporary files, in which MPI makes files at its start."""
    return {"shm": _space(_SHM), "temporary": try_folder(temporary)}


def gather() -> Facts:
    """Collect the state of h5py in this process."""
    return {"hdf5": _hdf5()}


def _space(folder: Path) -> dict[str, Any]:
    try:
        return filesystems.space(folder)
    except OSError as error:
        return {"error": reason(error)}


def _hdf5() -> dict[str, Any]:
    try:
        import h5py
    except Exception as error:  # also an h5py that was built for another numpy or MPI
        return {"error": f"h5py cannot be imported: {reason(error)}"}
    return {"h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version, "parallel": bool(h5py.get_config().mpi)}


def try_folder(folder: str) -> dict[str, Any]:
    """Write a file in a folder, lock it and read it; return what was found."""
    found: dict[str, Any] = {"folder": folder, **_space(Path(folder)), "mount": filesystems.mount_of(folder)}
    data = secrets.token_bytes(_TRIAL)
    try:
        path, found["locks"] = _make(folder, data)
        try:
            if Path(path).read_bytes() != data:
                found["error"] = "the data read differ from those written"
        finally:
            os.unlink(path)
    except OSError as error:
        found["error"] = reason(error)
    return found


def put(folder: str) -> tuple[str, bytes] | None:
    """Make a file for the other nodes to find; return its path and contents, or None if that fails."""
    data = secrets.token_bytes(16)
    try:
        return _make(folder, data)[0], data
    except OSError:
        return None


def _make(folder: str, data: bytes) -> tuple[str, str | None]:
    """Make a file that holds `data`; return its path, and why it cannot be locked or None."""
    fd, path = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    try:
        locks = _lock(fd)
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    return path, locks


def _lock(fd: int) -> str | None:
    """Lock a file as HDF5 does; return why it cannot be locked, or None."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return f"{errno.errorcode.get(error.errno or 0, error.errno)}: {reason(error)}"
    return None


def look(made: tuple[str, bytes] | None) -> bool | None:
    """Whether this rank sees the file that rank 0 made; None if it made none."""
    if made is None:
        return None
    try:
        return Path(made[0]).read_bytes() == made[1]
    except OSError:
        return False


def hold(made: tuple[str, bytes] | None) -> int | None:
    """Lock the file that :func:`put` made, until the file that is returned is closed; None if it cannot be locked."""
    if made is None:
        return None
    try:
        fd = os.open(made[0], os.O_RDWR)
    except OSError:
        return None
    if _lock(fd) is None:
        return fd
    os.close(fd)
    return None


def sees_lock(made: tuple[str, bytes] | None) -> bool | None:
    """Whether this node sees the lock that another one holds; None if it cannot tell."""
    if made is None:
        return None
    try:
        fd = os.open(made[0], os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(fd)
    return False


@topic("/dev/shm", "shm")
def _shm(ranks: Ranks) -> Verdict:
    bigger = "a container: docker run --shm-size=8g or --ipc=host; else mount -o remount,size=8g /dev/shm"
    for node in by_node(ranks):
        shm, host, count = node[0]["shm"], node[0]["host"], len(node)
        if "error" in shm or not shm["writable"]:
            return "broken", f"{host}: {shm.get('error', 'not writable')}", f"mount -t tmpfs tmpfs /dev/shm; {bigger}"
        text = f"{host}: {_free(shm)}, for {plural(count, 'rank')}"
        full = f"remove the files of ended jobs (ls -la /dev/shm); {bigger}"
        if shm["free"] < _MIN_SHM * count:
            return "broken", f"{text}: MPI's messages within a node may not fit", full
        if shm["free"] < _GOOD_SHM * count:
            return "warning", f"{text}: little for a DataLoader with workers", full
    return "ok", _free(min((facts["shm"] for facts in ranks), key=lambda shm: int(shm["free"])))


def _free(shm: dict[str, Any]) -> str:
    return f"{show_bytes(shm['free'])} free of {show_bytes(shm['bytes'])}"


@topic("HDF5", "hdf5")
def _h5py(ranks: Ranks) -> Verdict:
    failed = error_of(ranks, "hdf5")
    if failed is not None:
        fix = "pip install h5py; docs/how-to/install-on-a-cluster.md describes how to build it for parallel HDF5"
        return "broken", f"{failed[0]} ({ranks_text(failed[1])})", fix
    text = each(ranks, _versions)
    return ("ok", text) if agree(ranks, _versions) else ("broken", text, "the same environment on all nodes")


def _versions(facts: Facts) -> str:
    hdf5 = facts["hdf5"]
    kind = "parallel: writer mpio" if hdf5["parallel"] else "serial: every rank writes by itself, writer posix"
    return f"HDF5 {hdf5['hdf5']}, h5py {hdf5['h5py']}, {kind}"


@topic("MPI-IO", "hdf5", "mpi.library")
def _mpi_io(ranks: Ranks) -> Verdict:
    if not all(facts["hdf5"].get("parallel") for facts in ranks):
        return "ok", "not used: h5py is serial"
    mounts = [facts.get("staging", {}).get("mount") or facts.get("mounts", {}).get("current") for facts in ranks]
    nfs = next((mount for mount in mounts if mount and mount["type"].startswith("nfs")), None)
    if nfs is not None and len(by_node(ranks)) > 1:
        text = (
            f"{describe(nfs)}: its clients write whole pages back, so MPI-IO from several nodes is slow, or loses data "
        )
        fix = "staging.save(writer='posix'), which needs none of this; or a folder of the parallel file system"
        return "warning", f"{text}unless it is mounted with noac and locks", fix
    if "Open MPI" not in ranks[0]["mpi"]["library"]:
        return "ok", "ROMIO"
    chosen = ranks[0]["environ"].get("OMPI_MCA_io")
    default = "the default of Open MPI: ompio (on Lustre romio); OMPI_MCA_io=romio321 is an alternative"
    return "ok", f"OMPI_MCA_io={chosen}" if chosen else default


@topic("staging folder", "shm")
def _folder(ranks: Ranks) -> Verdict:
    tried = [facts for facts in ranks if "staging" in facts]
    if not tried:
        return None
    folder = tried[0]["staging"]["folder"]
    fix = "export HPCDIST_STAGING=FOLDER, or hpcdist.init(staging=...): a folder of the parallel file system"
    failed = error_of(tried, "staging")
    if failed is not None:
        hosts = sorted({facts["host"] for facts in tried if facts["rank"] in failed[1]})
        return "broken", f"{folder} on {', '.join(hosts)}: {failed[0]}", fix
    blind = sorted({facts["host"] for facts in ranks if facts.get("sees") is False})
    if blind:
        text = f"{', '.join(blind)} does not see what {ranks[0]['host']} writes: it is not shared by all nodes"
        return "broken", f"{folder}: {text}", fix
    free = min(facts["staging"]["free"] for facts in tried)
    nodes = len(by_node(ranks))
    text = f"{folder}: written and read{f', shared by {nodes} nodes' if nodes > 1 else ''}, {show_bytes(free)} free"
    if free < _MIN_SPACE:
        return "warning", text, f"{fix}; or remove what is no longer needed (df -h)"
    return "ok", text


@topic("HDF5 file", "file")
def _file(ranks: Ranks) -> Verdict:
    """Judge the HDF5 file that all ranks have written and read together."""
    tried = ranks[0]["file"]
    if "error" in tried:
        fix = "see staging folder and HDF5 above; staging.save(writer='posix') does not use MPI-IO"
        return "broken", str(tried["error"]), fix
    return "ok", f"written by all ranks (writer {tried['writer']}) and read again in {tried['seconds'] * 1e3:.0f} ms"


@topic("file locking", "shm")
def _locking(ranks: Ranks) -> Verdict:
    setting = ranks[0]["environ"].get("HDF5_USE_FILE_LOCKING")
    off = "export HDF5_USE_FILE_LOCKING=FALSE"
    if setting is not None and setting not in _KNOWN:
        text = f"HDF5_USE_FILE_LOCKING={setting}: HDF5 accepts {', '.join(_KNOWN)}"
        return "warning", text, f"{off}, or unset it"
    tried = [facts["staging"] for facts in ranks if "locks" in facts.get("staging", {})]
    if not tried:
        return None
    without = next((staging for staging in tried if staging["locks"]), None)
    if without is None:
        off_by_hand = setting is not None and setting in _OFF
        return (None if off_by_hand else _local(ranks)) or ("ok", "files in the staging folder can be locked")
    text = f"{without['folder']}: {without['locks']}"
    if setting is None:
        return "warning", f"{text}; hpcdist needs no locks, but h5py.File fails on such files", off
    if setting in (*_OFF, "BEST_EFFORT"):
        return "ok", f"{text}, and HDF5_USE_FILE_LOCKING={setting} does not need it"
    return "broken", f"{text}, and HDF5_USE_FILE_LOCKING={setting} requires it", off


def _local(ranks: Ranks) -> Verdict:
    """Judge locks that succeed, but hold on one node only."""
    blind = [facts for facts in ranks if facts.get("sees_lock") is False]
    mount = ranks[0].get("staging", {}).get("mount")
    option = local_locks(mount)
    if len(by_node(ranks)) == 1 or not (blind or option):
        return None
    where = f"{ranks[0]['staging']['folder']}: {describe(mount)}" if mount else ranks[0]["staging"]["folder"]
    text = f"{where} is mounted with {option}" if option else where
    text += f"; {blind[0]['host']} does not see a lock that {ranks[0]['host']} holds" if blind else ""
    text += ": locks hold on one node only. hpcdist needs none, but programs of other nodes may write the same file"
    point = mount["point"] if mount else "FOLDER"
    fix = f"one job at a time for each file; as root: mount -o remount,flock {point} (Lustre), or without nolock (NFS)"
    return "warning", text, fix


judge = Section("folders", _shm, _folder, _locking, _h5py, _mpi_io, _file)
