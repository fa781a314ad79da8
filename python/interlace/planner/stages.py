"""Memory of every pipeline stage of a layout, with what layouts share computed once."""

from __future__ import annotations

from dataclasses import replace

from .architecture import Architecture
from .cluster import Cluster
from .layout import Layout
from .memory import MemoryBreakdown, stage_memory
from .pipeline import in_flight_microbatches, stage_layers
from .workload import Training

__all__ = ["MemoryModel"]


class MemoryModel:
    """Memory of many layouts of one model, cluster and workload against `limit` bytes per rank."""

    def __init__(self, arch: Architecture, cluster: Cluster, training: Training, limit: float) -> None:
        self.arch, self.cluster, self.training, self.limit = arch, cluster, training, limit
        self._known_states: dict[tuple[int, ...], float] = {}
        self._known_candidates: dict[tuple[int, int], tuple[int, ...]] = {}
        self._latest: tuple[object, tuple[float, float]] = (None, (0.0, 0.0))
        self._known_rest: dict[tuple[int | float | str, ...], float] = {}

    def stage(self, layout: Layout, stage: int) -> MemoryBreakdown:
        """Bytes of one rank of `stage` at its peak, by category; the device's own reserve included."""
        found = stage_memory(
            self.arch,
            stage=stage,
            pp=layout.pp,
            tp=layout.tp,
            cp=layout.cp,
            dp=layout.dp,
            ep=layout.ep,
            expert_tp=layout.tp if layout.ep == 1 else 1,
            zero=layout.zero,
            seq=self.training.seq,
            microbatch=layout.microbatch,
            microbatches=layout.microbatches,
            interleave=layout.interleave,
            schedule=layout.schedule,
            recompute=layout.recompute,
            sequence_parallel=layout.sequence_parallel,
            precision=self.training.precision,
            flash=self.training.flash,
            dropout=self.training.dropout,
        )
        return replace(found, reserved=self.cluster.device.reserved)

    def fits(self, layout: Layout) -> bool:
        """Whether every stage stays within the limit."""
        return self.fullest(layout) <= self.limit

    def fullest(self, layout: Layout) -> float:
        """Bytes of the fullest stage."""
        return max(
            self._states(layout, number) + self._rest(layout, number)
            for number in self._candidates(layout.pp, layout.interleave)
        )

    def _candidates(self, pp: int, interleave: int) -> tuple[int, ...]:
        """The stages that can be the fullest: first, last, and of those with equal layers the first.

        Of stages with equal layers the first has the most microbatches in flight.
        """
        key = (pp, interleave)
        if key not in self._known_candidates:
            alike: dict[tuple[int, int], int] = {}
            for number, layers in enumerate(stage_layers(self.arch.layers, pp, interleave)):
                routed = sum(self.arch.is_moe_layer(layer) for layer in layers)
                # the embedding makes the first stage one of its own
                if number > 0:
                    alike.setdefault((len(layers), routed), number)
            self._known_candidates[key] = tuple(sorted({0, pp - 1, *alike.values()}))
        return self._known_candidates[key]

    def _states(self, layout: Layout, stage: int) -> float:
        """Parameters, gradients and optimizer states: what ZeRO divides."""
        replicas = layout.dp * layout.cp
        key = (layout.pp, layout.interleave, layout.tp, layout.ep, replicas, layout.zero, stage)
        if key not in self._known_states:
            self._known_states[key] = self._remember(layout, stage)[0]
        return self._known_states[key]

    def _rest(self, layout: Layout, stage: int) -> float:
        """Everything else: the same for all numbers of replicas."""
        passes = (layout.cp, layout.microbatch)
        if self.training.flash:  # without scores only their tokens count
            passes = (layout.microbatch * self.training.seq // layout.cp, 0)
        flying = in_flight_microbatches(
            layout.pp, layout.microbatches, stage, layout.interleave, layout.schedule
        )
        sizes = (layout.pp, layout.interleave, layout.tp, layout.ep, *passes, stage)
        key = (*sizes, flying, layout.recompute, layout.zero == 3)
        if key not in self._known_rest:
            self._known_rest[key] = self._remember(layout, stage)[1]
        return self._known_rest[key]

    def _remember(self, layout: Layout, stage: int) -> tuple[float, float]:
        key = (layout, stage)
        if self._latest[0] != key:
            found = self.stage(layout, stage)
            states = found.parameters + found.gradients + found.optimizer
            self._latest = (key, (states, found.total - states))
        return self._latest[1]

    def measured(self, layout: Layout) -> Layout:
        """The layout with the memory of all its stages and the limit."""
        stages = tuple(self.stage(layout, number) for number in range(layout.pp))
        return replace(layout, stages=stages, limit=self.limit)
