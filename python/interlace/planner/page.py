"""The answer as one self-contained page: no script, no font, no picture from elsewhere; readable on a phone."""

from __future__ import annotations

from html import escape
from math import log2
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from .explain import explain
from .figures import CURVES, Bars, ScalingPoint, color, memory_bars, scaling, time_bars
from .layout import Layout
from .ranking import causes
from .table import headline
from .words import duration, gigabytes, rate

if TYPE_CHECKING:
    from .command import Answer

__all__ = ["write_page"]

_STYLE = """
:root { --ink: #1a1a1a; --soft: #5a5a5a; --line: #d5d5d5; --paper: #ffffff; --tint: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --soft: #b0b0b0; --line: #484848; --paper: #161616; --tint: #222222; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
p { margin: 0.4rem 0; }
.soft { color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: 0.5rem; margin: 1rem 0; }
.facts div { background: var(--tint); border-radius: 0.4rem; padding: 0.5rem 0.7rem; }
.facts b { display: block; font-size: 1.25rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.25rem 0.6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); }
.left { text-align: left; }
.first td { font-weight: 700; }
.bars { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: 0.3rem 0.6rem; align-items: center; }
.bars .name { font-size: 0.85rem; text-align: right; }
.track { position: relative; display: flex; height: 1.3rem; background: var(--tint); }
.track i { display: block; height: 100%; border-right: 1px solid var(--paper); }
.track u { position: absolute; top: -0.15rem; bottom: -0.15rem; border-left: 2px dashed var(--ink); }
.keys { display: flex; flex-wrap: wrap; gap: 0.3rem 1rem; margin: 0.5rem 0; font-size: 0.85rem; }
.keys span::before { content: ""; display: inline-block; width: 0.8rem; height: 0.8rem; margin-right: 0.35rem;
  vertical-align: -0.05rem; background: var(--key); }
.keys .limit::before { background: none; border-left: 2px dashed var(--ink); width: 0.2rem; }
svg { width: 100%; max-width: 34rem; height: auto; display: block; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
pre { background: var(--tint); padding: 0.8rem; overflow-x: auto; font-size: 0.8rem; border-radius: 0.4rem; }
dt { font-weight: 600; margin-top: 0.7rem; }
dd { margin: 0 0 0 1rem; overflow-wrap: anywhere; font-size: 0.9rem; }
summary { cursor: pointer; font-weight: 600; margin-top: 2rem; }
"""

BARS = 8  # layouts side by side


def write_page(answer: Answer, path: str | PathLike[str], top: int = 10) -> None:
    """Write the page of the best `top` layouts to path."""
    Path(path).write_text(page(answer, top), encoding="utf-8")


def page(answer: Answer, top: int = 10) -> str:
    """The page as HTML text."""
    layouts, best = answer.layouts[:top], answer.layouts[0]
    title = f"{answer.model} on {answer.gpus} x {answer.cluster.device.name}"
    facts = headline(
        answer.arch, answer.cluster, answer.workload, answer.gpus, answer.model, answer.limit
    ).split("\n")
    body = [
        f"<h1>{escape(title)}: {escape(_name(best))}</h1>",
        *(f'<p class="soft">{escape(line)}</p>' for line in facts),
        _facts(best),
        f"<h2>Layouts that fit, best first ({len(layouts)} of {len(answer.layouts)})</h2>",
        _ranking(layouts),
        "<h2>Why the others lost</h2>" if len(layouts) > 1 else "",
        "".join(
            f"<p><b>{number} {escape(_name(layout))}</b> {escape(layout.lost)}</p>"
            for number, layout in enumerate(layouts, 1)
            if layout.lost
        ),
        _bars(memory_bars(layouts[:BARS])),
        _bars(memory_bars([best])) if len(best.stages) > 1 else "",
        _bars(time_bars(layouts[:BARS])),
        _collectives(best),
        _curves(scaling(answer)),
        _formulas(answer),
        "<h2>Run it</h2>",
        "".join(f"<pre>{escape(line)}</pre>" for line in answer.commands),
        f"<pre>{escape(answer.program)}</pre>",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _name(layout: Layout) -> str:
    if layout.serving is None:
        return layout.name
    return f"{layout.dp} {'replica' if layout.dp == 1 else 'replicas'} of tp{layout.tp} pp{layout.pp}"


def _facts(best: Layout) -> str:
    facts = [("tokens/s", rate(best.tokens_per_second))]
    if best.step is not None:
        facts += [("step", duration(best.seconds)), ("MFU", f"{best.mfu:.1%}")]
        facts += [
            ("exposed communication", duration(best.step.exposed)),
            ("bubble", f"{best.step.bubble_fraction:.1%}"),
        ]
        if best.days:
            facts += [("days", f"{best.days:.1f}"), ("GPU-hours", rate(best.gpu_hours))]
    if best.serving is not None:
        facts += [
            ("first token", duration(best.serving.first_token)),
            ("next token", duration(best.serving.inter_token)),
        ]
        facts += [
            ("requests at most", str(best.serving.max_concurrency)),
            ("decode bound by", best.serving.decode_bound_by),
        ]
    facts += [("memory per GPU", gigabytes(best.memory)), ("margin", gigabytes(best.margin))]
    cells = "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in facts)
    return f'<div class="facts">{cells}</div>'


def _table(columns: list[str], rows: list[list[str]], left: tuple[str, ...] = (), first: bool = False) -> str:
    """columns named in `left` are aligned to the left; first: the first row is bold."""

    def cells(tag: str, row: list[str]) -> str:
        marked = zip(columns, row, strict=True)
        return "".join(
            f"<{tag}{' class=left' if name in left else ''}>{escape(cell)}</{tag}>" for name, cell in marked
        )

    lines = [f"<tr>{cells('th', columns)}</tr>"]
    lines += [
        f"<tr{' class=first' if first and not number else ''}>{cells('td', row)}</tr>"
        for number, row in enumerate(rows)
    ]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _ranking(layouts: list[Layout]) -> str:
    rows = []
    for number, layout in enumerate(layouts, 1):
        row = {"#": str(number), "dp": str(layout.dp), "tp": str(layout.tp), "pp": str(layout.pp)}
        if layout.step is not None:
            row |= {"cp": str(layout.cp), "ep": str(layout.ep), "step": duration(layout.seconds)}
            row |= {"MFU": f"{layout.mfu:.1%}", "exposed": duration(layout.step.exposed)}
            row |= {"bubble": f"{layout.step.bubble_fraction:.1%}", "memory": gigabytes(layout.memory)}
            row |= {
                "margin": gigabytes(layout.margin),
                "ZeRO": str(layout.zero),
                "chunks": str(layout.interleave),
            }
            row |= {
                "batch x passes": f"{layout.microbatch} x {layout.microbatches}",
                "recompute": layout.recompute,
            }
        elif layout.serving is not None:
            one = layout.serving
            row |= {"tokens/s": rate(layout.tokens_per_second), "first token": duration(one.first_token)}
            row |= {"next token": duration(one.inter_token), "requests": str(one.concurrency)}
            row |= {"at most": str(one.max_concurrency), "memory": gigabytes(layout.memory)}
            row |= {"margin": gigabytes(layout.margin), "decode bound by": one.decode_bound_by}
        rows.append(row)
    return _table(
        list(rows[0]), [list(row.values()) for row in rows], ("recompute", "decode bound by"), first=True
    )


def _bars(bars: Bars) -> str:
    scale = 100.0 / (bars.highest or 1.0)
    rows = []
    for number, label in enumerate(bars.labels):
        parts = "".join(
            f'<i style="width:{values[number] * scale:.2f}%;background:{color(index)}" '
            f'title="{escape(name)} {values[number]:.3g} {bars.unit}"></i>'
            for index, (name, values) in enumerate(bars.values.items())
        )
        line = f'<u style="left:{bars.limit * scale:.2f}%"></u>' if bars.limit else ""
        rows.append(f'<span class="name">{escape(label)}</span><div class="track">{parts}{line}</div>')
    keys = [
        f'<span style="--key:{color(index)}">{escape(name)}</span>' for index, name in enumerate(bars.values)
    ]
    if bars.limit:
        keys.append(f'<span class="limit">limit {bars.limit:.1f} {bars.unit}</span>')
    names = list(bars.values)
    numbers = [
        [label, *(f"{bars.values[name][number]:.3g}" for name in names)]
        for number, label in enumerate(bars.labels)
    ]
    table = _table(["layout", *names], numbers, ("layout",))
    return (
        f"<h2>{escape(bars.title)}, {bars.unit}</h2>"
        f'<div class="keys">{"".join(keys)}</div><div class="bars">{"".join(rows)}</div>'
        f"<details><summary>The numbers</summary>{table}</details>"
    )


def _collectives(best: Layout) -> str:
    if best.step is None or not best.step.collectives:
        return ""
    rows = [
        [each.name, each.op, each.axis, each.link, rate(each.calls), gigabytes(each.bytes), duration(each.seconds),
         duration(each.exposed)]
        for each in best.step.collectives
    ]  # fmt: skip
    columns = ["collective", "op", "axis", "link", "calls", "sent", "total", "exposed"]
    table = _table(columns, rows, ("collective", "op", "axis", "link"))
    shares = ", ".join(
        f"{name} {seconds / best.seconds:.1%}" for name, seconds in causes(best).items() if seconds
    )
    return f"<h2>Communication of a step</h2>{table}<p class=soft>Share of the step: {escape(shares)}</p>"


def _curves(points: list[ScalingPoint]) -> str:
    if len(points) < 2:
        return ""
    rates = [value / point.gpus for point in points for value in (point.strong, point.weak) if value]
    low, high, top = log2(points[0].gpus), log2(points[-1].gpus), _round_up(max(rates))

    def place(gpus: int, value: float) -> tuple[float, float]:
        return 60 + 290 * (log2(gpus) - low) / (high - low), 190 - 170 * value / top

    parts = ['<line x1="60" y1="190" x2="360" y2="190" stroke="currentColor"/>']
    parts.append('<line x1="60" y1="20" x2="60" y2="190" stroke="currentColor"/>')
    for share in (0.5, 1.0):
        height = 190 - 170 * share
        parts.append(f'<text x="54" y="{height + 4:.0f}" text-anchor="end">{rate(top * share)}</text>')
        parts.append(
            f'<line x1="60" y1="{height}" x2="360" y2="{height}" stroke="currentColor" opacity="0.15"/>'
        )
    for point in points:
        x, _ = place(point.gpus, 0.0)
        parts.append(f'<text x="{x:.0f}" y="206" text-anchor="middle">{point.gpus}</text>')
    for name, _, marker, number in CURVES:
        found = [
            place(point.gpus, getattr(point, name) / point.gpus) for point in points if getattr(point, name)
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in found)
        dash = ' stroke-dasharray="6 4"' if marker == "s" else ""
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{color(number)}" stroke-width="2"{dash}/>'
        )
        for x, y in found:
            shape = f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"' if marker == "s" else (
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"'
            )  # fmt: skip
            parts.append(f'{shape} fill="{color(number)}"/>')
    keys = "".join(f'<span style="--key:{color(number)}">{label}</span>' for _, label, _, number in CURVES)
    return (
        f'<h2>Scaling: tokens/s per GPU by GPUs</h2><div class="keys">{keys}</div>'
        f'<svg viewBox="0 0 370 215" role="img" aria-label="tokens per second and GPU">{"".join(parts)}</svg>'
        '<p class="soft">The best layout is searched at each size.</p>'
    )


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 5 or 10 x 10^n above value, so that the axis has round numbers."""
    size = 10.0 ** int(f"{value:e}".partition("e")[2])
    return next(size * step for step in (1.0, 2.0, 2.5, 5.0, 10.0) if size * step >= value)


def _formulas(answer: Answer) -> str:
    rows = "".join(
        f"<dt>{escape(formula.name)} = {escape(formula.value)}</dt><dd>{escape(formula.formula)}</dd>"
        f"<dd>{escape(formula.numbers)}</dd><dd class=soft>{escape(formula.source)}</dd>"
        for formula in explain(answer.arch, answer.cluster, answer.workload, answer.layouts[0])
    )
    return f"<details><summary>Every formula with its numbers and source</summary><dl>{rows}</dl></details>"
