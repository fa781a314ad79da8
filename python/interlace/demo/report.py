"""What rank 0 prints: progress while it works, parity, the table; and the JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from interlace.bench import Timings, one_line
from interlace.demo.clock import COMPUTE_ONLY, Row
from interlace.demo.compare import Subject, Verdict

__all__ = ["Reporter"]

HOW_TO_READ = """\
unsplit: one process with the cores of all ranks. gloo: the split model with F.linear and torch.distributed's
all_reduce. reference: interlace's modules over torch.distributed. interlace: fused.
compute: the same path and engine without its collectives. exposed: what the collectives add to it. A core is
also its own copy engine, so on CPU fusion saves passes over memory, and the rest of the gain is the engine's.
x gloo: gloo's time divided by this one. Medians of interleaved runs, of the slowest rank each."""


class Reporter:
    """Silent unless `speaking`. With json "-" the JSON has standard output to itself."""

    def __init__(self, json_path: str | None, speaking: bool) -> None:
        self.json_path, self.speaking = json_path, speaking
        self.console = Console(stderr=json_path == "-", quiet=not speaking, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def opening(self, title: str, dtype: str, placement: str) -> None:
        """What is about to run, and where."""
        self.say(f"{title}, {dtype}")
        self.say(placement)

    def sizes(self, subject: Subject) -> None:
        """How much of the model each rank holds. Collective."""
        mine = torch.tensor([_parameters(subject.paths[-1].model)])
        held = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(held, mine)
        if subject.unsplit is not None:
            parts = " + ".join(f"{int(part) / 1e6:.1f}" for part in held)
            self.say(f"{_parameters(subject.unsplit) / 1e6:.1f} million parameters, split {parts}")

    @contextmanager
    def progress(self, phase: str) -> Iterator[Callable[[int, int], None]]:
        """A bar for one phase, on a terminal only; yields a function of (done, total)."""
        if not self.speaking or not self.console.is_terminal:
            yield lambda done, total: None
            return
        columns = (TextColumn("timing {task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(phase, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    def disturbances(self, phase: str, timings: Timings) -> None:
        """Say so when other work took the cores for most of the time: such numbers mean little.

        Told from the compute-only runs: the others share their core with gloo's threads.
        """
        alone = [timings.summary(name) for name in timings.runs if name.endswith(COMPUTE_ONLY)]
        fewest = min(alone, key=lambda one: one.kept / one.taken)
        if fewest.kept < fewest.taken / 2:
            self.say(
                f"busy machine: only {fewest.kept} of {fewest.taken} {phase} iterations kept their cores;"
                " run again when it is idle"
            )

    def parity(self, verdict: Verdict | None) -> None:
        """The comparison with the unsplit model."""
        if verdict is None:
            return
        what = "hidden states" if verdict.parity.greedy_equal is None else "logits"
        self.say(f"\nparity with the unsplit model, {verdict.tokens} tokens of text")
        self.say(
            f"  {what}: max difference {verdict.error.absolute:.2e}, which is {verdict.error.relative:.2e}"
            f" of the largest (limit {verdict.limit:.2e})"
        )
        if verdict.split.cosines:
            pairs = zip(verdict.unsplit.cosines, verdict.split.cosines, strict=True)
            self.say("  cosines of three sentences: " + ", ".join(f"{a:.4f} / {b:.4f}" for a, b in pairs))
        if verdict.parity.greedy_equal is not None:
            self._text(verdict)
        for reason in verdict.wrong:
            self.say(f"WRONG: {reason}")

    def _text(self, verdict: Verdict) -> None:
        self.say(
            f"  perplexity: {verdict.parity.perplexity_unsplit:.4f} unsplit,"
            f" {verdict.parity.perplexity_split:.4f} split"
        )
        self.say(f"  greedy text: {'equal' if verdict.parity.greedy_equal else 'NOT equal'}")
        self.say(f"    unsplit: {verdict.unsplit.answer!r}")
        self.say(f"    split:   {verdict.split.answer!r}")

    def closing(self, verdict: Verdict | None, rows: Sequence[Row], machine: Mapping[str, object]) -> None:
        """The table, the JSON, and what is wrong if something is."""
        if verdict is None:
            return
        self.say("")
        self.say(one_line(dict(machine)))
        self.console.print(_table(rows))
        self.say(HOW_TO_READ)
        if verdict.wrong:
            self.say("The split model is not the unsplit one: see WRONG above.")
        if self.json_path is not None:
            _write(self.json_path, verdict, rows, machine)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _table(rows: Sequence[Row]) -> Table:
    table = Table("phase", "path", title_justify="left")
    for name in ("ms", "compute", "exposed", "tokens/s", "x gloo"):
        table.add_column(name, justify="right")
    phase = ""
    for row in rows:
        if phase and row.phase != phase:
            table.add_section()
        compute = "" if row.path == "unsplit" else f"{row.ms - row.exposed_ms:.2f}"
        exposed = "" if row.path == "unsplit" else f"{row.exposed_ms:.2f}"
        table.add_row(
            row.phase if row.phase != phase else "",
            row.path,
            f"{row.ms:.2f}",
            compute,
            exposed,
            f"{row.tokens_per_second:.1f}",
            f"{row.ratio:.2f}",
        )
        phase = row.phase
    return table


def _finite(value: object) -> object:
    # JSON has no infinity: null says that there is no number
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(path: str, verdict: Verdict, rows: Sequence[Row], machine: Mapping[str, object]) -> None:
    content = {
        "parity": {key: _finite(value) for key, value in verdict.parity.keys().items()},
        "rows": [row.keys() for row in rows],
        "machine": dict(machine),
    }
    text = json.dumps(content, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(path).write_text(text)
