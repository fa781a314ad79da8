"""Serving: what a replica holds, how many requests fit, and the bounds of prefill and decode."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from ._check import dtype_bytes
from .architecture import Architecture
from .cluster import Cluster
from .communication import best_all_reduce
from .compute import head_seconds, layer_gemms, layer_seconds
from .domain import Group
from .layout import Axis, Layout, ServingEstimate
from .legality import DoesNotFit, pipeline_reason, tensor_reason
from .memory import MemoryBreakdown, kv_cache_bytes_per_token
from .model import parameters, stage_parameters
from .pipeline import stage_layers
from .workload import Serving

__all__ = ["Replica", "serving_layouts"]


@dataclass(frozen=True)
class Replica:
    """One copy of the model on tp x pp ranks; bytes are of the fullest rank.

    weights: bytes of parameters. kv_per_token: bytes one cached token adds on the rank. temporary: activations of
    one prefill pass. limit: bytes a rank may use.
    """

    tp: int
    pp: int
    weights: float
    kv_per_token: float
    temporary: float
    limit: float

    @property
    def spare(self) -> float:
        """Bytes left for the cache."""
        return self.limit - self.weights - self.temporary

    def requests(self, context: int) -> int:
        """Requests of `context` tokens that fit the cache of one replica."""
        return max(0, int(self.spare // (self.kv_per_token * context)))


def replica(
    arch: Architecture, cluster: Cluster, serving: Serving, tp: int, pp: int, limit: float
) -> Replica:
    """The Replica of tp x pp ranks.

    weights = parameters of the fullest stage / tp in the serving dtype; kv_per_token = kv_cache_bytes_per_token of
    the rank's share of heads x (layers of the stage / layers); temporary = the widest activations of one prompt:
    tokens x (2 hidden + MLP width / tp) x 2 bytes, and fp32 logits of one token per request in flight.
    """
    counted = parameters(arch)
    weight = dtype_bytes("plan", serving.dtype)
    stages = stage_layers(arch.layers, pp)
    held = []
    for number, layers in enumerate(stages):
        first, last = number == 0, number == pp - 1
        held.append(sum(stage_parameters(counted, arch, layers, first=first, last=last, tp=tp, expert_tp=tp)))
    share = max(len(layers) for layers in stages) / arch.layers
    width = max(arch.intermediate, arch.moe.intermediate * arch.moe.top_k if arch.moe else 0)
    temporary = serving.prompt * (2.0 * arch.hidden + width / tp) * 2.0 + 4.0 * arch.vocab / tp
    return Replica(
        tp,
        pp,
        max(held) * weight,
        kv_cache_bytes_per_token(arch, serving.kv_dtype, tp) * share,
        temporary + cluster.device.reserved,
        limit,
    )


def serving_layouts(
    arch: Architecture, cluster: Cluster, serving: Serving, gpus: int, limit: float
) -> list[Layout]:
    """Layouts of gpus / (tp x pp) replicas that hold at least one request each, by tokens/s.

    Raises ValueError when no layout is legal, DoesNotFit naming the smallest replica that fits when none fits.
    """
    refused: Counter[str] = Counter()
    found: list[Replica] = []
    short: list[Replica] = []
    for tp, pp in _splits(arch, cluster, gpus, refused):
        one = replica(arch, cluster, serving, tp, pp, limit)
        (found if one.requests(serving.context) else short).append(one)
    if not found and not short:
        reasons = "; ".join(reason for reason, _ in refused.most_common(3))
        raise ValueError(f"plan: no layout of {gpus} GPUs is legal: {reasons}")
    if not found:
        raise DoesNotFit(_smallest(arch, cluster, serving, gpus, limit, short))
    layouts = [_layout(arch, cluster, serving, gpus, one) for one in found]
    layouts.sort(key=lambda layout: (-layout.tokens_per_second, layout.tp, layout.pp))
    best = layouts[0]
    return [best, *(replace(layout, lost=_loss(best, layout)) for layout in layouts[1:])]


def _splits(arch: Architecture, cluster: Cluster, gpus: int, refused: Counter[str]) -> list[tuple[int, int]]:
    legal = []
    for tp in (size for size in range(1, gpus + 1) if gpus % size == 0):
        for pp in (size for size in range(1, gpus // tp + 1) if gpus // tp % size == 0):
            reason = tensor_reason(arch, cluster, tp) or pipeline_reason(arch, pp, 1)
            if reason:
                refused[reason] += 1
            else:
                legal.append((tp, pp))
    return legal


def _smallest(
    arch: Architecture, cluster: Cluster, serving: Serving, gpus: int, limit: float, short: list[Replica]
) -> str:
    nearest = max(short, key=lambda one: one.spare / one.kv_per_token)
    need = nearest.weights + nearest.temporary + nearest.kv_per_token * serving.context
    text = (
        f"plan: no replica on {gpus} x {cluster.device.name} ({limit / 1e9:.1f} GB usable each) holds one request of "
        f"{serving.context} tokens; tp{nearest.tp} pp{nearest.pp} needs {need / 1e9:.1f} GB per GPU; "
    )
    count = gpus
    while count < 64 * gpus and (cluster.fabric is not None or 2 * count <= cluster.devices_per_node):
        count *= 2
        for tp, pp in sorted(
            _splits(arch, cluster, count, Counter()), key=lambda split: (split[0] * split[1], split[1])
        ):
            if replica(arch, cluster, serving, tp, pp, limit).requests(serving.context):
                return text + f"smallest that fits is {tp * pp} GPUs: tp{tp} pp{pp}"
    return text + "shorten the prompt, quantise the weights, or take devices with more memory"


def _layout(arch: Architecture, cluster: Cluster, serving: Serving, gpus: int, one: Replica) -> Layout:
    replicas = gpus // (one.tp * one.pp)
    per_replica = one.requests(serving.context)
    asked = -(-serving.concurrency // replicas)
    batch = min(per_replica, asked)
    prefill, decode = (
        prefill_bounds(arch, cluster, serving, one),
        decode_bounds(arch, cluster, serving, one, batch),
    )
    first = _seconds(prefill)
    between = _seconds(decode)
    # a request's prefill stalls the others of its replica once, and its tokens come one per decode step
    round_seconds = serving.output * between + batch * first / one.pp
    rate = replicas * batch * serving.output / round_seconds
    cache = batch * serving.context * one.kv_per_token
    memory = MemoryBreakdown(
        parameters=one.weights,
        temporary=one.temporary - cluster.device.reserved,
        kv_cache=cache,
        reserved=cluster.device.reserved,
    )
    notes: tuple[str, ...] = ()
    if per_replica < asked:
        notes = (
            f"{serving.concurrency} requests asked, {replicas * per_replica} fit at once; the others queue",
        )
    estimate = ServingEstimate(
        replicas=replicas,
        weight_bytes=one.weights,
        kv_bytes_per_token=one.kv_per_token,
        max_concurrency=replicas * per_replica,
        concurrency=min(serving.concurrency, replicas * batch),
        first_token=first,
        inter_token=between,
        tokens_per_second=rate,
        prefill_bounds=prefill,
        decode_bounds=decode,
        decode_bound_by=max(decode, key=lambda name: decode[name]),
    )
    axes = [
        Axis("dp", replicas, one.tp * one.pp, "-"),  # replicas do not talk to each other
        Axis("pp", one.pp, one.tp, cluster.link(one.pp, one.tp).name if one.pp > 1 else "-"),
        Axis("tp", one.tp, 1, cluster.link(one.tp).name if one.tp > 1 else "-"),
    ]
    return Layout(
        dp=replicas,
        tp=one.tp,
        pp=one.pp,
        cp=1,
        zero=0,
        sequence_parallel=False,
        placement=tuple(axes),
        stages=(memory,),
        limit=one.limit,
        serving=estimate,
        tokens_per_second=rate,
        notes=notes,
    )


def _seconds(bounds: dict[str, float]) -> float:
    """Computation and memory traffic overlap; all-reduces and hops between stages do not."""
    return max(bounds["compute"], bounds["memory"]) + bounds["all_reduce"] + bounds["stages"]


def prefill_bounds(arch: Architecture, cluster: Cluster, serving: Serving, one: Replica) -> dict[str, float]:
    """Seconds of one prompt through an idle replica by cause.

    compute: products, attention and elementwise passes of all layers, and the head for one token.
    memory: weights once through memory. all_reduce: two per layer of prompt x hidden. stages: hops of the pipeline.
    """
    device, tokens = cluster.device, serving.prompt
    seconds = 0.0
    for layer in range(arch.layers):
        seconds += layer_seconds(
            arch,
            layer,
            device,
            seq=tokens,
            tp=one.tp,
            expert_tp=one.tp,
            sequence_parallel=False,
            dtype=serving.dtype,
        ).forward
    seconds += head_seconds(arch, device, seq=1, tp=one.tp, dtype=serving.dtype)[0]
    return _bounds(arch, cluster, serving, one, tokens, seconds, one.pp * one.weights)


def decode_bounds(
    arch: Architecture, cluster: Cluster, serving: Serving, one: Replica, batch: int
) -> dict[str, float]:
    """Seconds of one decode step of `batch` requests by cause.

    compute: products of one token per request, at their roofline without the weights' traffic. memory: the weights
    that are read and the cached tokens of all requests at half of their output. all_reduce: two per layer.
    """
    device = cluster.device
    peak = device.peak[serving.dtype] * device.efficiency
    flops = 0.0
    for layer in range(arch.layers):
        gemms = layer_gemms(arch, layer, batch, tp=one.tp, expert_tp=one.tp)
        flops += sum(2.0 * gemm.m * gemm.n * gemm.k * gemm.count for gemm in gemms)
    flops += 2.0 * batch * arch.hidden * arch.vocab / one.tp
    context = serving.prompt + serving.output / 2
    flops += 4.0 * batch * context * arch.query_width / one.tp * arch.layers
    read = one.pp * (one.weights * _read_share(arch, batch) + batch * context * one.kv_per_token)
    return _bounds(arch, cluster, serving, one, batch, flops / peak, read)


def _read_share(arch: Architecture, tokens: int) -> float:
    """Share of the weights `tokens` tokens read: of E experts with top_k each, E (1 - (1 - top_k / E)^tokens)."""
    if arch.moe is None:
        return 1.0
    counted = parameters(arch)
    experts = sum(layer.experts for layer in counted.layers)
    missed = (1.0 - arch.moe.top_k / arch.moe.experts) ** tokens
    return 1.0 - missed * experts / counted.total


def _bounds(
    arch: Architecture,
    cluster: Cluster,
    serving: Serving,
    one: Replica,
    tokens: int,
    compute: float,
    read: float,
) -> dict[str, float]:
    message = tokens * arch.hidden * 2.0
    device = cluster.device
    group = Group.of(cluster, one.tp)
    summed = 2 * arch.layers * best_all_reduce(message, one.tp, group.link)[1] if one.tp > 1 else 0.0
    hops = (one.pp - 1) * Group.of(cluster, one.pp, one.tp).send(message / one.tp) if one.pp > 1 else 0.0
    return {
        "compute": compute,
        "memory": read / (device.memory_bandwidth * device.memory_efficiency),
        "all_reduce": summed,
        "stages": hops,
    }


def _loss(best: Layout, layout: Layout) -> str:
    if best.serving is None or layout.serving is None:
        return ""
    ours, theirs = layout.serving, best.serving
    share = layout.tokens_per_second / best.tokens_per_second - 1.0
    return (
        f"{share:+.1%} tokens/s: {ours.concurrency} requests at {ours.inter_token * 1e3:.1f} ms per token "
        f"({ours.decode_bound_by}) against {theirs.concurrency} at {theirs.inter_token * 1e3:.1f} ms "
        f"({theirs.decode_bound_by})"
    )
