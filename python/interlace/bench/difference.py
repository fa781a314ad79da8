"""A comparison of two results as text."""

from __future__ import annotations

from collections.abc import Iterator

from .compare import Change, Comparison

__all__ = ["lines"]


def lines(found: Comparison, threshold: float, everything: bool = False) -> Iterator[str]:
    """Warnings, rows that changed (all of them with `everything`), rows of one side alone, and the sum of it."""
    yield from (f"warning: {text}" for text in found.warnings)
    slower = [change for change in found.changes if change.slower(threshold)]
    faster = [change for change in found.changes if change.faster(threshold)]
    shown = found.changes if everything else (*slower, *faster)
    if shown:
        yield f"{'ratio':>7}  {'noise':>6}  {'before us':>11}  {'after us':>11}"
    for change in sorted(shown, key=lambda c: -c.ratio):
        word = "SLOWER " if change in slower else "faster " if change in faster else ""
        notes = [
            f"{when}: {row.note}"
            for when, row in (("before", change.before), ("after", change.after))
            if row.note
        ]
        said = f" ({'; '.join(notes)})" if notes else ""
        yield f"{_figures(change)}  {word}{change.benchmark}: {change.after.name}{said}"
    yield from (f"only before: {name}" for name in found.gone)
    yield from (f"only after: {name}" for name in found.new)
    yield from (f"not measured after: {name}" for name in found.unmeasured)
    yield from (f"WRONG after: {name}" for name in found.wrong)
    same = len(found.changes) - len(slower) - len(faster)
    yield (
        f"{len(found.changes)} rows in both: {len(slower)} slower, {len(faster)} faster, {same} the same within "
        f"{threshold:.1%} or their noise"
    )


def _figures(change: Change) -> str:
    before, after = change.before.fused_us, change.after.fused_us
    return f"{change.ratio:7.3f}  {change.noise:6.3f}  {before:11.1f}  {after:11.1f}"
