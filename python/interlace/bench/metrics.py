"""Arithmetic of the columns: bus bandwidth, exposed time, overlap, floors. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .summary import Timings

__all__ = [
    "BUS_FACTORS",
    "bandwidth",
    "bus_factor",
    "figures",
    "floor_ratio",
    "overlap_efficiency",
    "rates",
    "spread",
    "teraflops",
]

# What every link of the machine carries per byte of the result (of the input for reduce_scatter and all_to_all), as
# nccl-tests counts it: with it a ring, a tree and a switch are judged by the same hardware limit.
BUS_FACTORS = {
    "all_reduce": (2, 1),  # 2 (n - 1) / n
    "all_gather": (1, 1),
    "reduce_scatter": (1, 1),
    "all_to_all": (1, 1),
    "gather": (1, 1),
    "scatter": (1, 1),
    "broadcast": (1, 0),
    "reduce": (1, 0),
    "send_recv": (1, 0),
}

# variants whose place in the schema is fixed; the rest go to `extra`
NAMED = ("fused", "baseline", "compute", "collective", "linear", "floor")


def bus_factor(op: str, ranks: int) -> float:
    """busbw / algbw: 2 (n - 1) / n for all_reduce, (n - 1) / n for gather, scatter, all_to_all, 1 for a tree's root.

    ValueError for an op it does not know, or fewer than one rank.
    """
    if op not in BUS_FACTORS or ranks < 1:
        raise ValueError(f"bus_factor: {op!r} on {ranks} ranks; expected one of {', '.join(BUS_FACTORS)}")
    times, less = BUS_FACTORS[op]
    return times * (ranks - less) / ranks if less else float(times)


def bandwidth(size: int, microseconds: float) -> float:
    """GB/s (1e9 bytes): `size` bytes in that time. In nccl-tests' words algbw."""
    return size / microseconds / 1e3


def teraflops(flops: int, microseconds: float) -> float:
    """TFLOP/s of one rank: its floating-point operations over its time."""
    return flops / microseconds / 1e6


def overlap_efficiency(exposed_us: float | None, collective_us: float | None) -> float | None:
    """1 - (fused - compute) / collective: 1 hides all of the collective, 0 none of it, below 0 costs more than it.

    None where there is no collective to hide (one rank), or nothing was timed.
    """
    if exposed_us is None or not collective_us:
        return None
    return 1.0 - exposed_us / collective_us


def floor_ratio(
    fused_us: float, compute_us: float | None, collective_us: float | None, floor_us: float | None = None
) -> float | None:
    """fused / the least it could take: max(compute, collective) of a fused op, `floor_us` of a plain collective."""
    least = max(compute_us or 0.0, collective_us or 0.0, floor_us or 0.0)
    return fused_us / least if least > 0 else None


def spread(median: float, p20: float) -> float:
    """Relative standard deviation that the lower half of the samples shows: (median - p20) / 0.84 sigma / median.

    The lower half, because the upper one holds what other processes did. 0.8416 is the normal quantile of 0.8.
    """
    return (median - p20) / 0.8416 / median if median > 0 else 0.0


def rates(tokens: int, found: Mapping[str, Any]) -> dict[str, float]:
    """Tokens per second of what `figures` found, fused and baseline, and the share of fused that is exposed."""
    told = {"tokens_per_second": tokens / found["fused_us"] * 1e6}
    if found.get("baseline_us"):
        told["baseline_tokens_per_second"] = tokens / found["baseline_us"] * 1e6
    if found.get("exposed_us") is not None:
        told["exposed_share"] = max(0.0, found["exposed_us"]) / found["fused_us"]
    return told


def figures(timings: Timings) -> dict[str, object]:
    """The timed fields of a Row. Variants: fused (must be there), baseline, compute, collective, linear, peer:NAME.

    Ratios and differences are medians within an iteration. speedup and peer_speedup are ratios of 20th percentiles: a
    library whose ranks sleep between calls is judged awake. Other variants end in `extra` as NAME_us and NAME_ratio
    (NAME / fused). ValueError without fused.
    """
    if "fused" not in timings.runs:
        raise ValueError(f"figures: variants are {list(timings.runs)}; one of them must be named 'fused'")
    us = {name: timings.summary(name).median * 1e6 for name in timings.runs}
    fused = timings.summary("fused")
    found: dict[str, object] = {
        "fused_us": us["fused"],
        "p20_us": fused.p20 * 1e6,
        "p95_us": fused.p95 * 1e6,
        "kept": fused.kept,
        "taken": fused.taken,
        "compute_us": us.get("compute"),
        "collective_us": us.get("collective"),
        "floor_us": us.get("floor"),
    }
    if "baseline" in us:
        best = timings.summary("baseline").p20 * 1e6
        found |= {"baseline_us": us["baseline"], "baseline_p20_us": best, "speedup": best / (fused.p20 * 1e6)}
    exposed = timings.difference("fused", "compute") * 1e6 if "compute" in us else None
    found |= {
        "exposed_us": exposed,
        "overlap_efficiency": overlap_efficiency(exposed, us.get("collective")),
        "x_floor": floor_ratio(us["fused"], us.get("compute"), us.get("collective"), us.get("floor")),
    }
    if "compute" in us:
        found["communication_ratio"] = timings.ratio("fused", "compute")
        if "linear" in us:
            found["engine_ratio"] = timings.ratio("compute", "linear")
    found |= _peers(timings, us, fused.p20 * 1e6)
    found["extra"] = _rest(timings, us)
    return found


def _peers(timings: Timings, us: Mapping[str, float], fused: float) -> dict[str, object]:
    best = {n.removeprefix("peer:"): timings.summary(n).p20 * 1e6 for n in us if n.startswith("peer:")}
    if not best:
        return {}
    name = min(best, key=lambda peer: best[peer])
    return {
        "peer": name,
        "peer_us": us[f"peer:{name}"],
        "peer_speedup": best[name] / fused,
        "peers_us": {peer: us[f"peer:{peer}"] for peer in best},
    }


def _rest(timings: Timings, us: Mapping[str, float]) -> dict[str, object]:
    rest: dict[str, object] = {} if "linear" not in us else {"linear_us": us["linear"]}
    for name in us:
        if name not in NAMED and not name.startswith("peer:"):
            key = name.replace(" ", "_")
            rest |= {f"{key}_us": us[name], f"{key}_ratio": timings.ratio(name, "fused")}
    return rest
