"""The roof of this machine: how fast a rank multiplies and moves memory while all ranks do the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..functional import column_linear
from .operands import packed

__all__ = ["measure_roof"]

SIZE = 512  # of a square product: 0.3 GFLOP, less than a slice of a busy machine's time
COPIED_BYTES = 64 << 20  # beyond the caches of a core
TURNS = 15


def measure_roof(
    dtypes: Any, barrier: Callable[[], None], device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """peak_tflops by name of dtype, and memory_gb_s (read and written), of the slowest rank at its best. Collective.

    dtypes: names, or None for float32. All ranks work at the same time, as they do in what is measured. The roof of
    products is the better of torch's and ours.
    """
    peak = {}
    for name in dtypes or ("float32",):
        x = torch.ones(SIZE, SIZE, dtype=getattr(torch, str(name)), device=device)
        calls = [partial(F.linear, x, x)]
        if x.device.type == "cpu":
            calls.append(partial(column_linear, x, packed(x, {}), group=None))
        peak[str(name)] = 2.0 * SIZE**3 / min(_best(call, barrier, device) for call in calls) / 1e12
    source = torch.ones(COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copied = 2.0 * COPIED_BYTES / _best(lambda: target.copy_(source), barrier, device) / 1e9
    return {"peak_tflops": peak, "memory_gb_s": copied}


def _best(call: Callable[[], object], barrier: Callable[[], None], device: torch.device | str) -> float:
    """Seconds of the slowest rank, each rank's least of the turns: what else runs here is no part of the roof."""
    call()
    seconds = []
    for _ in range(TURNS):
        barrier()
        begin = time.perf_counter()
        call()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    slowest = torch.tensor(min(seconds), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
