"""Data parallelism: what reducing gradients and gathering parameters costs per step, by ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass

from .domain import Group
from .exposed import Cost, hidden_behind

__all__ = ["Window", "gradient_cost"]


@dataclass(frozen=True)
class Window:
    """Computation of one stage and one microbatch that data-parallel communication can hide behind, seconds.

    layers: layers of the stage, which is also the number of buckets.
    """

    forward: float
    backward: float
    layers: int


def gradient_cost(
    gradient_bytes: float, parameter_bytes: float, group: Group, zero: int, microbatches: int, window: Window
) -> Cost:
    """Cost of one optimizer step's data-parallel communication on one stage.

    gradient_bytes, parameter_bytes: what one rank holds unsharded. With S_g, S_p these bytes and m microbatches:
    0: all-reduce of S_g behind the last backward. 1: scatter of S_g behind the last backward, gather of S_p behind
    the next forward. 2: the scatter after every microbatch, so that only 1/n of the sums is kept.
    3: gather of S_p in every forward and every backward, scatter of S_g in every backward.
    Volumes: ZeRO, arXiv 1910.02054, section 7. Overlap: one bucket per layer, the last has nothing to hide behind.
    """
    if group.ranks == 1 or gradient_bytes == 0.0:
        return Cost()
    share = (group.ranks - 1) / group.ranks
    if zero == 0:
        seconds = group.all_reduce(gradient_bytes)
        exposed = hidden_behind(seconds, window.backward, window.layers)
        return Cost(window.layers, 2 * share * gradient_bytes, seconds, exposed)
    scatter, gather = group.reduce_scatter(gradient_bytes), group.all_gather(parameter_bytes)
    scatters = microbatches if zero >= 2 else 1
    if zero < 3:
        exposed = scatters * hidden_behind(scatter, window.backward, window.layers)
        exposed += hidden_behind(gather, window.forward, window.layers)
        sent = share * (scatters * gradient_bytes + parameter_bytes)
        return Cost((scatters + 1) * window.layers, sent, scatters * scatter + gather, exposed)
    exposed = hidden_behind(gather, window.forward, window.layers)
    exposed += hidden_behind(gather + scatter, window.backward, window.layers)
    sent = microbatches * share * (2 * parameter_bytes + gradient_bytes)
    calls = 3 * microbatches * window.layers
    return Cost(calls, sent, microbatches * (2 * gather + scatter), microbatches * exposed)
