"""The matrix products of an architecture, as one rank runs them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from .architecture import Architecture

__all__ = ["Gemm", "attended_tokens", "attention_flops", "head_gemms", "layer_gemms"]


@dataclass(frozen=True)
class Gemm:
    """A product [m, k] x [k, n] done `count` times; role names it ("qkv", "o", "up", "down", "experts_up", ...)."""

    role: str
    m: int
    n: int
    k: int
    count: float = 1

    @property
    def flops(self) -> float:
        """Floating-point operations of all: 2 m n k count."""
        return 2.0 * self.m * self.n * self.k * self.count


def layer_gemms(
    architecture: Architecture, layer: int, tokens: int, *, tp: int = 1, ep: int = 1, expert_tp: int = 1
) -> tuple[Gemm, ...]:
    """Forward products of one layer on one rank (sizes in elements).

    tokens: sequence shard (seq / cp) x micro-batch; under sequence parallelism the gathered tokens. Experts: a rank
    gets tokens x top_k x expert_tp / tp rows when routing is balanced, over its experts / ep experts. The down-
    projections of latent attention are whole on every rank of TP. Encoders of an encoder-decoder are not in it.
    """
    a, up = architecture, 2 if architecture.gated else 1
    gemms = _attention_gemms(a, tokens, tp)
    if a.cross_attention:
        gemms += [Gemm(f"cross_{gemm.role}", gemm.m, gemm.n, gemm.k) for gemm in gemms]
    if a.moe is None or not a.is_moe_layer(layer):
        width = ceil(a.intermediate / tp)
        return (*gemms, Gemm("up", tokens, up * width, a.hidden), Gemm("down", tokens, a.hidden, width))
    moe = a.moe
    gemms.append(Gemm("router", ceil(tokens / tp), moe.experts, a.hidden))
    if moe.shared_intermediate:
        width = ceil(moe.shared_intermediate / tp)
        gemms += [
            Gemm("shared_up", tokens, up * width, a.hidden),
            Gemm("shared_down", tokens, a.hidden, width),
        ]
    local = ceil(moe.experts / ep)
    rows = tokens * moe.top_k * expert_tp / tp
    # fewer rows than experts: only that many experts have work
    busy = min(float(local), rows)
    each = max(1, round(rows / busy)) if busy else 1
    width = ceil(moe.intermediate / expert_tp)
    gemms.append(Gemm("experts_up", each, up * width, a.hidden, rows / each))
    gemms.append(Gemm("experts_down", each, a.hidden, width, rows / each))
    return tuple(gemms)


def _attention_gemms(a: Architecture, tokens: int, tp: int) -> list[Gemm]:
    heads = ceil(a.heads / tp)
    if a.latent is None:
        kv_heads = ceil(a.kv_heads / min(tp, a.kv_heads))
        width = (heads + 2 * kv_heads) * a.head_dim
        return [Gemm("qkv", tokens, width, a.hidden), Gemm("o", tokens, a.hidden, heads * a.head_dim)]
    latent = a.latent
    query = heads * (latent.nope_dim + latent.rope_dim)
    gemms = [Gemm("kv_down", tokens, latent.kv_rank + latent.rope_dim, a.hidden)]
    if latent.query_rank:
        gemms += [
            Gemm("q_down", tokens, latent.query_rank, a.hidden),
            Gemm("q_up", tokens, query, latent.query_rank),
        ]
    else:
        gemms.append(Gemm("q", tokens, query, a.hidden))
    gemms.append(Gemm("kv_up", tokens, heads * (latent.nope_dim + latent.value_dim), latent.kv_rank))
    gemms.append(Gemm("o", tokens, a.hidden, heads * latent.value_dim))
    return gemms


def head_gemms(architecture: Architecture, tokens: int, *, tp: int = 1) -> tuple[Gemm, ...]:
    """Forward products of the head on one rank; `tokens` as in layer_gemms, the vocabulary split over tp."""
    a = architecture
    if a.head == "lm":
        width = a.embedding_dim or a.hidden
        logits = Gemm("head", tokens, ceil(a.vocab / tp), width)
        return (Gemm("project", tokens, width, a.hidden), logits) if a.embedding_dim else (logits,)
    if a.head == "mlm":
        return Gemm("transform", tokens, a.hidden, a.hidden), Gemm(
            "head", tokens, ceil(a.vocab / tp), a.hidden
        )
    return ()


def attended_tokens(architecture: Architecture, layer: int, seq: int, *, causal: bool = True) -> float:
    """Mean number of tokens a token attends to: (seq + 1) / 2 when causal, less under a sliding window, else seq."""
    window = architecture.window[layer] if architecture.window else 0
    if not causal or not architecture.causal:
        return float(min(window, seq) if window and architecture.causal else seq)
    span = min(window, seq) if window else seq
    return (span * (span + 1) / 2 + (seq - span) * span) / seq


def attention_flops(
    architecture: Architecture, layer: int, seq: int, *, causal: bool = True, tp: int = 1
) -> float:
    """Floating-point operations of the attention core of one layer and one sequence, forward, on one rank.

    2 x seq x attended x heads / tp x (head_dim + value_dim). Cross attention counts like self attention.
    """
    a = architecture
    attended = attended_tokens(a, layer, seq, causal=causal)
    flops = 2.0 * seq * attended * ceil(a.heads / tp) * (a.head_dim + a.value_dim)
    return 2 * flops if a.cross_attention else flops
