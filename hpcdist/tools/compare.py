"""The command ``mpirun -n N python -m hpcdist compare``: time a user's calls, by hand and with hpcdist, and report.

First the data of a call, and common ways to write it by hand. Each is correct for ragged shards. Only preallocated
mpi4py and torch's lists have the counts of all ranks in advance; the others exchange them, as a program must.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.collectives.join import concat, gather
from hpcdist.collectives.plans import plan
from hpcdist.collectives.redistribute import redistribute
from hpcdist.collectives.split import split
from hpcdist.comm.tuning import ALGORITHMS, Rule, fingerprint
from hpcdist.control.objects import run_on_all, run_on_root
from hpcdist.errors import InputError
from hpcdist.formats.paths import check_target, file_errors, read_json, write_text
from hpcdist.layout import Split
from hpcdist.routes.select import load
from hpcdist.runtime.cli import Table, progress, run, write_page
from hpcdist.runtime.commandline import Parser, path, plural, show_bytes
from hpcdist.runtime.world import World, team_of
from hpcdist.tensors import accelerator
from hpcdist.tensors.storage import bits
from hpcdist.tools.timing import Contender, Spread, Timing, measure
from hpcdist.tools.trace import collectives, read

if TYPE_CHECKING:
    from mpi4py import MPI

VERBS: dict[str, Callable[..., Any]]
VERBS = {"concat": concat, "gather": gather, "split": split, "redistribute": redistribute}
# Those that gloo carries
_NAMES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
_MPI = {"concat": "allgather", "gather": "gather", "split": "scatter", "redistribute": "alltoall"}
_LISTS = (dist.scatter, dist.gather, dist.all_gather)
_OBJECTS = (dist.scatter_object_list, dist.gather_object, dist.all_gather_object)
_LIKE = {"all_gather": "concat", "all_gather_single": "concat"}  # torch's names in a trace
_ROUNDS = 30  # samples of each way, at most
_MOST = 8  # cases of a trace: those that take most time
_FORMAT = "hpcdist compare 1"
# First words of the ways; what the picture calls the fastest of them, and its colour
_KINDS = {
    "hpcdist": ("hpcdist", "#1f5fa8"),
    "mpi4py": ("mpi4py by hand", "#8d99a8"),
    "torch": ("torch idioms", "#c3cad3"),
}
Ways = dict[str, Spread]  # those of a case, the fastest first
Bar = tuple[str, str, Spread, str]  # label, colour, time, its text
Group = tuple[str, list[Bar]]  # of the picture: a title, and bars
Report = tuple[list[str], list[Table], list[Group]]  # sentences, a table for each case, and what is drawn


class Case:
    """The data of one call on this rank; a value is its index in the whole tensor, modulo what the dtype holds exactly.

    Args:
        shapes: of all ranks' shards: of the input of concat, gather and redistribute, and of the result of split. They
            differ in dim 0 only. redistribute changes blocks of rows to blocks of columns.
        group: torch's group of all ranks, for what is written with torch; None is the default group.

    Attributes:
        x, expected, out: the input and the result of this rank, if any, and memory for the result.
        rows, nbytes: of the shard of each rank.
        parts: what the ranks get of the input of split and redistribute.
        counts: the elements of the result that come from each rank.
        args, options: the arguments of hpcdist's verb.
        send, recv: what mpi4py sends and receives, in host memory.
        packs, unpacks: the copies to `send` and from `recv`, as pairs (to, of).
        plan: the call as a plan; made at its first use, which is collective.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        verb: str,
        dtype: torch.dtype,
        shapes: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.comm, self.rank, self.verb, self.dtype, self.group = comm, comm.rank, verb, dtype, group
        self.rows, self.rest = [shape[0] for shape in shapes], list(shapes[0][1:])
        self.nbytes = [prod(shape) * dtype.itemsize for shape in shapes]
        self.x: Any
        self.out: Any
        self.x, self.expected = self._data()
        self._kept = [(x, x.clone()) for x in (self.x, self.expected) if x is not None]
        splits, columns = verb == "split", verb == "redistribute"
        layouts = (Split(0, counts=tuple(self.rows)), Split(1)) if columns else ()
        self.args = (self.x, *layouts)
        self.options: dict[str, Any] = {"counts": self.rows} if splits and self.rank == 0 else {}
        self.parts: Sequence[Tensor] = [] if self.x is None else [self.x]
        if self.parts and (splits or columns):
            self.parts = self.x.tensor_split(comm.size, 1) if columns else torch.split(self.x, self.rows)
        sent = [part.numel() for part in self.parts]
        host, pinned = self.x, self.device.type != "cpu"
        self.packs, self.unpacks = list[Any](), list[Any]()
        if self.parts and (columns or pinned):
            host = torch.empty(self.x.numel(), dtype=dtype, device="cpu", pin_memory=pinned)
            self.packs = [(to.view(of.shape), of) for to, of in zip(torch.split(host, sent), self.parts, strict=True)]
        self.send = _message(host, sent if splits or columns else None)
        self.out, self.recv, self.counts = None, None, list[int]()
        if self.expected is not None:
            self.out = host = torch.empty_like(self.expected)
            self.counts = [rows * prod(host.shape[1:]) for rows in self.rows]
            if pinned:
                host = torch.empty_like(host, device="cpu", pin_memory=True)
                self.unpacks = [(self.out, host)]
            self.recv = _message(host, None if splits else self.counts)

    def _data(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the input and the expected result of this rank."""
        edges = [*accumulate(self.rows, initial=0)]
        index = torch.arange(edges[-1] * prod(self.rest), device=self.device)
        values = index.remainder_(self._bound()).to(self.dtype).view(edges[-1], *self.rest)
        shard = values[edges[self.rank] : edges[self.rank + 1]].clone()
        whole = values if self.verb == "concat" or self.rank == 0 else None
        if self.verb == "redistribute":
            return shard, values.tensor_split(self.comm.size, 1)[self.rank].contiguous()
        return (whole, shard) if self.verb == "split" else (shard, whole)

    def _bound(self) -> int:
        """Return an odd number, since sizes are mostly even, up to which the dtype holds every integer."""
        floating = self.dtype.is_floating_point
        return int(2 / torch.finfo(self.dtype).eps) - 1 if floating else torch.iinfo(self.dtype).max

    def reset(self) -> None:
        if self.out is not None:
            self.out.fill_(self._bound())  # which no value is

    def correct(self, result: Tensor | None) -> bool:
        if result is None or self.expected is None:
            return result is self.expected
        return torch.equal(result, self.expected)

    def intact(self) -> bool:
        return all(torch.equal(x, kept) for x, kept in self._kept)

    @cached_property
    def plan(self) -> Callable[..., Any]:
        return plan(VERBS[self.verb], *self.args, **self.options)


def _message(x: Tensor | None, counts: Sequence[int] | None = None) -> Any:
    """Return mpi4py's specification of a buffer; numpy does not know all dtypes."""
    if x is None:
        return None
    buffer = bits(x).numpy()
    return [buffer, counts] if counts else buffer


def ours(case: Case, **options: Any) -> Any:
    """hpcdist's verb, as a program calls it."""
    return VERBS[case.verb](*case.args, **case.options, **options)


def forced(operation: str, rule: Rule, repeats: dict[Any, Any], case: Case) -> Any:
    """The verb by one algorithm, whatever the rules are; `repeats` are those of earlier such calls."""
    with team_of().forced(operation, rule, repeats):
        return ours(case, route="nccl" if operation.startswith("nccl") else "auto")


def preallocated(case: Case) -> Any:
    """mpi4py as in its tutorial for arrays: into preallocated memory, counts known. redistribute packs the columns."""
    for to, of in case.packs:
        to.copy_(of)
    getattr(case.comm, f"{_MPI[case.verb].capitalize()}v")(case.send, case.recv)
    for to, of in case.unpacks:
        to.copy_(of)
    return case.out


def exchanged(case: Case) -> Any:
    """mpi4py, into a new tensor each time; the counts are exchanged first, with the lower-case call."""
    name, splits, width = _MPI[case.verb], case.verb == "split", prod(case.rest)
    x = None if case.x is None else case.x.cpu()
    rows: Any = getattr(case.comm, name)(case.rows if splits else len(case.x))  # of this rank, or of all ranks
    out = None
    if rows is not None:
        out = torch.empty(rows if splits else sum(rows), *case.rest, dtype=case.dtype, device="cpu")
    counts = [n * width for n in (case.rows if splits else rows or [])]
    sent, received = _message(x, counts if splits else None), _message(out, None if splits else counts)
    getattr(case.comm, f"{name.capitalize()}v")(sent, received)
    return None if out is None else out.to(case.device)


def pickled(case: Case) -> Any:
    """mpi4py's lower-case calls, which pickle tensors."""
    splits = case.verb == "split"  # pickle takes the whole memory in which a part lies
    found = getattr(case.comm, _MPI[case.verb])([part.clone().cpu() for part in case.parts] if splits else case.x.cpu())
    return _joined(case, [found] if splits else found)


def _joined(case: Case, parts: Any) -> Tensor | None:
    return None if parts is None else torch.cat([part.to(case.device) for part in parts])


def _by_lists(case: Case, sent: Any, received: Any, calls: Sequence[Any] = _LISTS) -> None:
    """Call the collective of torch whose list, sent or received, has a tensor or object for each rank."""
    if case.verb == "split":
        calls[0](received, sent, 0, group=case.group)
    elif case.verb == "gather":
        calls[1](sent, received if case.rank == 0 else None, 0, group=case.group)
    else:
        calls[2](received, sent, group=case.group)


def padded_to(x: Tensor, rows: int) -> Tensor:
    """Return `x` with that many rows, the last ones of any value."""
    return x if len(x) == rows else torch.cat([x, x.new_empty(rows - len(x), *x.shape[1:])])


def padded(case: Case) -> Any:
    """torch: exchange sizes, pad to the largest, all_gather (or gather, scatter) a list, trim, cat.

    torchmetrics' gather_all_tensors does so, and it is the usual answer on the PyTorch forum
    (discuss.pytorch.org, topic 44819). gloo's scatter refuses unequal parts (pytorch#84566).
    """
    sizes = sizes_of_all(case)
    most = max(sizes)
    mine = [padded_to(part, most) for part in case.parts]
    found = [torch.empty(most, *case.rest, dtype=case.dtype, device=case.device) for _ in sizes]
    if case.verb == "split":
        _by_lists(case, mine or None, found[0])
        return found[0][: sizes[case.rank]]
    _by_lists(case, mine[0], found)
    return _joined(case, [part[:size] for part, size in zip(found, sizes, strict=True)]) if case.counts else None


def known(case: Case) -> Any:
    """torch, the sizes known and into preallocated memory: lists without padding; redistribute by all_to_all_single."""
    if case.verb == "redistribute":
        packed, sent = torch.cat([part.flatten() for part in case.parts]), [part.numel() for part in case.parts]
        dist.all_to_all_single(case.out.view(-1), packed, case.counts, sent, group=case.group)
    elif case.verb == "split":
        _by_lists(case, [*case.parts] or None, case.out)
    else:
        _by_lists(case, case.x, case.counts and list(case.out.split(case.rows)))
    return case.out


def objects(case: Case) -> Any:
    """all_gather_object and its kin: torch pickles, pads and unpickles; as in detectron2 and many evaluation loops."""
    found, splits = [None] * case.comm.size, case.verb == "split"
    _by_lists(case, [part.clone() for part in case.parts] or None if splits else case.x, found, _OBJECTS)
    return _joined(case, found[:1] if splits else found) if case.counts else None


def sizes_of_all(case: Case) -> list[int]:
    """Exchange the rows of every rank's shard by torch: an all_gather of one integer, or a broadcast from the root."""
    sizes = torch.tensor(case.rows, device=case.device) * (case.rank == 0)  # the other ranks do not know them
    if case.verb == "split":
        dist.broadcast(sizes, 0, group=case.group)
    else:
        dist.all_gather(list(torch.split(sizes, 1)), torch.tensor([len(case.x)], device=case.device), group=case.group)
    return sizes.tolist()


def _columns(case: Case) -> str | None:
    return "not for redistribute" if case.verb == "redistribute" else None


def _uneven(case: Case) -> str | None:
    even = len({*case.rows}) == 1 or case.verb == "redistribute"
    ragged = case.verb == "concat" and dist.get_backend(case.group) == "nccl"
    return None if even or ragged else "torch refuses lists of unequal sizes"


def _no_choice(algorithm: str, case: Case) -> str | None:
    if case.verb != "concat":
        return "only for concat"
    usable = load("nccl").usable(team_of(), algorithm, sum(case.nbytes), max(case.nbytes))
    return None if usable else "only for equal messages"


CONTENDERS = [  # the name begins with the kind
    Contender("mpi4py, preallocated", preallocated),
    Contender("mpi4py, counts exchanged, new memory", exchanged, _columns),
    Contender("mpi4py, pickle", pickled, _columns),
    Contender("torch, padded", padded, _columns),
    Contender("torch, sizes known", known, _uneven),
    Contender("torch, objects", objects, _columns),
    Contender("hpcdist", ours),
    Contender("hpcdist, out=", lambda case: ours(case, out=case.out)),
    Contender("hpcdist plan, out=", lambda case: case.plan(case.x, case.out)),
]


def main(world: World, args: argparse.Namespace) -> int:
    """Time the cases and write the report, or compare two files. Collective.

    Returns:
        The exit status.
    """
    lines = run_on_root(world.comm, "compare", lambda: _asked(args, world.world_size))
    record = _measured(world, args.seconds, lines) if lines else {}
    text = run_on_root(world.comm, "compare", lambda: _reported(args, record))
    if world.rank == 0:
        print(text, flush=True)
    return 0


def _asked(args: argparse.Namespace, size: int) -> list[str]:
    """Return the lines of the cases, which parse() takes; none if two files are compared."""
    if len(args.files) != (0 if args.shapes or args.like else 2):
        raise InputError("HD505", "expected two files, or --shapes, or --like")
    args.output = args.output or ("change" if args.files else "compare")
    for name in (args.output, *(Path(args.output).with_suffix(suffix) for suffix in (".json", ".html"))):
        check_target(name, 0)
    if args.like:
        return _traced(Path(args.like), size)
    if not args.shapes:
        return []
    with file_errors(args.shapes):
        text = Path(args.shapes).read_text()
    lines = [*filter(None, (line.partition("#")[0].strip() for line in text.splitlines()))]
    if not lines:
        raise InputError("HD505", f"{args.shapes}: has no case")
    for line in lines:
        parse(line, size)
    return lines


def parse(line: str, size: int) -> tuple[str, str, list[list[int]]]:
    """Parse a case: a verb, a dtype, and the shapes of the ranks' shards; the last shape is that of all other ranks.

    Raises:
        InputError: it is not a case for `size` ranks.
    """
    shape = r"\d{1,12}(?:x\d{1,12})*"
    found = re.fullmatch(rf"({'|'.join(VERBS)})\s+({'|'.join(DTYPES)})((?:\s+{shape})+)", line)
    if not found:
        expected = f"{' or '.join(VERBS)}, {' or '.join(DTYPES)}, and shapes such as 1000x64"
        raise InputError("HD505", f"{line!r}: expected {expected}")
    verb, dtype, words = found.groups()
    shapes = [[int(n) for n in word.split("x")] for word in words.split()]
    dims = {tuple(shape[1:]) for shape in shapes}
    if len(dims) > 1 or len(shapes) > size or (verb == "redistribute" and dims == {()}):
        what = f"up to {plural(size, 'shape')}, which differ in dim 0 only; two dims or more for redistribute"
        raise InputError("HD505", f"{line!r}: expected {what}")
    return verb, dtype, shapes + shapes[-1:] * (size - len(shapes))


def _traced(folder: Path, size: int) -> list[str]:
    """Return the cases of a trace that take most time: the verbs and bytes of its calls."""
    trace = read(folder)
    if (world := trace.headers[0].world_size) != size:
        raise InputError("HD505", f"{folder}: is of {plural(world, 'rank')}; compare on as many")
    names = [re.split(r"\W", call)[0] for call in trace.calls]
    order, first = collectives(trace.rows, "rank")
    cost = defaultdict[str, int](int)
    calls: list[Any] = np.split(trace.rows[order], first[1:])
    for call in calls:
        counts, name = call.payload.tolist(), names[call.call[0]]
        verb = _LIKE.get(name, name)
        if len(call) < size or verb not in ("concat", "gather", "split") or not any(counts):
            continue
        if name != verb:  # the bytes of torch's calls are those of input and output
            counts = [count - sum(counts) // (size + 1) for count in counts]
        if verb == "split":  # the trace has the root's bytes only
            counts = [sum(counts) // size]
        dtype, itemsize = ("int64", 8) if all(count % 8 == 0 for count in counts) else ("uint8", 1)
        counts = counts[:1] if len({*counts}) == 1 else counts
        line = f"{verb} {dtype} {' '.join(str(count // itemsize) for count in counts)}"
        cost[line] += int((call.end - call.begin - call.waited).sum())
    if not cost:
        what = "calls of concat, gather, split or torch's all_gather by all ranks"
        raise InputError("HD505", f"{folder}: expected {what}")
    return sorted(cost, key=lambda line: -cost[line])[:_MOST]


def _add(cases: list[Case], *args: Any) -> None:
    cases.append(Case(*args))


def _measured(world: World, seconds: float, lines: list[str]) -> dict[str, Any]:
    """Time all contenders in all cases. Collective."""
    group = dist.new_group(backend=accelerator.LIBRARY if world.settings.own_gpus else "gloo")
    cases, made, ways = [], list[Case](), [*CONTENDERS]
    if load("nccl").missing(team_of()) is None:
        for name in ALGORITHMS["nccl allgatherv"]:
            call = partial(forced, "nccl allgatherv", Rule(0, 0, name), {})
            ways.append(Contender(f"algorithm {name}", call, partial(_no_choice, name)))
    for line in progress(lines, world, "compare"):
        verb, dtype, shapes = parse(line, world.world_size)
        make = partial(_add, made, world.comm, verb, DTYPES[dtype], shapes, world.device, group)
        run_on_all(world.comm, line, make)  # there may be too little memory
        timings = measure(ways, case := made.pop(), _ROUNDS, seconds / len(lines))
        cases.append({"case": line, "nbytes": sum(case.nbytes), "timings": [asdict(timing) for timing in timings]})
        del case  # frees its memory before the next one is made
    own = fingerprint()
    where = f"{plural(world.world_size, 'rank')} on {plural(world.nodes, 'node')}, {world.device.type}"
    return {"format": _FORMAT, "machine": f"{own['mpi']}, torch {own['torch']}, {where}", "cases": cases}


def _results(record: dict[str, Any]) -> dict[str, Ways]:
    """Return the ways of each case."""
    found = dict[str, Ways]()
    for of in record["cases"]:
        timings = [timing for timing in (Timing(**row) for row in of["timings"]) if timing.rounds]
        ways = {t.name: t.seconds for t in sorted(timings, key=lambda timing: timing.seconds.median)}
        found[f"{of['case']}: {show_bytes(of['nbytes'])}"] = ways
        _ = ways["hpcdist"]
    return found


def _shown(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"


def _times(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return f"{low} times" if low == high else f"{low} to {high} times"


def _bars(*files: tuple[str, Ways]) -> list[Bar]:
    """Return the bars of a case: the fastest way of each kind, in each file."""
    bars = list[Bar]()
    for kind, (title, colour) in _KINDS.items():
        for label, ways in files:
            best = {name.split()[0].strip(","): ways[name] for name in reversed(ways)}
            if kind in best:
                times = best[kind].median / best["hpcdist"].median
                text = _shown(best[kind].median) + ("" if kind == "hpcdist" else f", {times:.3g} x")
                bars.append((title + label, colour, best[kind], text))
    return bars


def _alone(record: dict[str, Any]) -> Report:
    """Return the report of a measurement."""
    tables, groups, shares = list[Table](), list[Group](), defaultdict[str, list[float]](list)
    for case, ways in _results(record).items():
        bars = _bars(("", ways))
        (_, _, ours, _), *others = bars
        for title, _, seconds, _ in reversed(others):
            shares[title].append(seconds.median / ours.median)
        medians = np.array([seconds.median for seconds in ways.values()])
        columns = {
            "": ways,
            "median": map(_shown, medians),
            "fastest hpcdist way = 1": medians / ours.median,
            "quartiles": (f"{_shown(seconds.low)} to {_shown(seconds.high)}" for seconds in ways.values()),
        }
        tables.append(Table(case, medians, columns, largest=False))
        groups.append((case, bars))
    long = (f"the fastest of {title} takes {_times(found)} as long" for title, found in shares.items())
    line = f"Compared with the fastest way of hpcdist, {'; '.join(long)}"
    return [f"{record['machine']}, {plural(len(tables), 'case')}", line], tables, groups


def _against(names: list[str]) -> Report:
    """Return the report of two files: how the second differs from the first."""
    results = []
    for name in names:
        with file_errors(name):
            results.append(_results(read_json(name, _FORMAT)))
    old, new = results
    first, second = (Path(name).stem for name in names) if Path(names[0]).stem != Path(names[1]).stem else names
    tables, groups, verdicts, shares = list[Table](), list[Group](), list[str](), list[float]()
    for case in filter(new.__contains__, old):
        names = [name for name in new[case] if name in old[case]]
        pairs = [(old[case][name], new[case][name]) for name in names]
        ratios = np.array([b.median / a.median for a, b in pairs])
        changes = ["faster" if b.high < a.low else "slower" if b.low > a.high else "" for a, b in pairs]
        columns: dict[str, Any] = {
            "": names,
            first: [_shown(a.median) for a, _ in pairs],
            second: [_shown(b.median) for _, b in pairs],
            "ratio": ratios,
            "beyond noise": changes,
        }
        tables.append(Table(case, ratios, columns, largest=False))
        bars = _bars((f", {first}", old[case]), (f", {second}", new[case]))
        groups.append((case, bars))
        shares.append(bars[1][2].median / bars[0][2].median)
        verdicts += changes
    if not tables:
        raise InputError("HD505", f"{first} and {second}: expected files with a case in common")
    line = (
        f"hpcdist takes {_times(shares)} its time in {first}. Beyond the noise (quartiles apart), "
        f"{verdicts.count('faster')} of {len(verdicts)} ways are faster and {verdicts.count('slower')} slower"
    )
    return [f"{second} against {first}: {plural(len(tables), 'case')}", line], tables, groups


def _reported(args: argparse.Namespace, record: dict[str, Any]) -> str:
    """Write the files, and return the report for a terminal."""
    target = Path(args.output).with_suffix(".json")
    lines, tables, groups = _against(args.files) if args.files else _alone(record)
    written = [str(target.with_suffix(".html"))]
    if not args.files:
        write_text(target, json.dumps(record, indent=1) + "\n")
        written.append(str(target))
    text = write_page(written[0], lines, tables, "bars.html.j2", groups=groups)
    return f"{text}\n\nwritten: {', '.join(written)}"


def parser() -> Parser:
    """Return the parser of python -m hpcdist.tools.compare."""
    p = Parser(
        prog="hpcdist compare",
        description="Time calls of given shapes, written by hand with mpi4py and torch (gloo, or nccl on GPUs), and "
        "with hpcdist. Runs are interleaved, the slowest rank counts, and each result is checked once. Print a table "
        "for each case, and write it as JSON and as a page with pictures. With two such files, compare them.",
        epilog="example: mpirun -n 4 python -m hpcdist compare --shapes shapes.txt",
    )
    p.add_argument("files", nargs="*", type=path, metavar="FILE", help="two files to compare, the older one first")
    which = p.add_mutually_exclusive_group()
    which.add_argument(
        "--shapes", type=path, metavar="FILE",
        help="file with one case per line, CALL DTYPE SHAPE...: one shape per rank, the last one repeated for the "
        "remaining ranks, e.g. concat float32 1000x64 10x64",
    )  # fmt: skip
    which.add_argument(
        "--like", type=path, metavar="DIR",
        help=f"traces of a run with HPCDIST_TRACE=DIR: the {_MOST} kinds of calls that took most time, along dim 0",
    )  # fmt: skip
    p.add_argument(
        "-o", "--output", type=path, metavar="NAME",
        help="files to write: NAME.json and NAME.html (default compare, or change)",
    )  # fmt: skip
    p.add_argument("--seconds", type=int, default=60, help="target duration (default 60)")
    return p


if __name__ == "__main__":
    run(parser(), main)
