"""Pictures as inline SVG: points and curves on axes, lanes of ranks over time. Colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from .figures import Curve, Roofline
from .trace import LANES, Span

__all__ = ["curves", "keys", "roofline", "timeline"]

# drawn at a phone's width and scaled up: text stays readable
_WIDTH, _HEIGHT = 360.0, 232.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 10.0, 8.0, 34.0
_DASHES = {"measured": "", "ideal": "2 4", "fit": "6 4", "predicted": "8 3 2 3"}
_LANE_COLORS = {"compute": 0, "publish": 3, "wait": 5, "reduce": 2}
_LANE_HEIGHT = 11.0
_JOINED = 0.8  # of 720: what lies nearer on a lane is drawn as one


@dataclass(frozen=True)
class Axis:
    """One axis: its range, where its lines are, whether it is logarithmic, how numbers are written."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool
    write: Callable[[float], str]

    def place(self, value: float, begin: float, end: float) -> float:
        """Where a value lies between begin and end."""
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return begin + share * (end - begin)


def logarithmic(values: Sequence[float], write: Callable[[float], str], base: float = 10.0) -> Axis:
    """Whole powers of the base around the values, five lines at most."""
    first = math.floor(math.log(min(values), base) + 1e-9)
    last = max(first + 1, math.ceil(math.log(max(values), base) - 1e-9))
    step = max(1, -(-(last - first) // 5))
    last = first + -(-(last - first) // step) * step
    return Axis(base**first, base**last, tuple(base**p for p in range(first, last + 1, step)), True, write)


def linear(highest: float, write: Callable[[float], str]) -> Axis:
    """From 0 to a round number, four lines or so."""
    raw = max(highest, 1e-12) / 4
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * s for s in (1.0, 2.0, 2.5, 5.0, 10.0) if size * s >= raw * 0.999)
    count = math.ceil(highest / step - 1e-9) or 1
    return Axis(0.0, count * step, tuple(i * step for i in range(count + 1)), False, write)


def number(value: float) -> str:
    """A number of an axis: 0.01, 5, 10k, 2M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.3g}"


def size_of(value: float) -> str:
    """Bytes in binary units."""
    for size, unit in ((2.0**30, "G"), (2.0**20, "M"), (2.0**10, "K")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def keys(names: Sequence[tuple[str, str]]) -> str:
    """A legend: (class, name) of every part."""
    return (
        '<div class="keys">' + "".join(f'<span class="{c}">{escape(n)}</span>' for c, n in names) + "</div>"
    )


class _Plot:
    """An SVG with two axes, and what is drawn into it."""

    def __init__(self, x: Axis, y: Axis, x_title: str, y_title: str) -> None:
        self.x, self.y = x, y
        self.parts: list[str] = []
        for tick in y.ticks:
            at = self.at(x.low, tick)[1]
            self.parts.append(
                f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDTH - _RIGHT}" y2="{at:.1f}"/>'
            )
            self.text(_LEFT - 5, at + 3.5, y.write(tick), "end")
        for tick in x.ticks:
            at = self.at(tick, y.low)[0]
            self.parts.append(
                f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{_HEIGHT - _BOTTOM}"/>'
            )
            self.text(at, _HEIGHT - _BOTTOM + 13, x.write(tick), "middle")
        self.text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 5, x_title, "middle")
        self.text(_LEFT + 4, _TOP + 9, y_title, "start", "axis")

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.x.place(x, _LEFT, _WIDTH - _RIGHT), self.y.place(y, _HEIGHT - _BOTTOM, _TOP)

    def text(self, x: float, y: float, text: str, anchor: str, style: str = "") -> None:
        styled = f' class="{style}"' if style else ""
        self.parts.append(
            f'<text{styled} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], color: int, dash: str) -> None:
        found = " ".join("{:.1f},{:.1f}".format(*self.at(x, y)) for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline class="s{color}" points="{found}"{dashed}/>')

    def mark(self, x: float, y: float, color: int, square: bool, said: str) -> None:
        left, top = self.at(x, y)
        if square:
            shape = f'<rect class="f{color}" x="{left - 3:.1f}" y="{top - 3:.1f}" width="6" height="6"'
        else:
            shape = f'<circle class="f{color}" cx="{left:.1f}" cy="{top:.1f}" r="3.4"'
        self.parts.append(f"{shape}><title>{escape(said)}</title>{'</rect>' if square else '</circle>'}")

    def svg(self, said: str) -> str:
        return (
            f'<svg class="plot" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{escape(said)}">'
            f"{''.join(self.parts)}</svg>"
        )


def roofline(figure: Roofline) -> str:
    """TFLOP/s over FLOP per byte, both logarithmic; circles are ours, squares the baseline; a roof per dtype."""
    intensities = [point.intensity for point in figure.points]
    rates = [point.tflops for point in figure.points] + list(figure.peak.values())
    x, y = logarithmic(intensities, number), logarithmic(rates, number)
    plot = _Plot(x, y, "FLOP per byte of operands", "TFLOP/s of a rank")
    dtypes = sorted({point.dtype for point in figure.points})
    named = []
    for index, dtype in enumerate(dtypes):
        color = (0, 5, 2, 3)[index % 4]
        if dtype in figure.peak and figure.bandwidth:
            ridge = figure.peak[dtype] * 1e3 / figure.bandwidth
            ends = [max(x.low, y.low * 1e3 / figure.bandwidth), min(max(ridge, x.low), x.high), x.high]
            roof = [(at, figure.roof(dtype, at) or 0.0) for at in ends]
            plot.line([p for p in roof if p[1] >= y.low * 0.999], color, "6 4")
        named += [(f"k{color} round", f"{dtype}, interlace"), (f"k{color}", f"{dtype}, baseline")]
        for point in figure.points:
            if point.dtype == dtype:
                who = "interlace" if point.ours else "baseline"
                said = f"{point.label}, {who}: {point.tflops:.3g} TFLOP/s at {point.intensity:.3g} FLOP/byte"
                plot.mark(point.intensity, point.tflops, color, not point.ours, said)
    return keys(named) + plot.svg("TFLOP/s over arithmetic intensity")


def curves(found: Sequence[Curve], x_title: str, y_title: str, *, ranks: bool) -> str:
    """Curves with their legend. ranks: x is a small count and y a ratio; else x is bytes, logarithmic."""
    values = [(x, y) for curve in found for x, y in curve.points]
    highest = max(y for _, y in values)
    if ranks:
        ticks = tuple(sorted({x for x, _ in values}))
        x = Axis(min(ticks[0], 1.0) * 0.9, ticks[-1] * 1.08, ticks, True, number)
    else:
        x = logarithmic([x for x, _ in values], size_of, 2.0)
    plot = _Plot(x, linear(highest, number), x_title, y_title)
    for curve in found:
        plot.line(curve.points, curve.number, _DASHES[curve.kind])
        if curve.kind != "ideal":
            for at, value in curve.points:
                said = f"{curve.name}: {value:.3g} at {x.write(at)}"
                plot.mark(at, value, curve.number, curve.kind != "measured", said)
    named = [(f"k{c.number}{' round' if c.kind == 'measured' else ' dashed'}", c.name) for c in found]
    return keys(named) + plot.svg(f"{y_title} over {x_title}")


def timeline(spans: Sequence[Span]) -> str:
    """Lanes of every rank for every variant, from its own start, all on one scale; pieces carry their name."""
    variants = list(dict.fromkeys(span.variant for span in spans))
    starts = {v: min(s.begin_ns for s in spans if s.variant == v) for v in variants}
    length = max(s.end_ns - starts[s.variant] for s in spans) / 1e3
    axis = linear(length, lambda us: f"{us:g} us" if length < 2e3 else f"{us / 1e3:g} ms")
    width, left = 720.0, 84.0
    parts: list[str] = []
    top = 4.0
    for variant in variants:
        parts.append(f'<text class="strong" x="0" y="{top + 11:.0f}">{escape(variant or "calls")}</text>')
        top += 17
        for rank in sorted({span.rank for span in spans if span.variant == variant}):
            for lane in LANES[1:]:
                mine = [s for s in spans if (s.variant, s.rank, s.lane) == (variant, rank, lane)]
                label = f"{rank} {lane}"
                parts.append(f'<text x="{left - 6:.0f}" y="{top + 9:.0f}" text-anchor="end">{label}</text>')
                parts.append(
                    f'<rect class="lane" x="{left}" y="{top:.1f}" width="{width - left}" height="{_LANE_HEIGHT - 1}"/>'
                )
                scale = (width - left) / axis.high / 1e3
                parts += _pieces(mine, starts[variant], left, top, scale, f"f{_LANE_COLORS[lane]}")
                top += _LANE_HEIGHT
            top += 4
        top += 6
    parts = _time_grid(axis, left, width, top) + parts
    svg = f'<svg class="time" viewBox="0 0 {width:.0f} {top + 16:.0f}" role="img" aria-label="timeline of the ranks">'
    named = [(f"k{_LANE_COLORS[lane]}", lane) for lane in LANES[1:]]
    return f'{keys(named)}<div class="wide">{svg}{"".join(parts)}</svg></div>'


def _time_grid(axis: Axis, left: float, width: float, top: float) -> list[str]:
    """Lines of the time axis, under the lanes, with their numbers below."""
    parts = []
    for tick in axis.ticks:
        x = left + tick / axis.high * (width - left)
        anchor = "start" if tick == 0 else "end" if tick == axis.ticks[-1] else "middle"
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="18" x2="{x:.1f}" y2="{top:.0f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{top + 12:.0f}" text-anchor="{anchor}">{axis.write(tick)}</text>')
    return parts


def _pieces(
    spans: Sequence[Span], start: int, left: float, top: float, scale: float, style: str
) -> list[str]:
    """Rectangles of one lane; neighbours that nobody could tell apart are one."""
    merged: list[list[float]] = []
    names: list[list[str]] = []
    for span in sorted(spans, key=lambda s: s.begin_ns):
        begin, end = (span.begin_ns - start) * scale, (span.end_ns - start) * scale
        if merged and begin - merged[-1][1] < _JOINED:
            merged[-1][1] = max(merged[-1][1], end)
            names[-1].append(span.name)
        else:
            merged.append([begin, end])
            names.append([span.name])
    out = []
    for (begin, end), found in zip(merged, names, strict=True):
        said = ", ".join(f"{found.count(name)} x {name}" for name in dict.fromkeys(found))
        said += f", {(end - begin) / scale / 1e3:.1f} us"
        out.append(
            f'<rect class="{style}" x="{left + begin:.2f}" y="{top:.1f}" width="{max(end - begin, 0.6):.2f}" '
            f'height="{_LANE_HEIGHT - 1}"><title>{escape(said)}</title></rect>'
        )
    return out
