"""Time of computation: products by roofline and measured efficiency, attention, elementwise passes, fused ops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from ._check import at_least, dtype_bytes, one_of
from .architecture import Architecture
from .hardware import Device
from .products import Gemm, attended_tokens, attention_flops, head_gemms, layer_gemms

__all__ = [
    "Gemm",
    "LayerSeconds",
    "attention_seconds",
    "elementwise_seconds",
    "fused_seconds",
    "gemm_efficiency",
    "gemm_seconds",
    "head_seconds",
    "layer_gemms",
    "layer_seconds",
    "measured_fused_seconds",
    "optimizer_seconds",
    "peak_flops",
]

# Backward of a fused attention core: 5 products for the forward's 2, arXiv 2307.08691 section 3.1.2.
FLASH_BACKWARD = 2.5
# Reads and writes of an elementwise backward against its forward: gradient and saved value in, gradient out.
ELEMENTWISE_BACKWARD = 1.5
# Tile of a library product in both output dims, and loop of k below which its pipeline is not full.
TILE, K_FILL = 128, 64
# Bytes per score of scale, mask, softmax, dropout and their reads by the second product, 16 bits, fused kernels.
SCORE_BYTES = 12.0
# Bytes per element of a chunk's attention output that is merged into the sum: both read and the sum written, fp32.
MERGE_BYTES = 12.0
# Bytes per element of an operand that is cast to 8 bits: read twice in 16 (largest value, cast), written twice in 8.
CAST_BYTES = 6.0


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer and one micro-batch on one rank, computation only.

    products, attention, elementwise: forward. backward: all of the backward without recomputation.
    recompute: what the backward repeats of the forward.
    """

    products: float
    attention: float
    elementwise: float
    backward: float
    recompute: float

    @property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        return self.products + self.attention + self.elementwise


def peak_flops(device: Device, dtype: str) -> float:
    """FLOP/s the device can do in dtype. Raises ValueError when its description has none."""
    if dtype in device.peak:
        return device.peak[dtype]
    raise ValueError(f"device {device.name}: no peak for {dtype}; it has {', '.join(device.peak)}")


def gemm_efficiency(m: int, n: int, k: int, device: Device, dtype: str = "bf16") -> float:
    """Share of the peak that [m, k] x [k, n] reaches, 0 to 1.

    With measured points of this dtype: the mean of the four nearest in log2(m, n, k), weighted by 1 / distance^2.
    Without: device.efficiency x the used share of 128 x 128 output tiles x k / (k + 64).
    """
    points = [point for point in device.gemms if point.dtype == dtype]
    if not points:
        tiles = ceil(m / TILE) * ceil(n / TILE) * TILE * TILE
        return device.efficiency * (m * n / tiles) * k / (k + K_FILL)
    near = []
    for point in points:
        distance = log2(m / point.m) ** 2 + log2(n / point.n) ** 2 + log2(k / point.k) ** 2
        if distance == 0:
            return point.efficiency
        near.append((distance, point.efficiency))
    near = sorted(near)[:4]
    return sum(value / distance for distance, value in near) / sum(1 / distance for distance, _ in near)


def gemm_seconds(m: int, n: int, k: int, device: Device, dtype: str = "bf16") -> float:
    """Seconds of [m, k] x [k, n]: max(2 m n k / (peak x efficiency), traffic / memory bandwidth) + kernel latency.

    Traffic reads both operands and writes the result once. efficiency: see gemm_efficiency.
    Source: roofline, Williams et al. 2009.
    """
    at_least("gemm_seconds", 1, m=m, n=n, k=k)
    return _gemm_seconds(m, n, k, device, dtype)


@lru_cache(maxsize=65536)
def _gemm_seconds(m: int, n: int, k: int, device: Device, dtype: str) -> float:
    flops = 2.0 * m * n * k / (peak_flops(device, dtype) * gemm_efficiency(m, n, k, device, dtype))
    traffic = (m * k + k * n + m * n) * dtype_bytes("gemm_seconds", dtype)
    return max(flops, traffic / (device.memory_bandwidth * device.memory_efficiency)) + device.kernel_latency


def attention_seconds(
    batch: int,
    seq: int,
    kv_seq: int,
    heads: int,
    head_dim: int,
    device: Device,
    *,
    causal: bool = True,
    dtype: str = "bf16",
    value_dim: int = 0,
) -> float:
    """Seconds of one fused attention core, forward: max of FLOP and traffic, plus kernel latency.

    2 b s s_kv heads (head_dim + value_dim) FLOP, half when causal (and s = s_kv), at peak x attention_efficiency;
    traffic reads q, k, v and writes the output once. Source: FlashAttention-2, arXiv 2307.08691.
    """
    at_least("attention_seconds", 1, batch=batch, seq=seq, kv_seq=kv_seq, heads=heads, head_dim=head_dim)
    width = head_dim + (value_dim or head_dim)
    share = 0.5 if causal and seq == kv_seq else 1.0
    flops = 2.0 * batch * seq * kv_seq * heads * width * share
    traffic = batch * heads * (seq + kv_seq) * width * dtype_bytes("attention_seconds", dtype)
    return _core_seconds(flops, traffic, device, dtype)


def _core_seconds(flops: float, traffic: float, device: Device, dtype: str) -> float:
    at_peak = flops / (peak_flops(device, dtype) * device.attention_efficiency)
    return (
        max(at_peak, traffic / (device.memory_bandwidth * device.memory_efficiency)) + device.kernel_latency
    )


def elementwise_seconds(bytes: float, device: Device, kernels: int = 1) -> float:  # noqa: A002
    """Seconds to move `bytes` through memory in `kernels` kernels: bytes / (bandwidth x efficiency) + latency."""
    return bytes / (device.memory_bandwidth * device.memory_efficiency) + kernels * device.kernel_latency


def fused_seconds(compute: float, communication: float, slowdown: float = 0.1) -> float:
    """Seconds of a fused product and collective where no measurement exists.

    max(compute, communication) x (1 + slowdown), and never more than their sum. Source: the slowdown coefficient of
    Galvatron, arXiv 2211.13878.
    """
    return min(compute + communication, max(compute, communication) * (1 + slowdown))


def measured_fused_seconds(
    op: str, m: int, n: int, k: int, ranks: int, device: Device, dtype: str = "bf16"
) -> float | None:
    """Seconds of a fused op from the device's measured table, or None where it has nothing near.

    [m, k] x [k, n] before the split over `ranks`. The nearest point in log2(m, n, k) with the same op, ranks and
    dtype, at most a factor of two away in each, scaled by the ratio of the products' FLOP.
    """
    best: tuple[float, float] | None = None
    for point in device.fused:
        if (point.op, point.ranks, point.dtype) != (op, ranks, dtype):
            continue
        steps = [abs(log2(a / b)) for a, b in ((m, point.m), (n, point.n), (k, point.k))]
        if max(steps) <= 1.0 and (best is None or sum(steps) < best[0]):
            best = (sum(steps), point.seconds * (m * n * k) / (point.m * point.n * point.k))
    return best[1] if best else None


def optimizer_seconds(parameters: float, device: Device, bytes_per_parameter: float = 34.0) -> float:
    """Seconds of the optimizer's update of `parameters` (this rank's share): one pass over its states.

    Adam in mixed precision reads gradient, master copy and two moments and writes three and the 16-bit weight:
    4 + 12 + 12 + 2 + 4 (clearing the gradient) = 34 bytes per parameter.
    """
    return elementwise_seconds(parameters * bytes_per_parameter, device)


@lru_cache(maxsize=16384)
def layer_seconds(
    architecture: Architecture,
    layer: int,
    device: Device,
    *,
    seq: int,
    microbatch: int = 1,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    expert_tp: int = 1,
    sequence_parallel: bool = True,
    recompute: str = "none",
    dtype: str = "bf16",
    flash: bool = True,
) -> LayerSeconds:
    """LayerSeconds of one layer: its products, attention core and elementwise passes (norms, residuals).

    Backward: each product twice (for input and weight), the core x 2.5 with flash attention and x 2 without,
    elementwise passes x 1.5. Context parallelism splits the causal core evenly (zigzag). "fp8" multiplies in 8 bits,
    casts each operand on its way in, and keeps the attention core and what is between the products in bf16.
    """
    one_of("layer_seconds", "recompute", recompute, ("none", "selective", "full"))
    a, tokens = architecture, ceil(seq * microbatch / cp)
    gemms = layer_gemms(a, layer, tokens, tp=tp, ep=ep, expert_tp=expert_tp)
    forward, backward = _products_seconds(gemms, device, dtype)
    wide = _wide(dtype)
    core, core_backward = _attention_of(a, layer, device, seq, microbatch, tp, cp, wide, flash)
    passes, kernels = _elementwise_bytes(a, layer, tokens, tp, sequence_parallel, wide)
    elementwise = elementwise_seconds(passes, device, kernels)
    if cp > 1 and flash:  # each chunk's output is weighed and added to the sum so far, in fp32
        merged = (cp - 1) * tokens * ceil(a.heads / tp) * a.value_dim * MERGE_BYTES
        elementwise += elementwise_seconds(merged, device, cp - 1)
    again = {"none": 0.0, "selective": 0.0 if flash else core, "full": forward + core + elementwise}[
        recompute
    ]
    return LayerSeconds(
        products=forward,
        attention=core,
        elementwise=elementwise,
        backward=backward + core_backward + ELEMENTWISE_BACKWARD * elementwise,
        recompute=again,
    )


@lru_cache(maxsize=4096)
def head_seconds(
    architecture: Architecture,
    device: Device,
    *,
    seq: int,
    microbatch: int = 1,
    tp: int = 1,
    cp: int = 1,
    dtype: str = "bf16",
) -> tuple[float, float]:
    """(forward, backward) seconds of the output product and the loss of one micro-batch on one rank.

    The loss reads and writes the fp32 logits twice forward and once backward. 8-bit training keeps the head wide.
    """
    tokens = ceil(seq * microbatch / cp)
    gemms = head_gemms(architecture, tokens, tp=tp)
    if not gemms:
        return 0.0, 0.0
    forward, backward = _products_seconds(gemms, device, _wide(dtype))
    logits = tokens * ceil(architecture.vocab / tp) * 4.0
    return forward + elementwise_seconds(4 * logits, device, 4), backward + elementwise_seconds(
        2 * logits, device, 2
    )


def _wide(dtype: str) -> str:
    """The dtype of everything but the products."""
    return "bf16" if dtype in ("fp8", "fp4", "int8") else dtype


def _products_seconds(gemms: tuple[Gemm, ...], device: Device, dtype: str) -> tuple[float, float]:
    """(forward, backward) seconds of products and of the casts of their operands, where those are narrower."""
    forward = backward = 0.0
    cast = CAST_BYTES if _wide(dtype) != dtype else 0.0
    for g in gemms:
        forward += g.count * _gemm_seconds(g.m, g.n, g.k, device, dtype)
        for_input, for_weight = (
            _gemm_seconds(g.m, g.k, g.n, device, dtype),
            _gemm_seconds(g.n, g.k, g.m, device, dtype),
        )
        backward += g.count * (for_input + for_weight)
        if cast:
            forward += elementwise_seconds(cast * g.count * g.k * (g.m + g.n), device, 2)
            backward += elementwise_seconds(cast * g.count * g.m * g.n, device, 1)
    return forward, backward


def _attention_of(
    a: Architecture,
    layer: int,
    device: Device,
    seq: int,
    batch: int,
    tp: int,
    cp: int,
    dtype: str,
    flash: bool,
) -> tuple[float, float]:
    """(forward, backward) seconds of the attention core."""
    size, heads = dtype_bytes("layer_seconds", dtype), ceil(a.heads / tp)
    if flash:
        flops = attention_flops(a, layer, seq, tp=tp) * batch / cp
        traffic = batch * heads * 2 * (seq / cp) * (a.head_dim + a.value_dim) * size
        core = _core_seconds(flops, traffic, device, dtype)
        return core, FLASH_BACKWARD * core
    # two batched products over all scores, and the passes over them
    flops = attention_flops(a, layer, seq, causal=False, tp=tp) * batch / cp
    efficiency = gemm_efficiency(seq, seq, a.head_dim, device, dtype)
    scores = batch * heads * seq * attended_tokens(a, layer, seq, causal=False) / cp
    core = flops / (peak_flops(device, dtype) * efficiency)
    core += elementwise_seconds(scores * SCORE_BYTES * size / 2, device, 3)
    return core, 2 * core


def _elementwise_bytes(
    a: Architecture, layer: int, tokens: int, tp: int, sequence_parallel: bool, dtype: str
) -> tuple[float, int]:
    """(bytes, kernels) of the forward's norms (read, write), residual adds (2 reads, write), rotation, activation."""
    size, split = dtype_bytes("layer_seconds", dtype), tp if sequence_parallel else 1
    adds = 1 if a.parallel_block else 2
    whole = (2 * a.norms_per_layer + 3 * adds) * a.hidden / split
    rotated = 2 * (a.heads + a.kv_heads) * a.head_dim / tp
    inside = a.intermediate / tp
    if a.moe is not None and a.is_moe_layer(layer):
        moe = a.moe
        inside = (moe.top_k * moe.intermediate + moe.shared_intermediate) / tp
        whole += 4 * moe.top_k * a.hidden / split  # permute and weighted sum of the routed rows
    values = whole + rotated + inside * (3 if a.gated else 2)
    return tokens * values * size, a.norms_per_layer + adds + 3
