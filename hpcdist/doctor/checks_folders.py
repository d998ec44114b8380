"""The checks of file systems, shared memory, HDF5 and the routes. The docstrings are their meanings."""

from __future__ import annotations

from functools import partial

from hpcdist.doctor.table import NODE, RANK, Facts, Ranks, Verdict, by_node, check, describe, names
from hpcdist.routes import select
from hpcdist.runtime.cli import plural, show_bytes

_MIN_SHM = 2**24  # bytes a rank, for the messages of an MPI library within a node
_GOOD_SHM = 2**27  # bytes a rank, enough for the batches of a DataLoader's workers as well
_MIN_SPACE = 2**30  # bytes; with less, staging is likely to fail
_OFF = ("FALSE", "0")  # of HDF5_USE_FILE_LOCKING; HDF5 ignores any other value, such as "false"
_KNOWN = ("TRUE", "1", *_OFF, "BEST_EFFORT")
_LOCAL_LOCKS = {"localflock", "nolock", "local_lock=all", "local_lock=flock"}  # of Lustre; of NFS
_POSIX = "`staging.save(writer='posix')`, which does not use MPI-IO"
_OTHER_FOLDER = "`export HPCDIST_STAGING=FOLDER`, or `hpcdist.init(staging=...)`: a folder of the parallel file system"


@check("folders", "file systems", "mounts", per=RANK, fix="`cd $SCRATCH`, or to another folder that all nodes have")
def _systems(facts: Facts) -> Verdict:
    """The current folder is not there (broken) or not writable on some node. If it is ok, the text has the types of the
    file systems of the environment and of the current folder."""
    current, mounts = facts["current"], facts["mounts"]
    if not current:
        return "broken", "the current folder is not there"
    if not current.get("writable"):
        return "warning", f"the current folder {current['folder']} cannot be written to"
    folders = {"environment": facts["prefix"], "current": current["folder"]}
    return "ok", ", ".join(f"{name} {folders[name]} ({describe(mount)})" for name, mount in mounts.items())


@check(
    "folders", "/dev/shm", "shm", per=NODE,
    fix="remove the files of ended jobs (`ls -la /dev/shm`); a container: `docker run --shm-size=8g` or `--ipc=host`; "
    "else `mount -o remount,size=8g /dev/shm`",
)  # fmt: skip
def _shm(ranks: Ranks) -> Verdict:
    """It is too small for MPI's messages within the node (broken), or for DataLoader workers."""
    shm = ranks[0]["shm"]
    if "error" in shm or not shm["writable"]:
        return "broken", shm.get("error", "not writable"), "mount -t tmpfs tmpfs /dev/shm"
    text = f"{show_bytes(shm['free'])} free of {show_bytes(shm['bytes'])}, for {plural(len(ranks), 'rank')}"
    if shm["free"] < _MIN_SHM * len(ranks):
        return "broken", f"{text}: MPI's messages within a node may not fit"
    good = shm["free"] >= _GOOD_SHM * len(ranks)
    return ("ok", text) if good else ("warning", f"{text}: little for a DataLoader with workers")


@check("folders", "staging folder", "staging.free", errors="staging", fix=_OTHER_FOLDER)
def _folder(ranks: Ranks) -> Verdict:
    """It cannot be written or read, is not shared by the nodes, or is almost full (`df -h`)."""
    found, count = ranks[0]["staging"], len(ranks)
    blind = [facts for facts in ranks if facts.get("sees") is False]
    if blind:
        text = f"{names(blind)} does not see what {ranks[0]['host']} writes: it is not shared by all nodes"
        return "broken", f"{found['folder']}: {text}"
    free = min(facts["staging"]["free"] for facts in ranks)
    text = f"{found['folder']}: written and read" + (f", shared by {count} nodes" if count > 1 else "")
    text += f", {show_bytes(free)} free"
    text += f" ({describe(found['mount'])})" if found["mount"] else ""
    return "ok" if free >= _MIN_SPACE else "warning", text


@check(
    "folders", "file locking", "staging.free",
    fix="`export HDF5_USE_FILE_LOCKING=FALSE`; one job at a time for each file; as root: `mount -o remount,flock "
    "FOLDER` (Lustre), or without nolock (NFS)",
)  # fmt: skip
def _locking(ranks: Ranks) -> Verdict:
    """Files cannot be locked, or locks hold on one node only (Lustre with `localflock`, NFS with `nolock`); or HDF5
    ignores the value of `HDF5_USE_FILE_LOCKING`, which must be in capitals. hpcdist needs no locks."""
    setting = ranks[0]["environ"].get("HDF5_USE_FILE_LOCKING")
    if setting not in (None, *_KNOWN):
        text = f"HDF5_USE_FILE_LOCKING={setting}: HDF5 accepts {', '.join(_KNOWN)}"
        return "warning", text, "export HDF5_USE_FILE_LOCKING=FALSE, or unset it"
    found = ranks[0]["staging"]
    without = next((text for facts in ranks if (text := facts["staging"].get("locks"))), None)
    local = _LOCAL_LOCKS.intersection(found["mount"]["options"] if found["mount"] and len(ranks) > 1 else ())
    if setting in _OFF:
        return "ok", "HDF5 does not lock"
    if without and setting is None:
        return "warning", f"{found['folder']}: {without}; hpcdist needs no locks, but h5py.File fails on such files"
    if without and setting != "BEST_EFFORT":
        return "broken", f"{found['folder']}: {without}, and HDF5_USE_FILE_LOCKING={setting} requires it"
    if local:
        text = (
            f"{found['folder']}: {describe(found['mount'])} is mounted with {local.pop()}: locks hold on one node only"
        )
        return "warning", f"{text}. hpcdist needs none, but programs of other nodes may write the same file"
    return "ok", "files in the staging folder can be locked, or need not be"


@check(
    "folders", "HDF5", "hdf5.h5py", per=RANK, errors="hdf5", alike=("broken", "the same environment on all nodes"),
    fix="`pip install h5py`; docs/how-to/install-on-a-cluster.md describes how to build it for parallel HDF5",
)  # fmt: skip
def _h5py(facts: Facts) -> Verdict:
    """h5py is missing, or differs between the nodes."""
    hdf5 = facts["hdf5"]
    kind = "parallel: writer mpio" if hdf5["parallel"] else "serial: every rank writes by itself, writer posix"
    return "ok", f"HDF5 {hdf5['hdf5']}, h5py {hdf5['h5py']}, {kind}"


@check("folders", "MPI-IO", "staging.mount", "hdf5.h5py", fix=f"{_POSIX}; or a folder of the parallel file system")
def _mpi_io(ranks: Ranks) -> Verdict:
    """The staging folder is on NFS, and several nodes would write whole pages of one file."""
    mount = ranks[0]["staging"]["mount"]
    if not ranks[0]["hdf5"]["parallel"]:
        return "ok", "not used: h5py is serial"
    if not mount["type"].startswith("nfs") or len(by_node(ranks)) == 1:
        return "ok", "used by writer mpio; OMPI_MCA_io=romio321 is an alternative to Open MPI's own"
    text = (
        f"{describe(mount)}: its clients write whole pages back, so MPI-IO from several nodes is slow, or loses data "
    )
    return "warning", f"{text}unless it is mounted with noac and locks"


@check("folders", "HDF5 file", "file.seconds", errors="file", fix=f"see staging folder and HDF5 above; {_POSIX}")
def _file(ranks: Ranks) -> Verdict:
    """All ranks wrote a file together, and that failed, or the data read differ."""
    tried = ranks[0]["file"]
    return "ok", f"written by all ranks (writer {tried['writer']}) and read again in {tried['seconds'] * 1e3:.0f} ms"


def _route(name: str, ranks: Ranks) -> Verdict:
    row = ranks[0]["routes"][name]
    if "absent" in row:
        return "ok", f"not here: {row['absent']}"
    if not row["right"]:
        return "broken", "the data received differ from those sent"
    rate = row["bytes"] / max(row["seconds"], 1e-9) / 1e6
    return "ok", f"concat of 1 MiB a rank: {row['seconds'] * 1e3:7.2f} ms, {rate:6.0f} MB/s"


_ROUTES = {
    "nccl": "`NCCL_DEBUG=INFO` shows what NCCL tries; `NCCL_SOCKET_IFNAME`, `NCCL_IB_DISABLE=1`; /dev/shm",
    "gloo": "`unset GLOO_SOCKET_IFNAME`; look at the findings about the network",
    "mpi": "look at the findings about MPI and /dev/shm",
    "hdf5": "look at the finding about the staging folder",
}
for _name in select.ROUTES:
    check(
        "routes", f"route {_name}", f"routes.{_name}", errors=f"routes.{_name}", fix=_ROUTES[_name],
        meaning="A concat of 1 MiB a rank over this route failed, or brought wrong data.",
    )(partial(_route, _name))  # fmt: skip
