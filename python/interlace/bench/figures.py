"""What the page and the picture show: bars of exposed and hidden communication, a roofline, curves. No drawing here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .row import Report, Row

__all__ = [
    "Bar",
    "BarGroup",
    "Curve",
    "Point",
    "Roofline",
    "bandwidth_curves",
    "exposed_bars",
    "geometric_mean",
    "roofline",
    "scaling_curves",
    "short_name",
]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True)
class Bar:
    """One way to do the work, microseconds: compute + exposed is all of it; hidden ran behind compute."""

    name: str
    compute: float
    exposed: float
    hidden: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.exposed


@dataclass(frozen=True)
class BarGroup:
    """One row of a report: what it is, and a bar per way to do it."""

    label: str
    bars: tuple[Bar, ...]
    note: str = ""

    @property
    def longest(self) -> float:
        return max(bar.total for bar in self.bars)


@dataclass(frozen=True)
class Point:
    """FLOP per byte of memory that must move, and TFLOP/s of one rank."""

    intensity: float
    tflops: float
    dtype: str
    label: str
    ours: bool


@dataclass(frozen=True)
class Roofline:
    """Points under the roof of one rank: peak TFLOP/s by dtype, memory bandwidth in GB/s; both measured, or absent."""

    points: tuple[Point, ...]
    peak: dict[str, float]
    bandwidth: float | None

    def roof(self, dtype: str, intensity: float) -> float | None:
        """TFLOP/s that are possible at an intensity; None where nobody measured the roof."""
        if dtype not in self.peak or self.bandwidth is None:
            return None
        return min(self.peak[dtype], intensity * self.bandwidth / 1e3)


@dataclass(frozen=True)
class Curve:
    """y over x. kind: "measured", "ideal", "fit" or "predicted"; number: its colour."""

    name: str
    points: tuple[tuple[float, float], ...]
    kind: str
    number: int


def geometric_mean(values: Iterable[float]) -> float | None:
    """The mean of ratios; None of none."""
    found = [value for value in values if value > 0]
    return math.exp(sum(map(math.log, found)) / len(found)) if found else None


def short_name(row: Row) -> str:
    """What tells a row of a report from the others, short enough for a phone."""
    sizes = " x ".join(str(value) for value in (row.m, row.n, row.k) if value)
    parts = [row.case or row.op, sizes]
    parts += [f"{row.tokens:,} token{'s' * (row.tokens != 1)}"] if row.tokens else []
    parts += [_bytes(row.bytes)] if row.bytes and not sizes else []
    parts += [{"float32": "fp32", "bfloat16": "bf16"}.get(row.dtype, row.dtype)]
    parts += [f"{row.world_size} ranks"] if row.world_size > 2 or row.value("mode") else []
    if row.case and not row.case.startswith(row.op):
        parts.insert(0, row.op)
    return ", ".join(part for part in parts if part)


def _bytes(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"


def exposed_bars(report: Report) -> list[BarGroup]:
    """Rows in which a fused op, or a model of them, stands beside its own compute without communication."""
    groups = []
    told = _told_caches(report)
    for row in report.rows:
        if row.skipped or not row.fused_us or not row.compute_us:
            continue
        bars = []
        if row.baseline_us:
            # without communication the baseline has its own product, not ours
            alone = min(row.value("linear_us") or row.compute_us, row.baseline_us)
            bars.append(Bar(row.baseline or "baseline", alone, row.baseline_us - alone))
        if row.peer_us:
            alone = min(row.value("linear_us") or row.compute_us, row.peer_us)
            bars.append(Bar(row.peer or "peer", alone, row.peer_us - alone))
        exposed = max(0.0, row.fused_us - row.compute_us)
        compute = row.fused_us - exposed
        hidden = min(compute, max(0.0, (row.collective_us or 0.0) - exposed))
        bars.append(Bar("interlace", compute, exposed, hidden))
        groups.append(BarGroup(short_name(row) + told.get(row.cache, ""), tuple(bars), _marks(row)))
    return groups


def _told_caches(report: Report) -> dict[str, str]:
    """What tells hot from cold behind a name, where the report has both."""
    caches = {row.cache for row in report.rows}
    return {cache: f", {cache}" for cache in caches} if len(caches) > 1 else {}


def _marks(row: Row) -> str:
    said = [] if row.correct else ["WRONG"]
    said += ["oversubscribed"] if row.oversubscribed else []
    said += [f"a rank {row.straggler_us:g} us late"] if row.straggler_us else []
    return ", ".join(said)


def roofline(report: Report) -> Roofline:
    """Products of known size; bytes are those of x, weight and output of a rank, each moved once."""
    points = []
    for row in report.rows:
        sized = row.m and row.n and row.k and row.fused_us and row.dtype in ITEM_BYTES
        if row.skipped or row.straggler_us or not sized:  # a wait is no work
            continue
        flops = 2.0 * row.m * row.n * row.k
        moved = ITEM_BYTES[row.dtype] * (row.m * row.k + row.n * row.k + row.m * row.n)
        for us, ours in ((row.baseline_us, False), (row.fused_us, True)):
            if us:
                points.append(Point(flops / moved, flops / us / 1e6, row.dtype, short_name(row), ours))
    roof = report.machine.get("roof") or {}
    return Roofline(tuple(points), dict(roof.get("peak_tflops", {})), roof.get("memory_gb_s"))


def bandwidth_curves(report: Report) -> dict[str, list[Curve]]:
    """op and dtype -> bus bandwidth over bytes: interlace, the baseline, every peer."""
    found: dict[str, list[Row]] = {}
    told = _told_caches(report)
    for row in report.rows:
        plain = row.bytes and not row.m  # with a product the bus has nothing to do for most of the time
        if plain and row.busbw_gbps and row.fused_us and not row.skipped and not row.straggler_us:
            name = (row.op if row.dtype == "float32" else f"{row.op}, {row.dtype}") + told.get(row.cache, "")
            found.setdefault(name, []).append(row)
    return {name: _bandwidths(rows) for name, rows in found.items() if len({row.bytes for row in rows}) > 1}


def _bandwidths(rows: Sequence[Row]) -> list[Curve]:
    by_name: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda r: r.bytes or 0):
        scale = (row.busbw_gbps or 0.0) * (row.fused_us or 0.0)  # bus bytes: the same for everybody
        times = {"interlace": row.fused_us, row.baseline or "baseline": row.baseline_us, **row.peers_us}
        for name, us in times.items():
            if us:
                by_name.setdefault(name, []).append((float(row.bytes or 0), scale / us))
    return [
        Curve(name, tuple(points), "measured", number)
        for number, (name, points) in enumerate(by_name.items())
    ]


def scaling_curves(report: Report) -> dict[str, list[Curve]]:
    """case and dtype -> speed-up over ranks: measured, ideal, the fit, the planner's prediction, the baseline."""
    found: dict[str, list[Row]] = {}
    for row in report.rows:
        if row.value("mode") and not row.skipped:
            found.setdefault(f"{row.case}, {row.dtype}", []).append(row)
    lines = (
        ("interlace", "speedup_over_one", "measured", 0),
        ("torch + gloo", "baseline_speedup_over_one", "measured", 5),
        ("fit", "fit_speedup", "fit", 2),
        ("planner", "planner_speedup", "predicted", 3),
    )
    curves: dict[str, list[Curve]] = {}
    for name, rows in found.items():
        ordered = sorted(rows, key=lambda row: row.world_size)
        ideal = tuple((float(row.world_size), float(row.world_size)) for row in ordered)
        curves[name] = [Curve("ideal", ideal, "ideal", 7)]
        for title, key, kind, number in lines:
            points = tuple(
                (float(r.world_size), float(r.value(key))) for r in ordered if r.value(key) is not None
            )
            if points:
                curves[name].append(Curve(title, points, kind, number))
    return curves
