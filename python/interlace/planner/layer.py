"""Cost of one layer and one microbatch on one rank: computation, and the collectives inside the layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .architecture import Architecture
from .cluster import Cluster
from .compute import Gemm, gemm_seconds, layer_gemms, layer_seconds, measured_fused_seconds
from .domain import Group
from .exposed import Cost, all_to_all_cost, behind_cost, gather_cost, reduce_cost, ring_cost
from .workload import Training

__all__ = ["LayerCost", "Split", "kv_bytes", "layer_cost"]

# Products of one gathered input, and products whose output is summed over the ranks; one entry per collective.
COLUMN: tuple[tuple[str, ...], ...] = (
    ("qkv", "q", "q_down", "kv_down"),
    ("cross_qkv", "cross_q", "cross_q_down", "cross_kv_down"),
    ("up", "shared_up", "experts_up"),
)
ROW: tuple[tuple[str, ...], ...] = (("o",), ("cross_o",), ("down", "shared_down", "experts_down"))
EXPERTS = ("experts_up", "experts_down")


@dataclass(frozen=True)
class Split:
    """How one layer is cut: tensor, context and expert ranks, sequences per pass, recomputation."""

    tp: int
    cp: int
    ep: int
    microbatch: int
    recompute: str

    @property
    def expert_tp(self) -> int:
        """Ranks that cut each expert: tp where experts are not spread, else 1 (each expert whole on one rank)."""
        return self.tp if self.ep == 1 else 1


@dataclass(frozen=True)
class LayerCost:
    """Seconds of one layer and one microbatch; costs: communication by name ("tensor", "context", "experts").

    forward_exposed: the part of all exposed seconds that falls into the forward pass.
    """

    forward: float
    backward: float
    recompute: float
    costs: Mapping[str, Cost]
    forward_exposed: float


def kv_bytes(arch: Architecture, tokens: float, tp: int, element: float) -> float:
    """Bytes of the keys and values of `tokens` tokens on one of tp ranks; a head has at least one rank."""
    if arch.latent is not None:
        width = arch.latent.nope_dim + arch.latent.rope_dim + arch.latent.value_dim
        return tokens * arch.heads / tp * width * element
    heads = max(1, arch.kv_heads // tp)
    return tokens * heads * (arch.head_dim + arch.value_dim) * element


def layer_cost(
    arch: Architecture, layer: int, cluster: Cluster, training: Training, split: Split, expert_group: Group
) -> LayerCost:
    """LayerCost of one layer under a split.

    Tensor parallelism with sequence parallelism, forward: a gather before each column product and a scatter of the
    sum after each row product; backward: a scatter of the sum of each column product's input gradient, a gather of
    each row product's output gradient, and a second gather of the column products' input for their weight gradient.
    Without: one sum after each row product forward, one of each column product's input gradient backward.
    Context: keys and values go round the ring forward, and with their gradients backward. Experts: routed tokens go
    out and back, forward and backward. "full" recomputation repeats the forward's communication as well.
    """
    device, dtype = cluster.device, training.dtype
    seconds = layer_seconds(
        arch,
        layer,
        device,
        seq=training.seq,
        microbatch=split.microbatch,
        tp=split.tp,
        cp=split.cp,
        ep=split.ep,
        expert_tp=split.expert_tp,
        sequence_parallel=training.sequence_parallel,
        recompute=split.recompute,
        dtype=dtype,
        flash=training.flash,
    )
    tokens = split.microbatch * training.seq // split.cp
    gemms = layer_gemms(arch, layer, tokens, tp=split.tp, ep=split.ep, expert_tp=split.expert_tp)
    tensor = _tensor(arch, cluster, training, split, gemms, tokens)
    context = _context(arch, cluster, training, split, seconds.attention, tokens)
    experts = _experts(arch, layer, cluster, training, split, gemms, tokens, expert_group)
    again: tuple[str, ...] = ("tensor", "context", "experts") if split.recompute == "full" else ()
    if split.recompute == "selective" and not training.flash:
        again = ("context",)
    costs, forward_exposed = {}, 0.0
    for name, (forward, backward) in (("tensor", tensor), ("context", context), ("experts", experts)):
        if forward.seconds or backward.seconds:
            costs[name] = forward * (2 if name in again else 1) + backward
            forward_exposed += forward.exposed
    return LayerCost(seconds.forward, seconds.backward, seconds.recompute, costs, forward_exposed)


def _seconds(gemms: list[Gemm], training: Training, cluster: Cluster) -> float:
    return sum(
        gemm.count * gemm_seconds(gemm.m, gemm.n, gemm.k, cluster.device, training.dtype) for gemm in gemms
    )


def _tensor(
    arch: Architecture,
    cluster: Cluster,
    training: Training,
    split: Split,
    gemms: tuple[Gemm, ...],
    tokens: int,
) -> tuple[Cost, Cost]:
    if split.tp == 1:
        return Cost(), Cost()
    group = Group.of(cluster, split.tp)
    size = tokens * arch.hidden * training.precision.activations
    spread = EXPERTS if split.ep > 1 else ()  # these get their rows by all-to-all

    def fused(op: str, roles: tuple[str, ...], cost: Callable[..., Cost]) -> Cost:
        mine = [gemm for gemm in gemms if gemm.role in roles and gemm.role not in spread]
        if not mine:
            return Cost()
        known = _measured(op, mine, split.tp, cluster, training) if len(mine) == 1 else None
        return cost(size, group, _seconds(mine, training, cluster), cluster.device, known)

    def beside(roles: tuple[str, ...], cost: Callable[..., Cost]) -> Cost:
        mine = [gemm for gemm in gemms if gemm.role in roles and gemm.role not in spread]
        return behind_cost(fused("", roles, cost), _seconds(mine, training, cluster))

    forward, backward = Cost(), Cost()
    for roles in COLUMN:
        if training.sequence_parallel:
            forward += fused("all_gather_gemm", roles, gather_cost)
            backward += beside(roles, gather_cost)  # scatter of the summed input gradient
            backward += beside(roles, gather_cost)  # second gather
        else:
            backward += beside(roles, reduce_cost)
    for roles in ROW:
        if training.sequence_parallel:
            forward += fused("gemm_reduce_scatter", roles, gather_cost)
            backward += fused("", roles, gather_cost)
        else:
            forward += fused("gemm_all_reduce", roles, reduce_cost)
    return forward, backward


def _measured(op: str, gemms: list[Gemm], tp: int, cluster: Cluster, training: Training) -> float | None:
    """Measured seconds of the fused op, or None; the table holds sizes before the split."""
    (gemm,) = gemms
    n, k = (gemm.n * tp, gemm.k) if op == "all_gather_gemm" else (gemm.n, gemm.k * tp)
    return measured_fused_seconds(op, gemm.m, n, k, tp, cluster.device, training.dtype) if op else None


def _context(
    arch: Architecture, cluster: Cluster, training: Training, split: Split, attention: float, tokens: int
) -> tuple[Cost, Cost]:
    if split.cp == 1:
        return Cost(), Cost()
    group = Group.of(cluster, split.cp, split.tp)
    size = kv_bytes(arch, tokens, split.tp, training.precision.activations)
    forward = ring_cost(size, group, attention, cluster.device)
    # backward: five products instead of two, and the gradients of keys and values travel with them
    backward = ring_cost(2 * size, group, 2.5 * attention, cluster.device)
    return forward, backward


def _experts(
    arch: Architecture,
    layer: int,
    cluster: Cluster,
    training: Training,
    split: Split,
    gemms: tuple[Gemm, ...],
    tokens: int,
    group: Group,
) -> tuple[Cost, Cost]:
    if split.ep == 1 or arch.moe is None or not arch.is_moe_layer(layer):
        return Cost(), Cost()
    # with tensor-parallel ranks each sends its own tokens / tp
    size = tokens / split.tp * arch.moe.top_k * arch.hidden * training.precision.activations
    both = Cost()
    for role in EXPERTS:
        product = _seconds([gemm for gemm in gemms if gemm.role == role], training, cluster)
        both += all_to_all_cost(size, group, product, cluster.device)
    return both, both
