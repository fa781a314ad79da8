"""The report as one PNG: bars of exposed and hidden communication, then rooflines and curves."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from .figures import BarGroup, Curve, Roofline, bandwidth_curves, exposed_bars, roofline, scaling_curves
from .row import Report
from .style import PALETTE

__all__ = ["png"]

CASES = 12  # groups of bars in a picture
STYLES = {"measured": "-", "ideal": ":", "fit": "--", "predicted": "-."}


def png(reports: Sequence[Report]) -> bytes:
    """The picture of all reports. ImportError in one line without matplotlib, ValueError with nothing to draw."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("bench: --plot needs matplotlib: pip install 'interlace[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [panel for report in reports for panel in panels_of(report)]
    if not panels:
        raise ValueError(
            "bench: --plot has nothing to draw: no row has a time of its compute, a size or ranks"
        )
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(6.4 * columns, 4.6 * rows), layout="constrained", squeeze=False
    )
    for place, panel in zip(axes.flat, panels, strict=False):
        panel(place)
    for place in axes.flat[len(panels) :]:
        place.set_visible(False)
    first = reports[0]
    figure.suptitle(f"{first.machine.get('cpu', '')}, commit {first.commit}", fontsize=10)
    out = io.BytesIO()
    figure.savefig(out, dpi=110, format="png")
    pyplot.close(figure)
    return out.getvalue()


def panels_of(report: Report) -> list[Callable[[Any], None]]:
    """A function per picture that draws it on its axes."""
    panels: list[Callable[[Any], None]] = []
    groups = exposed_bars(report)
    if groups:
        shown = groups[:: max(1, -(-len(groups) // CASES))]
        panels.append(lambda axes: _bars(axes, shown, report.benchmark))
    figure = roofline(report)
    if len(figure.points) > 1:
        panels.append(lambda axes: _roofline(axes, figure, report.benchmark))
    for name, found in bandwidth_curves(report).items():
        panels.append(lambda axes, n=name, f=found: _curves(axes, f, n, "bytes", "bus bandwidth, GB/s"))
    for name, found in scaling_curves(report).items():
        panels.append(lambda axes, n=name, f=found: _curves(axes, f, n, "ranks", "times one rank"))
    return panels


def _bars(axes: Any, groups: Sequence[BarGroup], title: str) -> None:
    """Every group relative to its longest bar."""
    labels, place = [], 0.0
    for group in reversed(groups):
        for bar in reversed(group.bars):
            left = 0.0
            parts = (
                (bar.compute - bar.hidden, 0, "", "compute"),
                (bar.hidden, 4, "////", "compute that hides communication"),
                (bar.exposed, 5, "", "exposed communication"),
            )
            for us, color, hatch, name in parts:
                axes.barh(
                    place, us / group.longest, left=left, height=0.85, color=PALETTE[color], hatch=hatch,
                    edgecolor="white", linewidth=0.3, label=name if place == 0.0 else None,
                )  # fmt: skip
                left += us / group.longest
            labels.append((place, bar.name))
            place += 1.0
        axes.text(0.0, place - 0.3, group.label, fontsize=6, va="bottom")
        place += 0.9
    axes.set_yticks([at for at, _ in labels], [name for _, name in labels], fontsize=6)
    axes.set_ylim(-0.7, place + 0.3)
    axes.set_xlabel("share of the slowest way")
    axes.set_title(f"{title}: exposed and hidden")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False)


def _roofline(axes: Any, figure: Roofline, title: str) -> None:
    for index, dtype in enumerate(sorted({point.dtype for point in figure.points})):
        color = PALETTE[(0, 5, 2, 3)[index % 4]]
        for ours, marker in ((True, "o"), (False, "s")):
            found = [p for p in figure.points if p.dtype == dtype and p.ours is ours]
            who = "interlace" if ours else "baseline"
            axes.plot(
                [p.intensity for p in found], [p.tflops for p in found], marker, color=color, markersize=4,
                fillstyle="full" if ours else "none", label=f"{dtype}, {who}",
            )  # fmt: skip
        spread = sorted(p.intensity for p in figure.points)
        steps = [spread[0] * (spread[-1] / spread[0]) ** (i / 60) for i in range(61)]
        roof = [(x, y) for x in steps if (y := figure.roof(dtype, x)) is not None]
        if roof:
            axes.plot(*zip(*roof, strict=True), "--", color=color, linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte of operands")
    axes.set_ylabel("TFLOP/s of a rank")
    axes.set_title(f"{title}: roofline")
    axes.legend(fontsize=7)


def _curves(axes: Any, found: Sequence[Curve], title: str, x_title: str, y_title: str) -> None:
    for curve in found:
        marker = {"measured": "o", "ideal": ""}.get(curve.kind, "s")
        axes.plot(
            *zip(*curve.points, strict=True), STYLES[curve.kind], marker=marker, markersize=4,
            color=PALETTE[curve.number % len(PALETTE)], label=curve.name,
        )  # fmt: skip
    if x_title == "bytes":
        axes.set_xscale("log", base=2)
    else:
        axes.set_xticks(sorted({x for curve in found for x, _ in curve.points}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_title)
    axes.set_ylabel(y_title)
    axes.set_title(title)
    axes.legend(fontsize=7)
