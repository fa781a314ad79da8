"""Tables of a README, made of result files: what stands between two marks is replaced, or checked to be in step.

A mark is `<!-- bench:NAME -->`, the end is `<!-- bench:end -->`; NAME is a benchmark with FOLDER/NAME.json, and its
module says in `readme(report)` what the table shows.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

from .row import Report, read_report

__all__ = ["NAMES", "filled", "origin"]

NAMES = ("collective", "gemm", "attention", "layer", "model", "moe", "scaling")
MARKED = re.compile(r"(<!-- bench:(?!end)(\w+) -->\n)(.*?)(<!-- bench:end -->)", re.DOTALL)
OPENED = re.compile(r"<!-- bench:(?!end)\w+ -->")


def filled(text: str, results: str | Path) -> str:
    """The text with every marked table made anew from the results.

    ValueError for a mark without an end, a name nobody knows, a missing or an old result file.
    """
    if len(OPENED.findall(text)) != len(MARKED.findall(text)):
        raise ValueError("bench readme: a <!-- bench:NAME --> has no <!-- bench:end --> after it")
    return MARKED.sub(lambda found: found[1] + _block(found[2], Path(results)) + found[4], text)


def _block(name: str, folder: Path) -> str:
    if name not in NAMES:
        raise ValueError(f"bench readme: mark bench:{name}; expected one of {', '.join(NAMES)}")
    path = folder / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"bench readme: {path} is missing; `interlace bench {name} --json {path}` writes it")
    report = read_report(path)
    module = importlib.import_module(f"interlace.bench.{name}")
    table: Callable[[Report], str] = module.readme
    return f"\n{table(report)}\n\n{origin(report)}\n\n"


def origin(report: Report) -> str:
    """Where the table's numbers are from, in a line."""
    machine = report.machine
    parts = [f"`{report.command}`", f"commit {report.commit}", f"{machine.get('ranks')} ranks"]
    parts += [f"torch {machine.get('torch')}"]
    if machine.get("topology"):
        parts.append(f"caches {str(machine['topology']).lower()} ({machine['peer_read_gb_s']} GB/s)")
    parts += [f"load {machine.get('load_1min')} before"] if machine.get("load_1min") is not None else []
    busy = sum("busy" in row.note for row in report.rows)
    parts += [f"{busy} of {len(report.rows)} rows on a busy machine"] if busy else []
    parts += ["WRONG results: " + "; ".join(report.wrong)] if report.wrong else []
    return "<sub>" + ", ".join(parts) + "</sub>"
