"""Why a layout is slower than the best one, in seconds by cause."""

from __future__ import annotations

from dataclasses import replace

from .layout import Layout
from .words import duration

__all__ = ["causes", "explain_losses"]


def causes(layout: Layout) -> dict[str, float]:
    """Seconds of a step by cause; they add up to layout.step.total."""
    step = layout.step
    if step is None:
        return {}
    found = {
        "compute": step.compute,
        "recompute": step.recompute,
        "bubble": step.bubble,
        "optimizer": step.optimizer,
    }
    for collective in step.collectives:
        found[f"exposed {collective.name}"] = collective.exposed
    return found


def explain_losses(ranked: list[Layout]) -> list[Layout]:
    """The layouts with `lost` filled in: the two largest causes by which each is slower than the first."""
    if not ranked:
        return []
    return [ranked[0], *(replace(layout, lost=_loss(ranked[0], layout)) for layout in ranked[1:])]


def _loss(best: Layout, layout: Layout) -> str:
    ours, theirs = causes(layout), causes(best)
    worse = {name: ours[name] - theirs.get(name, 0.0) for name in ours}
    largest = sorted(worse, key=lambda name: -worse[name])[:2]
    total = layout.seconds - best.seconds
    named = [
        f"{name} {duration(ours[name])} against {duration(theirs.get(name, 0.0))}"
        for name in largest
        if worse[name] > 0.05 * total
    ]
    return f"+{duration(total)} ({total / best.seconds:+.1%}): {', '.join(named) or 'small differences'}"
