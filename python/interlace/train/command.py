"""`interlace train`: run a layout for a few steps on this machine or under torchrun, and record it."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["train"]


@click.command()
@click.option("--model", required=True, help="config.json, its folder, or a name such as llama-3.2-1b.")
@click.option("--dp", default=1, show_default=True, help="Data-parallel ranks.")
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--pp", default=1, show_default=True, help="Pipeline stages.")
@click.option("--cp", default=1, show_default=True, help="Context-parallel ranks; 1 only.")
@click.option("--ep", default=1, show_default=True, help="Expert-parallel ranks; 1 only.")
@click.option("--interleave", default=1, show_default=True, help="Model chunks per pipeline rank.")
@click.option("--schedule", default="1f1b", show_default=True, help="1f1b, gpipe or interleaved.")
@click.option("--zero", default=0, show_default=True, help="ZeRO stage, 0 to 3.")
@click.option("--microbatch", default=1, show_default=True, help="Sequences of one rank and one pass.")
@click.option("--microbatches", type=int, help="Passes per step; sets the global batch.")
@click.option("--global-batch", type=int, help="Sequences per step; default 8 per replica.")
@click.option("--seq", default=128, show_default=True, help="Tokens per sequence.")
@click.option("--steps", default=5, show_default=True, help="Optimizer steps.")
@click.option("--dtype", default="fp32", show_default=True, help="fp32 or bf16, of weights and activations.")
@click.option("--recompute", default="none", show_default=True, help="none or full.")
@click.option(
    "--sequence-parallel/--no-sequence-parallel", default=True, show_default=True, help="With --tp."
)
@click.option("--learning-rate", default=1e-3, show_default=True, help="Of AdamW.")
@click.option("--seed", default=0, show_default=True, help="Of weights and random tokens.")
@click.option("--text", default="", help="A file whose bytes are the tokens; random tokens without.")
@click.option("--out", default="", help="Where to write run.json.")
@click.option("--track/--no-track", default=True, show_default=True, help="Measure memory by category.")
def train(cp: int, ep: int, microbatches: int | None, global_batch: int | None, **options: Any) -> None:
    """Train a causal language model for a few steps under one layout and record what it took.

    Starts dp x tp x pp processes on this machine, or uses torchrun's when it runs under torchrun. Weights are random
    and equal in every layout, so that losses can be compared between layouts. Needs transformers.
    """
    from .settings import Settings

    if cp != 1 or ep != 1:
        name, value = ("cp", cp) if cp != 1 else ("ep", ep)
        raise click.BadParameter(f"{name}={value}; this trainer runs dp, tp and pp", param_hint=f"--{name}")
    if microbatches and not global_batch:
        global_batch = options["dp"] * options["microbatch"] * microbatches
    try:
        settings = Settings(**options, global_batch=global_batch or 8 * options["dp"] * options["microbatch"])
        if microbatches and settings.microbatches != microbatches:
            raise ValueError(
                f"train: global_batch={settings.global_batch} makes {settings.microbatches} microbatches, "
                f"not {microbatches}"
            )
        from .model import model_config

        model_config(settings.model)
    except ImportError as error:
        raise click.ClickException(f"train needs transformers: {error}") from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    raise SystemExit(_start(settings.as_dict()))


def _start(settings: dict[str, Any]) -> int:
    import torch.distributed as dist

    from interlace.bench import join, launch, leave

    if not dist.is_torchelastic_launched():
        world = settings["dp"] * settings["tp"] * settings["pp"]
        return launch("interlace.train.session:run", settings, world)
    from .session import run

    join()
    try:
        return run(settings)
    finally:
        leave()
