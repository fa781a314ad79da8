"""`interlace families`: try the families of models on this machine and print, or write down, what holds."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from interlace.families.check import Row

__all__ = ["families"]

FILE_WIDTH = 110  # columns where there is no terminal that says


@click.command()
@click.option(
    "--world",
    "worlds",
    multiple=True,
    default=(2,),
    show_default=True,
    type=click.IntRange(1, 8),
    help="Processes to split over; may be given several times.",
)
@click.option("--only", multiple=True, metavar="NAME", help="A family; may be given several times.")
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True),
    help="Write the rows as JSON; - is standard output.",
)
@click.option(
    "--write",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the table as a page of documentation (docs/families.md).",
)
def families(
    worlds: tuple[int, ...], only: tuple[str, ...], json_path: str | None, write: Path | None
) -> None:
    """Split a small random model of every family over processes and compare it with the unsplit one.

    Logits, the gradient of every parameter, and greedy generation with a dynamic and a static KV cache. Exits
    with 1 when a family of the table fails, and says why. Takes about half a minute; nothing is downloaded.
    """
    if importlib.util.find_spec("transformers") is None:
        raise click.ClickException("families needs transformers; install with: pip install 'interlace[demo]'")
    from interlace.families.catalogue import named

    try:
        chosen = [family.name for family in named(only)]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--only") from error
    for option, path in (("--json", json_path), ("--write", write)):
        if path not in (None, "-") and not Path(path).absolute().parent.is_dir():
            raise click.BadParameter(f"{path}: its folder does not exist", param_hint=option)
    rows = _rows(worlds, chosen)
    _tell(rows, json_path)
    failed = [row for row in rows if not row.passed]
    if write is not None and not failed:
        from interlace.families.table import page

        write.write_text(page(rows, " ".join(("interlace families", *_arguments(worlds, only, write)))))
    raise SystemExit(1 if failed else 0)


def _arguments(worlds: Sequence[int], only: Sequence[str], write: Path) -> list[str]:
    return [
        *(f"--world {world}" for world in worlds),
        *(f"--only {name}" for name in only),
        f"--write {write}",
    ]


def _rows(worlds: Sequence[int], names: Sequence[str]) -> list[Row]:
    from interlace.bench import launch
    from interlace.families.check import Row

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for world in worlds:
            path = Path(folder) / f"{world}.json"
            status = launch("interlace.families.session:run", {"only": list(names), "rows": str(path)}, world)
            if status:
                raise SystemExit(status)
            rows += [Row.of(keys) for keys in json.loads(path.read_text())]
    return rows


def _tell(rows: Sequence[Row], json_path: str | None) -> None:
    from rich.console import Console

    from interlace.families.table import MEANING, terminal_table, versions

    console = Console(stderr=json_path == "-", highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(terminal_table(rows))
    console.print(MEANING, markup=False)
    console.print(", ".join(f"{name} {number}" for name, number in versions().items()), markup=False)
    for row in rows:
        if not row.passed:
            console.print(f"FAILED {row.family}, {row.worlds} processes: {row.problem}", markup=False)
    if json_path is None:
        return
    text = json.dumps({"versions": versions(), "rows": [row.keys() for row in rows]}, indent=2) + "\n"
    if json_path == "-":
        sys.stdout.write(text)
    else:
        Path(json_path).write_text(text)
