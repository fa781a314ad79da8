"""What the picture and the page show: stacked bars of memory and time, and curves of scaling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .layout import Layout
from .ranking import causes
from .search import plan
from .table import CATEGORIES
from .workload import Training

if TYPE_CHECKING:
    from .command import Answer

__all__ = ["CURVES", "Bars", "ScalingPoint", "color", "memory_bars", "scaling", "time_bars"]

# Okabe and Ito's palette: apart for all common forms of colour blindness, and in lightness
_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999", "#444444")
# field of ScalingPoint, what it is called, marker, colour
CURVES = (
    ("strong", "strong: the same global batch", "o", 0),
    ("weak", "weak: the batch grows with the GPUs", "s", 5),
)
_MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Bars:
    """Stacked bars: labels[i] has values[part][i] of every part. limit: a line across, 0 for none."""

    title: str
    unit: str
    labels: list[str]
    values: dict[str, list[float]]
    limit: float = 0.0

    @property
    def highest(self) -> float:
        """The highest bar or the limit."""
        totals: list[float] = [sum(column) for column in zip(*self.values.values(), strict=True)]
        return max([*totals, self.limit])


@dataclass(frozen=True)
class ScalingPoint:
    """Tokens/s of the best layout of `gpus` GPUs: with the same global batch, and with a batch grown alike; 0: none."""

    gpus: int
    strong: float
    weak: float


def color(number: int) -> str:
    """The colour of part `number` of a bar."""
    return _PALETTE[number % len(_PALETTE)]


def memory_bars(layouts: list[Layout]) -> Bars:
    """Gigabytes of the fullest stage of each layout by category; of every stage when there is one layout."""
    if len(layouts) == 1 and len(layouts[0].stages) > 1:
        columns = list(layouts[0].stages)
        labels = [f"stage {number}" for number in range(len(columns))]
    else:
        columns = [layout.stages[layout.fullest_stage] for layout in layouts]
        labels = [short_name(layout) for layout in layouts]
    values = {name: [getattr(column, name) / 1e9 for column in columns] for name in CATEGORIES}
    shown = {name: column for name, column in values.items() if any(column)}
    return Bars("Memory per GPU", "GB", labels, shown, layouts[0].limit / 1e9)


def time_bars(layouts: list[Layout]) -> Bars:
    """Seconds of a step by cause; for serving, milliseconds of a decode step."""
    labels = [short_name(layout) for layout in layouts]
    if layouts[0].serving is not None:
        values: dict[str, list[float]] = {name: [] for name in ("compute", "memory", "all_reduce", "stages")}
        for layout in layouts:
            bounds = layout.serving.decode_bounds if layout.serving is not None else {}
            for name, column in values.items():
                # compute and memory traffic overlap: only the longer of the two takes time
                hidden = name in ("compute", "memory") and bounds[name] < max(
                    bounds["compute"], bounds["memory"]
                )
                column.append(0.0 if hidden else bounds[name] * 1e3)
        shown = {name: column for name, column in values.items() if any(column)}
        return Bars("Time to the next token, by what bounds it", "ms", labels, shown)
    each = [causes(layout) for layout in layouts]
    names = list(dict.fromkeys(name for column in each for name in column))
    values = {name: [column.get(name, 0.0) for column in each] for name in names}
    return Bars(
        "Time of a step", "s", labels, {name: column for name, column in values.items() if any(column)}
    )


def short_name(layout: Layout) -> str:
    """The axes above one: `dp8 tp4`, with ZeRO stage and chunks where they matter."""
    sizes = [
        f"{name}{getattr(layout, name)}"
        for name in ("dp", "tp", "pp", "cp", "ep")
        if getattr(layout, name) > 1
    ]
    return " ".join(sizes) or "1 GPU"


def scaling(answer: Answer) -> list[ScalingPoint]:
    """Best tokens/s at a quarter to four times the GPUs, each searched afresh; empty for serving."""
    workload = answer.workload
    if not isinstance(workload, Training):
        return []
    points = []
    for multiple in _MULTIPLES:
        gpus = round(answer.gpus * multiple)
        if gpus < 1 or gpus != answer.gpus * multiple:
            continue
        if multiple == 1.0:
            rate = answer.layouts[0].tokens_per_second
            points.append(ScalingPoint(gpus, rate, rate))
            continue
        batch = workload.global_batch * multiple
        grown = replace(workload, global_batch=int(batch)) if batch == int(batch) and batch >= 1 else None
        points.append(ScalingPoint(gpus, _rate(answer, gpus, workload), _rate(answer, gpus, grown)))
    return [point for point in points if point.strong or point.weak]


def _rate(answer: Answer, gpus: int, training: Training | None) -> float:
    if training is None:
        return 0.0
    try:
        found = plan(
            answer.arch, cluster=answer.cluster, gpus=gpus, training=training, headroom=answer.headroom, top=1
        )
    except ValueError:  # nothing legal, or nothing fits: no point on the curve
        return 0.0
    return found[0].tokens_per_second
