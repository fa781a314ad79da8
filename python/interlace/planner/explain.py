"""Every formula of the best layout with its numbers, its value and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from .architecture import Architecture
from .cluster import Cluster
from .layout import Collective, Layout
from .memory import kv_cache_bytes_per_token
from .model import count_parameters, flops_per_token
from .pipeline import bubble_of_ideal, in_flight_microbatches
from .step import StepModel
from .words import count, duration, gigabytes, rate
from .workload import Serving, Training

__all__ = ["Formula", "explain"]

_ZERO = ("p + g + o", "p + g + o / N", "p + (g + o) / N", "(p + g + o) / N")
_COLLECTIVE_SOURCES = {
    "tensor": "fused: max(product, communication) x (1 + slowdown), arXiv 2211.13878; volumes arXiv 2205.05198",
    "context": "ring attention, arXiv 2310.01889; n - 1 messages behind n parts of the attention, slowed meanwhile",
    "experts": "alpha-beta all-to-all, Thakur et al. 2005, fused with the experts' products",
    "pipeline": "alpha-beta; filling and draining are exposed, arXiv 2104.04473 section 2.2",
    "data": "volumes arXiv 1910.02054 section 7; one bucket per layer, the last is exposed",
    "expert data": "volumes arXiv 1910.02054 section 7; over the replicas of the experts",
}


@dataclass(frozen=True)
class Formula:
    """One line of the explanation: name = formula = numbers = value."""

    name: str
    formula: str
    numbers: str
    value: str
    source: str


def explain(
    arch: Architecture, cluster: Cluster, workload: Training | Serving, layout: Layout
) -> list[Formula]:
    """The formulas of a layout, in the order in which they build on one another."""
    if isinstance(workload, Serving):
        return _model(arch) + _serving(arch, cluster, workload, layout)
    found = _model(arch) + _mesh(workload, layout) + _memory(workload, layout)
    return found + _time(arch, cluster, workload, layout) + _result(arch, cluster, workload, layout)


def _model(arch: Architecture) -> list[Formula]:
    total, active = count_parameters(arch)
    numbers = (
        f"{arch.layers} layers, hidden {arch.hidden}, {arch.heads} heads, {arch.kv_heads} key/value heads, "
    )
    numbers += f"MLP {arch.intermediate}, vocabulary {arch.vocab}"
    if arch.moe is not None:
        numbers += f", {arch.moe.experts} experts of {arch.moe.intermediate}, {arch.moe.top_k} per token"
    value = f"{total:,} ({active:,} active per token)" if active != total else f"{total:,}"
    return [Formula("parameters", "sum of the shapes of all modules", numbers, value, "the model's config")]


def _mesh(training: Training, layout: Layout) -> list[Formula]:
    dp, tp, pp, cp = layout.dp, layout.tp, layout.pp, layout.cp
    return [
        Formula(
            "world", "dp x tp x pp x cp", f"{dp} x {tp} x {pp} x {cp}", str(layout.world_size), "definition"
        ),
        Formula(
            "microbatches",
            "global batch / (dp x microbatch)",
            f"{training.global_batch} / ({dp} x {layout.microbatch})",
            str(layout.microbatches),
            "definition",
        ),
    ]


def _memory(training: Training, layout: Layout) -> list[Formula]:
    number, precision = layout.fullest_stage, training.precision
    stage = layout.stages[number]
    states = stage.parameters + stage.gradients + stage.optimizer
    flying = in_flight_microbatches(
        layout.pp, layout.microbatches, number, layout.interleave, layout.schedule
    )
    per_parameter = (
        f"p = {precision.parameters:g}, g = {precision.gradients:g}, o = {precision.optimizer:g} B"
    )
    found = [
        Formula(
            f"states of stage {number}",
            f"parameters of the rank x ({_ZERO[layout.zero]})",
            f"{per_parameter}, N = dp x cp = {layout.dp * layout.cp}",
            gigabytes(states),
            "ZeRO, arXiv 1910.02054, figure 1",
        ),
        Formula(
            "microbatches in flight",
            {"gpipe": "m", "interleaved": "(2 (p - s - 1) + (v - 1) p + 1) / v"}.get(
                layout.schedule, "min(m, p - s)"
            ),
            f"p = {layout.pp}, s = {number}, v = {layout.interleave}, m = {layout.microbatches}",
            f"{flying:.3g}",
            "arXiv 2104.04473 section 2.2, arXiv 2205.05198 section 4.2.3",
        ),
        Formula(
            f"activations of stage {number}",
            "kept per layer x layers x microbatches in flight",
            f"seq {training.seq} / cp {layout.cp}, microbatch {layout.microbatch}, recompute {layout.recompute}",
            gigabytes(stage.activations),
            "arXiv 2205.05198 table 2, counted for this architecture",
        ),
    ]
    rest = ("logits", "temporary", "workspaces", "reserved")
    others = ", ".join(f"{name} {gigabytes(getattr(stage, name))}" for name in rest if getattr(stage, name))
    found.append(
        Formula(
            "others", "sum", others, gigabytes(sum(getattr(stage, n) for n in rest)), "formulas of memory"
        )
    )
    found.append(
        Formula(
            "margin",
            "limit - total",
            f"{gigabytes(layout.limit)} - {gigabytes(stage.total)}",
            gigabytes(layout.margin),
            "device memory less the headroom",
        )
    )
    return found


def _time(arch: Architecture, cluster: Cluster, training: Training, layout: Layout) -> list[Formula]:
    step = layout.step
    if step is None:
        return []
    stages = StepModel(arch, cluster, training).stages(layout)
    slowest = max(stages, key=lambda stage: stage.total)
    device, passes = cluster.device, layout.microbatches
    found = [
        Formula(
            "compute",
            "microbatches x (forward + backward of the slowest stage)",
            f"{passes} x ({duration(slowest.forward)} + {duration(slowest.backward)}), {slowest.layers} layers; "
            f"products at {device.efficiency:.0%} of {device.peak[training.dtype] / 1e12:.0f} TFLOP/s where large",
            duration(step.compute),
            "roofline, Williams et al. 2009; attention arXiv 2307.08691",
        )
    ]
    if step.recompute:
        numbers = f"{passes} x {duration(slowest.recompute)}"
        found.append(
            Formula(
                "recompute",
                "microbatches x repeated forward",
                numbers,
                duration(step.recompute),
                "arXiv 2205.05198",
            )
        )
    found += [_collective(each) for each in step.collectives]
    if layout.pp > 1:
        share = bubble_of_ideal(layout.pp, passes, layout.interleave, layout.schedule)
        formula = "(p - 1) / (v m) x busy" if layout.schedule != "zero_bubble" else "(p - 1) / (3 v m) x busy"
        found.append(
            Formula(
                "bubble",
                formula,
                f"p = {layout.pp}, v = {layout.interleave}, m = {passes}: {share:.4f} of the busy time; "
                f"{step.bubble_fraction:.4f} of {step.bubble_of}",
                duration(step.bubble),
                "arXiv 2104.04473 section 2.2, arXiv 2401.10241",
            )
        )
    found.append(
        Formula(
            "optimizer",
            "bytes of the states of this rank / memory bandwidth",
            f"{device.memory_bandwidth / 1e9:.0f} GB/s x {device.memory_efficiency:.0%}",
            duration(step.optimizer),
            "one pass over states, gradients and parameters",
        )
    )
    return found


def _collective(each: Collective) -> Formula:
    return Formula(
        f"exposed {each.name}",
        each.how,
        f"{each.op} over {each.axis} ({each.link}): {rate(each.calls)} calls, {gigabytes(each.bytes)} sent, "
        f"{duration(each.seconds)} in all",
        duration(each.exposed),
        _COLLECTIVE_SOURCES[each.name],
    )


def _result(arch: Architecture, cluster: Cluster, training: Training, layout: Layout) -> list[Formula]:
    step = layout.step
    if step is None:
        return []
    parts = [step.compute, step.recompute, step.bubble, step.optimizer, step.exposed]
    per_token = flops_per_token(arch, training.seq)
    peak = cluster.device.peak[training.dtype]
    found = [
        Formula(
            "step",
            "compute + recompute + bubble + optimizer + exposed",
            " + ".join(duration(part) for part in parts),
            duration(step.total),
            "sum of the above",
        ),
        Formula(
            "tokens/s",
            "global batch x seq / step",
            f"{training.global_batch} x {training.seq} / {duration(step.total)}",
            rate(layout.tokens_per_second),
            "definition",
        ),
        Formula(
            "MFU",
            "FLOP per token x tokens/s / (world x peak)",
            f"{per_token / 1e9:.2f} GFLOP x {rate(layout.tokens_per_second)} / "
            f"({layout.world_size} x {peak / 1e12:.0f} TFLOP/s)",
            f"{layout.mfu:.1%}",
            "arXiv 2204.02311 appendix B, with the half of causal attention that is computed; nothing recomputed",
        ),
    ]
    if training.tokens:
        numbers = f"{count(training.tokens)} / {rate(layout.tokens_per_second)} / 86400"
        found.append(
            Formula("days", "tokens / (tokens/s) / 86400", numbers, f"{layout.days:.2f}", "definition")
        )
        numbers = f"{layout.days:.2f} x 24 x {layout.world_size}"
        found.append(Formula("GPU-hours", "days x 24 x world", numbers, rate(layout.gpu_hours), "definition"))
    return found


def _serving(arch: Architecture, cluster: Cluster, serving: Serving, layout: Layout) -> list[Formula]:
    one = layout.serving
    if one is None:
        return []
    stage, context = layout.stages[0], serving.context
    per_token = kv_cache_bytes_per_token(arch, serving.kv_dtype)
    found = [
        Formula(
            "cache of a token, whole model",
            "2 x layers x kv heads x head dim x bytes, or the latent's rank",
            f"{arch.layers} layers, {arch.kv_heads} kv heads of {arch.head_dim}, {serving.kv_dtype}",
            f"{per_token:,.0f} B",
            "GQA arXiv 2305.13245; MLA arXiv 2405.04434",
        ),
        Formula(
            "most requests",
            "replicas x (limit - weights - temporary) / (cache of a token x (prompt + output))",
            f"{one.replicas} x ({gigabytes(layout.limit)} - {gigabytes(one.weight_bytes)} - "
            f"{gigabytes(stage.temporary + stage.reserved)}) / ({one.kv_bytes_per_token:,.0f} B x {context})",
            str(one.max_concurrency),
            "definition",
        ),
    ]
    for name, bounds, value in (
        ("first token", one.prefill_bounds, one.first_token),
        ("next token", one.decode_bounds, one.inter_token),
    ):
        found.append(
            Formula(
                name,
                "max(compute, memory) + all-reduces + hops between stages",
                ", ".join(f"{cause} {duration(seconds)}" for cause, seconds in bounds.items()),
                duration(value),
                "roofline, Williams et al. 2009; alpha-beta, Thakur et al. 2005",
            )
        )
    batch = -(-one.concurrency // one.replicas)
    found.append(
        Formula(
            "tokens/s",
            "replicas x batch x output / (output x next token + batch x first token / pp)",
            f"{one.replicas} x {batch} x {serving.output} / ({serving.output} x {duration(one.inter_token)} + "
            f"{batch} x {duration(one.first_token)} / {layout.pp})",
            rate(layout.tokens_per_second),
            "each prefill stalls the requests of its replica once",
        )
    )
    return found
