"""Whether a case fits this machine: its memory, and the time somebody is ready to wait."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

__all__ = ["Capacity", "free_bytes"]

SHARE = 0.8  # of the free memory: copies that a library makes for itself are not in a case's sum
PROBE = (256, 1024, 1024)  # M, N, K of the product that tells how fast this machine multiplies


class Capacity:
    """What a rank has. Asked on all ranks, answered by the first, so that none of them skips alone."""

    def __init__(self, settings: Mapping[str, object], world_size: int) -> None:
        given = settings.get("memory")
        self._given = float(str(given)) * 2**30 if given else None
        self._longest = float(str(settings.get("longest", 20.0)))
        self._world_size = world_size
        self._rate: float | None = None

    def lacking(self, case: Any) -> str | None:
        """What this machine has too little of for the case; None when it fits. Collective."""
        if case.flops and self._rate is None:
            self._rate = _agreed(_multiplies())
        needed = case.memory_bytes * self._world_size
        free = _agreed(self._given if self._given is not None else free_bytes() * SHARE)
        if needed > free:
            return f"not enough memory: {needed / 2**30:.3g} GiB needed, {free / 2**30:.3g} GiB to be had"
        seconds = case.flops / self._rate if self._rate else 0.0
        if seconds > self._longest:
            return f"a call takes about {seconds:.0f} s here; --longest {seconds * 1.5:.0f} measures it"
        return None


def free_bytes() -> float:
    """Memory that can be had without swapping; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024.0 if found else float("inf")


def _multiplies() -> float:
    """Floating-point operations per second of this rank in fp32, best of three."""
    rows, columns, depth = PROBE
    x, weight = torch.ones(rows, depth), torch.ones(columns, depth)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        F.linear(x, weight)
        best = min(best, time.perf_counter() - begin)
    return 2.0 * rows * columns * depth / best


def _agreed(value: float) -> float:
    held = torch.tensor(value, dtype=torch.float64)
    dist.broadcast(held, 0)
    return float(held)
