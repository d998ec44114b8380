"""The data loader beside torch's DataLoader over h5py, beside indexing of memory, and over wires of 1 Gbit/s.

mpirun -n 2 python benchmarks/data.py --folder DIR          DIR on the disk to measure, with space for 3 times --size
mpirun -n 2 python benchmarks/data.py --only memory,warm --size 1G --rounds 10
python benchmarks/data.py --hosts                           two hosts of network namespaces: root, iproute2, util-linux

Parts: "bytes" that are read from the files; "cold": an epoch after the page cache was dropped; "memory": batches of
data in memory; "warm": the same beside files in the page cache; "first": the first batch of many small samples in many
files; "shuffle": how well keep="file" shuffles. --hosts: bytes on the wire, and what steps hide of an epoch.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import harness
import numpy as np
import report
import results
import torch
from mpi4py import MPI
from results import Amount
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

import hpcdist as hd
from hpcdist.data.dataset import BLOCK
from hpcdist.data.sampler import Order
from hpcdist.formats import plain

BATCH = 64
FEWEST, SHARE = 5, 2  # rounds, and seconds of all rounds, that each way gets at least
FIXED, SMALL, RAGGED = "samples of 16 KiB", "samples of 256 B", "samples of 1 to 64 KiB"
ROWS = {FIXED: 2**14, SMALL: 2**8}  # bytes of a sample
SHORTEST, LONGEST = 2**10, 2**16  # bytes of a ragged one
FILES, TINY = 1000, 16  # of "first": files, and bytes of a sample
KEEPS = ("node", "job", "file")
WINDOWS = (4, 16, 64, 256)  # blocks
OWN, OWN_AGAIN, OWN_LIST, OWN_CLONES = "x[idx]", results.CONTROL, "[xs[i] for i in idx]", "[xs[i].clone() for i in idx]"
LOADERS = {workers: f"DataLoader over h5py, num_workers={workers}" for workers in (0, 2)}
HPCDIST = {keep: f'hpcdist, keep="{keep}"' for keep in KEEPS}


# The files: every element of sample i is i


def in_parts(total: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(total, start + step)) for start in range(0, total, step))


def lengths_of(nbytes: int) -> np.ndarray:
    """Elements of the samples of a ragged field."""
    some = np.random.default_rng(0).integers(SHORTEST // 4, LONGEST // 4 + 1, 2 + 2 * nbytes // (SHORTEST + LONGEST))
    return some[: max(8, int(some.cumsum().searchsorted(nbytes // 4, "right")))]


def write(path: Path, layout: str, nbytes: int) -> None:
    """Write a file of contiguous datasets, and sync it, so that its pages can be dropped."""
    with h5py.File(path, "w") as file:
        if layout == RAGGED:
            lengths = lengths_of(nbytes)
            offsets = np.concatenate([[0], lengths.cumsum()])
            x = file.create_dataset("x", (offsets[-1],), "i4")
            file["offsets"] = offsets
            for a, b in in_parts(len(lengths), 2**10):
                x[offsets[a] : offsets[b]] = np.repeat(np.arange(a, b, dtype=np.int32), lengths[a:b])
        else:
            columns = ROWS[layout] // 4
            x = file.create_dataset("x", (max(8 * BATCH, nbytes // ROWS[layout]), columns), "i4")
            for a, b in in_parts(len(x), max(1, 2**25 // ROWS[layout])):
                x[a:b] = np.repeat(np.arange(a, b, dtype=np.int32)[:, None], columns, 1)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


@dataclass
class Case:
    """A file, and what the ways keep of it between their samples.

    Attributes:
        layout: FIXED, SMALL or RAGGED.
        own: this rank's copy of the samples, for the ways that index it.
    """

    comm: MPI.Intracomm
    path: Path
    layout: str
    nbytes: int
    own: Any = None
    loaders: list[hd.data.Loader] = field(default_factory=list)
    iterators: dict[str, Iterator[Any]] = field(default_factory=dict)

    @property
    def fields(self) -> Any:
        return [("x", "offsets")] if self.layout == RAGGED else "x"

    @property
    def batch(self) -> int:
        """Mean bytes of a batch of a rank."""
        return BATCH * ((SHORTEST + LONGEST) // 2 if self.layout == RAGGED else ROWS[self.layout])

    def drop(self) -> None:
        """Drop the file from the page cache. Collective."""
        self.comm.Barrier()
        drop([self.path])
        self.comm.Barrier()

    def page_in(self) -> None:
        page_in([self.path], self.comm)

    def close(self) -> None:
        for iterator in self.iterators.values():
            iterator.close()  # type: ignore[attr-defined]
        for loader in self.loaders:
            loader.close()
        self.iterators.clear()
        self.loaders.clear()
        self.own = None


def drop(paths: Sequence[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        plain.forget(fd)
        os.close(fd)


def page_in(paths: Sequence[Path], comm: MPI.Intracomm) -> None:
    """Read files, each rank a share of each. Collective."""
    buffer = bytearray(2**22)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            nbytes = path.stat().st_size
            at, end = (nbytes * (comm.rank + i) // comm.size for i in range(2))
            file.seek(at)
            while at < end and (got := file.readinto(memoryview(buffer)[: end - at])):
                at += got
    comm.Barrier()


# The ways: iterators of batches, without end


@dataclass(frozen=True)
class Way:
    """A way to get batches.

    Attributes:
        start: returns batches without end.
        batches: of a sample; 0 for an epoch.
        prepare: what is done before each sample, not timed.
    """

    name: str
    start: Callable[[Case], Iterator[Any]]
    batches: int
    prepare: Callable[[Case], None] = lambda case: None


def loaded(case: Case, keep: str) -> Iterator[Any]:
    """hpcdist's loader."""
    data = hd.data.open(case.path, case.fields, keep)
    loader = hd.data.Loader(data, BATCH)
    case.loaders.append(loader)
    while True:
        for batch in loader.epoch(loader.next_epoch):
            yield batch[0] if case.layout == RAGGED else batch


class Rows(torch.utils.data.Dataset[Tensor]):
    """Rows of an HDF5 file as people read them: each process opens it for itself."""

    def __init__(self, path: Path, layout: str) -> None:
        self.path, self.x, self.offsets = path, None, None
        with h5py.File(path, "r") as file:
            if layout == RAGGED:
                self.offsets = file["offsets"][:]
            self.samples = len(file["x"]) if self.offsets is None else len(self.offsets) - 1

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> Tensor:
        if self.x is None:
            self.x = h5py.File(self.path, "r")["x"]
        rows = self.x[i] if self.offsets is None else self.x[self.offsets[i] : self.offsets[i + 1]]
        return torch.from_numpy(rows)


def by_rows(case: Case, workers: int) -> Iterator[Any]:
    """torch's DataLoader and DistributedSampler."""
    rows = Rows(case.path, case.layout)
    sampler: DistributedSampler[Tensor] = DistributedSampler(rows, case.comm.size, case.comm.rank)
    collate = list if case.layout == RAGGED else None
    loader = DataLoader(rows, BATCH, sampler=sampler, num_workers=workers, collate_fn=collate)
    for epoch in range(2**62):
        sampler.set_epoch(epoch)
        yield from loader


def own(case: Case) -> Any:
    """This rank's copy of all samples."""
    if case.own is None:
        with h5py.File(case.path, "r") as file:
            x = torch.empty(file["x"].shape, dtype=torch.int32)
            file["x"].read_direct(x.numpy())
            if case.layout == RAGGED:
                x = list(x.split(np.diff(file["offsets"][:]).tolist()))
        case.own = x
    return case.own


def indexed(case: Case, take: Callable[[Any, Any], Any]) -> Iterator[Any]:
    x, generator = own(case), torch.Generator().manual_seed(case.comm.rank)
    while True:
        order = torch.randperm(len(x), generator=generator)
        for idx in order.split(BATCH) if isinstance(x, Tensor) else map(Tensor.tolist, order.split(BATCH)):
            yield take(x, idx)


def right(case: Case, batch: Any) -> bool:
    """Whether these are samples of the file."""
    return len(batch) == BATCH and all(len(x) and bool((x == x[0]).all()) for x in batch)


def sample(case: Case, way: Way) -> tuple[float, int]:
    """Return the seconds per batch, on the slowest rank, and the number of batches. Collective."""
    iterator, batches = case.iterators[way.name], way.batches or len(case.loaders[-1])
    way.prepare(case)
    case.comm.Barrier()
    start = time.perf_counter()
    for _ in range(batches):
        next(iterator)
    return float(case.comm.allreduce(time.perf_counter() - start, op=MPI.MAX)) / batches, batches


def measure(case: Case, ways: Sequence[Way], rounds: int, seconds: float) -> list[results.Timing]:
    """Check all ways, then time them in turn; slow ones in fewer rounds, if necessary. Collective."""
    until, timings, costs = time.monotonic() + seconds, [], []
    for way in ways:
        iterator = case.iterators[way.name] = way.start(case)
        ok = case.comm.allgather(right(case, next(iterator)))
        if not all(ok):
            raise SystemExit(f"{way.name!r} gave wrong data on ranks {[i for i, good in enumerate(ok) if not good]}")
        if not way.batches:  # what is left of the epoch
            for _ in range(len(case.loaders[-1]) - 1):
                next(iterator)
        begin = time.monotonic()
        _, batches = sample(case, way)
        costs.append(case.comm.bcast(time.monotonic() - begin))
        timings.append(results.Timing(way.name, batches, []))
    share = max(SHARE, case.comm.bcast(until - time.monotonic()) / len(ways))
    taken = [min(rounds, max(FEWEST, int(share / cost))) for cost in costs]
    total = max(taken)
    turns = [{i * total // n for i in range(n)} for n in taken]
    for round_ in range(total):
        found: dict[int, float] = {}
        for i in random.Random(round_).sample(range(len(ways)), len(ways)):
            if round_ in turns[i]:
                found[i] = float(f"{sample(case, ways[i])[0]:.4g}")
        for i, timing in enumerate(timings):
            timing.samples.append(found.get(i))
    case.close()
    return timings


def whole(name: str, keep: str, prepare: Callable[[Case], None]) -> Way:
    return Way(name, partial(loaded, keep=keep), 0, prepare)


def ways(what: str, layout: str) -> list[Way]:
    if what == "cold":
        by_h5py = [Way(name, partial(by_rows, workers=n), 24, Case.drop) for n, name in LOADERS.items()]
        return [*by_h5py, whole(HPCDIST["file"], "file", Case.drop)]
    if what == "warm":
        by_h5py = [Way(name, partial(by_rows, workers=n), 48, Case.page_in) for n, name in LOADERS.items()]
        kept = [whole(HPCDIST["file"], "file", Case.page_in)]
        return [*by_h5py, Way(HPCDIST["node"], partial(loaded, keep="node"), 200), *kept]
    batches = 1000 if layout == SMALL else 200
    node = Way(HPCDIST["node"], partial(loaded, keep="node"), batches)
    if layout == RAGGED:
        lists = {
            OWN_LIST: lambda xs, idx: [xs[i] for i in idx],
            OWN_CLONES: lambda xs, idx: [xs[i].clone() for i in idx],
        }
        return [*(Way(name, partial(indexed, take=take), batches) for name, take in lists.items()), node]
    take = partial(indexed, take=lambda x, idx: x[idx])
    return [Way(OWN, take, batches), Way(OWN_AGAIN, take, batches), node]


LAYOUTS = {"cold": (FIXED, RAGGED), "memory": (FIXED, SMALL, RAGGED), "warm": (FIXED, RAGGED)}


# Amounts


def counted() -> np.ndarray:
    """Bytes that this process has read so far: from the disk, and by calls that read."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return np.array([int(found["read_bytes"]), int(found["rchar"])])


def read_bytes(case: Case, keep: str) -> list[int]:
    """Bytes that all ranks read from the files, by open() and one epoch: from the disk, and by calls. Collective."""
    case.drop()
    before = counted()
    loader = hd.data.Loader(hd.data.open(case.path, case.fields, keep), BATCH)
    for _ in loader.epoch(0):
        pass
    more = case.comm.allreduce(counted() - before)
    loader.close()
    return [int(n) for n in more]


def bytes_read(case: Case, rounds: int) -> Iterator[Amount]:
    total = case.path.stat().st_size
    for keep in KEEPS:
        found = [read_bytes(case, keep) for _ in range(min(rounds, 2))]
        for name, values in zip(("from the disk", "by calls"), zip(*found, strict=True), strict=True):
            yield Amount(f'bytes read {name}, keep="{keep}", {case.layout}', list(values), total)


def first_batch(comm: MPI.Intracomm, folder: Path, samples: int, rounds: int) -> Iterator[Amount]:
    """The seconds from open() to the first batch, less those that it takes to read the bytes of the files."""
    each, paths = max(BATCH, samples // FILES), [folder / f"{i:05d}.h5" for i in range(FILES)]
    folder.mkdir(exist_ok=True)
    for i in range(comm.rank, FILES, comm.size):
        with h5py.File(paths[i], "w") as file:
            rows = np.arange(i * each, (i + 1) * each, dtype=np.int32)
            file["x"] = np.repeat(rows[:, None], TINY // 4, 1)
    comm.Barrier()

    def plainly() -> None:
        for path in paths[comm.rank :: comm.size]:
            path.read_bytes()

    def by_hpcdist(keep: str) -> None:
        loader = hd.data.Loader(hd.data.open(folder, "x", keep), BATCH)
        batches = loader.epoch(0)
        next(batches)
        ends.append((loader, batches))

    def timed(call: Callable[[], None]) -> float:
        comm.Barrier()
        start = time.perf_counter()
        call()
        found = float(comm.allreduce(time.perf_counter() - start, op=MPI.MAX))
        while ends:
            loader, batches = ends.pop()
            batches.close()
            loader.close()
        return found

    ends: list[tuple[hd.data.Loader, Any]] = []
    steps = {"plain": plainly} | {keep: partial(by_hpcdist, keep) for keep in KEEPS}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(-1, min(rounds, 5)):  # the first one warms up
        for name in random.Random(round_).sample([*steps], len(steps)):
            seconds = timed(steps[name])
            if round_ >= 0:
                found[name].append(seconds)
    label = f"{each * FILES:,} samples in {FILES:,} files"
    yield Amount(f"reading the bytes of {label}, s", found["plain"], 1)
    for keep in KEEPS:
        more = [a - b for a, b in zip(found[keep], found["plain"], strict=True)]
        yield Amount(f'first batch of {label}, keep="{keep}", s beyond reading', more, 1)


def neighbours(cuts: np.ndarray, window: int, seed: int) -> float:
    """The mean distance of samples that follow each other in an epoch of keep="file"."""
    order = Order(cuts, window, (seed, 0))
    found = order(np.arange(cuts[-1]))
    assert (np.bincount(found) == 1).all()
    return float(np.abs(np.diff(found)).mean())


def expected(blocks: int, window: int) -> float:
    """The same, relative to that of a permutation, n/3: of blocks of many samples, window among them.

    Two neighbours are of one block with probability 1/W, and then n/(3M) apart, for M blocks. Those of two blocks are
    n/3 (1 + 1/M) apart, as blocks of which none is taken twice: (1 - 1/W)(1 + 1/M) + 1/(MW).
    """
    return 1 - 1 / window + 1 / blocks


def shuffled(nbytes: int) -> Iterator[Amount]:
    samples = max(2**12, nbytes // ROWS[FIXED])
    blocks = max(2 * WINDOWS[-1], samples * ROWS[FIXED] // BLOCK)
    cuts = samples * np.arange(blocks + 1) // blocks
    third = samples / 3
    for window in WINDOWS:
        found = [neighbours(cuts, window, seed) for seed in range(5)]
        name = f"distance of neighbours / that of a permutation, window of {window} of {blocks:,} blocks"
        yield Amount(name, found, third)
        yield Amount(f"{name}: by the formula", [expected(blocks, window) * third], third)


# Two hosts


@contextmanager
def wire() -> Iterator[list[int]]:
    """Yield a list, to which the bytes received and sent by this host's wire meanwhile are added. Collective."""

    def traffic() -> list[int]:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
        values = next(line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
        return [int(values[0]), int(values[8])]

    found, before = [], traffic()
    yield found
    time.sleep(0.05)  # acknowledgements may still be on their way
    found += [b - a for a, b in zip(before, traffic(), strict=True)]


def matrix_products(count: int) -> None:
    for _ in range(count):
        torch.mm(MATRIX, MATRIX)


MATRIX = torch.ones(128, 128)
STEPS: dict[str, Callable[[int], None]] = {
    "sleep": lambda count: time.sleep(count * 1e-6),
    "products of matrices": matrix_products,
}


def over_wires(comm: MPI.Intracomm, path: Path, rounds: int, host: Callable[[], Any] = wire) -> Iterator[Amount]:
    """Epochs of keep="job": what is on the wires, and what is hidden behind steps that take as long as a batch."""
    data = hd.data.open(path, "x", "job")
    loader = hd.data.Loader(data, BATCH)
    batches, total = len(loader), len(data) * ROWS[FIXED]

    def timed(call: Callable[[], None]) -> float:
        comm.Barrier()
        start = time.perf_counter()
        call()
        return float(comm.allreduce(time.perf_counter() - start, op=MPI.MAX))

    def epoch(step: Callable[[], None] = lambda: None) -> None:
        for _ in loader.epoch(loader.next_epoch):
            step()

    def steps(step: Callable[[], None]) -> None:
        for _ in range(batches):
            step()

    epoch()
    each = timed(epoch) / batches
    calls = {"sleep": round(each * 1e6)}
    torch.set_num_threads(1)
    calls["products of matrices"] = max(1, round(each / (timed(partial(matrix_products, 1000)) / 1000)))
    names = ["epoch", *(f"{kind}{end}" for kind in STEPS for end in ("", ", steps alone"))]
    found: dict[str, list[float]] = {name: [] for name in names}
    carried = []
    for round_ in range(rounds):
        for name in random.Random(round_).sample(names, len(names)):
            kind, _, alone = name.partition(", ")
            comm.Barrier()
            with host() as traffic:
                if kind == "epoch":
                    seconds = timed(epoch)
                else:
                    step = partial(STEPS[kind], calls[kind])
                    seconds = timed(partial(steps if alone else epoch, step))
                comm.Barrier()
            found[name].append(float(f"{seconds:.4g}"))
            if kind == "epoch":
                carried.append(max(comm.allgather(traffic[0])))
    loader.close()
    # Of the samples that a rank gets, half are on the other host: each host receives that part.
    yield Amount("bytes received by a host, an epoch, / the fewest", carried, total / 2 / comm.size)
    yield Amount("epoch, s", found["epoch"], 1)
    for kind in STEPS:
        pairs = zip(found[kind], found[f"{kind}, steps alone"], strict=True)
        yield Amount(f"epoch with steps as long ({kind}) / the steps alone", [a / b for a, b in pairs], 1)


def on_hosts(asked: argparse.Namespace) -> None:
    """Start this program on two hosts."""
    tests = Path(__file__).parents[1] / "tests"
    sys.path += [str(tests / "cluster"), str(tests / "helpers")]
    from hosts import Hosts

    options = ["--inside", "--size", str(asked.size), "--rounds", str(asked.rounds)]
    options += ["--json", str(asked.json.resolve())] if asked.json else []
    with Hosts(2) as hosts:
        hosts.rate("1gbit")
        environ = {"PYTHONPATH": os.pathsep.join([str(tests / "helpers"), str(Path(__file__).parent)])}
        program = [Path(__file__).resolve(), *options, "--folder", hosts.folder]
        job = hosts.start_mpirun([1, 1], *program, env=environ).wait(900)
    print(job.out)
    if job.status:
        raise SystemExit(job.err)


# The runs


def made(comm: MPI.Intracomm, folder: Path, layout: str, size: int) -> Case:
    """A case, and its file, if there is none yet. Collective."""
    path = folder / f"{layout.replace(' ', '-')}.h5"
    nbytes = size // 4 if layout == SMALL else size
    if comm.rank == 0 and not path.exists():
        write(path, layout, nbytes)
    comm.Barrier()
    return Case(comm, path, layout, nbytes)


def amounts(
    part: str, comm: MPI.Intracomm, case: Case | None, folder: Path, asked: argparse.Namespace
) -> Iterator[Amount]:
    """Measure a part without ways that are compared. Collective."""
    if part == "shuffle":
        return shuffled(asked.size)
    if case is None:
        return first_batch(comm, folder / "many", min(10**7, asked.size // 100), asked.rounds)
    return bytes_read(case, asked.rounds) if part == "bytes" else over_wires(comm, case.path, min(asked.rounds, 5))


def run(asked: argparse.Namespace, comm: MPI.Intracomm, folder: Path) -> None:
    """Measure all that is asked for, print on rank 0, write JSON."""
    root, end = comm.rank == 0, time.monotonic() + asked.seconds
    record = harness.start("data-hosts" if asked.inside else "data", comm)
    record.versions |= {"h5py": h5py.__version__, "data of": results.show_size(asked.size)}
    steps = [("wires", FIXED)] if asked.inside else [(part, layout) for part in asked.only for layout in PARTS[part]]
    for done, (part, layout) in enumerate(tqdm(steps, "data", disable=None if root else True)):
        seconds = comm.bcast(max(0, end - time.monotonic()) / (len(steps) - done))
        case = made(comm, folder, layout, asked.size) if layout else None
        if part in LAYOUTS:
            timings = measure(case, ways(part, layout), asked.rounds, seconds)
            record.cases.append(results.Case(case.batch, layout, [case.batch] * comm.size, timings, part))
            text = report.case_table(record, record.cases[-1])
        else:
            found = list(amounts(part, comm, case, folder, asked))
            record.amounts += found
            text = report.amounts_table(f"{record.verb}, np {comm.size}: {part}", found)
        if root:
            tqdm.write(text + "\n")
        if root and asked.json:  # keeps the measurements if the run is interrupted
            results.save(record, asked.json)


PARTS = {"bytes": (FIXED, RAGGED), **LAYOUTS, "first": ("",), "shuffle": ("",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.choice(parser, "--only", PARTS)
    parser.add_argument(
        "--size", type=lambda text: harness.sizes(text)[0], default="4G", help="bytes of the data (%(default)s)"
    )
    parser.add_argument("--rounds", type=harness.rounds, default=10, help="samples per way (%(default)s)")
    parser.add_argument("--seconds", type=float, default=400, help="target duration of the timed parts (%(default)g)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--hosts", action="store_true", help="start two hosts, without mpirun")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all samples; in a folder: MPI-npN-data")
    asked = parser.parse_args()
    if asked.hosts:
        on_hosts(asked)
        return
    with hd.init(device="cpu") as world, harness.shared_folder(world.comm, asked.folder, "data") as folder:
        run(asked, world.comm, folder)


if __name__ == "__main__":
    main()
