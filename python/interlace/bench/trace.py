"""What every rank did when: lanes compute, publish, wait and reduce of one call, as spans and as a Chrome trace.

The fused ops record their own work (products, signals, waits, sums) in the native library. What torch runs around
them (attention, norms, torch's own collectives) comes from torch's profiler. Both clocks are the host's, so the
lanes of all ranks share one axis. Recording costs: two readings of the clock a piece, and the profiler's about
1 us an op; a trace shows order and shape, the tables show times.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from .._native import _C
from ..functional import all_reduce
from .peak import quiet
from .row import Report, Row

__all__ = [
    "LANES",
    "Span",
    "Timeline",
    "chrome",
    "lane_seconds",
    "native_spans",
    "record",
    "spans_of",
    "text_of",
    "with_timelines",
]

LANES = ("call", "compute", "publish", "wait", "reduce")
_LANE_OF = {
    "call": "call",
    "product": "compute",
    "stage": "publish",
    "signal": "publish",
    "wait": "wait",
    "sum": "reduce",
    "pull": "reduce",
}
_CAPACITY = 1 << 16  # events of one rank, 40 bytes each: a step of a small model
_TURNS = 3
_SHOWN = 6000  # spans of all ranks that a page can hold
_LONGEST_US = 1e6
# ops whose time is that of ops inside them, or of the native record
_OPENED = ("interlace::", "c10d::", "autograd::", "torch::", "Optimizer.", "ProfilerStep", "##", "nn.Module:")
_WAITS = ("gloo:", "mpi:", "nccl:", "c10d::", "_c10d_functional::")
# what moves no byte
_FREE = {"aten::empty", "aten::new_empty", "aten::view", "aten::transpose", "aten::t", "aten::slice"}


@dataclass(frozen=True)
class Span:
    """One piece of work of one rank. Times in ns of the host's monotonic clock; peer -1 and part 0 say nothing."""

    rank: int
    lane: str
    name: str
    begin_ns: int
    end_ns: int
    op: str = ""
    epoch: int = 0
    part: int = 0
    peer: int = -1
    thread: int = 0
    variant: str = ""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) * 1e-9


@contextmanager
def native_spans(group_name: str, rank: int, capacity: int = _CAPACITY) -> Iterator[list[Span]]:
    """Inside, the calls of the group on shared memory are recorded; the list is filled at the end.

    Raises ValueError when there were more than `capacity` events, KeyError for a group without shared memory.
    """
    with _native(group_name, rank, capacity) as (spans, dropped):
        yield spans
    _complain(sum(dropped))


@contextmanager
def _native(group_name: str, rank: int, capacity: int = _CAPACITY) -> Iterator[tuple[list[Span], list[int]]]:
    """The spans, and how many more there were."""
    spans: list[Span] = []
    lost: list[int] = []
    _C.start_trace(group_name, capacity)
    try:
        yield spans, lost
    finally:
        events, dropped = _C.stop_trace(group_name)
        lost.append(dropped)
        spans += [
            Span(rank, _LANE_OF[work], work, begin, end, op, epoch, part, peer, thread)
            for begin, end, op, work, epoch, part, peer, thread in events
        ]


def _complain(dropped: int) -> None:
    if dropped:
        raise ValueError(f"trace: {dropped} events of the calls did not fit; record fewer calls at a time")


def record(call: Callable[[], object], group_name: str, variant: str = "") -> list[Span]:
    """Spans of one call on all ranks, in the order of their begin: the shortest of three. Collective.

    group_name: the group whose ops are recorded; without shared memory torch's ops alone are. The call is run once
    before. Without a process group this process is recorded. ValueError, on all ranks, when a call has more pieces
    than there is room for.
    """
    call()
    turns = [_recorded(call, group_name, variant) for _ in range(_TURNS)]
    return min(turns, key=_length)


def _length(spans: Sequence[Span]) -> int:
    return max(s.end_ns for s in spans) - spans[0].begin_ns if spans else 0


def _recorded(call: Callable[[], object], group_name: str, variant: str) -> list[Span]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if dist.is_initialized():
        dist.barrier()
    lost = [0]
    with quiet(), profile(activities=[ProfilerActivity.CPU]) as recorded:
        offset = time.time_ns() - time.monotonic_ns()  # the profiler has the time of day
        if group_name in _C.group_names():
            all_reduce(torch.zeros(1), group=group_name)  # gloo's barrier lets ranks go 100 us apart
            with _native(group_name, rank) as (spans, lost):
                since = time.monotonic_ns()
                call()
        else:
            spans, since = [], time.monotonic_ns()
            call()
    found = _torch_spans(recorded.profiler.kineto_results.events(), rank, offset)  # type: ignore[union-attr]
    spans += [span for span in found if span.begin_ns >= since]
    parts = _all_ranks(([replace(span, variant=variant) for span in spans], sum(lost)))
    _complain(sum(dropped for _, dropped in parts))
    return sorted((span for part, _ in parts for span in part), key=lambda span: span.begin_ns)


def _all_ranks(mine: tuple[list[Span], int]) -> list[tuple[list[Span], int]]:
    if not dist.is_initialized():
        return [mine]
    parts: list[tuple[list[Span], int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return [part for part in parts if part is not None]


class Timeline:
    """Of all cases of a run that with the most pieces a page can hold: its baseline, and the fused way."""

    def __init__(self, group_name: str) -> None:
        self.group_name, self.case = group_name, ""
        self.spans: list[Span] = []

    def offer(self, variants: Mapping[str, Callable[[], object]], row: Row) -> None:
        """Record the case of `row`, and keep it if it has more to show than what is kept. Collective."""
        if not 0.0 < (row.fused_us or 0.0) < _LONGEST_US:
            return
        titles = {"baseline": row.baseline or "baseline", "fused": "interlace"}
        spans: list[Span] = []
        for name, title in titles.items():
            if name in variants:
                spans += record(variants[name], self.group_name, title)
        if len(self.spans) < len(spans) <= _SHOWN:
            self.spans, self.case = spans, row.name

    def entry(self) -> dict[str, Any]:
        """What a report keeps: {} of nothing, else the case and its spans."""
        return {"case": self.case, "spans": [asdict(span) for span in self.spans]} if self.spans else {}


def spans_of(timeline: Mapping[str, Any]) -> list[Span]:
    """The spans of an entry."""
    return [Span(**span) for span in timeline.get("spans", [])]


def _torch_spans(events: Iterable[Any], rank: int, offset: int) -> list[Span]:
    """Outermost torch ops on the compute lane, torch's collectives on the wait lane; ours are opened."""
    spans: list[Span] = []
    until: dict[int, int] = {}
    found = sorted(events, key=lambda e: (e.start_ns(), -e.duration_ns()))
    for event in found:
        name, begin, thread = event.name(), event.start_ns(), event.start_thread_id()
        end = begin + event.duration_ns()
        waits = name.startswith(_WAITS)
        if begin < until.get(thread, 0) or end <= begin or name in _FREE:
            continue
        if not waits and (name.startswith(_OPENED) or "::" not in name):
            continue
        until[thread] = end
        spans.append(Span(rank, "wait" if waits else "compute", name, begin - offset, end - offset, name))
    return spans


def lane_seconds(spans: Iterable[Span]) -> dict[tuple[str, int], dict[str, float]]:
    """(variant, rank) -> lane -> seconds in which something ran on that lane; spans that overlap count once."""
    lanes: dict[tuple[str, int], dict[str, list[tuple[int, int]]]] = {}
    for span in spans:
        lanes.setdefault((span.variant, span.rank), {}).setdefault(span.lane, []).append(
            (span.begin_ns, span.end_ns)
        )
    return {key: {lane: _covered(times) for lane, times in found.items()} for key, found in lanes.items()}


def _covered(times: list[tuple[int, int]]) -> float:
    total = until = 0
    for begin, end in sorted(times):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total * 1e-9


def chrome(spans: Sequence[Span], facts: Mapping[str, object] | None = None) -> dict[str, object]:
    """The trace as Chrome's JSON, which Perfetto and chrome://tracing open: a process per variant and rank, a
    thread per lane; microseconds from the first span. facts: machine, versions and commit, kept beside it.
    """
    start = min((span.begin_ns for span in spans), default=0)
    ranks = max((span.rank for span in spans), default=0) + 1
    variants = list(dict.fromkeys(span.variant for span in spans))
    places = {(v, r): i * ranks + r for i, v in enumerate(variants) for r in range(ranks)}
    threads = 1 + max((span.thread for span in spans), default=0)
    events: list[dict[str, object]] = []
    for (variant, rank), process in places.items():
        title = f"{variant}: rank {rank}" if variant else f"rank {rank}"
        events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": title}})
    used = sorted(
        {(places[s.variant, s.rank], LANES.index(s.lane) * threads + s.thread, s.lane) for s in spans}
    )
    for process, lane, name in used:
        named = {"pid": process, "tid": lane}
        events.append({"ph": "M", "name": "thread_name", **named, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", **named, "args": {"sort_index": lane}})
    for span in spans:
        told = {"op": span.op, "epoch": span.epoch, "part": span.part, "peer": span.peer}
        events.append(
            {
                "ph": "X",
                "name": span.op if span.name == "call" else span.name,
                "cat": span.lane,
                "pid": places[span.variant, span.rank],
                "tid": LANES.index(span.lane) * threads + span.thread,
                "ts": (span.begin_ns - start) / 1e3,
                "dur": (span.end_ns - span.begin_ns) / 1e3,
                "args": {name: value for name, value in told.items() if value not in ("", -1)},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": dict(facts or {})}


def with_timelines(reports: Sequence[Report], path: str | None) -> list[Report]:
    """The reports with the timelines that `text_of` wrote for them. ValueError for a file that is none."""
    if path is None:
        return list(reports)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        spans, cases = spans_of(content), content["otherData"]["cases"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a file of `interlace bench ... --trace` ({error})") from None
    for report in reports:
        if cases.get(report.benchmark):
            named = f"{report.benchmark}: " if len(cases) > 1 else ""
            mine = [s for s in spans if s.variant.startswith(named)]
            entry = [asdict(replace(span, variant=span.variant.removeprefix(named))) for span in mine]
            report.timeline = {"case": cases[report.benchmark], "spans": entry}
    return list(reports)


def text_of(reports: Sequence[Report]) -> str:
    """Chrome's JSON of the timelines of all reports; the spans go along, so that a page can be drawn from the file."""
    spans: list[Span] = []
    for report in reports:
        named = f"{report.benchmark}: " if len(reports) > 1 else ""
        spans += [replace(span, variant=named + span.variant) for span in spans_of(report.timeline)]
    first = reports[0]
    facts = {
        "machine": first.machine,
        "versions": first.versions,
        "commit": first.commit,
        "command": first.command,
    }
    cases = {report.benchmark: report.timeline.get("case", "") for report in reports}
    content = chrome(spans, {**facts, "cases": cases}) | {"spans": [asdict(span) for span in spans]}
    return json.dumps(content) + "\n"
