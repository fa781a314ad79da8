"""The table of families: on a terminal, and as a page of the documentation."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

from rich.box import SIMPLE_HEAD
from rich.table import Table

from interlace.families.check import LIMIT, NEW_TOKENS, Row

__all__ = ["page", "terminal_table", "together", "versions"]

COLUMNS = ("family", "model", "world", "forward", "gradients", "dynamic", "static", "plan", "fused", "split")
SHORT = {"forward": "fwd", "gradients": "grads"}
MEANING = f"""\
Each family is a small random model in fp32, split by `interlace.parallelize(model, mesh)` and compared with the
unsplit model. forward, gradients: relative error (Frobenius norm) of the logits, and the largest of any
parameter; a row fails above {LIMIT:.0e}. dynamic, static: {NEW_TOKENS} greedy tokens by `generate` with that KV
cache are those of the unsplit model; `-`: the family does not generate. plan: where it came from, the model's
own base_model_tp_plan (hf) or the structure of its modules. fused: modules whose collective runs inside the
matrix product, of those that have one. split: share of the parameters that is cut; the rest is on every rank."""


def versions() -> dict[str, str]:
    """Of everything the result depends on."""
    found = {name: _version(name) for name in ("interlace", "torch", "transformers")}
    return found | {"python": platform.python_version()}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of the source tree"


def terminal_table(rows: Sequence[Row]) -> Table:
    """One line per family, the worst of its worlds; failures in red. The caller tells why they failed."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in (*COLUMNS, "result"):
        if name != "model":  # the classes are for the page: a terminal has 80 columns
            right = name in ("world", "forward", "gradients", "fused", "split")
            table.add_column(
                SHORT.get(name, name), justify="right" if right else "left", no_wrap=name != "family"
            )
    for row in together(rows):
        title, _, *rest = cells(row)
        table.add_row(title, *rest, "ok" if row.passed else "FAILED", style=None if row.passed else "red")
    return table


def page(rows: Sequence[Row], command: str) -> str:
    """docs/families.md: written by the command, so that it can be made again and compared."""
    told = ", ".join(f"{name} {number}" for name, number in versions().items())
    lines = [
        "# Families",
        "",
        f"Written by `{command}` with {told}.",
        "",
        MEANING,
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(cells(row))} |" for row in together(rows)),
        "",
        "A family that is not listed may work too: `parallelize` knows blocks, not names. One that it does not",
        "understand raises and leaves the model as it was.",
        "",
    ]
    return "\n".join(lines)


def cells(row: Row) -> tuple[str, ...]:
    """The cells of a row, in the order of COLUMNS."""
    return (
        row.title,
        row.model,
        row.worlds,
        _error(row.forward),
        _error(row.gradients),
        _answer(row.dynamic),
        _answer(row.static),
        row.source.replace("base_model_tp_plan", "hf") or "-",
        f"{row.fused}/{row.collectives}" if row.collectives else "-",
        f"{row.split:.0%}" if row.split else "-",
    )


def together(rows: Iterable[Row]) -> list[Row]:
    """Rows of one family in several worlds as one: the worst of each."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.family, []).append(row)
    return [Row.worst(members) for members in groups.values()]


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _answer(value: bool | None) -> str:
    return "-" if value is None else "equal" if value else "other"
