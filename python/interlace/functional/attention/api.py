"""Attention over a sequence of which every rank holds a part: ring, all-gather, all-to-all, and two of them mixed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...groups import Group, GroupInfo, resolve
from .._check import refuse
from .heads import gather_tokens, scatter_tokens, split_heads
from .ops import ALONE, context_attention
from .problem import agree, problem_of

__all__ = [
    "all_gather_attention",
    "all_to_all_attention",
    "context_attention_of_heads",
    "hierarchical_attention",
    "ring_attention",
]

Lengths = Sequence[int] | Tensor | None


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
    window: int | None = None,
    cu_seqlens: Lengths = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale Q K^T + mask) V over the whole sequence; keys and values go around the ring, block by block.

    q [B, Hq, S/R, D], k, v [B, Hkv, S/R, D] (Hkv divides Hq, nothing is expanded) -> [B, Hq, S/R, D]; with
    return_lse also the log-sum-exp of the scores [B, Hq, S/R] in fp32, which takes no gradient.
    layout: which tokens of the sequence a rank holds: "contiguous", "zigzag" or "striped" (see `spans_of`); under a
    causal mask only the last two give every rank the same work. window: a token sees itself and the window - 1
    tokens before it. cu_seqlens [0, .., S]: packed documents (B = 1) that do not see each other; the same on all
    ranks. Blocks that the mask hides are neither computed nor sent. Queries that see nothing give 0.
    Merges are in fp32 and in one order: two runs are bitwise equal. Liu et al., arXiv 2310.01889.
    Raises ValueError or TypeError on every rank when shapes, dtypes or options do not fit or differ between ranks.
    """
    options = _options(causal, scale, layout, window, cu_seqlens)
    out, lse = context_attention(q, k, v, "ring_attention", "ring", *options, 1, resolve(group).name)
    return (out, lse) if return_lse else out


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
    window: int | None = None,
    cu_seqlens: Lengths = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `ring_attention`, with keys and values gathered chunk by chunk while the own chunk is worked on.

    Gradients of keys and values are summed by one reduce-scatter: fewer steps than the ring, but a rank holds
    those of the whole sequence for a moment. Same arguments, result and errors.
    """
    options = _options(causal, scale, layout, window, cu_seqlens)
    out, lse = context_attention(
        q, k, v, "all_gather_attention", "all_gather", *options, 1, resolve(group).name
    )
    return (out, lse) if return_lse else out


def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
    window: int | None = None,
    cu_seqlens: Lengths = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `ring_attention`, by exchanging heads for tokens before and after attention over the whole sequence.

    Every rank works on some heads: whole key/value groups, evenly or not; with fewer key/value heads than ranks
    they are sent to every rank that reads them. Balanced for any mask, needs at least as many query heads as ranks.
    Jacobs et al., arXiv 2309.14509. Same arguments, result and errors.
    """
    options = _options(causal, scale, layout, window, cu_seqlens)
    return _exchanged(q, k, v, "all_to_all_attention", resolve(group), ALONE, options, return_lse)


def hierarchical_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
    window: int | None = None,
    cu_seqlens: Lengths = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `ring_attention`, with an all-to-all inside and a ring across (Fang and Zhao, arXiv 2405.07719).

    mesh: two axes, the outer one for the ring (between nodes), the inner one for the all-to-all (inside a node);
    token shards are numbered outer rank * inner size + inner rank. Same other arguments, result and errors.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        raise ValueError(
            f"hierarchical_attention: got {mesh!r}; expected a DeviceMesh of two axes, (ring, all-to-all)"
        )
    options = _options(causal, scale, layout, window, cu_seqlens)
    ring, inner = resolve(mesh.get_group(0)), resolve(mesh.get_group(1))
    return _exchanged(q, k, v, "hierarchical_attention", inner, ring, options, return_lse)


def context_attention_of_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    shards: int,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
    window: int | None = None,
    cu_seqlens: Lengths = None,
) -> Tensor:
    """Attention on one rank over all tokens, which lie shard after shard as the ranks of `layout` hold them.

    q [B, h, S, D], k, v [B, m, S, D] with S the tokens of `shards` ranks; what is between the two exchanges of
    `all_to_all_attention`. Raises ValueError or TypeError when shapes or options do not fit.
    """
    options = _options(causal, scale, layout, window, cu_seqlens)
    return context_attention(q, k, v, "context_attention_of_heads", "ring", *options, shards, ALONE.name)[0]


Options = tuple[bool, float | None, str, int | None, list[int] | None]


def _options(
    causal: bool, scale: float | None, layout: str, window: int | None, cu_seqlens: Lengths
) -> Options:
    lengths = None
    if cu_seqlens is not None:
        lengths = [int(n) for n in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]
    return causal, scale, layout, window, lengths


def _exchanged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    op: str,
    inner: GroupInfo,
    ring: GroupInfo,
    options: Options,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    causal, scale, layout, window, cu_seqlens = options
    if not torch.compiler.is_compiling():
        try:
            problem = problem_of(
                op, q, k, v, inner.world_size * ring.world_size, causal=causal, scale=scale, layout=layout,
                window=window, cu_seqlens=cu_seqlens,
            )  # fmt: skip
            if q.shape[1] < inner.world_size:
                raise ValueError(
                    f"{op}: {q.shape[1]} query heads for {inner.world_size} ranks; every rank needs one: use "
                    "ring_attention, or a mesh whose inner axis is shorter"
                )
        except (ValueError, TypeError) as error:
            refuse(inner, type(error), str(error))
        agree(op, q, k, problem, inner)
    split = split_heads(q.shape[1], k.shape[1], inner.world_size)
    own_q, own_k, own_v = gather_tokens(q, k, v, split, inner.rank, inner.name)
    out, lse = context_attention(own_q, own_k, own_v, op, "ring", *options, inner.world_size, ring.name)
    out = scatter_tokens(out, split, inner.rank, inner.name)
    if not return_lse:
        return out
    return out, scatter_tokens(lse.detach(), split, inner.rank, inner.name)
