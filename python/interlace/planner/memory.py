"""Memory of a rank by category: states, activations, logits, workspaces and the KV cache. All in bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .architecture import Architecture, Source

__all__ = [
    "MemoryBreakdown",
    "Precision",
    "activation_bytes_per_layer",
    "kv_cache_bytes_per_token",
    "logits_bytes",
    "stage_memory",
    "workspace_bytes",
    "zero_bytes",
]

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of each state, and per element of an activation.

    mixed: bf16 parameters and gradients, fp32 master copy and two Adam moments = 2 + 2 + 12 (arXiv 1910.02054).
    fp32 main gradients, as Megatron keeps, are gradients=4. Plain fp32 training is 4 + 4 + 8, activations=4.
    """

    parameters: float = 2
    gradients: float = 2
    optimizer: float = 12
    activations: float = 2


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes of one rank at its peak, by category.

    temporary: gradients of activations, gathered parameters and other buffers that live inside one layer's pass.
    workspaces: staging of our fused collectives. reserved: context of device and libraries.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    temporary: float = 0.0
    workspaces: float = 0.0
    kv_cache: float = 0.0
    reserved: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all categories, bytes."""
        return float(sum(getattr(self, item.name) for item in fields(self)))

    def as_dict(self) -> dict[str, float]:
        """Bytes by category name, without the total."""
        return {item.name: float(getattr(self, item.name)) for item in fields(self)}


def zero_bytes(params: float, world_size: int, stage: int, precision: Precision | None = None) -> float:
    """Bytes of parameters, gradients and optimizer states per rank under ZeRO `stage` 0 (DDP) to 3.

    With P parameters, N ranks and p, g, o bytes: 0: (p + g + o) P; 1: (p + g) P + o P / N; 2: p P + (g + o) P / N;
    3: (p + g + o) P / N. 70e9 parameters on 64 ranks: 1120, 293, 155, 17.5 GB. Source: arXiv 1910.02054, figure 1.
    """
    raise NotImplementedError


def activation_bytes_per_layer(
    seq: int,
    batch: int,
    hidden: int,
    heads: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes of activations one GPT layer keeps for its backward, 16-bit values and 1-byte dropout masks.

    With s, b, h, a, t: none: s b h (10 + 24 / t + 5 a s / (h t)), with SP s b h / t (34 + 5 a s / h);
    selective drops 5 a s / h; full keeps 2 s b h (with SP too: the published table counts the input unsplit).
    Source: arXiv 2205.05198, table 2.
    """
    raise NotImplementedError


def kv_cache_bytes_per_token(config: Source, dtype: object = "bf16", tp: int = 1) -> float:
    """Bytes one token adds to the KV cache, all layers, per rank.

    2 x layers x ceil(kv_heads / tp) x head_dim x bytes (kv heads are copied where tp exceeds them); latent attention
    keeps layers x (kv_rank + rope_dim) x bytes on every rank. Llama-3.1-70B in bf16: 327,680.
    Source: GQA arXiv 2305.13245; MLA arXiv 2405.04434, section 2.1.
    """
    raise NotImplementedError


def logits_bytes(tokens: float, vocab: int, tp: int = 1, *, logits: float = 2, loss: float = 4) -> float:
    """Bytes of the logits and of their fp32 softmax with gradients: tokens x vocab / tp x (logits + loss)."""
    raise NotImplementedError


def workspace_bytes(tokens: float, hidden: int, tp: int, element: float = 2) -> float:
    """Bytes of symmetric memory our fused collectives stage: both parities of the largest message, 2 x tokens x hidden.

    Zero for tp = 1. Source: the signal protocol of this package (double-buffered by epoch parity).
    """
    raise NotImplementedError


def stage_memory(
    architecture: Architecture,
    *,
    stage: int = 0,
    pp: int = 1,
    tp: int = 1,
    cp: int = 1,
    dp: int = 1,
    ep: int = 1,
    expert_tp: int = 1,
    zero: int = 0,
    seq: int,
    microbatch: int = 1,
    microbatches: int = 1,
    interleave: int = 1,
    schedule: str = "1f1b",
    recompute: str = "none",
    sequence_parallel: bool = False,
    precision: Precision | None = None,
    flash: bool = True,
    workspaces: bool = True,
) -> MemoryBreakdown:
    """MemoryBreakdown of one rank of pipeline stage `stage`, bytes.

    Parameters by `model.stage_parameters`, states by ZeRO over DP x CP (experts over their own replicas), activations
    of the architecture's own layers x micro-batches in flight. flash: attention scores are never stored.
    Source: arXiv 1910.02054, arXiv 2205.05198.
    """
    raise NotImplementedError
