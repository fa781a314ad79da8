"""Search over layouts: every legal mesh, the memory it needs, the time it takes, and what it loses by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from os import PathLike

from ._check import at_least
from .architecture import Architecture, Source, read_architecture
from .cluster import Cluster, read_cluster
from .layout import Layout
from .legality import (
    DoesNotFit,
    context_reason,
    expert_reason,
    microbatch_reason,
    pipeline_reason,
    tensor_reason,
)
from .ranking import explain_losses
from .serving import serving_layouts
from .stages import MemoryModel
from .step import StepModel
from .workload import RECOMPUTES, ZERO_STAGES, Serving, Training

__all__ = ["legal_layouts", "plan"]

INTERLEAVES = (1, 2, 4, 8)
MICROBATCHES = (1, 2, 4, 8, 16)
LARGEST_MULTIPLE = 1024  # how many times the GPUs are doubled in the search for what fits


def plan(
    model: Source,
    *,
    cluster: Cluster | str | PathLike[str] = "h100x8",
    gpus: int,
    seq: int = 0,
    global_batch: int = 0,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    recompute: str = "",
    zero: int | None = None,
    schedule: str = "",
    tokens: float = 0.0,
    training: Training | None = None,
    serving: Serving | None = None,
    headroom: float = 0.05,
    top: int | None = None,
) -> list[Layout]:
    """Layouts of `gpus` ranks that fit, best first; one for each dp x tp x pp x cp x ep.

    model: what read_architecture takes (config dict, path, preset name, nn.Module). cluster: what read_cluster takes.
    Training: seq (tokens), global_batch (sequences) and the options of Training, or a Training. Serving: a Serving.
    headroom: share of the device's memory kept free. top: how many to return, None for all.
    World = dp x tp x pp x cp, ep divides dp x cp x tp. Training ranks by the seconds of a step, serving by tokens/s.
    Raises ValueError in one line for bad arguments or when no layout is legal, DoesNotFit (a ValueError) naming the
    smallest that fits when none fits.
    """
    arch, machine = read_architecture(model), read_cluster(cluster)
    check_gpus(machine, gpus)
    if not 0.0 <= headroom < 1.0:
        raise ValueError(f"plan: headroom={headroom:g} must be a share of the memory, 0 <= headroom < 1")
    limit = machine.device.memory * (1.0 - headroom)
    if serving is not None:
        found = serving_layouts(arch, machine, serving, gpus, limit)
    else:
        if training is None:
            if not seq or not global_batch:
                raise ValueError("plan: training needs seq and global_batch, or pass training= or serving=")
            training = Training(global_batch, seq, dtype, optimizer, recompute, zero, schedule, tokens)
        found = training_layouts(arch, machine, training, gpus, limit)
    return found if top is None else found[:top]


def check_gpus(cluster: Cluster, gpus: int) -> None:
    """Raise ValueError unless gpus is a positive count that the cluster can hold in whole nodes."""
    at_least("plan", 1, gpus=gpus)
    per_node = cluster.devices_per_node
    if gpus > per_node and gpus % per_node:
        raise ValueError(
            f"plan: {gpus} GPUs do not fill whole nodes of {per_node} ({cluster.name}); "
            f"use {gpus // per_node * per_node} or {-(-gpus // per_node) * per_node}"
        )
    if gpus > per_node and cluster.fabric is None:
        raise ValueError(
            f"plan: {cluster.name} is one node of {per_node} devices and has no fabric for {gpus} GPUs"
        )


def legal_layouts(
    arch: Architecture, cluster: Cluster, training: Training, gpus: int, refused: Counter[str] | None = None
) -> Iterator[Layout]:
    """Every legal mesh, interleaving and microbatch; ZeRO stage and recomputation are left at their defaults.

    refused: counts the reasons of what is not legal.
    """
    refused = Counter() if refused is None else refused
    divisors = [size for size in range(1, gpus + 1) if gpus % size == 0]

    def legal(reason: str) -> bool:
        if reason:
            refused[reason] += 1
        return not reason

    parallel = [
        (tp, cp)
        for tp, cp in product(divisors, divisors)
        if gpus % (tp * cp) == 0
        and legal(tensor_reason(arch, cluster, tp))
        and legal(context_reason(arch, training.seq, cp, tp, sequence_parallel=training.sequence_parallel))
    ]
    chunks = [
        (pp, interleave, schedule)
        for pp, interleave in product(divisors, INTERLEAVES)
        for schedule in _schedules(training, pp, interleave)
        if legal(pipeline_reason(arch, pp, interleave))
    ]
    for (tp, cp), (pp, interleave, schedule) in product(parallel, chunks):
        dp, left = divmod(gpus, tp * cp * pp)
        if left:
            continue
        for microbatch in MICROBATCHES:
            if not legal(microbatch_reason(training, dp, pp, interleave, microbatch)):
                continue
            passes = training.global_batch // (dp * microbatch)
            for ep in _expert_sizes(arch, dp * cp * tp):
                yield Layout(
                    dp,
                    tp,
                    pp,
                    cp,
                    ep,
                    interleave,
                    microbatch=microbatch,
                    microbatches=passes,
                    schedule=schedule,
                    sequence_parallel=training.sequence_parallel and tp > 1,
                )


def _schedules(training: Training, pp: int, interleave: int) -> tuple[str, ...]:
    """Schedules of pp stages with `interleave` chunks that the workload admits."""
    if pp == 1:
        return ("1f1b",) if interleave == 1 else ()
    fitting = ("interleaved",) if interleave > 1 else ("1f1b", "gpipe", "zero_bubble")
    if training.schedule:
        return (training.schedule,) if training.schedule in fitting else ()
    return fitting[:1]


def _expert_sizes(arch: Architecture, ranks: int) -> list[int]:
    if arch.moe is None:
        return [1]
    sizes = range(1, min(ranks, arch.moe.experts) + 1)
    return [ep for ep in sizes if not expert_reason(arch, ep, ranks)]


def training_layouts(
    arch: Architecture, cluster: Cluster, training: Training, gpus: int, limit: float
) -> list[Layout]:
    """Layouts that fit `limit` bytes per rank, by step time; the fastest options of each mesh."""
    refused: Counter[str] = Counter()
    memory, steps = MemoryModel(arch, cluster, training, limit), StepModel(arch, cluster, training)
    best: dict[tuple[int, ...], Layout] = {}
    smallest_failed: dict[tuple[int, ...], int] = {}
    legal = 0
    for mesh in legal_layouts(arch, cluster, training, gpus, refused):
        legal += 1
        key = (mesh.dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep)
        if mesh.microbatch > smallest_failed.get((*key, mesh.interleave), mesh.microbatch):
            continue  # more sequences per pass only need more memory
        if key in best and steps.floor(mesh) >= best[key].seconds:
            continue
        options = list(_options(training, mesh, memory))
        if not options:
            smallest_failed.setdefault((*key, mesh.interleave), mesh.microbatch)
        for option in options:
            if key in best and steps.floor(option) >= best[key].seconds:
                continue
            timed = steps.timed(option)
            if key not in best or timed.seconds < best[key].seconds:
                best[key] = timed
    if not legal:
        raise ValueError(f"plan: no layout of {gpus} GPUs is legal: {_commonest(refused)}")
    if not best:
        raise DoesNotFit(_smallest(arch, cluster, training, gpus, limit))
    ranked = sorted(best.values(), key=lambda layout: (layout.seconds, layout.tp, layout.pp, layout.cp))
    return explain_losses([memory.measured(layout) for layout in ranked])


def _options(training: Training, mesh: Layout, memory: MemoryModel) -> Iterator[Layout]:
    """ZeRO stages of a mesh with the least recomputation that fits."""
    stages = ZERO_STAGES if training.zero is None else (training.zero,)
    if training.zero is None and mesh.dp * mesh.cp == 1:
        stages = stages[:1]
    recomputes = (training.recompute,) if training.recompute else RECOMPUTES
    leanest = replace(mesh, zero=stages[-1], recompute=recomputes[-1])
    if not memory.fits(leanest):
        return
    for zero in stages:
        for recompute in recomputes:
            options = replace(mesh, zero=zero, recompute=recompute)
            if memory.fits(options):
                yield options
                break


def _commonest(refused: Counter[str]) -> str:
    return "; ".join(reason for reason, _ in refused.most_common(3)) or "nothing divides"


def _smallest(arch: Architecture, cluster: Cluster, training: Training, gpus: int, limit: float) -> str:
    """One line: how far the nearest layout is from fitting, and the fewest GPUs that do fit."""
    nearest = _leanest(arch, cluster, training, gpus, limit)
    text = (
        f"plan: nothing fits {gpus} x {cluster.device.name} ({limit / 1e9:.1f} GB usable each); "
        f"the nearest, {_describe(nearest)}, needs {nearest.memory / 1e9:.1f} GB; "
    )
    count = gpus
    while count < gpus * LARGEST_MULTIPLE:
        count = count * 2 if count >= cluster.devices_per_node else min(2 * count, cluster.devices_per_node)
        if count > cluster.devices_per_node and cluster.fabric is None:
            return text + f"{cluster.name} has no more devices: take devices with more memory"
        try:
            layout = _leanest(arch, cluster, training, count, limit)
        except ValueError:
            continue
        if layout.fits:
            return (
                text
                + f"smallest that fits is {count} GPUs: {_describe(layout)} ({layout.memory / 1e9:.1f} GB)"
            )
    return text + f"not even {count} GPUs do; shorten the sequence or take devices with more memory"


def _leanest(arch: Architecture, cluster: Cluster, training: Training, gpus: int, limit: float) -> Layout:
    """The legal layout that needs the least memory; where several fit, the least cp, tp and recomputation."""
    memory = MemoryModel(arch, cluster, training, limit)
    best: tuple[tuple[float, ...], Layout] | None = None
    for mesh in legal_layouts(arch, cluster, training, gpus):
        stages = (
            (max(ZERO_STAGES) if mesh.dp * mesh.cp > 1 else 0,) if training.zero is None else (training.zero,)
        )
        for zero, recompute in product(stages, (training.recompute,) if training.recompute else RECOMPUTES):
            layout = replace(mesh, zero=zero, recompute=recompute)
            size = memory.fullest(layout)
            order = (float(layout.cp), float(layout.tp), float(RECOMPUTES.index(recompute)), size)
            rank = (0.0, *order) if size <= limit else (1.0, size)
            if best is None or rank < best[0]:
                best = (rank, layout)
    if best is None:
        raise ValueError(f"plan: no layout of {gpus} GPUs is legal")
    return memory.measured(best[1])


def _describe(layout: Layout) -> str:
    return f"{layout.name} ZeRO-{layout.zero}, microbatch {layout.microbatch}, recompute {layout.recompute}"
