"""The options that every subcommand of `interlace bench` has."""

from __future__ import annotations

from collections.abc import Callable

import click

__all__ = ["SIZES", "options", "shape_options"]

SIZES = ("quick", "small", "full")
DTYPES = ("bfloat16", "float32")


def options(function: Callable[..., None]) -> Callable[..., None]:
    """Ranks, dtypes, how long, hot or cold, and what is written."""
    for option in reversed(
        (
            click.option("--ranks", default=2, show_default=True, type=click.IntRange(1, 8)),
            click.option(
                "--dtype", multiple=True, default=DTYPES, show_default=True, type=click.Choice(DTYPES)
            ),
            click.option(
                "--size",
                default="full",
                show_default=True,
                type=click.Choice(SIZES),
                help="How many cases, how often: quick is for a look, small takes minutes.",
            ),
            click.option("--quick", is_flag=True, help="The same as --size quick; not for numbers."),
            click.option("--cache", default="cold", show_default=True, type=click.Choice(["hot", "cold", "both"]),
                         help="cold: operands come from memory, as a model's do."),
            click.option("--straggler", metavar="US", type=click.FloatRange(0, min_open=True),
                         help="A second row per case, with the last rank this late."),
            click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"])),
            click.option("--plain", is_flag=True, help="Weights as in training, not packed for the engine."),
            click.option("--peers/--no-peers", default=True, show_default=True,
                         help="Time the other libraries that are installed."),
            click.option("--memory", metavar="GIB", type=click.FloatRange(0, min_open=True),
                         help="Skip cases that need more.  [default: what is free]"),
            click.option("--longest", metavar="SECONDS", default=20.0, show_default=True,
                         type=click.FloatRange(0, min_open=True), help="Skip cases whose one call takes longer."),
            click.option("--seed", default=0, show_default=True, help="Of the order of the variants."),
            click.option("--json", metavar="FILE", help="All figures as JSON; - is standard output."),
            click.option("--csv", metavar="FILE", help="All figures as CSV."),
            click.option("--markdown", is_flag=True, help="Print the table as Markdown."),
            click.option("--plot", metavar="PNG", help="Bars: what is exposed and what is hidden."),
            click.option("--html", metavar="FILE", help="One page with tables and pictures; needs no network."),
            click.option("--trace", metavar="FILE", help="A timeline of the ranks for Perfetto or Chrome."),
            click.option("--rank", envvar="RANK", type=int, hidden=True),
        )
    ):  # fmt: skip
        function = option(function)
    return function


def shape_options(function: Callable[..., None]) -> Callable[..., None]:
    """Which shapes: a named set, split how many ways, with how many rows."""
    for option in reversed(
        (
            click.option("--shapes", multiple=True, metavar="NAME", help="A set of shapes; may be given again."),
            click.option("--tp", type=click.IntRange(1), help="Ways the model's matrices are split.  [default: ranks]"),
            click.option("--phase", default="both", show_default=True,
                         type=click.Choice(["decode", "prefill", "both"])),
            click.option("--rows", metavar="M,M,..", help="Rows of x instead of the set's."),
        )
    ):  # fmt: skip
        function = option(function)
    return function
