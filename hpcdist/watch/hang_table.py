"""The calls of all ranks as a table, and the ranks that keep a call waiting. Pure functions of reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcdist.activity import ANYBODY, NOBODY, CallEntry, ThreadStatus
from hpcdist.errors import coded

ISSUED = " issued to "  # marks a call that is recorded as finished, though a GPU may not have done it
WAITS = "waits"  # the rank is in a call of this library
IO = "in I/O"
GONE = ("dead", "stopped")
_ALIKE = 16  # waiting ranks that are shown at most; all others are shown
_STACKS = 4  # stacks that are shown at most


@dataclass
class Report:
    """The activity of a rank.

    Attributes:
        threads: threads that have called the library.
        doing: description: WAITS, "dead", "stopped", "in Python, at ...".
        stack: stack of its main thread, if its own rank has reported it.
        known: whether its calls are known, from itself or another rank of its node.
        still, launched: seconds without a new collective on a GPU, and how many it has launched in each of torch's
            groups, if its own rank has reported them.
    """

    rank: int
    host: str
    pid: int
    threads: list[ThreadStatus] = field(default_factory=list)
    doing: str = WAITS
    stack: list[str] = field(default_factory=list)
    known: bool = True
    still: float = 0.0
    launched: dict[str, int] = field(default_factory=dict)

    @property
    def calls(self) -> list[CallEntry]:
        """The calls under way."""
        return [thread.call for thread in self.threads if thread.call is not None]

    @property
    def who(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


def table(reports: Iterable[Report], now: float) -> str:
    """Format a line for each call under way, and for each rank without one.

    Args:
        now: seconds of the epoch.
    """
    rows = [["rank", "host", "pid", "last call finished", "is in", "for", "what it does"]]
    waiting = 0
    for report in sorted(reports, key=lambda report: report.rank):
        waiting += report.doing == WAITS
        if report.doing != WAITS or waiting <= _ALIKE:
            rows += _rows(report, now)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *([f"and {waiting - _ALIKE} more that wait"] if waiting > _ALIKE else [])])


def _rows(report: Report, now: float) -> list[list[str]]:
    who = [str(report.rank), report.host, str(report.pid)]
    if not report.known:
        return [[*who, "unknown", "unknown", "", report.doing]]
    busy = [thread for thread in report.threads if thread.call is not None]
    idle = sorted(report.threads, key=lambda thread: thread.ended)
    rows = []
    for thread in busy or idle[-1:] or [ThreadStatus(0, None, None, 0.0)]:
        last, call = "none", thread.call
        if thread.last is not None:
            # Of a call that may not have finished on the GPU, the number, to compare ranks by.
            number = f", number {thread.last.number}" if ISSUED in thread.last.text and thread.last.number > 0 else ""
            last = f"{thread.last.text}{number}, {_ago(now - thread.ended)} ago"
        rows.append([*who, last, *((call.text, _ago(now - call.since)) if call else ("no call", "")), report.doing])
    return rows


def _ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def missing(call: CallEntry, peers: Sequence[int], reports: Mapping[int, Report]) -> list[int]:
    """Return the ranks that a call waits for: those of its team that have not reached it, or the peer of a message.

    Args:
        peers: the world's rank of each rank of the team.
    """
    if call.number < 0:
        return list(peers[-1 - call.number : -call.number])  # none of ANYBODY and NOBODY, which are beyond all ranks
    return [rank for rank in peers if rank in reports and not _has_come(reports[rank], call)]


def chain(call: CallEntry, peers_of: Callable[[int], Sequence[int]], reports: Mapping[int, Report]) -> list[int]:
    """Return the ranks that a call waits for, directly or through the calls of other ranks that it waits for.

    Args:
        peers_of: returns the world's ranks of a team.
    """
    absent = missing(call, peers_of(call.team), reports)
    for report in (reports[rank] for rank in absent if rank in reports):  # the loop appends to `absent`
        for other in report.calls if report.doing == WAITS else []:
            absent += [r for r in missing(other, peers_of(other.team), reports) if r not in absent]
    return absent


def made_progress(call: CallEntry, reports: Mapping[int, Report], limit: float) -> bool:
    """Whether any rank has made progress in a call in the last `limit` seconds."""
    return any(
        report.doing not in GONE and thread.call is not None and thread.call.same(call) and thread.waited < limit
        for report in reports.values()
        for thread in report.threads
    )


def _has_come(report: Report, call: CallEntry) -> bool:
    """Whether a rank has reached a call or finished it."""
    for thread in report.threads:
        for entry in (thread.call, thread.last):
            if entry is not None and entry.team == call.team and entry.number >= call.number:
                return entry is thread.last or report.doing == WAITS or report.doing.startswith(IO)
    return False


def verdict(
    call: CallEntry,
    absent: Sequence[int],
    reports: Mapping[int, Report],
    peers_of: Callable[[int], Sequence[int]] = lambda team: (),
) -> str:
    """Describe which ranks keep a call waiting, and why.

    Args:
        absent: those ranks, see :func:`chain`.
        peers_of: returns the world's ranks of a team; none of one that is not known.
    """
    absent = [rank for rank in absent if rank in reports]
    lines = [f"{reports[rank].who} {_why(reports[rank], call)}" for rank in absent]
    # Otherwise all wait because of ranks that do not wait, or whose async_op differs.
    if all(reports[rank].doing == WAITS for rank in absent) and not any("HD301" in line for line in lines):
        lines += _circle(absent, peers_of, reports) + _threads_of(call, reports)
    if not lines and call.number == -1 - ANYBODY:
        lines = [coded("HD601", "no rank has sent what this call receives")]
    lines = lines or _same_call(call, reports)
    if not absent:
        lines += [f"{report.who} is {report.doing}" for report in reports.values() if report.doing.startswith(IO)]
    for rank in [rank for rank in absent if reports[rank].stack][:_STACKS]:
        lines += [f"rank {rank} is here:", *reports[rank].stack]
    return "\n".join(lines)


def _same_call(call: CallEntry, reports: Mapping[int, Report]) -> list[str]:
    """Describe a call that all ranks have reached: where they are in it, and with which tensors; or which ranks are in
    another collective, by the same number of the same group."""
    ranks: dict[str, list[str]] = {}
    mismatches, verb = [], call.text.split("(")[0]
    for rank, report in reports.items():
        busy = [thread for thread in report.threads if thread.call is not None]
        here = [thread for thread in busy if thread.call is not None and thread.call.same(call)]
        texts = [f"in {t.call and t.call.text}{t.tensors and ', of '}{t.tensors}" for t in here or busy]
        ranks.setdefault("; ".join(texts) or report.doing, []).append(str(rank))
        others = [t.call.text for t in here if t.call is not None and t.call.text.split("(")[0] != verb]
        must = f"not in {call.text}: all ranks of a group must call the same"
        mismatches += [coded("HD601", f"rank {rank} is in {other}, {must}") for other in others if call.number > 0]
    why = "the transfer itself hangs (network, or file system)"
    if len(ranks) > 1:
        why = f"if the differences below are a mistake, they are the cause; else {why}"
    lines = [coded("HD602", f"all its ranks have reached this call: {why}")]
    for what, who in list(ranks.items())[:_ALIKE]:
        more = f" and {len(who) - _ALIKE} more" if len(who) > _ALIKE else ""
        lines.append(f"{'ranks' if len(who) > 1 else 'rank'} {', '.join(who[:_ALIKE])}{more}: {what}")
    return mismatches or lines


def _threads_of(call: CallEntry, reports: Mapping[int, Report]) -> list[str]:
    """Describe the ranks of which several threads are in calls of the team of `call`, which no order unites.

    A call in the background has two threads, which are no sign of it: one runs it, and one waits for it.
    """
    ranks = []
    for rank, report in reports.items():
        entries = [entry for entry in report.calls if entry.team == call.team != 0]
        waiting = [entry.text for entry in entries if entry.number == -1 - NOBODY]
        running = [entry.text for entry in entries if entry.number > 0]
        several = max(waiting, running, key=len)
        if len(several) > 1:
            ranks.append(f"of rank {rank}: {', '.join(several[:_STACKS])}")
    if not ranks:
        return []
    text = (
        f"several threads of a rank are in calls of this group at once ({ranks[0]}), on {len(ranks)} of "
        f"{len(reports)} ranks: they may call in another order on each. Give each thread a group of its own, or make "
        "one call after the other"
    )
    return [coded("HD601", text)]


def _circle(
    absent: Sequence[int], peers_of: Callable[[int], Sequence[int]], reports: Mapping[int, Report]
) -> list[str]:
    """Describe the ranks that keep a call waiting and wait for each other, if any do."""
    waits_for: dict[int, tuple[CallEntry, int]] = {}
    for rank in absent:
        for call in reports[rank].calls:
            if others := missing(call, peers_of(call.team), reports):
                waits_for[rank] = call, others[0]
    path: list[int] = []
    rank = absent[0] if absent else -1
    while rank in waits_for and rank not in path:
        path.append(rank)
        rank = waits_for[rank][1]
    if rank not in path:
        return []
    circle = path[path.index(rank) :]
    if len(circle) == 1:
        text = (
            f"rank {rank} waits for itself, in {waits_for[rank][0].text}: what it sent itself has gone to an earlier "
        )
        return [coded("HD601", f"{text}receive, or was not sent")]
    steps = [f"rank {r} is in {waits_for[r][0].text} and waits for rank {waits_for[r][1]}" for r in circle]
    return [coded("HD601", f"they wait for each other: {'; '.join(steps[:_ALIKE])}")]


def _why(report: Report, call: CallEntry) -> str:
    """Describe why a rank has not reached a call."""
    here = report.calls[0] if report.calls else None
    lasts = [t.last.text for t in sorted(report.threads, key=lambda t: t.ended) if t.last is not None]
    was = f"it was in {here.text}" if here else f"it was after {lasts[-1]}" if lasts else "it was before any call"
    if not report.known:
        was = "its calls are unknown"
    if report.doing == "dead":
        return coded("HD604", f"is dead: its process has ended without finalize(), by a signal or os._exit; {was}")
    if report.doing == "stopped":
        text = f"is stopped, by a signal or a debugger (kill -CONT {report.pid} resumes it); {was}"
        return coded("HD604", text)
    if not report.known:
        return coded("HD601", f"{report.doing}; {was}")
    if report.doing != WAITS:
        inside = call.number > 0 and any(map(call.same, report.calls))
        where = "is in this call, and" if inside else "has not reached this call: it is"
        return coded("HD601", f"{where} {report.doing}; {was}")
    text = f"has not reached this call: {was.replace('was', 'is', 1)}"
    # The number of a team in the background differs from that of its foreground in the last bit.
    if call.team and any(other.team == call.team ^ 1 for other in report.calls):
        kinds = ("without", "with") if call.team & 1 else ("with", "without")
        return coded("HD301", f"{text} {kinds[0]} async_op, and this call is {kinds[1]} it: async_op must agree")
    if here and here.team == call.team and 0 < here.number < call.number:
        text += f", which is call {here.number} of the group, where this is call {call.number}"
    return coded("HD601", text)
