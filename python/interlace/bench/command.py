"""`interlace bench`: microbenchmarks, each with the result checked before it is timed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .options import options, shape_options

__all__ = ["bench"]


class Group(click.Group):
    """A mistake in a value, told by ValueError, is a line for the user and status 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            raise click.UsageError(str(error), ctx) from None


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Microbenchmarks: paired, interleaved, checked for right results first.

    Times are medians of the slowest rank. A wrong result is printed as WRONG and makes the exit status 1.
    """


def measure(name: str, ranks: int, rank: int | None, settings: dict[str, Any], *, mpi: bool = False) -> None:
    """Start the subcommand's module on the ranks, after its cases were listed once here: mistakes cost no start."""
    from .launching import on_ranks
    from .output import check

    check(settings)
    module = importlib.import_module(f"interlace.bench.{name}")
    if settings["device"] not in getattr(module, "DEVICES", ("cpu", "cuda")):
        raise ValueError(f"bench: {name} is measured on CPUs only; leave --device out")
    if settings["device"] == "cuda":
        check_cuda(ranks)
    module.cases(settings, ranks)
    on_ranks(f"interlace.bench.{name}", module.run, settings, ranks, rank, mpi=mpi)


def check_cuda(ranks: int) -> None:
    """ValueError when torch sees fewer devices than ranks."""
    import torch

    if torch.cuda.device_count() < ranks:
        raise ValueError(
            f"bench: --device cuda with {ranks} ranks, and torch sees {torch.cuda.device_count()} CUDA devices; "
            "use --ranks or --device cpu"
        )


def subcommand(
    *more: Callable[[Any], Any], name: str | None = None
) -> Callable[[Callable[..., None]], click.Command]:
    """A subcommand with the common options and `more` of its own."""

    def decorate(function: Callable[..., None]) -> click.Command:
        for option in reversed(more):
            function = option(function)
        return bench.command(name=name)(options(function))

    return decorate


@subcommand(click.option("--bytes", metavar="N,N,..", help="Sizes instead of 4 KiB to 64 MiB."))
def collective(ranks: int, rank: int | None, **settings: Any) -> None:
    """All-reduce, all-gather, reduce-scatter, all-to-all in nccl-tests' columns.

    Against torch.distributed and against DeepSpeed and MPI where they are installed. algbw is bytes / time, busbw
    what every link carries of it, x floor the time over that of a plain copy of the result.
    """
    measure("collective", ranks, rank, settings, mpi=True)


@subcommand(shape_options)
def gemm(ranks: int, rank: int | None, **settings: Any) -> None:
    """The three fused ops: whole, compute alone, collective alone, and what they replace.

    Sets of shapes: cpu, quick, llama1b, llama8b, llama70b, llama405b, qwen, deepseek, mixtral, or any model that
    `interlace plan` knows, split --tp ways. M, N and K are those of a rank's product. overlap is 1 - (fused -
    compute) / collective, x floor is fused / the longer of compute and collective.
    """
    measure("gemm", ranks, rank, settings, mpi=True)


@subcommand(
    click.option(
        "--tokens",
        type=click.IntRange(64),
        help="Of the whole sequence.  [default: 4096; small 2048, quick 512]",
    ),
    click.option("--heads", default=8, show_default=True, type=click.IntRange(1)),
    click.option("--kv-heads", default=8, show_default=True, type=click.IntRange(1)),
)
def attention(ranks: int, rank: int | None, **settings: Any) -> None:
    """Ring, all-gather and all-to-all attention by layout, causal and packed, against one process.

    Ideal is the time of one process divided by the ranks. KV moved counts keys and values that cross ranks in a
    forward pass; peak is what a rank grows by in forward and backward, allowed is the growth of one process divided
    by the ranks, and two blocks of keys and values.
    """
    measure("attention", ranks, rank, settings)


@subcommand(
    click.option("--shapes", multiple=True, metavar="NAME", help="A set of shapes; may be given again."),
    click.option("--rows", metavar="N,N,..", help="Tokens instead of the set's."),
)
def layer(ranks: int, rank: int | None, **settings: Any) -> None:
    """The MLP and the attention block of a layer: forward, and a step of training.

    Against F.linear with torch's all-reduce, parallelize_module and the unsplit block. Sets of shapes: small, wide,
    llama1b, llama8b, llama70b, llama405b, qwen. exposed is what a call takes beyond its compute.
    """
    measure("layer", ranks, rank, settings)


@subcommand(
    click.option("--model", multiple=True, metavar="NAME", help="transformer or smollm2.  [default: both]")
)
def model(ranks: int, rank: int | None, **settings: Any) -> None:
    """Whole decoders: prefill, decode, a step of training.

    Llama's architecture with random weights, and SmolLM2-135M with its own (93 MB, fetched once). Against F.linear with
    torch's all-reduce, parallelize_module, the tp_plan of transformers and the unsplit model.
    """
    measure("model", ranks, rank, settings)


@subcommand(
    click.option("--shapes", multiple=True, metavar="NAME", help="small, fine, mixtral or deepseek."),
    click.option("--tokens", type=click.IntRange(1), help="Of all ranks together, instead of the set's."),
)
def moe(ranks: int, rank: int | None, **settings: Any) -> None:
    """Routed experts: whole ones behind dispatch and combine, or a part of every expert on every rank.

    Against all_to_all_single and all-reduce of torch.distributed. imbalance is the rows of the busiest rank over the
    mean, moved what a rank sends.
    """
    measure("moe", ranks, rank, settings)


@subcommand(
    click.option("--worlds", metavar="N,N,..", help="Ranks at work.  [default: 1, 2, 4, .. to --ranks]"),
    click.option(
        "--planner/--no-planner", default=None, help="Its prediction beside.  [default: not with --quick]"
    ),
)
def scaling(ranks: int, rank: int | None, **settings: Any) -> None:
    """A decoder on 1, 2, .. ranks: strong scaling, weak scaling, a fit, and what the planner said.

    Efficiency is the time of one rank / (ranks x time), for weak scaling time of one rank / time; one rank is the
    unsplit model of torch on one core. Worlds with more ranks than cores are marked.
    """
    measure("scaling", ranks, rank, settings)


@subcommand(click.option("--out", metavar="FOLDER", help="A JSON file per subcommand."), name="all")
def everything(ranks: int, rank: int | None, **settings: Any) -> None:
    """All subcommands on one start of the ranks; with --quick less than a minute."""
    measure("all", ranks, rank, settings, mpi=True)


@bench.command()
@click.argument("before", type=click.Path(exists=True))
@click.argument("after", type=click.Path(exists=True))
@click.option("--threshold", metavar="PERCENT", default=5.0, show_default=True, type=click.FloatRange(0))
@click.option("--metric", default="time", show_default=True, type=click.Choice(["time", "speedup"]))
@click.option("--count-busy", is_flag=True, help="Rows of a busy machine make the status 1, too.")
@click.option("--all", "everything", is_flag=True, help="Print rows that did not change, too.")
def compare(
    before: str, after: str, threshold: float, metric: str, count_busy: bool, everything: bool
) -> None:
    """Ratios of two results (files or folders of --json); exit status 1 when a row is slower or wrong.

    A row counts as slower when it takes more than --threshold longer, and longer by more than twice the noise, which
    is taken from the spread of both rows' samples. Rows that met a busy machine are shown and do not count.
    --metric speedup compares the ratio to the baseline instead, which carries over between machines.
    """
    from .compare import compare as compare_reports
    from .compare import read_reports
    from .difference import lines

    found = compare_reports(read_reports(before), read_reports(after), metric)
    if not found.changes and not found.unmeasured and not found.wrong:
        raise ValueError(
            f"bench compare: {before} and {after} have no measured row in common; measure the same cases twice"
        )
    for text in lines(found, threshold / 100, everything):
        click.echo(text)
    if found.failed(threshold / 100, count_busy):
        raise SystemExit(1)


@bench.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--html", metavar="FILE", help="One page with tables and pictures; needs no network.")
@click.option("--plot", metavar="PNG", help="The pictures alone.")
@click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="Of the same run: its timelines.",
)
def report(files: tuple[str, ...], html: str | None, plot: str | None, trace: str | None) -> None:
    """A page or a picture of results that were written before (FILES of --json or --out)."""
    from .output import write
    from .row import read_report
    from .trace import with_timelines

    if not html and not plot:
        raise ValueError("bench report: nothing to write; add --html FILE or --plot PNG")
    found = [read_report(name) for name in files]
    write(with_timelines(found, trace), {"html": html, "plot": plot})


@bench.command()
@click.option(
    "--readme", "paths", default=("README.md", "docs/results.md"), show_default=True, multiple=True,
    type=click.Path(exists=True, dir_okay=False), help="A page with marks; may be given again.",
)  # fmt: skip
@click.option("--results", default="benchmarks/results", show_default=True, type=click.Path(exists=True))
@click.option("--check", is_flag=True, help="Write nothing; status 1 when a table is not in step.")
def readme(paths: tuple[str, ...], results: str, check: bool) -> None:
    """Make the tables of README.md and docs/results.md anew from result files.

    A table stands between <!-- bench:NAME --> and <!-- bench:end -->; NAME is a subcommand, its file NAME.json.
    """
    from .output import replace_file
    from .readme import filled

    stale = 0
    for path in paths:
        text = Path(path).read_text(encoding="utf-8")
        made = filled(text, results)
        if check and made != text:
            stale += 1
            click.echo(f"{path} is not in step with {results}; `interlace bench readme` brings it there")
            continue
        if made != text:
            replace_file(path, made)
        click.echo(f"{path} is in step with {results}")
    if stale:
        raise SystemExit(1)
