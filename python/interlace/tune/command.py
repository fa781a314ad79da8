"""The command: where it runs, what it prints, what it writes."""

from __future__ import annotations

import datetime
from pathlib import Path

import click
import torch
import torch.distributed as dist

from .. import groups
from ..cuda_dispatch import state_of
from ..hardware import KNOWN, Hardware
from ..heuristics import Table, merged, read, write
from .cases import MODELS, Candidate, Case, candidates, cases, problem_of
from .measure import tuned_entry

__all__ = ["tune"]

NO_DEVICE = (
    "interlace tune measures CUDA kernels, and there is no CUDA device here. The CPU ops need no tuning: their "
    "crossovers are few and measured at build time (csrc/core/heuristics.h), distances between cores are probed at "
    "start. `interlace tune --dry-run` shows what would be measured on a GPU"
)
NOT_LAUNCHED = (
    "interlace tune runs on every GPU of a group; start it with torchrun, for example\n"
    "  torchrun --nproc-per-node 8 --no-python interlace tune --out tuned.json"
)


@click.command()
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("tuned.json"),
    show_default=True,
    help="File to write; entries that are in it already and are not measured again stay.",
)
@click.option("--models", default="8b,70b", show_default=True, help="Whose shapes: 8b, 70b.")
@click.option(
    "--repeats", type=click.IntRange(1, 1000), default=20, show_default=True, help="Timed calls each."
)
@click.option("--quick", is_flag=True, help="Five numbers of rows instead of fifteen.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print what would be measured, on the GPU given by --gpu; measure nothing.",
)
@click.option(
    "--gpu", default="NVIDIA H200", show_default=True, help="For --dry-run: a GPU of the built-in list."
)
@click.option(
    "--world-size", type=click.IntRange(2, 1024), default=8, show_default=True, help="For --dry-run."
)
def tune(
    out: Path, models: str, repeats: int, quick: bool, dry_run: bool, gpu: str, world_size: int
) -> None:  # fmt: skip
    """Measure the ways each op can take on these GPUs and write the fastest to a table.

    The table is keyed by GPU, number of ranks, dtype, op and shape bucket. INTERLACE_TUNED names it to later runs, on
    every rank; rank 0's is the one that counts.
    """
    names = tuple(models.split(","))
    if unknown := [name for name in names if name not in MODELS]:
        raise click.BadParameter(
            f"{', '.join(unknown)}; expected some of {', '.join(MODELS)}", param_hint="--models"
        )
    if dry_run:
        if gpu not in KNOWN:
            raise click.BadParameter(f"{gpu}; expected one of {', '.join(KNOWN)}", param_hint="--gpu")
        _show(KNOWN[gpu], world_size, cases(world_size, names, quick=quick))
        return
    if not torch.cuda.is_available():
        raise click.ClickException(NO_DEVICE)
    if not dist.is_torchelastic_launched():
        raise click.ClickException(NOT_LAUNCHED)
    _on_gpus(out, names, repeats, quick)


def _show(hardware: Hardware, world_size: int, all_cases: list[Case]) -> None:
    """One line a case: op, shapes, candidates."""
    for case in all_cases:
        found = ", ".join(c.name for c in candidates(problem_of(case, world_size), hardware))
        dtype = str(case.dtype).removeprefix("torch.")
        click.echo(f"{case.op:<28} {dtype:<14} rows {case.rows:>6}  width {case.width:>6}  {found}")
    click.echo(f"{len(all_cases)} cases on {world_size} x {hardware.name}")


def _on_gpus(out: Path, names: tuple[str, ...], repeats: int, quick: bool) -> None:
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    try:
        info = groups.resolve(None)
        state = state_of("tune", info.name, device)
        stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
        origin = f"measured {stamp}, torch {torch.__version__}, CUDA {torch.version.cuda}"
        if info.rank == 0 and state.unavailable:
            click.echo(f"no kernels of ours here: {state.unavailable}; measuring what is left")
        measured: Table = Table({}, {})
        scaled = state.hardware.capability >= (8, 9)
        for case in cases(info.world_size, names, scaled=scaled, quick=quick):
            entry, times = tuned_entry(case, info, state, device, repeats=repeats, origin=origin)
            measured = merged(measured, Table({}, {entry.key: entry}))
            if info.rank == 0:
                click.echo(_line(case, times, entry.algorithm))
                save(out, measured)
    finally:
        dist.destroy_process_group()


def save(out: Path, measured: Table) -> None:
    """Lay what was measured over what the file holds; a file that does not parse is not overwritten."""
    write(out, merged(read(out), measured) if out.exists() else measured)


def _line(case: Case, times: dict[Candidate, float], algorithm: str) -> str:
    shown = "  ".join(f"{c.name} {value:.1f}" for c, value in sorted(times.items(), key=lambda item: item[1]))
    return f"{case.op} rows {case.rows} width {case.width}: {algorithm} ({shown}; us)"
