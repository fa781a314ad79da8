"""The report as one self-contained page: no script, no font, no picture from elsewhere; readable on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from .drawing import curves, keys, roofline, timeline
from .figures import (
    BarGroup,
    bandwidth_curves,
    exposed_bars,
    geometric_mean,
    scaling_curves,
    short_name,
)
from .figures import roofline as roofline_of
from .row import Report, Row
from .style import STYLE
from .summary import percentile
from .trace import spans_of

__all__ = ["page"]

OPEN = 24  # rows of a table that is unfolded
BARS = 16  # cases drawn; the table has all

# title, field of Row or name in its extra, form, whether it is text
TABLE: tuple[tuple[str, str, str], ...] = (
    ("ranks", "world_size", "{}"),
    ("cache", "cache", "{}"),
    ("interlace us", "fused_us", "{:,.1f}"),
    ("x baseline", "speedup", "{:.2f}"),
    ("x peer", "peer_speedup", "{:.2f}"),
    ("x unsplit", "unsplit_ratio", "{:.2f}"),
    ("exposed us", "exposed_us", "{:,.1f}"),
    ("exposed share", "exposed_share", "{:.1%}"),
    ("overlap efficiency", "overlap_efficiency", "{:.2f}"),
    ("efficiency", "efficiency", "{:.1%}"),
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("baseline tokens/s", "baseline_tokens_per_second", "{:,.0f}"),
    ("baseline us", "baseline_us", "{:,.1f}"),
    ("peer us", "peer_us", "{:,.1f}"),
    ("compute us", "compute_us", "{:,.1f}"),
    ("collective us", "collective_us", "{:,.1f}"),
    ("engine", "engine_ratio", "{:.3f}"),
    ("communication", "communication_ratio", "{:.3f}"),
    ("x floor", "x_floor", "{:.2f}"),
    ("planner us", "planner_us", "{:,.1f}"),
    ("planner off by", "planner_error", "{:+.0%}"),
    ("TFLOP/s", "tflops", "{:.4g}"),
    ("algbw GB/s", "algbw_gbps", "{:.2f}"),
    ("busbw GB/s", "busbw_gbps", "{:.2f}"),
    ("p20 us", "p20_us", "{:,.1f}"),
    ("p95 us", "p95_us", "{:,.1f}"),
    ("#wrong", "wrong", "{}"),
    ("peer", "peer", "{}"),
    ("baseline", "baseline", "{}"),
    ("algorithm", "algorithm", "{}"),
    ("why", "reason", "{}"),
    ("note", "note", "{}"),
)
WORDS = {"peer", "baseline", "algorithm", "reason", "note", "cache"}
NATURE = {
    "gemm": "Products fused with their collective. Baseline: torch's product, then the collective.",
    "collective": "Plain collectives in the columns of nccl-tests.",
    "attention": "Attention over a split sequence.",
    "layer": "A layer split over the ranks: forward, and a step of training.",
    "model": "Whole models: prefill, decode, a step of training.",
    "moe": "Experts: tokens are dispatched to them, multiplied, and combined.",
    "scaling": "The same work on more ranks (strong), and work that grows with them (weak).",
}


def page(reports: Sequence[Report]) -> str:
    """The page as HTML text. Raises ValueError without reports."""
    if not reports:
        raise ValueError("page: no reports; run a benchmark, or name result files")
    first = reports[0]
    title = "interlace bench: " + ", ".join(report.benchmark for report in reports)
    links = "".join(f'<a href="#{escape(r.benchmark)}">{escape(r.benchmark)}</a>' for r in reports)
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="soft">{text}</p>' for text in _origin(first)),
        f"<nav>{links}</nav>" if len(reports) > 1 else "",
        *(_section(report, first) for report in reports),
        "<h2>How to read this</h2>",
        *(f"<p>{text}</p>" for text in _LEGEND.strip().split("\n\n")),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


_LEGEND = """
Times are microseconds of the slowest rank, medians of interleaved runs (A B B A, so that all ways meet the same
machine), with p20 and p95. Every result was checked against an unsplit one before it was timed. <b>x baseline</b> is
the 20th percentile of the baseline over ours: ranks that sleep between calls are judged awake.

<b>Exposed</b> is what a call takes beyond its own compute without communication. <b>Overlap efficiency</b> is 1 -
exposed / the collective alone: 1 hides all of it, 0 none, below 0 costs more than it. <b>Engine</b> is our product
against torch's, <b>communication</b> the fused op against our product alone: the two halves of a gain.

<b>Oversubscribed</b> rows ran more ranks than cores: ranks took turns, so they show that it works, not how fast.

Timelines are of one call, recorded with a clock read before and after each piece and torch's profiler on: they
show order and shape; the tables have the times.
"""


def _origin(report: Report) -> list[str]:
    """Which machine, which versions, which commit, which command; escaped."""
    m = report.machine
    place = [
        str(m.get("cpu", "unknown machine")),
        f"{m.get('cores', '?')} cores",
        f"{m.get('memory_gib', '?')} GiB",
    ]
    place += [str(m[name]) for name in ("isa", "system", "placement") if m.get(name)]
    if m.get("load_1min") is not None:
        place.append(f"load {m['load_1min']}")
    if m.get("peer_read_gb_s"):
        place.append(f"a rank reads its peer's cache at {m['peer_read_gb_s']} GB/s ({m.get('topology')})")
    versions = dict(report.versions) or {n: m[n] for n in ("interlace", "torch", "python") if n in m}
    told = ", ".join(f"{name} {value}" for name, value in versions.items())
    lines = [escape(", ".join(place)), escape(f"commit {report.commit or 'unknown'}; {told}")]
    if report.harness:
        lines.append(escape(f"harness: {report.harness.get('overhead_us', 0.0):.2f} us a call, subtracted"))
    return lines


def _section(report: Report, first: Report) -> str:
    parts = [f'<h2 id="{escape(report.benchmark)}">{escape(report.benchmark)}</h2>']
    if report.benchmark in NATURE:
        parts.append(f"<p>{NATURE[report.benchmark]}</p>")
    if report.command and (report is first or report.command != first.command):
        parts.append(f"<p><code>{escape(report.command)}</code></p>")
    if report is not first and (report.machine.get("cpu"), report.commit) != (
        first.machine.get("cpu"),
        first.commit,
    ):
        parts += [f'<p class="soft">{text}</p>' for text in _origin(report)]
    parts += [f'<p class="bad">WRONG: {escape(text)}</p>' for text in report.wrong]
    parts += ['<p class="bad">Interrupted: rows are missing.</p>'] if report.partial else []
    parts += [f'<p class="soft">{escape(text)}</p>' for text in report.warnings]
    busy = sum("busy" in row.note for row in report.rows)
    if busy:
        parts.append(
            f'<p class="soft">{busy} of {len(report.rows)} rows were measured on a busy machine.</p>'
        )
    parts += [_facts(report), _bars(exposed_bars(report)), _pictures(report)]
    spans = spans_of(report.timeline)
    if spans:
        parts.append(f"<h3>Timeline: {escape(report.timeline['case'])}</h3>{timeline(spans)}")
    parts += [_table(report.rows), _peers(report)]
    return "\n".join(filter(None, parts))


def _facts(report: Report) -> str:
    """Figures of the whole section, of its right results."""
    rows = [row for row in report.rows if not row.skipped and not row.straggler_us]
    right = [row for row in rows if row.correct]
    gains = [row.speedup for row in right if row.speedup]
    overlap = [row.overlap_efficiency for row in right if row.overlap_efficiency is not None]
    found: list[tuple[str, str]] = []
    if gains:
        found.append((f"{_times(geometric_mean(gains))} x", "of the baseline's speed, geometric mean"))
        found.append((f"{_times(min(gains))} to {_times(max(gains))} x", "worst and best case"))
    peers = [row.peer_speedup for row in right if row.peer_speedup]
    if peers:
        found.append((f"{_times(geometric_mean(peers))} x", "of the best peer's speed, geometric mean"))
    if overlap:
        found.append(
            (f"{min(1.0, max(0.0, percentile(overlap, 0.5))):.0%}", "of the collective hidden, median")
        )
    if rows:
        wrong = sum(not row.correct for row in rows)
        found.append((f"{len(rows) - wrong} of {len(rows)}", "cases with right results"))
    cells = "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for value, name in found)
    return f'<div class="facts">{cells}</div>' if cells else ""


def _times(ratio: float | None) -> str:
    """Three digits of a ratio."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def _bars(groups: Sequence[BarGroup]) -> str:
    """Every case on its own scale: the longest of its bars is the whole width."""
    if not groups:
        return ""
    shown = sorted(groups[:: max(1, -(-len(groups) // BARS))], key=groups.index)
    cases = []
    for group in shown:
        lines = []
        for bar in group.bars:
            scale = 100.0 / group.longest
            widths = (
                ("b0", bar.compute - bar.hidden, "compute"),
                ("hid", bar.hidden, "compute, the collective runs behind it"),
                ("b5", bar.exposed, "exposed communication"),
            )
            parts = "".join(
                f'<i class="{name}" style="width:{us * scale:.2f}%" title="{said}: {us:,.1f} us"></i>'
                for name, us, said in widths
                if us > 0
            )
            lines.append(
                f'<div class="bar"><span class="who" title="{escape(bar.name)}">{escape(bar.name)}</span>'
                f'<div class="track">{parts}</div><span>{duration(bar.total)}</span></div>'
            )
        note = f' <span class="bad">{escape(group.note)}</span>' if group.note else ""
        cases.append(f'<div class="case"><b>{escape(group.label)}</b>{note}{"".join(lines)}</div>')
    named = [("k0", "compute"), ("hid", "compute that hides communication"), ("k5", "exposed communication")]
    more = f", {len(shown)} of {len(groups)} cases" if len(shown) < len(groups) else ""
    return f'<h3>Exposed and hidden{more}</h3>{keys(named)}<div class="cases">{"".join(cases)}</div>'


def duration(us: float) -> str:
    """Microseconds for a person."""
    if us < 1000:
        return f"{us:.1f} us"
    return f"{us / 1e3:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def _pictures(report: Report) -> str:
    charts = []
    figure = roofline_of(report)
    if len(figure.points) > 1:
        roof = "" if figure.peak else " (no roof was measured)"
        charts.append(f"<div><h3>Roofline{roof}</h3>{roofline(figure)}</div>")
    for name, found in bandwidth_curves(report).items():
        drawn = curves(found, "bytes", "bus bandwidth, GB/s", ranks=False)
        charts.append(f"<div><h3>{escape(name)}</h3>{drawn}</div>")
    for name, found in scaling_curves(report).items():
        drawn = curves(found, "ranks", "times the speed of one rank", ranks=True)
        charts.append(f"<div><h3>{escape(name)}</h3>{drawn}</div>")
    return f'<div class="charts">{"".join(charts)}</div>' if charts else ""


def _table(rows: Sequence[Row]) -> str:
    """All rows; columns that say nothing are left out."""
    if not rows:
        return ""
    shown = [
        (title, key, form)
        for title, key, form in TABLE
        if any(row.value(key) not in (None, "") for row in rows)
        and not (key == "wrong" and not any(r.wrong for r in rows))
    ]
    head = "".join(f"<th{_style(key)}>{escape(title)}</th>" for title, key, _ in shown)
    lines = [f"<tr><th>case</th>{head}</tr>"]
    for row in rows:
        values = [(key, form, row.value(key)) for _, key, form in shown]
        if row.skipped:
            body = f'<td class="words" colspan="{len(shown)}">skipped: {escape(row.skipped)}</td>'
        else:
            body = "".join(f"<td{_style(key)}>{_cell(value, form)}</td>" for key, form, value in values)
        lines.append(f"<tr><td>{escape(short_name(row))}{_mark(row)}</td>{body}</tr>")
    table = f'<div class="wide"><table>{"".join(lines)}</table></div>'
    opened = " open" if len(rows) <= OPEN else ""
    return f"<details{opened}><summary>{len(rows)} rows</summary>{table}</details>"


def _style(key: str) -> str:
    return ' class="words"' if key in WORDS else ""


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else escape(form.format(value))


def _mark(row: Row) -> str:
    said = [] if row.correct else ["WRONG"]
    said += ["oversubscribed"] if row.oversubscribed else []
    said += [f"straggler {row.straggler_us:g} us"] if row.straggler_us else []
    return f' <span class="bad">{", ".join(said)}</span>' if said else ""


def _peers(report: Report) -> str:
    """Which other libraries were there, and why the rest was not."""
    if not report.peers:
        return ""
    lines = []
    for peer in report.peers:
        name = escape(str(peer.get("name", "?")))
        version = escape(str(peer.get("version") or ""))
        why = escape(str(peer.get("absent") or peer.get("reason") or ""))
        lines.append(f"<li>{name} {version}{': not there, ' + why if why else ''}</li>")
    return f"<details><summary>Peers</summary><ul>{''.join(lines)}</ul></details>"
