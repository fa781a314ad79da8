"""Memory of every pipeline stage of a layout, with what layouts share computed once."""

from __future__ import annotations

from dataclasses import replace

from .architecture import Architecture
from .cluster import Cluster
from .layout import Layout
from .memory import MemoryBreakdown, stage_memory
from .workload import Training

__all__ = ["MemoryModel"]


class MemoryModel:
    """Memory of many layouts of one model, cluster and workload against `limit` bytes per rank."""

    def __init__(self, arch: Architecture, cluster: Cluster, training: Training, limit: float) -> None:
        self.arch, self.cluster, self.training, self.limit = arch, cluster, training, limit

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
        """Whether the stages that can be the fullest fit: the first, the second (a short first), the last."""
        numbers = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
        return all(self.stage(layout, number).total <= self.limit for number in numbers)

    def measured(self, layout: Layout) -> Layout:
        """The layout with the memory of all its stages and the limit."""
        stages = tuple(self.stage(layout, number) for number in range(layout.pp))
        return replace(layout, stages=stages, limit=self.limit)
