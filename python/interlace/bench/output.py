"""What a run leaves: lines of a table as they come, and at its end JSON, CSV, Markdown, a plot, a page."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .row import SCHEMA, Report, Row

__all__ = [
    "Column",
    "cells",
    "check",
    "csv_text",
    "json_text",
    "line",
    "markdown",
    "replace_file",
    "short",
    "table",
    "write",
]

ABSENT = "-"


@dataclass(frozen=True)
class Column:
    """A column of a table: a field of Row or a name in its `extra`, how it is printed, how wide."""

    title: str
    key: str
    form: str = "{}"
    width: int = 9

    def cell(self, row: Row) -> str:
        """The value for a person; "-" where there is none. The first number of a skipped row says so."""
        value = row.value(self.key)
        return ABSENT if value is None else self.form.format(value)

    @property
    def numeric(self) -> bool:
        """Printed to a number of decimals, so aligned right."""
        return self.form != "{}"


def cells(row: Row, columns: Sequence[Column]) -> list[str]:
    """One line of a table."""
    return [column.cell(row) for column in columns]


def short(dtype: str) -> str:
    """bf16, fp16, fp32, fp64 for torch's names."""
    return {"bfloat16": "bf16"}.get(dtype, dtype.replace("float", "fp"))


def marks(row: Row) -> str:
    """What a reader must know before a number of this row is used."""
    said = ["skipped: " + row.skipped] if row.skipped else []
    said += ["WRONG"] if not row.correct else []
    said += ["oversubscribed"] if row.oversubscribed else []
    said += [f"a rank {row.straggler_us:g} us late"] if row.straggler_us else []
    return ", ".join([*said, *filter(None, [row.note])])


def line(texts: Sequence[str], columns: Sequence[Column], tail: str = "") -> str:
    """One line of the table on a terminal; `tail` stands after it."""
    body = "  ".join(text.rjust(column.width) for text, column in zip(texts, columns, strict=True))
    return f"{body}  {tail}" if tail else body


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Markdown; the first `left` columns are words, the others numbers, to the right."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(rule)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def markdown(rows: Sequence[Row], columns: Sequence[Column], notes: bool = True) -> str:
    """Rows as a Markdown table: numbers to the right; what a reader must know of a row stands in its last cell."""
    rule = ["---:" if column.numeric else "---" for column in columns]
    lines = [f"| {' | '.join(c.title for c in columns)} |", f"|{'|'.join(rule)}|"]
    for row in rows:
        texts = cells(row, columns)
        said = marks(row) if notes else ""
        texts[-1] += f" ({said})" if said else ""
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def json_text(reports: Sequence[Report]) -> str:
    """One report as it is, several under "reports"."""
    if len(reports) == 1:
        return reports[0].to_json()
    parts = [json.loads(report.to_json()) for report in reports]
    return json.dumps({"schema": SCHEMA, "reports": parts}, indent=1, allow_nan=False) + "\n"


def csv_text(reports: Sequence[Report]) -> str:
    """A line per row, a column per field of Row after the name of the benchmark; maps as JSON."""
    out = io.StringIO()
    names = [f.name for f in fields(Row)]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["benchmark", *names])
    for report in reports:
        for row in report.rows:
            content = asdict(row)
            writer.writerow([report.benchmark, *(_flat(content[name]) for name in names)])
    return out.getvalue()


def _flat(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, Mapping) else value


def replace_file(path: str | Path, content: str | bytes) -> None:
    """Write a whole file or none of it; the folder is made. "-" is standard output."""
    if str(path) == "-":
        sys.stdout.write(content if isinstance(content, str) else content.decode())
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(beside, target)


def check(settings: Mapping[str, object]) -> None:
    """ValueError for a file that could not be written later: minutes of measuring come before it."""
    for option in ("json", "csv", "plot", "trace", "html", "out"):
        path = settings.get(option)
        if not path or (option == "json" and path == "-"):
            continue
        target = Path(str(path))
        if option != "out" and target.is_dir():
            raise ValueError(f"bench: --{option} {path} is a folder; name a file in it")
        folder = target if option == "out" else target.parent
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise ValueError(
                f"bench: --{option} {path}: nothing can be written in {existing}; name another place"
            )
    if settings.get("plot") and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("bench: --plot needs matplotlib: pip install 'interlace[bench]'")


def write(reports: Sequence[Report], settings: Mapping[str, object]) -> None:
    """All files the settings ask for. OSError when one cannot be written, ValueError for a plot of nothing."""
    if settings.get("json"):
        replace_file(str(settings["json"]), json_text(reports))
    if settings.get("csv"):
        replace_file(str(settings["csv"]), csv_text(reports))
    if settings.get("out"):
        for report in reports:
            replace_file(Path(str(settings["out"])) / f"{report.benchmark}.json", report.to_json())
    if settings.get("trace"):
        from .trace import text_of

        replace_file(str(settings["trace"]), text_of(reports))
    if settings.get("html"):
        from .html import page

        replace_file(str(settings["html"]), page(reports))
    if settings.get("plot"):  # last: it can find nothing to draw
        from .plot import png

        replace_file(str(settings["plot"]), png(reports))
