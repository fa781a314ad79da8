"""Parameters and floating-point operations of an architecture, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from .architecture import Architecture, Source

__all__ = [
    "LayerParameters",
    "Parameters",
    "count_parameters",
    "flops_per_token",
    "parameters",
    "stage_parameters",
]


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one layer, by how a layout splits them (counts).

    heads: products cut by query head (q, o, latent up-projections and their cut biases): / tp.
    kv: products cut by key/value head: / min(tp, kv_heads), copies beyond. mlp: dense MLP and shared experts: / tp.
    experts: routed experts: / ep, then / expert_tp. replicated: norms, router, output biases, latent down-projections.
    """

    heads: int
    kv: int
    mlp: int
    experts: int
    replicated: int

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.heads + self.kv + self.mlp + self.experts + self.replicated


@dataclass(frozen=True)
class Parameters:
    """Parameters of a model by part (counts).

    embedding: token table (cut by vocabulary under TP). head: the output product where it is not tied (same cut).
    first, last: what else only the first or the last stage holds (positions, token types, patches; final norm,
    transforms), replicated. encoder: layers of the encoder, run before `layers`.
    """

    embedding: int
    first: int
    layers: tuple[LayerParameters, ...]
    last: int
    head: int
    tied: bool
    active: int
    encoder: tuple[LayerParameters, ...] = ()

    @property
    def total(self) -> int:
        """All parameters; tied weights once."""
        stacks = sum(layer.total for layer in (*self.encoder, *self.layers))
        return self.embedding + self.first + stacks + self.last + self.head


def parameters(source: Source) -> Parameters:
    """Parameters by part (counts). See `architecture.read_architecture` for what source may be."""
    raise NotImplementedError


def count_parameters(config: Source) -> tuple[int, int]:
    """(total, active) parameters: all there are, and those one token uses.

    active counts top_k of the experts of each layer; everything else in full, embeddings included (as model cards do).
    Source: the shapes of the Hugging Face modules of each family; equal to theirs to the parameter.
    """
    counted = parameters(config)
    return counted.total, counted.active


def stage_parameters(
    counted: Parameters,
    architecture: Architecture,
    layers: tuple[int, ...],
    *,
    first: bool,
    last: bool,
    tp: int = 1,
    ep: int = 1,
    expert_tp: int = 1,
) -> tuple[float, float]:
    """(dense, expert) parameters one rank of a pipeline stage holds (counts).

    layers: the stage's layer indices. first, last: it has the embedding, the head. Dense parameters are replicated
    over DP x CP; expert parameters over DP x CP x TP / (EP x expert_tp), so ZeRO divides the two by different worlds.
    A tied head on another stage than the embedding holds a copy of the table.
    """
    raise NotImplementedError


def flops_per_token(
    architecture: Source, seq: int, *, causal: bool = True, backward: bool = True, recompute: str = "none"
) -> float:
    """Floating-point operations per token of one step (2 per multiply-add).

    Products: 2 x their active weights (the embedding look-up is none), attention 4 seq x heads x head_dim per layer,
    half of it when causal counts only what is computed; backward is twice the forward; recompute "full" repeats
    the forward, "selective" the attention core. Megatron's published TFLOP/s use causal=False.
    Source: arXiv 2104.04473 appendix, F = 96 B s l h^2 (1 + s / 6h + V / 16 l h) with recompute "full".
    """
    raise NotImplementedError
