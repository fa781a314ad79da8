"""What rank 0 shows while a benchmark runs: lines of the table, a progress bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .output import Column, cells, line, markdown, marks
from .row import Report, Row

__all__ = ["Screen"]


class Screen:
    """Silent on all ranks but the first. With --json - the JSON has standard output to itself."""

    def __init__(self, columns: Sequence[Column], settings: Mapping[str, object], rank: int) -> None:
        self.columns, self._speaking = columns, rank == 0
        self._markdown = bool(settings.get("markdown"))
        stream = sys.stderr if settings.get("json") == "-" else sys.stdout
        # MPI gives its ranks a terminal of their own: whoever started them knows whether somebody looks
        seen = settings.get("terminal")
        self._console = Console(
            file=stream, highlight=False, soft_wrap=True, force_terminal=None if seen is None else bool(seen)
        )

    def say(self, text: str) -> None:
        """A line, above the bar where there is one."""
        if self._speaking:
            self._console.print(text, markup=False)
            self._console.file.flush()

    def opening(self, lines: Sequence[str]) -> None:
        """What the numbers depend on, and the head of the table."""
        for text in lines:
            self.say(text)
        if self._markdown:
            for text in markdown([], self.columns).splitlines():
                self.say(text)
        else:
            self.say(line([column.title for column in self.columns], self.columns))

    def row(self, row: Row) -> None:
        """One line of the table."""
        if self._markdown:
            self.say(markdown([row], self.columns).splitlines()[2])
        else:
            self.say(line(cells(row, self.columns), self.columns, marks(row)))

    def closing(self, report: Report) -> None:
        """What is wrong, when something is."""
        if report.wrong:
            self.say(f"{len(report.wrong)} WRONG: {'; '.join(report.wrong)}")

    @staticmethod
    def marked(row: Row, wrong: int, oversubscribed: bool) -> Row:
        """The row with what the session knows of it."""
        return replace(row, wrong=wrong, correct=not wrong, oversubscribed=oversubscribed)

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar over the cases, on a terminal only; yields a function that is called as each begins.

        It is drawn between cases only: a thread that redraws would take the core from rank 0 while it is timed.
        """
        if not self._speaking or not self._console.is_terminal:
            yield lambda name: None
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, transient=True, auto_refresh=False) as bar:
            task = bar.add_task(title, total=total)
            begun = -1

            def step(name: str) -> None:
                nonlocal begun
                begun += 1
                bar.update(task, completed=begun, description=f"{title} {name}", refresh=True)

            yield step
