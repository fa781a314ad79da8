"""How one call is timed: by the wall clock on a CPU, by events of the stream on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

from .summary import percentile

__all__ = ["Clock", "EventClock", "WallClock", "clock_for", "tick"]

Call = Callable[[], object]
EMPTY_CALLS = 2001  # a call of nothing takes 0.1 us: all of them less than a millisecond


def _nothing() -> None:
    return None


class Clock(Protocol):
    """`run` times a call as lightly as it can; `read` makes seconds of what it returned, after all calls are done."""

    overhead: float  # seconds that `read` takes off: what timing a call of nothing shows
    residual: float  # seconds by which that differs from one time to the next

    def run(self, call: Call) -> Any: ...

    def read(self, sample: Any) -> float: ...


class WallClock:
    """time.perf_counter around the call. `calibrated` takes the cost of the clock itself off."""

    def __init__(self, overhead: float = 0.0, residual: float = 0.0) -> None:
        self.overhead, self.residual = overhead, residual

    @classmethod
    def calibrated(cls) -> WallClock:
        """Times a call of nothing; the spread from the 20th to the 80th percentile, or a tick, is the residual."""
        bare = cls()
        seconds = [bare.run(_nothing) for _ in range(EMPTY_CALLS)]
        middle = percentile(seconds, 0.5)
        return cls(middle, max(percentile(seconds, 0.8) - percentile(seconds, 0.2), tick(seconds)))

    def run(self, call: Call) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def read(self, sample: float) -> float:
        return max(sample - self.overhead, 0.0)


class EventClock:
    """CUDA events before and after what the call puts on the current stream; the device is idle when it starts."""

    overhead = 0.0
    residual = 0.5e-6  # what torch.cuda.Event.elapsed_time resolves

    def run(self, call: Call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        event: Any = torch.cuda.Event  # torch leaves it untyped
        begin, end = (event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        return begin, end

    def read(self, sample: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
        begin, end = sample
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def tick(seconds: Sequence[float]) -> float:
    """The least by which two readings differ, seconds: most calls of nothing read alike where a clock is coarse.

    Below the clock's own resolution two readings differ by the rounding of a difference of floats alone.
    """
    resolution = time.get_clock_info("perf_counter").resolution
    distinct = sorted(set(seconds))
    steps = [b - a for a, b in pairwise(distinct) if b - a > resolution / 2]
    return min(steps, default=resolution)


def clock_for(device: str) -> Clock:
    """The clock of "cpu" or "cuda"."""
    return EventClock() if device == "cuda" else WallClock.calibrated()
