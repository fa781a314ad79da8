"""The `interlace` command. A subcommand's module is imported when it is called, not before."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version

import click

__all__ = ["main"]

COMMANDS = {
    "bench": ("interlace.bench.command", "bench", "Microbenchmarks: paired, checked, with tables and JSON."),
    "demo": ("interlace.demo.command", "demo", "Split a pretrained model over processes and compare."),
    "families": (
        "interlace.families.command",
        "families",
        "Try the families of models against unsplit ones.",
    ),
    "doctor": ("interlace.doctor.command", "doctor", "Show what was built and which path each op takes."),
    "train": ("interlace.train.command", "train", "Run a layout for some steps and record what it took."),
    "plan": ("interlace.planner.command", "plan_command", "Rank layouts DP x TP x PP x CP of a model."),
    "tune": (
        "interlace.tune.command",
        "tune",
        "Measure the ways of each op on these GPUs and write the fastest.",
    ),
}


class LazyGroup(click.Group):
    """A group that knows its subcommands by name and imports one only to run it or to show its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*COMMANDS, *super().list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, attribute, _ = COMMANDS[cmd_name]
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            raise click.ClickException(f"{error}\n`interlace doctor` says more") from error
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, text) for name, (_, _, text) in COMMANDS.items()]
        rows += [(name, command.get_short_help_str()) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Collectives hidden inside matrix products, as drop-in parallel layers for PyTorch."""


@main.command(name="version")
def show_version() -> None:
    """Print the installed version."""
    try:
        click.echo(f"interlace {version('interlace')}")
    except PackageNotFoundError:
        raise click.ClickException(
            "interlace is not installed here; pip install . in its source tree"
        ) from None
