"""From a command line to ranks and back: start them or join torchrun's, and write what they left behind."""

from __future__ import annotations

import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeAlias

import click

from . import output
from .group import join, leave
from .journal import read_journals
from .mpi import find_mpiexec
from .processes import CTRL_C, launch
from .row import Report

__all__ = ["command_line", "on_ranks"]

Run: TypeAlias = Callable[[Mapping[str, object]], int]


def command_line() -> str:
    """What was typed, for the report."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def on_ranks(
    target: str,
    run: Run,
    settings: Mapping[str, object],
    ranks: int,
    rank: int | None,
    *,
    mpi: bool = False,
) -> NoReturn:
    """Start `target`'s run on every rank, or run it as one of torchrun's (which sets rank); then write the files.

    target: "package.module" or a script's path, where `run` is to be found by its name. The exit status is 0, 1 for a
    wrong result, 130 after Ctrl-C, else that of the rank that failed; rows that were finished are written in any case.
    mpi: MPI starts the ranks where it is installed and peers are wanted: it can be compared with from inside only.
    """
    with tempfile.TemporaryDirectory(prefix="interlace-bench-") as folder:
        settings = {"command": command_line(), **settings, "journal": folder}
        if rank is None:
            mpiexec, reason = find_mpiexec() if mpi and settings.get("peers") else (None, "not asked for")
            stream = sys.stderr if settings.get("json") == "-" else sys.stdout
            settings |= {"mpiexec": mpiexec, "no_mpi": reason, "terminal": stream.isatty()}
            with _terminated_like_ctrl_c():
                status = launch(f"{target}:{run.__name__}", settings, ranks, mpiexec=mpiexec)
        else:
            with _terminated_like_ctrl_c():  # torchrun hands on what it got
                status = _joined(run, settings)
        reports = read_journals(folder)
    if reports:
        _leave_behind(reports, settings, status)
    raise SystemExit(status)


@contextmanager
def _terminated_like_ctrl_c() -> Iterator[None]:
    """SIGTERM, of a time limit for example: rows are written, ranks and files are gone."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _joined(run: Run, settings: Mapping[str, object]) -> int:
    join()
    try:
        return run(settings)
    except KeyboardInterrupt:
        return CTRL_C
    finally:
        leave()


def _leave_behind(reports: Sequence[Report], settings: Mapping[str, object], status: int) -> None:
    to_stderr = settings.get("json") == "-"
    for report in reports:
        if report.partial:
            click.echo(f"{report.benchmark}: ended early, {len(report.rows)} rows are whole", err=to_stderr)
    try:
        output.write(reports, settings)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"cannot write the results: {error}") from None
