"""Interleaved timing of several variants of the same work on all ranks of a group."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interlace.bench.clock import Clock, WallClock
from interlace.bench.summary import Run, Timings, combine, order

__all__ = ["RunDelay", "fitting_iterations", "measure"]


class RunDelay:
    """Seconds the thread was runnable without a core, from /proc/thread-self/schedstat; 0 elsewhere."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        with contextlib.suppress(OSError):
            self._file = Path("/proc/thread-self/schedstat").open("rb", buffering=0)  # noqa: SIM115

    def read(self) -> float:
        if self._file is None:
            return 0.0
        self._file.seek(0)
        return int(self._file.read().split()[1]) * 1e-9

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def fitting_iterations(
    variants: Mapping[str, Callable[[], object]],
    budget_seconds: float,
    *,
    fewest: int,
    most: int,
    warmup: int = 2,
    barrier: Callable[[], None] = dist.barrier,
) -> int:
    """Warm up and count the iterations that fit the budget. Collective; rank 0 counts for all.

    Warming up ends early when one round takes more than half the budget: a slow machine is not made to wait.
    """
    seconds = 0.0
    for _ in range(max(1, warmup)):
        begin = time.perf_counter()
        for call in variants.values():
            barrier()
            call()
        seconds = _of_rank_zero(time.perf_counter() - begin)
        if seconds > budget_seconds / 2:
            break
    return max(fewest, min(most, int(budget_seconds / max(seconds, 1e-9))))


def _of_rank_zero(value: float) -> float:
    if not dist.is_initialized():
        return value
    agreed = torch.tensor(value, dtype=torch.float64)
    dist.broadcast(agreed, 0)
    return float(agreed)


def measure(
    variants: Mapping[str, Callable[[], object]],
    *,
    iterations: int,
    warmup: int = 2,
    seed: int = 0,
    barrier: Callable[[], None] = dist.barrier,
    progress: Callable[[], None] | None = None,
    clock: Clock | None = None,
) -> Timings:
    """Time every variant once per iteration, in an order drawn from `seed`, with a barrier before each.

    The order of every second iteration is that before it backwards: A B B A. Collective: every rank passes the same
    names, iterations and seed. Calls `progress` after each iteration. The garbage collector is off meanwhile, so
    that no variant pays for another's litter. ValueError without variants.
    """
    if not variants or iterations < 1:
        raise ValueError(
            f"measure: {len(variants)} variants, {iterations} iterations; need at least one of each"
        )
    names = list(variants)
    for _ in range(warmup):
        for name in names:
            barrier()
            variants[name]()
    clock = clock or WallClock()
    samples: dict[str, list[tuple[Any, float]]] = {name: [] for name in names}
    delay = RunDelay()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for iteration in range(iterations):
            for index in order(seed, iteration, len(names)):
                call = variants[names[index]]
                barrier()
                waited = delay.read()
                sample = clock.run(call)
                samples[names[index]].append((sample, delay.read() - waited))
            if progress is not None:
                progress()
    finally:
        delay.close()
        if collecting:
            gc.enable()
    runs = {name: [Run(clock.read(sample), waited) for sample, waited in samples[name]] for name in names}
    return combine(_all_ranks(runs))


def _all_ranks(runs: dict[str, list[Run]]) -> list[dict[str, list[Run]]]:
    if not dist.is_initialized():
        return [runs]
    gathered: list[dict[str, list[Run]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, runs)
    return [part for part in gathered if part is not None]
