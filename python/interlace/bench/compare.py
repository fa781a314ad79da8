"""Two results of the same benchmarks: what became slower, beyond what the runs themselves vary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .metrics import spread
from .row import SCHEMA, Report, Row, read_report

__all__ = ["Change", "Comparison", "compare", "read_reports"]

METRICS = {"time": "fused_us", "speedup": "speedup"}


@dataclass(frozen=True)
class Change:
    """One row in both results. ratio: after / before of the time, or before / after of the speedup: above 1 is worse.

    noise: the relative standard deviation of that ratio, from the spread of both rows' samples.
    """

    benchmark: str
    before: Row
    after: Row
    ratio: float
    noise: float

    @property
    def busy(self) -> bool:
        """Did other work take cores from either row?"""
        return "busy" in self.before.note or "busy" in self.after.note

    def slower(self, threshold: float) -> bool:
        """Worse by more than the threshold and by more than twice the noise."""
        return self.ratio > 1 + max(threshold, 2 * self.noise)

    def faster(self, threshold: float) -> bool:
        """Better by as much."""
        return self.ratio < 1 / (1 + max(threshold, 2 * self.noise))


@dataclass(frozen=True)
class Comparison:
    """All rows of both: changed ones, those that one side alone has, those whose result is wrong after.

    unmeasured: rows that had the figure before and lack it after, with the reason where there is one.
    """

    changes: tuple[Change, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]
    wrong: tuple[str, ...]
    unmeasured: tuple[str, ...]
    warnings: tuple[str, ...]

    def failed(self, threshold: float, count_busy: bool = False) -> bool:
        """Something is slower beyond threshold and noise, or wrong. Rows of a busy machine count on demand."""
        counted = (change for change in self.changes if count_busy or not change.busy)
        return bool(self.wrong) or any(change.slower(threshold) for change in counted)


def read_reports(path: str | Path) -> list[Report]:
    """The reports of a result file, or of all result files of a folder. ValueError when there is none."""
    where = Path(path)
    if where.is_dir():
        files = sorted(where.glob("*.json"))
        if not files:
            raise ValueError(f"{path}: no *.json in this folder")
        return [report for file in files for report in read_reports(file)]
    try:
        content = json.loads(where.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if isinstance(content, dict) and content.get("schema") == SCHEMA and "reports" in content:
        return [Report.of(part, part.pop("rows"), str(path)) for part in content["reports"]]
    return [read_report(where)]


def compare(before: Sequence[Report], after: Sequence[Report], metric: str = "time") -> Comparison:
    """Rows are matched by benchmark and key. metric: "time", or "speedup", which two machines share more of.

    Rows that never had that figure (skipped, no baseline) take no part. ValueError for another metric.
    """
    if metric not in METRICS:
        raise ValueError(f"bench compare: metric {metric!r}; expected one of {', '.join(METRICS)}")
    one, other = _by_key(before), _by_key(after)
    shared = [key for key in one if key in other]
    changes = [_change(str(key[0]), one[key], other[key], METRICS[metric]) for key in shared]
    return Comparison(
        changes=tuple(change for change in changes if change is not None),
        gone=tuple(f"{key[0]}: {row.name}" for key, row in one.items() if key not in other),
        new=tuple(f"{key[0]}: {row.name}" for key, row in other.items() if key not in one),
        wrong=tuple(f"{key[0]}: {row.name}" for key, row in other.items() if not row.correct),
        unmeasured=tuple(_lost(shared, one, other, METRICS[metric])),
        warnings=tuple(_differences(before, after, metric)),
    )


def _by_key(reports: Sequence[Report]) -> dict[tuple[object, ...], Row]:
    return {(report.benchmark, *row.key): row for report in reports for row in report.rows}


def _change(benchmark: str, before: Row, after: Row, field: str) -> Change | None:
    old, new = getattr(before, field), getattr(after, field)
    if not old or not new:
        return None
    ratio = new / old if field == "fused_us" else old / new
    noises = (_noise(before, field), _noise(after, field))
    return Change(benchmark, before, after, ratio, sum(noise**2 for noise in noises) ** 0.5)


def _lost(
    shared: Sequence[tuple[object, ...]],
    before: Mapping[tuple[object, ...], Row],
    after: Mapping[tuple[object, ...], Row],
    field: str,
) -> Iterator[str]:
    for key in shared:
        if getattr(before[key], field) and not getattr(after[key], field):
            yield f"{key[0]}: {after[key].name} ({after[key].skipped or f'no {field}'})"


def _noise(row: Row, field: str) -> float:
    """Relative standard deviation of the figure: a speedup varies with both of its times."""
    pairs = [(row.fused_us, row.p20_us)]
    pairs += [(row.baseline_us, row.baseline_p20_us)] if field == "speedup" else []
    return sum(spread(us, p20) ** 2 for us, p20 in pairs if us is not None and p20 is not None) ** 0.5


def _differences(before: Sequence[Report], after: Sequence[Report], metric: str) -> list[str]:
    """What makes times hard to compare: another CPU, another topology, another torch, an interrupted run."""
    said = []
    by_name = {report.benchmark: report for report in before}
    for report in after:
        old = by_name.get(report.benchmark)
        if old is None:
            continue
        for what in ("cpu", "cores", "isa", "topology", "torch"):
            a, b = old.machine.get(what), report.machine.get(what)
            if a != b:
                advice = "; --metric speedup is the fairer one" if metric == "time" else ""
                said.append(f"{report.benchmark}: {what} was {a}, is {b}{advice}")
        for name, part in (("before", old), ("after", report)):
            if part.partial:
                said.append(f"{report.benchmark}: the run {name} ended early")
    return said
