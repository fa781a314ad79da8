"""What the benchmarks of layers, models, experts and scaling share: columns of a step, and rows for the README."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .output import Column, markdown, short
from .row import Report, Row

__all__ = ["README_AGAINST", "README_STEP", "against", "readme_of", "step"]


def step(form: str) -> list[Column]:
    """What a step takes and what of it is communication; times in `form`."""
    return [
        Column("us", "fused_us", form),
        Column("p95", "p95_us", form),
        Column("tokens/s", "tokens_per_second", "{:,.0f}"),
        Column("TFLOP/s", "tflops", "{:.3f}", 7),
        Column("compute", "compute_us", form),
        Column("coll.", "collective_us", form, 8),
        Column("exposed", "exposed_us", form, 8),
        Column("share", "exposed_share", "{:.1%}", 6),
        Column("overlap", "overlap_efficiency", "{:.2f}", 7),
        Column("comm", "communication_ratio", "{:.3f}", 6),
    ]


def against(form: str) -> list[Column]:
    """The same step by torch, by the best peer, unsplit."""
    return [
        Column("torch us", "baseline_us", form),
        Column("x torch", "speedup", "{:.2f}", 7),
        Column("peer", "peer", width=18),
        Column("x peer", "peer_speedup", "{:.2f}", 6),
        Column("x unsplit", "unsplit_ratio", "{:.2f}"),
    ]


README_STEP = [
    Column("dtype", "dtype"),
    Column("tokens", "tokens", "{:,}"),
    Column("ms", "milliseconds", "{:.2f}"),
    Column("tokens/s", "tokens_per_second", "{:,.0f}"),
    Column("of it exposed", "exposed_share", "{:.1%}"),
]
README_AGAINST = [
    Column("x torch", "speedup", "{:.2f}"),
    Column("x best peer", "peer_speedup", "{:.2f}"),
    Column("x unsplit", "unsplit_ratio", "{:.2f}"),
]


def readme_of(report: Report, columns: Sequence[Column], *, notes: bool = False) -> str:
    """The report as a Markdown table, rows of stragglers left out. notes: what a row says besides its figures."""
    rows = [_milliseconds(row) for row in report.rows if not row.straggler_us]
    return markdown(rows, columns, notes=notes)


def _milliseconds(row: Row) -> Row:
    """The row with a time that a person reads."""
    took = None if row.fused_us is None else row.fused_us / 1e3
    return replace(row.with_extra(milliseconds=took), dtype=short(row.dtype))
