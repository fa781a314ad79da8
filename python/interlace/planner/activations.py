"""Bytes of activations the layers of a real architecture keep for their backward."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from .architecture import Architecture

__all__ = ["ActivationShape", "layer_activation_bytes"]


@dataclass(frozen=True)
class ActivationShape:
    """What activations of a layer depend on beside its architecture.

    seq: tokens of a whole sequence; a rank has seq / cp. element: bytes per value. flash: scores are not stored.
    dropout: masks of the three dropouts of a GPT layer, 1 byte each. eager: unfused modules, as Hugging Face writes
    them (RMSNorm in fp32 with its normalised value kept, SiLU and its product apart).
    """

    seq: int
    batch: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    sequence_parallel: bool = False
    element: float = 2
    flash: bool = True
    dropout: bool = False
    eager: bool = False

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on this rank, before sequence parallelism splits them further."""
        return self.seq / self.cp * self.batch


def layer_activation_bytes(
    architecture: Architecture, layer: int, shape: ActivationShape, recompute: str = "none"
) -> float:
    """Bytes one rank keeps of one layer and micro-batch: tokens x (shared values / split + own values / tp).

    Shared (each rank of TP has them whole, or 1 / tp under sequence parallelism): inputs of the norms, of the first
    products and of the residual dropouts. Own: q, k, v, attention output, MLP inside. "selective" drops the scores
    (nothing with flash attention), "full" keeps the input. A GPT layer with dropout and scores in 16 bits gives the
    table of arXiv 2205.05198: s b h (10 + 24 / t + 5 a s / (h t)).
    """
    a, size = architecture, shape.element
    split = shape.tp if shape.sequence_parallel else 1
    if recompute == "full":
        return shape.tokens * a.hidden * size / split
    inputs = 1 if a.parallel_block else 2
    shared = a.hidden * (max(a.norms_per_layer, 1) + inputs) * size
    shared += 2 * a.hidden if shape.dropout else 0
    if shape.eager and a.norm == "rms":
        shared += a.norms_per_layer * a.hidden * (size + (4 if size < 4 else 0))
        shared -= a.norms_per_layer * a.hidden * size if size < 4 else 0
    own = _attention(a, shape) * (2 if a.cross_attention else 1)
    if not shape.flash and recompute == "none":
        kept = 2 * size + 1 if shape.dropout else size
        own += ceil(a.heads / shape.tp) * shape.seq * kept
    if a.moe is not None and a.is_moe_layer(layer):
        own += _experts(a, shape)
    else:
        own += ceil(a.intermediate / shape.tp) * _inside(a, shape) * size
    return shape.tokens * (shared / split + own)


def _inside(a: Architecture, shape: ActivationShape) -> int:
    """Values kept per element of the MLP's width: gate, up and their product, or up and its activation."""
    return (4 if shape.eager else 3) if a.gated else 2


def _attention(a: Architecture, shape: ActivationShape) -> float:
    """Bytes per token of q, k, v, the output and the row sums of flash attention."""
    heads = ceil(a.heads / shape.tp)
    sums = 4 * heads if shape.flash else 0
    if a.latent is None:
        kv_heads = ceil(a.kv_heads / min(shape.tp, a.kv_heads))
        return (2 * heads + 2 * kv_heads) * a.head_dim * shape.element + sums
    latent = a.latent
    down = 2 * latent.query_rank + 2 * latent.kv_rank + latent.rope_dim  # before and behind their norms
    split = shape.tp if shape.sequence_parallel else 1
    wide = heads * (2 * a.head_dim + 2 * latent.value_dim)
    return (down / split + wide) * shape.element + sums


def _experts(a: Architecture, shape: ActivationShape) -> float:
    """Bytes per token of routed rows (dispatched input, inside, output to combine) and of shared experts."""
    moe = a.moe
    assert moe is not None
    rows = moe.top_k * shape.expert_tp / shape.tp
    inside = ceil(moe.intermediate / shape.expert_tp) * _inside(a, shape)
    routed = rows * (2 * a.hidden + inside) * shape.element
    return routed + ceil(moe.shared_intermediate / shape.tp) * _inside(a, shape) * shape.element
