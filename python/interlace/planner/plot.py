"""The answer as one PNG: memory with its limit, time by cause, weak and strong scaling."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from .figures import CURVES, Bars, ScalingPoint, color, memory_bars, scaling, time_bars

if TYPE_CHECKING:
    from .command import Answer

__all__ = ["write_plot"]

SHOWN = 8  # layouts side by side


def write_plot(answer: Answer, path: str | PathLike[str]) -> None:
    """Write the picture of the best layouts to path. Raises ImportError in one line where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plan: --plot needs matplotlib: pip install 'interlace[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = scaling(answer)
    figure, axes = pyplot.subplots(
        1, 3 if points else 2, figsize=(18 if points else 12, 6), layout="constrained"
    )
    shown = answer.layouts[:SHOWN]
    _stack(axes[0], memory_bars(shown), "limit")
    _stack(axes[1], time_bars(shown), "")
    if points:
        _curves(axes[2], points)
    figure.suptitle(f"{answer.model} on {answer.gpus} x {answer.cluster.device.name}")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _stack(axes: Any, bars: Bars, line: str) -> None:
    bottom = [0.0] * len(bars.labels)
    for number, (name, values) in enumerate(bars.values.items()):
        axes.bar(bars.labels, values, bottom=bottom, color=color(number), edgecolor="white", label=name)
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    if line and bars.limit:
        axes.axhline(bars.limit, color="black", linestyle="--", label=f"{line} {bars.limit:.1f} {bars.unit}")
    axes.set_title(bars.title)
    axes.set_ylabel(bars.unit)
    axes.set_ylim(0, bars.highest * 1.25)
    axes.tick_params(axis="x", rotation=35)
    for label in axes.get_xticklabels():
        label.set_horizontalalignment("right")
    axes.legend(fontsize=8, ncols=2, loc="upper right")


def _curves(axes: Any, points: list[ScalingPoint]) -> None:
    sizes = [point.gpus for point in points]
    for name, label, marker, number in CURVES:
        found = [(point.gpus, getattr(point, name) / point.gpus) for point in points if getattr(point, name)]
        axes.plot(*zip(*found, strict=True), color=color(number), marker=marker, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(0, 1.2 * max(max(point.strong, point.weak) / point.gpus for point in points))
    axes.set_title("Scaling: the best layout at each size")
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens/s per GPU")
    axes.legend(loc="lower left")
