"""Arithmetic of paired timings: which iterations count, medians, ratios and differences. Pure, no torch.

One iteration runs every variant once, so that two variants of one iteration met the same machine. Its time is
the maximum over ranks: a collective is done when the last rank is.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Run", "Summary", "Timings", "combine", "order", "percentile"]

DELAY_SHARE = 0.01  # an iteration that waited for the core longer than 1 % of its time ...
DELAY_SECONDS = 2e-6  # ... plus 2 us, what reading schedstat twice can cost, is not this code's time
FEWEST_KEPT = 5  # below five undisturbed iterations a median says nothing: keep all and report it


@dataclass(frozen=True)
class Run:
    """One timed call: seconds on the clock, and seconds the thread was runnable but had no core."""

    seconds: float
    delay: float = 0.0

    @property
    def preempted(self) -> bool:
        return self.delay > DELAY_SHARE * self.seconds + DELAY_SECONDS


@dataclass(frozen=True)
class Summary:
    """Median, 20th and 95th percentile in seconds; `kept` of `taken` iterations were undisturbed."""

    median: float
    p20: float
    p95: float
    kept: int
    taken: int


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, linear between neighbours; ValueError when empty."""
    if not values:
        raise ValueError("percentile: no values; measure at least one iteration")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def order(seed: int, iteration: int, count: int) -> list[int]:
    """The order of the variants in one iteration, the same on every rank: A B, then B A, then another pair.

    A fixed order lets one variant always pay for the cache its predecessor leaves; that alone moves ratios by
    10 %. Backwards every second time, a drift of the machine weighs on all variants alike.
    """
    indices = list(range(count))
    random.Random(seed * 1_000_003 + iteration // 2).shuffle(indices)
    return indices[::-1] if iteration % 2 else indices


def combine(by_rank: Sequence[Mapping[str, Sequence[Run]]]) -> Timings:
    """Runs of all ranks -> one: per variant and iteration the slowest rank, the longest delay of any rank."""
    if not by_rank:
        raise ValueError("combine: no ranks; pass the runs of at least one rank")
    names = list(by_rank[0])
    for rank, runs in enumerate(by_rank):
        if list(runs) != names:
            raise ValueError(
                f"combine: rank {rank} timed {list(runs)}, rank 0 timed {names}; use the same variants"
            )
    merged = {
        name: tuple(
            Run(max(run.seconds for run in same), max(run.delay for run in same))
            for same in zip(*(runs[name] for runs in by_rank), strict=True)
        )
        for name in names
    }
    return Timings(merged)


@dataclass(frozen=True)
class Timings:
    """Runs of every variant, one per iteration, combined over ranks."""

    runs: Mapping[str, tuple[Run, ...]]

    def _kept(self, *names: str) -> list[int]:
        count = len(self.runs[names[0]])
        quiet = [i for i in range(count) if not any(self.runs[name][i].preempted for name in names)]
        return quiet if len(quiet) >= min(FEWEST_KEPT, count) else list(range(count))

    def summary(self, name: str) -> Summary:
        """Median, p20, p95 of the undisturbed iterations of one variant; of all when fewer than five are."""
        kept = self._kept(name)
        seconds = [self.runs[name][i].seconds for i in kept]
        quiet = sum(not run.preempted for run in self.runs[name])
        return Summary(
            median=percentile(seconds, 0.5),
            p20=percentile(seconds, 0.2),
            p95=percentile(seconds, 0.95),
            kept=quiet,
            taken=len(self.runs[name]),
        )

    def ratio(self, name: str, base: str) -> float:
        """Median over iterations of time(name) / time(base), both of the same iteration."""
        mine, other = self.runs[name], self.runs[base]
        return percentile([mine[i].seconds / other[i].seconds for i in self._kept(name, base)], 0.5)

    def difference(self, name: str, base: str) -> float:
        """Median over iterations of time(name) - time(base), both of the same iteration; seconds."""
        mine, other = self.runs[name], self.runs[base]
        return percentile([mine[i].seconds - other[i].seconds for i in self._kept(name, base)], 0.5)
