"""The trial on one rank: every family in turn; rank 0 shows how far it is and keeps the rows."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from interlace.families.catalogue import Family, named
from interlace.families.check import check

__all__ = ["run"]


def run(settings: Mapping[str, Any]) -> int:
    """What every rank calls. settings: only (names), rows (file for rank 0's rows). 0 when every family passed."""
    _quiet()
    torch.set_num_threads(1)
    families = named(tuple(settings["only"]))
    rows = []
    with _progress(families) as show:
        for family in families:
            show(family)
            rows.append(check(family))
    if dist.get_rank() == 0:
        Path(settings["rows"]).write_text(json.dumps([row.keys() for row in rows]))
    return 0


@contextmanager
def _progress(families: Sequence[Family]) -> Iterator[Any]:
    """A bar on a terminal, a line per family elsewhere, nothing on ranks other than 0."""
    console = Console(stderr=True, quiet=dist.get_rank() != 0, highlight=False)
    world = f"{dist.get_world_size()} processes"
    if not console.is_terminal:
        yield lambda family: console.print(f"{world}: {family.title}", markup=False)
        return
    columns = (TextColumn(f"{world}: {{task.description}}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(families), completed=-1)
        yield lambda family: bar.update(task, description=family.title, advance=1)


def _quiet() -> None:
    """Families are built from odd small configurations; what transformers says about them is no news."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
