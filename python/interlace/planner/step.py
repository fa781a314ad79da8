"""Time of one optimizer step of a layout: computation by roofline, what each collective leaves exposed, the bubble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .architecture import Architecture
from .cluster import Cluster
from .compute import head_seconds, optimizer_seconds, peak_flops
from .domain import Group
from .exposed import Cost
from .gradients import Window, gradient_cost
from .layer import LayerCost, Split, layer_cost
from .layout import Axis, Collective, Layout, StepTime
from .model import flops_per_token, parameters, stage_parameters
from .pipeline import bubble_of_ideal, stage_layers
from .workload import Training

__all__ = ["StageCost", "StepModel"]

_DESCRIPTIONS = {
    "tensor": ("all_gather_gemm, gemm_reduce_scatter", "tp", "fused with the products of the layer"),
    "context": (
        "ring_attention",
        "cp",
        "keys and values travel while the attention of the chunk before runs",
    ),
    "experts": ("moe_dispatch_gemm, moe_gemm_combine", "ep", "fused with the products of the experts"),
    "pipeline": ("send", "pp", "behind other microbatches, but for filling and draining"),
}
_GRADIENTS = (
    "all_reduce",
    "reduce_scatter, all_gather",
    "reduce_scatter, all_gather",
    "all_gather, reduce_scatter",
)


@dataclass(frozen=True)
class StageCost:
    """Seconds of one microbatch on one stage; exposed: of the collectives inside its layers, by name."""

    forward: float
    backward: float
    recompute: float
    costs: Mapping[str, Cost]
    layers: int

    @cached_property
    def total(self) -> float:
        """Seconds from the start of a microbatch's work on the stage to its end."""
        exposed = sum(cost.exposed for cost in self.costs.values())
        return self.forward + self.backward + self.recompute + exposed


class StepModel:
    """Step times of many layouts of one model, cluster and workload; parts that layouts share are computed once."""

    def __init__(self, arch: Architecture, cluster: Cluster, training: Training) -> None:
        self.arch, self.cluster, self.training = arch, cluster, training
        self.counted = parameters(arch)
        self.flops = flops_per_token(arch, training.seq) * training.tokens_per_step
        self._kinds = [self._kind(layer) for layer in range(arch.layers)]
        self._known: dict[tuple[Any, ...], Any] = {}

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def group(self, ranks: int, stride: int = 1) -> Group:
        """The group of `ranks` members `stride` apart."""
        result: Group = self._once(("group", ranks, stride), lambda: Group.of(self.cluster, ranks, stride))
        return result

    def _kind(self, layer: int) -> int:
        """The first layer that costs the same as this one."""
        arch = self.arch
        windows = arch.window or (0,) * arch.layers
        alike = (windows[layer], arch.is_moe_layer(layer))
        return next(
            other for other in range(layer + 1) if (windows[other], arch.is_moe_layer(other)) == alike
        )

    def layer(self, layer: int, split: Split) -> LayerCost:
        """Cost of one layer and one microbatch under a split; equal layers share it."""
        first = self._kinds[layer]
        result: LayerCost = self._once(
            ("layer", first, split),
            lambda: layer_cost(self.arch, first, self.cluster, self.training, split, self.group(split.ep)),
        )
        return result

    def stages(self, layout: Layout) -> tuple[StageCost, ...]:
        """Cost of one microbatch on every pipeline stage, first to last."""
        split = Split(layout.tp, layout.cp, layout.ep, layout.microbatch, layout.recompute)
        key = ("stages", layout.pp, layout.interleave, split)
        result: tuple[StageCost, ...] = self._once(key, lambda: self._stages(layout, split))
        return result

    def _stages(self, layout: Layout, split: Split) -> tuple[StageCost, ...]:
        head = head_seconds(
            self.arch,
            self.cluster.device,
            seq=self.training.seq,
            microbatch=layout.microbatch,
            tp=layout.tp,
            cp=layout.cp,
            dtype=self.training.dtype,
        )
        found = []
        for number, layers in enumerate(stage_layers(self.arch.layers, layout.pp, layout.interleave)):
            last = number == layout.pp - 1
            forward, backward, recompute, shared = 0.0, 0.0, 0.0, dict[str, Cost]()
            for kind, count in Counter(self._kinds[layer] for layer in layers).items():
                cost = self.layer(kind, split)
                forward += count * cost.forward
                backward += count * cost.backward
                recompute += count * cost.recompute
                for name, each in cost.costs.items():
                    shared[name] = shared.get(name, Cost()) + each * count
            if last:
                forward, backward = forward + head[0], backward + head[1]
            found.append(StageCost(forward, backward, recompute, shared, len(layers)))
        return tuple(found)

    def floor(self, layout: Layout) -> float:
        """Seconds that no ZeRO stage and no recomputation gets below: the passes of the slowest stage."""
        return layout.microbatches * max(stage.total for stage in self.stages(layout))

    def largest_stage(self, layout: Layout) -> tuple[float, float]:
        """(dense, expert) parameters a rank of the stage with the most parameters holds."""
        key = ("parameters", layout.pp, layout.interleave, layout.tp, layout.ep)
        result: tuple[float, float] = self._once(key, lambda: max(self._parameters(layout), key=sum))
        return result

    def _parameters(self, layout: Layout) -> list[tuple[float, float]]:
        stages = stage_layers(self.arch.layers, layout.pp, layout.interleave)
        return [
            stage_parameters(
                self.counted,
                self.arch,
                layers,
                first=number == 0,
                last=number == layout.pp - 1,
                tp=layout.tp,
                ep=layout.ep,
                expert_tp=layout.tp if layout.ep == 1 else 1,
            )
            for number, layers in enumerate(stages)
        ]

    def timed(self, layout: Layout) -> Layout:
        """The layout with its step time, placement, throughput, MFU and cost."""
        orders = [("pp", "dp", "cp", "tp")]
        if layout.pp > 1 and layout.dp > 1 and layout.ep <= layout.tp * layout.cp:
            orders.append(("dp", "pp", "cp", "tp"))
        options = [(self._step(layout, axes), axes) for axes in (self._axes(layout, o) for o in orders)]
        step, axes = min(options, key=lambda option: option[0].total)
        training, world = self.training, layout.world_size
        peak = peak_flops(self.cluster.device, training.dtype) * world
        rate = training.tokens_per_step / step.total
        seconds = training.tokens / rate
        return replace(
            layout,
            placement=axes,
            step=step,
            flops=self.flops,
            tokens_per_second=rate,
            mfu=self.flops / (step.total * peak),
            days=seconds / 86400.0,
            gpu_hours=seconds / 3600.0 * world,
        )

    def _axes(self, layout: Layout, order: tuple[str, ...]) -> tuple[Axis, ...]:
        axes, stride = [], 1
        for name in reversed(order):
            size = getattr(layout, name)
            axes.append(Axis(name, size, stride, self.group(size, stride).link.name if size > 1 else "-"))
            stride *= size
        return tuple(reversed(axes))

    def _step(self, layout: Layout, axes: tuple[Axis, ...]) -> StepTime:
        stages = self.stages(layout)
        slowest = max(stages, key=lambda stage: stage.total)
        passes = layout.microbatches
        strides = {axis.name: axis.stride for axis in axes}
        costs = {name: cost * passes for name, cost in slowest.costs.items()}
        if layout.pp > 1:
            costs["pipeline"] = self._pipeline(layout, slowest, strides["pp"])
        groups = {"tensor": self.group(layout.tp), "context": self.group(layout.cp, layout.tp)}
        groups |= {"experts": self.group(layout.ep), "pipeline": self.group(layout.pp, strides["pp"])}
        collectives = [self._collective(name, cost, groups[name]) for name, cost in costs.items()]
        collectives += self._gradients(layout, slowest, strides["dp"])
        share = bubble_of_ideal(layout.pp, passes, layout.interleave, layout.schedule)
        # the formula's stages are equal; ours wait for the work of the stages there really are
        others = (sum(stage.total for stage in stages) - slowest.total) / max(1, layout.pp - 1)
        bubble = share * passes * others
        busy = passes * slowest.total
        return StepTime(
            compute=passes * (slowest.forward + slowest.backward),
            recompute=passes * slowest.recompute,
            bubble=bubble,
            optimizer=self._optimizer(layout),
            collectives=tuple(collectives),
            bubble_fraction=bubble / (busy + bubble),
        )

    def _collective(self, name: str, cost: Cost, group: Group) -> Collective:
        op, axis, how = _DESCRIPTIONS[name]
        if name == "tensor" and not self.training.sequence_parallel:
            op = "gemm_all_reduce"
        return Collective(
            name, op, axis, group.link.name, round(cost.calls), cost.bytes, cost.seconds, cost.exposed, how
        )

    def _pipeline(self, layout: Layout, slowest: StageCost, stride: int) -> Cost:
        split = layout.tp if self.training.sequence_parallel else 1
        tokens = layout.microbatch * self.training.seq / layout.cp / split
        size = tokens * self.arch.hidden * self.training.precision.activations
        send = self.group(layout.pp, stride).send(size)
        sends = 2 * layout.interleave * layout.microbatches
        beside = slowest.total / (2 * layout.interleave)  # one forward or backward of a chunk
        exposed = 2 * (layout.pp - 1) * send + sends * max(0.0, send - beside)
        return Cost(sends, sends * size, sends * send, min(exposed, sends * send))

    def _gradients(self, layout: Layout, stage: StageCost, stride: int) -> list[Collective]:
        precision = self.training.precision
        window = Window(stage.forward, stage.backward + stage.recompute, stage.layers)
        dense, expert = self.largest_stage(layout)
        replicas = self._replicas(layout)
        found = []
        for name, count, ranks, step in (
            # with cp the gradient group is dp x cp; its members are tp apart where cp lies inside dp
            ("data", dense, replicas[0], layout.tp if stride == layout.tp * layout.cp else stride),
            ("expert data", expert, replicas[1], layout.ep if layout.ep > 1 else layout.tp),
        ):
            group = self.group(ranks, step)
            cost = gradient_cost(
                count * precision.gradients,
                count * precision.parameters,
                group,
                layout.zero,
                layout.microbatches,
                window,
            )
            if cost.seconds:
                how = f"ZeRO-{layout.zero}: behind the layers' forward and backward, one bucket per layer"
                found.append(
                    Collective(
                        name,
                        _GRADIENTS[layout.zero],
                        "dp" if layout.cp == 1 else "dp x cp",
                        group.link.name,
                        round(cost.calls),
                        cost.bytes,
                        cost.seconds,
                        cost.exposed,
                        how,
                    )
                )
        return found

    def _replicas(self, layout: Layout) -> tuple[int, int]:
        dense = layout.dp * layout.cp
        return dense, dense if layout.ep == 1 else dense * layout.tp // layout.ep

    def _optimizer(self, layout: Layout) -> float:
        precision = self.training.precision
        counts, replicas = self.largest_stage(layout), self._replicas(layout)
        held = sum(
            count / (ranks if layout.zero else 1) for count, ranks in zip(counts, replicas, strict=True)
        )
        # states are read and written, gradients read and cleared, parameters written
        per_parameter = 2 * precision.optimizer + 2 * precision.gradients + precision.parameters
        return optimizer_seconds(held, self.cluster.device, per_parameter)
