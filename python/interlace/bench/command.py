"""`interlace bench`: microbenchmarks, each with the result checked before it is timed."""

from __future__ import annotations

import click

from .harness import on_ranks, options

__all__ = ["bench"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Microbenchmarks: paired, interleaved, checked for right results first."""


@bench.command()
@click.option(
    "--tokens", default=4096, show_default=True, type=click.IntRange(64), help="Of the whole sequence."
)
@click.option("--heads", default=8, show_default=True, type=click.IntRange(1))
@click.option("--kv-heads", default=8, show_default=True, type=click.IntRange(1))
@options
def attention(ranks: int, rank: int | None, **settings: object) -> None:
    """Ring, all-gather and all-to-all attention by layout, causal and packed, against one process.

    Ideal is the time of one process divided by the ranks. KV moved counts keys and values that cross ranks in a
    forward pass; peak is what a rank grows by in forward and backward, allowed is the growth of one process divided
    by the ranks, and two blocks of keys and values.
    """
    from . import attention as module

    on_ranks("interlace.bench.attention", module.run, settings, ranks, rank)
