"""Pipeline schedules: bubble, micro-batches in flight, and which layers a stage holds."""

from __future__ import annotations

from ._check import at_least, one_of

__all__ = ["SCHEDULES", "bubble_fraction", "bubble_of_ideal", "in_flight_microbatches", "stage_layers"]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def bubble_fraction(stages: int, microbatches: int, interleave: int = 1) -> float:
    """Share of the whole pipeline time in which a stage is idle, without unit.

    (p - 1) / (v m + p - 1) with p stages, m micro-batches and v model chunks per stage: GPipe, 1F1B and interleaved
    1F1B with equal chunks. 4 stages and 4, 16, 32 micro-batches give 3/7, 3/19, 3/35. Relative to the time the step
    takes, bubble included; `bubble_of_ideal` is relative to the time without a bubble.
    Source: GPipe arXiv 1811.06965; interleaving Megatron arXiv 2104.04473, section 2.2.
    """
    at_least("bubble_fraction", 1, stages=stages, microbatches=microbatches, interleave=interleave)
    return (stages - 1) / (interleave * microbatches + stages - 1)


def bubble_of_ideal(stages: int, microbatches: int, interleave: int = 1, schedule: str = "1f1b") -> float:
    """Idle time of a stage divided by its busy time, without unit.

    (p - 1) / (v m) for GPipe, 1F1B and interleaved 1F1B. "zero_bubble" fills a third of each bubble slot with weight
    gradients and leaves (p - 1) / (3 m) with 1F1B's memory (ZB-H1), forward, input and weight gradient taken equal.
    Source: arXiv 2104.04473, section 2.2; zero bubble arXiv 2401.10241, table 2.
    """
    at_least("bubble_of_ideal", 1, stages=stages, microbatches=microbatches, interleave=interleave)
    one_of("bubble_of_ideal", "schedule", schedule, SCHEDULES)
    share = 1 / 3 if schedule == "zero_bubble" else 1.0
    return share * (stages - 1) / (interleave * microbatches)


def in_flight_microbatches(
    stages: int, microbatches: int, stage: int = 0, interleave: int = 1, schedule: str = "1f1b"
) -> float:
    """Micro-batches whose activations `stage` (0-based) holds at its peak, in units of its own layers.

    gpipe: m. 1f1b and zero_bubble: min(m, p - stage). interleaved: the warm-up of stage s runs
    2 (p - s - 1) + (v - 1) p chunk passes before its first backward, so min(v m, 2 (p - s - 1) + (v - 1) p + 1)
    chunks of 1 / v of the layers each; the first stage holds p (1 + (p - 1) / (p v)) micro-batches.
    Source: arXiv 2104.04473 section 2.2; arXiv 2205.05198 section 4.2.3.
    """
    at_least("in_flight_microbatches", 1, stages=stages, microbatches=microbatches, interleave=interleave)
    one_of("in_flight_microbatches", "schedule", schedule, SCHEDULES)
    if not 0 <= stage < stages:
        raise ValueError(f"in_flight_microbatches: stage={stage}; expected 0 to {stages - 1}")
    if schedule == "gpipe":
        return float(microbatches)
    if interleave == 1 or stages == 1:
        return float(min(microbatches, stages - stage))
    chunks = 2 * (stages - stage - 1) + (interleave - 1) * stages + 1
    return min(interleave * microbatches, chunks) / interleave


def stage_layers(layers: int, stages: int, interleave: int = 1) -> tuple[tuple[int, ...], ...]:
    """Layer indices of each stage: chunk c of stage s is the (c p + s)-th part of the stack.

    Where p v does not divide the layers, the first and the last parts get the shorter ones, because they also carry
    embedding and head. Raises ValueError with fewer layers than parts. Source: arXiv 2104.04473, figure 4.
    """
    at_least("stage_layers", 1, layers=layers, stages=stages, interleave=interleave)
    parts = stages * interleave
    if layers < parts:
        raise ValueError(
            f"stage_layers: {layers} layers for {stages} stages x {interleave} chunks; need one each"
        )
    short, extra = divmod(layers, parts)
    lengths = [short] * parts
    # the middle first: ends hold the embedding and the head
    middle = sorted(range(parts), key=lambda part: (abs(2 * part - parts + 1), part))
    for part in middle[:extra]:
        lengths[part] += 1
    starts = [sum(lengths[:part]) for part in range(parts)]
    return tuple(
        tuple(
            layer
            for chunk in range(interleave)
            for layer in range(
                starts[chunk * stages + s], starts[chunk * stages + s] + lengths[chunk * stages + s]
            )
        )
        for s in range(stages)
    )
