"""What the benchmarks share: options, ranks, the barrier, correctness first, tables and JSON.

Run a script by itself (it starts its ranks) or under torchrun. Every number comes from paired, interleaved
runs; see `interlace.bench`. A wrong result is printed as WRONG and makes the exit status 1.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

import click
import torch
import torch.distributed as dist
from torch import Tensor

import interlace
from interlace.bench import (
    Timings,
    describe,
    fitting_iterations,
    join,
    launch,
    leave,
    measure,
    one_line,
    peer_read_bandwidth,
    place,
)

__all__ = [
    "Column",
    "Session",
    "command",
    "copies_for",
    "on_ranks",
    "options",
    "packed",
    "relative_error",
    "rotating",
]

Run: TypeAlias = Callable[[Mapping[str, object]], int]

# max |got - want| / max |want|. fp32: sums of a few thousand products round to 1e-6 of the largest. bf16:
# partial sums and the result are rounded to 8 bits, 2^-9 each, three times at most.
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CACHE_BYTES = 80 << 20  # weights that do not fit here come from memory, as those of a real model do in decode


@dataclass(frozen=True)
class Column:
    """A column of the table: where its value is in a line, and how it is printed."""

    title: str
    key: str
    form: str = "{}"
    width: int = 9


class Session:
    """One run on one rank: its place, the lines of the table so far, the wrong results so far."""

    def __init__(self, title: str, columns: Sequence[Column], settings: Mapping[str, object]) -> None:
        torch.set_grad_enabled(False)
        self.title, self.columns, self.settings = title, columns, settings
        self.lines: list[dict[str, object]] = []
        self.wrong: list[str] = []
        self.placement = place(dist.get_rank(), dist.get_world_size())
        self.group = interlace.resolve(None)
        self.rank, self.world_size = self.group.rank, self.group.world_size
        self._flag = torch.zeros(1)
        self._shown = False

    def barrier(self) -> None:
        """All ranks leave within a hop of a flag: an all-reduce on the symmetric heap, else gloo's."""
        interlace.functional.all_reduce(self._flag, group=self.group.name)

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [getattr(torch, str(name)) for name in self.settings["dtype"]]  # type: ignore[attr-defined]

    @property
    def quick(self) -> bool:
        return bool(self.settings["quick"])

    def time(self, variants: Mapping[str, Callable[[], object]], budget_seconds: float = 3.0) -> Timings:
        """Paired times of the variants, within the budget (a fifth of it with --quick)."""
        budget = budget_seconds / 5 if self.quick else budget_seconds
        count = fitting_iterations(variants, budget, fewest=7, most=301, barrier=self.barrier)
        seed = int(str(self.settings["seed"]))
        return measure(variants, iterations=count, warmup=0, seed=seed, barrier=self.barrier)

    def machine(self) -> dict[str, object]:
        """What the numbers depend on, as it is now. Collective."""
        return describe(len(self.placement.cores), peer_read_bandwidth(self.barrier))

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True, file=sys.stderr if self.settings["json"] == "-" else sys.stdout)

    def check(self, what: str, got: Tensor, want: Tensor, limit: float = 0.0) -> None:
        """Compare with the oracle on this rank; collective, so that all ranks know. Shapes must agree too.

        limit: what may be off where that is more than a single product's rounding.
        """
        worst = torch.tensor(relative_error(got, want), dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        limit = max(limit, LIMIT[got.dtype])
        if not float(worst) <= limit:
            self.wrong.append(what)
            self.say(f"WRONG {what}: off by {float(worst):.2e} of the largest, limit {limit:.1e}")

    def add(self, **line: object) -> None:
        """One line of the table, printed as soon as it is there."""
        if not self._shown:
            self._shown = True
            self.say(one_line(self.machine()))
            self.say(str(self.placement))
            self.say(self._row([column.title for column in self.columns]))
            if self.settings["markdown"]:
                self.say("|" + "---|" * len(self.columns))
        self.lines.append(line)
        self.say(
            self._row([c.form.format(line[c.key]) if line[c.key] is not None else "-" for c in self.columns])
        )

    def _row(self, cells: Sequence[str]) -> str:
        if self.settings["markdown"]:
            return "| " + " | ".join(cells) + " |"
        return "  ".join(cell.rjust(c.width) for cell, c in zip(cells, self.columns, strict=True))

    def finish(self) -> int:
        """Write the JSON; 1 when anything was wrong, on every rank."""
        path, now = self.settings["json"], self.machine()
        if self.rank == 0 and path is not None:
            machine = now | {"ranks": self.world_size}
            content = {"benchmark": self.title, "machine": machine, "wrong": self.wrong, "rows": self.lines}
            text = json.dumps(content, indent=2) + "\n"
            sys.stdout.write(text) if path == "-" else Path(str(path)).write_text(text)
        return 1 if self.wrong else 0


def relative_error(got: Tensor, want: Tensor) -> float:
    """max |got - want| / max |want| in fp64; infinite for another shape, NaN or infinity."""
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return math.inf
    if not want.numel():
        return 0.0
    return float((got.double() - want.double()).abs().max()) / max(float(want.abs().max()), 1e-30)


def packed(weight: Tensor, settings: Mapping[str, object]) -> Tensor:
    """A frozen weight as the tile engine wants it; as it is with --plain, or where there is no tile engine."""
    if settings["plain"]:
        return weight
    try:
        return interlace.PackedWeight.pack(weight)
    except RuntimeError:
        return weight


def rotating(tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
    """A function that returns the tensors in turn, for ever."""
    place_ = -1

    def take() -> Tensor:
        nonlocal place_
        place_ = (place_ + 1) % len(tensors)
        return tensors[place_]

    return take


def copies_for(rows: int, weight_bytes: int) -> int:
    """How many weights to rotate so that decode (few rows) reads them from memory; one for the rest."""
    return min(64, -(-CACHE_BYTES // weight_bytes)) if rows <= 16 else 1


def options(function: Callable[..., None]) -> Callable[..., None]:
    """The options every script has."""
    for option in reversed(
        (
            click.option("--ranks", default=2, show_default=True, type=click.IntRange(1, 8)),
            click.option(
                "--dtype",
                multiple=True,
                default=("bfloat16", "float32"),
                show_default=True,
                type=click.Choice(["bfloat16", "float32"]),
            ),
            click.option("--seed", default=0, show_default=True, help="Of the order of the variants."),
            click.option("--json", metavar="FILE", help="Write all figures as JSON; - is standard output."),
            click.option("--markdown", is_flag=True, help="Print the table as Markdown."),
            click.option("--plain", is_flag=True, help="Weights as in training, not packed for the engine."),
            click.option("--quick", is_flag=True, help="Fewer shapes and iterations; not for numbers."),
            click.option("--rank", envvar="RANK", type=int, hidden=True),
        )
    ):
        function = option(function)
    return function


def on_ranks(script: str, run: Run, settings: Mapping[str, object], ranks: int, rank: int | None) -> NoReturn:
    """Start the script's `run` on every rank, or run it as one of torchrun's (which sets rank)."""
    if rank is None:
        raise SystemExit(launch(f"{script}:{run.__name__}", settings, ranks))
    join()
    try:
        raise SystemExit(run(settings))
    finally:
        leave()


def command(script: str, run: Run, doc: str | None) -> click.Command:
    """The command line of a script that has no options of its own."""

    @click.command(help=doc, context_settings={"help_option_names": ["-h", "--help"]})
    @options
    def main(ranks: int, rank: int | None, **settings: object) -> None:
        on_ranks(script, run, settings, ranks, rank)

    return main
