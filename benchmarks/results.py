"""The results of benchmark runs, and their statistics. It starts no MPI."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpcdist.tools.timing import Spread, Timing, spread

FOLDER = Path(__file__).parent / "results"
BASELINE = "mpi4py, preallocated"
CONTROL = "the same once more (control)"
# The plain call, which chooses its route, and the same with each route that it could choose.
HPCDIST_NEW, HPCDIST_OUT, HPCDIST_SHARED = "hpcdist", "hpcdist, out=", "hpcdist, shared=True"
PLAN_OUT = "hpcdist plan, out="
ROUTES = {route: f"hpcdist, route {route}" for route in ("mpi", "gloo", "hdf5")}
MPI4PY_NEW, MPI4PY_PICKLE = "mpi4py, counts exchanged, new memory", "mpi4py, pickle"
GLOO_PADDED = "gloo, padded"
GLOO_BY_ROOT, GLOO_OBJECT = "gloo, sends to the root, broadcast", "gloo, all_gather_object"
GLOO_GROUP, MPI_GROUP = "gloo", "mpi"  # backend; the baseline is gloo
# redistribute; the baseline is pack, Alltoallv, unpack
DTENSOR = "DTensor on gloo"
KINDS = {
    "columns": "rows to columns",
    "rows": "columns to rows",
    "tiles": "rows to tiles",
    "ragged": "ragged rows to even rows",
}
# staging; the baseline is the operating system's calls for the same bytes in one shared file
POSIX = "POSIX"
PLAIN_H5PY, H5PY_ALONE = "h5py, collective", "h5py, each rank on its own"
WRITER = "staging writer"  # key in a record's versions: the meaning of writer="auto"
# checkpoints
SAVE, LOAD, ELSEWHERE = "save", "load", "load of what one rank has saved"
# overlap; the baseline is one after the other
AFTER, TOGETHER = "one after the other", "at once"
TRANSFER, COMPUTE = "the transfer alone", "the computation alone"
# What a case's `skew` and `what` mean, where they are keys.
WORDS = {
    **KINDS,
    "even": "",
    "16:1": "16:1",
    "dim1": "dim 1",
    "small": "1,000 small tensors to the next rank",
    "large": "10 tensors of 8 MiB to the next rank",
    "many": "16 tensors from every rank to all",
    "metrics": "sums of 1,000 numbers in dicts",
    "mm": "products of matrices on this core",
    "sleep": "sleep: another device computes",
    "late": "products of matrices, rank 1 starts 50 ms late",
    "mpi": ROUTES["mpi"],
    "gloo": ROUTES["gloo"],
    "Iallgather": "mpi4py, Iallgather",
    "gloo-async": "gloo, async_op=True",
}


@dataclass
class Case:
    """A case: all contenders, timed in the same rounds.

    Attributes:
        size: bytes of an even shard, or of rank 0's shard if the skew is not "even"; for staging, the mean.
        skew: "even" or "16:1"; for staging, the partition of the tensor.
        nbytes: bytes of each rank's shard.
        timings: timings of the contenders, the baseline first.
        what: kind of case, if a record has several: "save" or "load"; "send" or "gather".
    """

    size: int
    skew: str
    nbytes: list[int]
    timings: list[Timing]
    what: str = ""

    def timing(self, name: str) -> Timing | None:
        """Return the timing of a contender; None if it is unknown or was skipped."""
        return next((t for t in self.timings if t.name == name and not t.skipped), None)

    @property
    def label(self) -> str:
        """What was moved: the size of rank 0's shard, and the kind of case."""
        size = "" if "step" in self.what else show_size(self.size)
        parts = (self.what and WORDS.get(self.what, self.what), size, WORDS.get(self.skew, self.skew))
        return ", ".join(filter(None, parts))


@dataclass
class Peak:
    """Peak memory of one call in bytes: the additional memory of the process, including the result (maximum over all
    ranks), and the size of the result."""

    name: str
    extra: int
    result: int


@dataclass
class Amount:
    """A figure that was measured in some rounds, relative to `per`: bytes to the fewest, seconds to 1."""

    name: str
    values: list[float]
    per: float

    @property
    def spread(self) -> Spread:
        return spread([value / self.per for value in self.values])


@dataclass
class Resident:
    """Peak resident memory of each rank's whole process, in a command on `nbytes` of data."""

    command: str
    nbytes: int
    ranks: list[int]


@dataclass
class Record:
    """One run of one verb: software, machine, and all samples.

    Attributes:
        peaks: peak memory of a rank in one call of each contender.
        nodes: memory of all ranks together while they hold the results of one call of each contender.
        amounts: other figures.
    """

    verb: str
    world_size: int
    mpi: str
    versions: dict[str, str]
    machine: str
    threads: int
    date: str
    cases: list[Case] = field(default_factory=list)
    peaks: list[Peak] = field(default_factory=list)
    no_peaks: str | None = None
    resident: Resident | None = None
    nodes: list[Peak] = field(default_factory=list)
    amounts: list[Amount] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of its file and its table: <mpi>-np<N>-<verb>."""
        vendor = self.mpi.rsplit(" ", 1)[0]
        return f"{vendor.lower().replace(' ', '')}-np{self.world_size}-{self.verb}"

    def case(self, size: int, skew: str, what: str = "") -> Case | None:
        found = (case for case in self.cases if (case.size, case.skew, case.what) == (size, skew, what))
        return next(found, None)


def save(record: Record, path: Path) -> Path:
    """Write the record to `path`, or under its own name if that is a folder. One line per case."""
    path = path / f"{record.name}.json" if path.is_dir() else path
    whole = asdict(record)
    cases, peaks = whole.pop("cases"), whole.pop("peaks")
    lists = [f'"{key}": [\n  {_lines(value)}\n]' for key, value in (("cases", cases), ("peaks", peaks))]
    path.write_text(json.dumps(whole, indent=1).removesuffix("\n}") + ",\n" + ",\n".join(lists) + "\n}\n")
    return path


def _lines(values: Sequence[object]) -> str:
    return ",\n  ".join(json.dumps(value) for value in values)


def load(path: Path) -> Record:
    """Read what :func:`save` wrote."""
    whole = json.loads(path.read_text())
    cases = [Case(**{**case, "timings": [Timing(**t) for t in case["timings"]]}) for case in whole.pop("cases")]
    peaks = [Peak(**peak) for peak in whole.pop("peaks")]
    nodes = [Peak(**peak) for peak in whole.pop("nodes", [])]
    amounts = [Amount(**amount) for amount in whole.pop("amounts", [])]
    resident = Resident(**found) if (found := whole.pop("resident", None)) else None
    return Record(**whole, cases=cases, peaks=peaks, nodes=nodes, amounts=amounts, resident=resident)


def load_all(folder: Path = FOLDER) -> list[Record]:
    """Load all records in a folder, by name."""
    return sorted((load(path) for path in folder.glob("*-np*.json")), key=lambda record: record.name)


def pairs(case: Case, name: str, other: str = BASELINE) -> list[tuple[float, float]]:
    """Return (seconds of `name`, seconds of `other`) of the rounds with both; empty if one was not timed."""
    first, second = case.timing(name), case.timing(other)
    if first is None or second is None:
        return []
    both = zip(first.samples, second.samples, strict=True)
    return [(a, b) for a, b in both if a is not None and b is not None]


def ratio(case: Case, name: str, other: str = BASELINE) -> Spread | None:
    """Compute the paired ratio: in each round, the time of `name` divided by that of `other`."""
    both = pairs(case, name, other)
    return spread([a / b for a, b in both]) if both else None


def difference(case: Case, name: str, other: str = BASELINE) -> Spread | None:
    """Compute the paired difference: in each round, the time of `name` minus that of `other`, in seconds."""
    both = pairs(case, name, other)
    return spread([a - b for a, b in both]) if both else None


def best(case: Case, names: Sequence[str]) -> str | None:
    """Return the contender of `names` with the smallest median time; None if none was timed."""
    timings = [timing for timing in map(case.timing, names) if timing]
    return min(timings, key=lambda timing: timing.seconds.median).name if timings else None


def by_hand(case: Case) -> list[str]:
    """Return the contenders that were timed and are not hpcdist's, the control aside."""
    names = [t.name for t in case.timings if not t.skipped and t.name not in (CONTROL, MPI_GROUP)]
    return [name for name in names if "hpcdist" not in name and not name.startswith("staging.")]


def alike(value: float) -> Spread:
    """Return a single figure, without a spread."""
    return Spread(value, value, value)


def faster(case: Case, ours: str, others: Sequence[str] = ()) -> Spread | None:
    """Return how many times faster ours is than the fastest of the others (all by hand), in pairs of a round."""
    other = best(case, others or by_hand(case))
    return None if other is None else ratio(case, other, ours)


def overlap(case: Case) -> Spread | None:
    """Return the saved time of each round, relative to the maximum: the shorter of transfer and computation."""
    timings = [case.timing(name) for name in (AFTER, TOGETHER, TRANSFER, COMPUTE)]
    rounds = zip(*(timing.samples for timing in timings if timing), strict=True)
    found = [(a - b) / min(t, c) for a, b, t, c in (r for r in rounds if len(r) == len(timings) and None not in r)]
    return spread(found) if found else None


def gigabytes_per_second(case: Case, timing: Timing) -> float:
    """Compute the bytes of the whole tensor divided by the median time of a call, in 1e9 bytes per second."""
    return sum(case.nbytes) / timing.seconds.median / 1e9


def show_size(nbytes: int) -> str:
    """Format a size.

    Example::

        >>> show_size(65536)
        '64 KiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes} {unit}"
        nbytes //= 1024
    return f"{nbytes} GiB"
