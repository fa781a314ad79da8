"""Parameters and floating-point operations of an architecture, part by part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from ._check import at_least, one_of
from .architecture import Architecture, Source, read_architecture
from .products import attention_flops, head_gemms, layer_gemms

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
    architecture = read_architecture(source)
    stack = tuple(_layer(architecture, index) for index in range(architecture.layers))
    encoder = architecture.encoder
    first, last = _first(architecture), _last(architecture)
    encoder_layers: tuple[LayerParameters, ...] = ()
    if encoder:
        encoder_layers = tuple(_layer(encoder, index) for index in range(encoder.layers))
        first += _first(encoder) + _last(encoder)
    table = architecture.vocab * (architecture.embedding_dim or architecture.hidden)
    head = table if architecture.head == "lm" and not architecture.tied else 0
    if architecture.head_bias or architecture.head == "mlm":
        head += architecture.vocab
    moe = architecture.moe
    idle = sum(layer.experts * (moe.experts - moe.top_k) // moe.experts for layer in stack) if moe else 0
    counted = Parameters(
        embedding=table,
        first=first,
        layers=stack,
        last=last,
        head=head,
        tied=architecture.tied and architecture.head in ("lm", "mlm"),
        active=0,
        encoder=encoder_layers,
    )
    return replace(counted, active=counted.total - idle)


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
    at_least("stage_parameters", 1, tp=tp, ep=ep, expert_tp=expert_tp)
    heads = _share(architecture.heads, tp)
    kv = _share(architecture.kv_heads, min(tp, architecture.kv_heads))
    mlp = _share(architecture.intermediate, tp)
    own = [counted.layers[index] for index in layers]
    if first:
        own += counted.encoder
    dense = sum(part.heads * heads + part.kv * kv + part.mlp * mlp + part.replicated for part in own)
    experts = 0.0
    if architecture.moe:
        experts = sum(part.experts for part in own) * _share(architecture.moe.experts, ep) / expert_tp
    vocab = _share(architecture.vocab, tp) if architecture.vocab else 0.0
    table = counted.embedding * vocab
    if first:
        dense += table + counted.first
    if last:
        dense += counted.head * vocab + counted.last + (table if counted.tied and not first else 0)
    return dense, experts


def flops_per_token(
    architecture: Source, seq: int, *, causal: bool = True, backward: bool = True, recompute: str = "none"
) -> float:
    """Floating-point operations per token of one step (2 per multiply-add).

    Products: 2 x their active weights (the embedding look-up is none), attention 4 seq x heads x head_dim per layer,
    half of it when causal counts only what is computed; backward is twice the forward; recompute "full" repeats
    the forward, "selective" the attention core. Megatron's published TFLOP/s use causal=False.
    Source: arXiv 2104.04473 appendix, F = 96 B s l h^2 (1 + s / 6h + V / 16 l h) with recompute "full".
    """
    at_least("flops_per_token", 1, seq=seq)
    one_of("flops_per_token", "recompute", recompute, ("none", "selective", "full"))
    built = read_architecture(architecture)
    products = cores = 0.0
    for index in range(built.layers):
        products += sum(gemm.flops for gemm in layer_gemms(built, index, 1))
        cores += attention_flops(built, index, seq, causal=causal) / seq
    head = sum(gemm.flops for gemm in head_gemms(built, 1))
    if not backward:
        return products + cores + head
    again = {"none": 0.0, "selective": cores, "full": products + cores}[recompute]
    return 3 * (products + cores + head) + again


def _share(size: int, parts: int) -> float:
    # the largest shard, as torch.chunk cuts
    return ceil(size / parts) / size if size else 0.0


def _norm(architecture: Architecture) -> int:
    per_element = {"rms": 1, "layer": 2, "scale": 1, "none": 0}
    one_of("architecture", "norm", architecture.norm, per_element)
    return per_element[architecture.norm] * architecture.hidden


def _first(a: Architecture) -> int:
    positions = (a.positions + a.token_types) * a.hidden
    project = a.embedding_dim * a.hidden
    return positions + project + (_norm(a) if a.embedding_norm else 0) + a.other_parameters


def _last(a: Architecture) -> int:
    count = _norm(a) if a.final_norm else 0
    count += a.hidden * a.embedding_dim if a.head == "lm" else 0
    square = a.hidden * a.hidden + a.hidden
    if a.pooler:
        count += square
    if a.head == "mlm":
        count += square + 2 * a.hidden
    if a.head in ("classifier", "dense_classifier"):
        count += (a.hidden + 1) * a.labels + (square if a.head == "dense_classifier" else 0)
    return count


def _layer(a: Architecture, index: int) -> LayerParameters:
    heads, kv, replicated = _latent(a) if a.latent else _attention(a)
    if a.cross_attention:
        heads, kv, replicated = 2 * heads, 2 * kv, 2 * replicated
    if a.relative_buckets and index == 0:
        heads += a.relative_buckets * a.heads
    replicated += a.norms_per_layer * _norm(a)
    up = 2 if a.gated else 1
    mlp = experts = 0
    if a.moe is not None and a.is_moe_layer(index):
        moe = a.moe
        biases = up * moe.intermediate + a.hidden if moe.expert_bias else 0
        experts = moe.experts * ((up + 1) * a.hidden * moe.intermediate + biases)
        mlp = (up + 1) * a.hidden * moe.shared_intermediate
        replicated += a.hidden * moe.experts + (moe.experts if moe.router_bias else 0)
        replicated += a.hidden if moe.shared_gate else 0
    else:
        mlp = (up + 1) * a.hidden * a.intermediate
        if a.mlp_bias:
            mlp += up * a.intermediate
            replicated += a.hidden
    return LayerParameters(heads=heads, kv=kv, mlp=mlp, experts=experts, replicated=replicated)


def _attention(a: Architecture) -> tuple[int, int, int]:
    heads = 2 * a.hidden * a.query_width
    kv = 2 * a.hidden * a.kv_width
    heads += a.query_width if a.query_bias else 0
    kv += a.kv_width * (a.key_bias + a.value_bias)
    heads += a.heads if a.sinks else 0
    replicated = a.hidden if a.output_bias else 0
    norms = {"": (0, 0, 0), "head": (0, 0, 2), "layer_head": (0, 0, 4), "full": (1, 1, 0)}
    one_of("architecture", "qk_norm", a.qk_norm, norms)
    query, key, head = norms[a.qk_norm]
    return heads + query * a.query_width, kv + key * a.kv_width, replicated + head * a.head_dim


def _latent(a: Architecture) -> tuple[int, int, int]:
    latent = a.latent
    assert latent is not None
    query = a.heads * (latent.nope_dim + latent.rope_dim)
    heads = a.heads * latent.value_dim * a.hidden
    heads += latent.kv_rank * a.heads * (latent.nope_dim + latent.value_dim)
    down = a.hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank
    down += latent.kv_rank + latent.rope_dim if a.key_bias else 0
    down += a.hidden if a.output_bias else 0
    if not latent.query_rank:
        return heads + a.hidden * query, 0, down
    down += a.hidden * latent.query_rank + latent.query_rank
    down += latent.query_rank if a.query_bias else 0
    return heads + latent.query_rank * query, 0, down
