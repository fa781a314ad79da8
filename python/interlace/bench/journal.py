"""The rows of a run on disk as they come, so that whoever started the ranks has them when the ranks are gone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .row import Report, Row, rounded

__all__ = ["Journal", "read_journals"]


class Journal:
    """Appends to FOLDER/NAME.jsonl. Silent without a folder, and on all ranks but the first."""

    def __init__(self, folder: object, report: Report, rank: int) -> None:
        self.report = report
        self._path = Path(str(folder)) / f"{report.benchmark}.jsonl" if folder and rank == 0 else None
        self._write({"head": report.head() | {"partial": True}})

    def _write(self, what: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as out:
                out.write(json.dumps(what, allow_nan=False) + "\n")

    def row(self, row: Row) -> None:
        """One more row."""
        self._write({"row": rounded(asdict(row))})

    def head(self, *, partial: bool = True) -> None:
        """What the report says beside its rows, as it is now."""
        self._write({"head": self.report.head() | {"partial": partial}})


def read_journals(folder: str | Path) -> list[Report]:
    """The reports begun in this folder, in the order they were begun; one that was not ended is `partial`."""
    reports = []
    for path in sorted(Path(folder).glob("*.jsonl"), key=lambda p: p.stat().st_ctime_ns):
        head: dict[str, Any] = {}
        rows = []
        for text in path.read_text().splitlines():
            try:
                entry = json.loads(text)
            except json.JSONDecodeError:  # the line a killed rank was writing
                continue
            head = entry.get("head", head)
            rows += [entry["row"]] if "row" in entry else []
        if head:
            reports.append(Report.of(head, rows, str(path)))
    return reports
