"""Time of computation: products by roofline and measured efficiency, attention, elementwise passes, fused ops."""

from __future__ import annotations

from dataclasses import dataclass

from .architecture import Architecture
from .cluster import Device

__all__ = [
    "Gemm",
    "LayerSeconds",
    "attention_seconds",
    "elementwise_seconds",
    "fused_seconds",
    "gemm_seconds",
    "head_seconds",
    "layer_gemms",
    "layer_seconds",
]


@dataclass(frozen=True)
class Gemm:
    """A product [m, k] x [k, n] done `count` times; role names it ("qkv", "o", "up", "down", "experts", ...)."""

    role: str
    m: int
    n: int
    k: int
    count: int = 1


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


def gemm_seconds(m: int, n: int, k: int, device: Device, dtype: str = "bf16") -> float:
    """Seconds of [m, k] x [k, n]: max(2 m n k / (peak x efficiency), traffic / memory bandwidth) + kernel latency.

    Traffic reads both operands and writes the result once. efficiency: interpolated in the device's measured table
    where it has one, else device.efficiency x the share of whole 128 x 128 tiles and full k loops.
    Source: roofline, Williams et al. 2009.
    """
    raise NotImplementedError


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
    """Seconds of one fused attention core, forward: 2 b s s_kv heads (head_dim + value_dim) FLOP, half when causal,
    at peak x attention_efficiency, or its traffic. Source: FlashAttention-2, arXiv 2307.08691.
    """
    raise NotImplementedError


def elementwise_seconds(bytes: float, device: Device, kernels: int = 1) -> float:  # noqa: A002
    """Seconds to move `bytes` through memory in `kernels` kernels: bytes / (bandwidth x efficiency) + latency."""
    raise NotImplementedError


def fused_seconds(compute: float, communication: float, slowdown: float = 0.1, chunks: int = 8) -> float:
    """Seconds of a fused product and collective where no measurement exists.

    max(compute, communication) x (1 + slowdown), and never more than their sum. Source: the slowdown coefficient of
    Galvatron, arXiv 2211.13878.
    """
    raise NotImplementedError


def layer_gemms(
    architecture: Architecture, layer: int, tokens: int, *, tp: int = 1, ep: int = 1, expert_tp: int = 1
) -> tuple[Gemm, ...]:
    """Forward products of one layer on one rank for `tokens` tokens (of the rank's sequence shard x batch)."""
    raise NotImplementedError


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
    """LayerSeconds of one layer: its products, attention core and elementwise passes (norms, residuals)."""
    raise NotImplementedError


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
    """(forward, backward) seconds of the output product and the loss of one micro-batch on one rank."""
    raise NotImplementedError
