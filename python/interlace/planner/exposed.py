"""What each kind of communication costs in one pass, and how much of it computation hides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .cluster import Device
from .compute import fused_seconds
from .domain import Group

__all__ = [
    "Cost",
    "all_to_all_cost",
    "behind_cost",
    "gather_cost",
    "hidden_behind",
    "reduce_cost",
    "ring_cost",
    "sum_costs",
]


@dataclass(frozen=True)
class Cost:
    """Communication of one kind: how often, bytes one rank sends, seconds on the wire, seconds nothing hides."""

    calls: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.calls + other.calls,
            self.bytes + other.bytes,
            self.seconds + other.seconds,
            self.exposed + other.exposed,
        )

    def __mul__(self, times: float) -> Cost:
        return Cost(self.calls * times, self.bytes * times, self.seconds * times, self.exposed * times)


def sum_costs(costs: Iterable[Cost]) -> Cost:
    """The sum of all."""
    return sum(costs, Cost())


def gather_cost(
    size: float, group: Group, product: float, device: Device, measured: float | None = None
) -> Cost:
    """Cost of gathering `size` bytes for a product of `product` seconds, or of scattering its sum.

    exposed = measured - product where the fused op was measured, else fused_seconds(product, communication) - product.
    """
    seconds = group.all_gather(size)
    return _fused(seconds, size * (group.ranks - 1) / group.ranks, product, device, measured)


def reduce_cost(
    size: float, group: Group, product: float, device: Device, measured: float | None = None
) -> Cost:
    """Cost of summing the `size` bytes a product of `product` seconds leaves on every rank; else as gather_cost."""
    seconds = group.all_reduce(size)
    return _fused(seconds, 2 * size * (group.ranks - 1) / group.ranks, product, device, measured)


def all_to_all_cost(
    size: float, group: Group, product: float, device: Device, measured: float | None = None
) -> Cost:
    """Cost of sending `size` bytes of routed tokens to the ranks of their experts, or back; else as gather_cost."""
    seconds = group.all_to_all(size)
    return _fused(seconds, size * (group.ranks - 1) / group.ranks, product, device, measured)


def behind_cost(cost: Cost, product: float) -> Cost:
    """The same collective behind a product of `product` seconds that does not need it: exposed = seconds - product.

    In the backward of a column product the sum of the input gradient runs beside the weight gradient, and the second
    gather beside the input gradient (Megatron-LM, arXiv 2205.05198).
    """
    return replace(cost, exposed=max(0.0, cost.seconds - product))


def ring_cost(size: float, group: Group, attention: float, device: Device) -> Cost:
    """Cost of passing `size` bytes (keys and values of a rank's tokens) around the ring while attention runs.

    n - 1 messages of m seconds; each travels behind one of the n parts of the attention, a seconds long, which slows
    by the device's slowdown while it does: exposed = (n - 1) (max(0, m - a) + slowdown x min(m, a)).
    Source: ring attention, arXiv 2310.01889.
    """
    if group.ranks == 1:
        return Cost()
    part = attention / group.ranks
    message = group.send(size)
    exposed = max(0.0, message - part) + device.slowdown * min(message, part)
    hops = group.ranks - 1
    return Cost(hops, hops * size, hops * message, hops * exposed)


def hidden_behind(seconds: float, window: float, pieces: int) -> float:
    """Exposed part of `seconds` of communication in `pieces` buckets behind `window` seconds of computation.

    The last bucket starts when the computation is over: max(seconds - window, seconds / pieces).
    """
    if seconds == 0.0:
        return 0.0
    return max(seconds - window, seconds / pieces)


def _fused(seconds: float, size: float, product: float, device: Device, measured: float | None) -> Cost:
    if seconds == 0.0:
        return Cost()
    together = fused_seconds(product, seconds, device.slowdown) if measured is None else measured
    return Cost(1, size, seconds, max(0.0, together - product))
