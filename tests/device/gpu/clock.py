"""Times on a GPU: variants in turn, so that all see the same clocks; cold second-level cache; medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU so far
WARM_UPS = 2


@dataclass(frozen=True)
class Time:
    """Of one call, in microseconds."""

    median: float
    p95: float

    def tflops(self, flops: float) -> float:
        """Rate of a call of so many floating-point operations."""
        return flops / self.median / 1e6

    def gigabytes(self, nbytes: float) -> float:
        """Rate of a call that moves so many bytes, GB/s."""
        return nbytes / self.median / 1e3


def compare(
    variants: Mapping[str, Callable[[], object]], *, seconds: float = 0.2, most: int = 30, cold: bool = True
) -> dict[str, Time]:
    """Time each variant, A B A B ...; about `seconds` in all. cold: something else is in the L2 before each call."""
    scratch = torch.empty(FLUSH_BYTES if cold else 1, dtype=torch.uint8, device="cuda")
    for call in variants.values():
        for _ in range(WARM_UPS):
            call()
    torch.cuda.synchronize()
    first = {name: _once(call, scratch) for name, call in variants.items()}
    rounds = max(3, min(most, int(seconds * 1e6 / max(1.0, sum(first.values())))))
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            taken[name].append(_once(call, scratch))
    return {
        name: Time(statistics.median(t), sorted(t)[int(0.95 * (len(t) - 1))]) for name, t in taken.items()
    }


def _once(call: Callable[[], object], scratch: torch.Tensor) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    scratch.fill_(1)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def replayed(call: Callable[[], object], repeats: int = 20) -> Callable[[], object]:
    """A graph of `repeats` calls: what the device needs, without the host's part."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph.replay
