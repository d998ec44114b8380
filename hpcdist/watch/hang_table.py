"""The calls of all ranks as a table, and the ranks that keep a call waiting. Pure functions of reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcdist.activity import ANYBODY, NOBODY, Entry, ThreadStatus
from hpcdist.errors import coded

__all__ = ["GONE", "ISSUED", "WAITS", "Report", "chain", "made_progress", "missing", "of_json", "table", "verdict"]

ISSUED = " issued to "  # in the text of a call that is recorded as finished, though a GPU may not have done it
WAITS = "waits"  # in a call of this library
IO = "in I/O"
GONE = ("dead", "stopped")
_ALIKE = 16  # waiting ranks that are shown at most; all others are shown
_STACKS = 4  # that are shown at most


@dataclass
class Report:
    """What a rank is doing.

    Attributes:
        threads: threads that have called the library.
        doing: description: WAITS, "dead", "stopped", "in Python, at ...".
        stack: stack of its main thread, if its own rank has reported it.
        known: whether its calls are known: neither it nor another rank of its node may be there to tell them.
    """

    rank: int
    host: str
    pid: int
    threads: list[ThreadStatus] = field(default_factory=list)
    doing: str = WAITS
    stack: list[str] = field(default_factory=list)
    known: bool = True

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def who(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


def of_json(fields: Mapping[str, Any]) -> Report:
    """Restore a report from what :meth:`Report.json` returned."""
    threads = [
        ThreadStatus(
            int(t["thread"]),
            _entry(t["call"]),
            _entry(t["last"]),
            float(t["ended"]),
            float(t["waited"]),
            str(t["tensors"]),
        )
        for t in fields["threads"]
    ]
    doing, stack = str(fields["doing"]), [str(line) for line in fields["stack"]]
    known = bool(fields["known"])
    return Report(int(fields["rank"]), str(fields["host"]), int(fields["pid"]), threads, doing, stack, known)


def _entry(fields: Sequence[Any] | None) -> Entry | None:
    return None if fields is None else Entry(float(fields[0]), int(fields[1]), int(fields[2]), str(fields[3]))


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
    idle = sorted((t for t in report.threads if t.last is not None), key=lambda thread: thread.ended)
    rows = []
    for thread in busy or idle[-1:] or [ThreadStatus(0, None, None, 0.0)]:
        last = "none" if thread.last is None else f"{_finished(thread.last)}, {_ago(now - thread.ended)} ago"
        if thread.call is None:
            rows.append([*who, last, "no call", "", report.doing])
        else:
            rows.append([*who, last, thread.call.text, _ago(now - thread.call.since), report.doing])
    return rows


def _finished(call: Entry) -> str:
    """Describe a call that is recorded as finished; with its number if it may not be, to compare ranks by."""
    return f"{call.text}, number {call.number}" if ISSUED in call.text and call.number > 0 else call.text


def _ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def missing(call: Entry, peers: Sequence[int], reports: Mapping[int, Report]) -> list[int]:
    """Return the ranks that a call waits for: those of its team that have not reached it, or the peer of a message.

    Args:
        peers: the world's rank of each rank of the team.
    """
    if call.number < 0:
        peer = -1 - call.number
        return [] if peer in (ANYBODY, NOBODY) else [peers[peer]]
    return [rank for rank in peers if rank in reports and not _has_come(reports[rank], call)]


def chain(call: Entry, peers_of: Callable[[int], Sequence[int]], reports: Mapping[int, Report]) -> list[int]:
    """Return the ranks that a call waits for, directly or through the calls of other ranks that it waits for.

    Args:
        peers_of: returns the world's ranks of a team.
    """
    found = missing(call, peers_of(call.team), reports)
    for rank in found:  # the loop appends to it
        report = reports.get(rank)
        for thread in report.threads if report is not None and report.doing == WAITS else []:
            if thread.call is not None:
                found += [r for r in missing(thread.call, peers_of(thread.call.team), reports) if r not in found]
    return found


def made_progress(call: Entry, reports: Mapping[int, Report], limit: float) -> bool:
    """Whether any rank has made progress in a call in the last `limit` seconds."""
    threads = [thread for report in reports.values() if report.doing not in GONE for thread in report.threads]
    return any(
        t.call and (t.call.team, t.call.number) == (call.team, call.number) and t.waited < limit for t in threads
    )


def _has_come(report: Report, call: Entry) -> bool:
    """Whether a rank is in a call, or has finished it."""
    for thread in report.threads:
        for entry in (thread.call, thread.last):
            if entry is not None and entry.team == call.team and entry.number >= call.number:
                return entry is thread.last or report.doing == WAITS or report.doing.startswith(IO)
    return False


def verdict(
    call: Entry,
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
    done = _finished_by_others(call, [reports[rank] for rank in peers_of(call.team) if rank in reports])
    lines = [f"{reports[rank].who} {_why(reports[rank], call, done)}" for rank in absent]
    kinds = [odd for rank in absent if (odd := _odd_kind(reports[rank], call))]
    lines += kinds
    if not absent and call.number == -1 - ANYBODY:
        lines = [coded("HD606", "no rank has sent what this call receives")]
    elif not absent:
        lines = _odd_calls(call, reports)
    if not kinds and all(reports[rank].doing == WAITS for rank in absent):  # else that is why all wait
        lines += _circle(absent, peers_of, reports) + _threads_of(call, reports)
    if not lines:
        lines = _same_call(call, reports)
    if not absent:
        lines += [f"{report.who} is {report.doing}" for report in reports.values() if report.doing.startswith(IO)]
    for rank in [rank for rank in absent if reports[rank].stack][:_STACKS]:
        lines += [f"rank {rank} is here:", *reports[rank].stack]
    return "\n".join(lines)


def _finished_by_others(call: Entry, reports: Sequence[Report]) -> str:
    """Describe the last call of a team that all its ranks whose calls are known have finished; "" if none is known."""
    texts: dict[int, str] = {0: ""}
    latest: list[int] = []  # of each rank: the number of the last call that it has finished
    for report in (report for report in reports if report.known):
        lasts = [t.last for t in report.threads if t.last is not None and t.last.team == call.team]
        texts |= {entry.number: entry.text for entry in lasts}
        latest.append(max([0, *(entry.number for entry in lasts)]))
    return texts[min(latest, default=0)]


def _in_call(call: Entry, reports: Mapping[int, Report]) -> list[tuple[int, ThreadStatus, Entry]]:
    """Return (rank, thread, call) of each thread that is in the same call: in the same team, by the same number."""
    return [
        (rank, thread, other)
        for rank, report in reports.items()
        for thread in report.threads
        if (other := thread.call) is not None and (other.team, other.number) == (call.team, call.number)
    ]


def _odd_calls(call: Entry, reports: Mapping[int, Report]) -> list[str]:
    """Describe the ranks that are in another collective than `call`, by the same number of the same group."""
    verb = call.text.split("(")[0]
    return [
        coded("HD601", f"rank {rank} is in {other.text}, not in {call.text}: all ranks of a group must call the same")
        for rank, _, other in _in_call(call, reports)
        if call.number > 0 and other.text.split("(")[0] != verb
    ]


def _same_call(call: Entry, reports: Mapping[int, Report]) -> list[str]:
    """Describe a call that all ranks have reached: where they are in it, and with which tensors."""
    ranks: dict[str, list[str]] = {}
    for rank, report in reports.items():
        busy = [t for t in report.threads if t.call is not None]
        busy = [t for _, t, _ in _in_call(call, {rank: report})] or busy
        texts = [f"in {t.call and t.call.text}{t.tensors and ', of '}{t.tensors}" for t in busy]
        ranks.setdefault("; ".join(texts) or report.doing, []).append(str(rank))
    why = "it is the transfer that hangs (network, or file system)"
    if len(ranks) > 1:
        why = f"if what differs below must be alike, that is why it hangs; else {why}"
    lines = [coded("HD602", f"all its ranks have reached this call: {why}")]
    for what, who in list(ranks.items())[:_ALIKE]:
        more = f" and {len(who) - _ALIKE} more" if len(who) > _ALIKE else ""
        lines.append(f"{'ranks' if len(who) > 1 else 'rank'} {', '.join(who[:_ALIKE])}{more}: {what}")
    return lines


def _threads_of(call: Entry, reports: Mapping[int, Report]) -> list[str]:
    """Describe the ranks of which several threads are in calls of the team of `call`, which no order unites.

    A call in the background has two threads, which are no sign of it: one runs it, and one waits for it.
    """
    found = []
    for rank, report in reports.items():
        mine = [t.call for t in report.threads if t.call is not None and t.call.team == call.team != 0]
        waiting = [entry for entry in mine if entry.number == -1 - NOBODY]
        running = [entry for entry in mine if entry.number > 0]
        several = max(waiting, running, key=len)
        if len(several) > 1:
            found.append((rank, ", ".join(entry.text for entry in several[:_STACKS])))
    if not found:
        return []
    rank, texts = found[0]
    text = (
        f"several threads of a rank are in calls of this group at once (of rank {rank}: {texts}), on {len(found)} of "
        f"{len(reports)} ranks: they may call in another order on each. Give each thread a group of its own, or make "
        "one call after the other"
    )
    return [coded("HD601", text)]


def _circle(
    absent: Sequence[int], peers_of: Callable[[int], Sequence[int]], reports: Mapping[int, Report]
) -> list[str]:
    """Describe the ranks among those that keep a call waiting that wait for each other, if any do."""
    waits_for: dict[int, tuple[Entry, int]] = {}
    for rank in absent:
        for thread in reports[rank].threads:
            if thread.call is not None and (others := missing(thread.call, peers_of(thread.call.team), reports)):
                waits_for[rank] = thread.call, others[0]
    path: list[int] = []
    rank = absent[0] if absent else -1
    while rank in waits_for and rank not in path:
        path.append(rank)
        rank = waits_for[rank][1]
    if rank not in path:
        return []
    circle = path[path.index(rank) :]
    steps = [f"rank {r} is in {waits_for[r][0].text} and waits for rank {waits_for[r][1]}" for r in circle]
    return [coded("HD601", f"they wait for each other: {'; '.join(steps[:_ALIKE])}")]


def _odd_kind(report: Report, call: Entry) -> str:
    """Describe a call of the same group that differs from `call` in async_op; "" if the rank is in no such call.

    The number of a team in the background differs from that of its foreground in the last bit.
    """
    other = next((t.call for t in report.threads if t.call and call.team and t.call.team == call.team ^ 1), None)
    if other is None:
        return ""
    kinds = ("with", "without") if call.team & 1 else ("without", "with")
    here, there = f"{call.text} is {kinds[0]} it", f"rank {report.rank} is in {other.text} {kinds[1]} it"
    return coded("HD301", f"async_op must agree: {here}, and {there}")


def _why(report: Report, call: Entry, done: str) -> str:
    """Describe why a rank has not reached a call.

    Args:
        done: last call of the team that its other ranks have finished.
    """
    calls = [thread.call for thread in report.threads if thread.call is not None]
    lasts = [t.last.text for t in sorted(report.threads, key=lambda t: t.ended) if t.last is not None]
    was = f"it was in {calls[0].text}" if calls else f"it was after {lasts[-1]}" if lasts else "it was before any call"
    if not report.known:
        was = f"its calls are unknown{done and ', and the last one that the others have finished is '}{done}"
    if report.doing == "dead":
        return coded("HD604", f"is dead: its process has ended without finalize(), by a signal or os._exit; {was}")
    if report.doing == "stopped":
        text = f"is stopped, by a signal or a debugger (kill -CONT {report.pid} lets it go on); {was}"
        return coded("HD604", text)
    if not report.known:
        return coded("HD601", f"{report.doing}; {was}")
    if report.doing != WAITS:
        here = call.number > 0 and _in_call(call, {report.rank: report})
        return coded(
            "HD601", f"{'is in this call, and' if here else 'has not reached this call: it is'} {report.doing}; {was}"
        )
    same = bool(calls) and calls[0].team == call.team and 0 < calls[0].number < call.number
    number = f", which is call {calls[0].number} of the group, where this is call {call.number}" if same else ""
    return coded("HD601", f"has not reached this call: {was.replace('was', 'is', 1)}{number}")
