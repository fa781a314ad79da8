"""Self-attention over a sequence of which every rank holds a part, with its projections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..functional import all_gather, all_to_all_linear, linear_all_to_all
from ..functional.attention import context_attention_of_heads, decode_attention, head_shards, positions_of
from ..groups import Group, resolve
from ..modules.rotary import apply_rotary, rotary_angles
from .attention import ContextAttention
from .cache import ShardedKVCache

__all__ = ["ContextParallelAttention"]


class ContextParallelAttention(nn.Module):
    """y = o(softmax(q k^T / sqrt(head_dim) + mask) v) over the tokens of all ranks; weights are whole on each.

    x [B, S/R, hidden_size], this rank's tokens in the given layout -> y of the same shape. `algorithm`: "ring",
    "all_gather", "all_to_all" (the exchange of heads for tokens is fused with the projections), or "hierarchical"
    over a mesh of two axes. Parameters q_proj, k_proj, v_proj, o_proj and, with qk_norm_eps, q_norm, k_norm; their
    gradients are this rank's share: average them over the ranks as DDP and `fully_shard` do, with the loss of
    `global_mean`. rope_theta turns on rotary positions, of the whole sequence. sliding_window W lets a token see
    itself and the W - 1 tokens before it.
    Raises ValueError when heads do not fit together or the algorithm does not fit the mesh.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        causal: bool = True,
        sliding_window: int | None = None,
        rope_theta: float | None = None,
        qk_norm_eps: float | None = None,
        group: Group = None,
        algorithm: str = "ring",
        layout: str = "zigzag",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"ContextParallelAttention: num_heads={num_heads} is no positive multiple of "
                f"num_kv_heads={num_kv_heads}"
            )
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(
                f"ContextParallelAttention: hidden_size={hidden_size} is no multiple of num_heads={num_heads}; "
                "give head_dim"
            )
        self.attention = ContextAttention(group, algorithm, layout)
        size = self.attention.rank_and_size[1]
        if algorithm == "all_to_all" and num_heads < size:
            raise ValueError(
                f"ContextParallelAttention: {num_heads} query heads for {size} ranks; every rank needs one: use "
                'algorithm="ring"'
            )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = head_dim or hidden_size // num_heads
        self.causal, self.sliding_window, self.rope_theta = causal, sliding_window, rope_theta
        sizes = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias, **sizes)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias, **sizes)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias, **sizes)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias, **sizes)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=qk_norm_eps, **sizes)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=qk_norm_eps, **sizes)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        cache: ShardedKVCache | None = None,
    ) -> Tensor:
        """x -> y; see the class.

        positions [S/R]: for rotary, default those of the layout (without cu_seqlens), counted from the start of
        each document with them. cache: takes this rank's keys and values of a prompt, for `decode`.
        """
        rank, size = self.attention.rank_and_size
        documents = None if cu_seqlens is None else [int(n) for n in cu_seqlens]
        if self.attention.algorithm == "all_to_all" and cache is None and size > 1:
            return self._exchanged(x, positions, documents)
        q, k, v = self._projected(x)
        if positions is None:
            positions = positions_of(self.attention.layout, x.shape[1] * size, size, documents)[rank].to(
                x.device
            )
        q, k = self._turned(q, k, positions)
        if cache is not None:
            if documents is not None or cache.length:
                raise ValueError(
                    "ContextParallelAttention: a cache takes one prompt, without cu_seqlens, once"
                )
            cache.add_shard(k, v, positions, x.shape[1] * size)
        y = self.attention(q, k, v, causal=self.causal, window=self.sliding_window, cu_seqlens=documents)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out

    def decode(self, x: Tensor, cache: ShardedKVCache) -> Tensor:
        """New tokens x [B, T, hidden_size], the same on every rank, behind the tokens of the cache -> y of that shape.

        The cache takes them in. One exchange of partial results.
        """
        rank, size = self.attention.rank_and_size
        q, k, v = self._projected(x)
        new = torch.arange(cache.length, cache.length + x.shape[1], device=x.device)
        q, k = self._turned(q, k, new)
        cache.add_decoded(k, v, rank, size)
        keys, values, positions = cache.held(k)
        y = decode_attention(
            q, keys, values, group=self.attention.whole_group, query_positions=new, key_positions=positions,
            window=self.sliding_window,
        )  # fmt: skip
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = (-1, self.head_dim)
        q, k, v = (p(x).unflatten(-1, heads).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v

    def _turned(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [B, heads, tokens, head_dim], normed and turned by their positions."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            cos, sin = rotary_angles(positions, self.head_dim, self.rope_theta, q.dtype)
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        return q, k

    def _exchanged(self, x: Tensor, positions: Tensor | None, documents: list[int] | None) -> Tensor:
        """By heads: projections write what the peers read, attention sees all tokens, the output comes back."""
        info = resolve(self.attention.mesh)
        queries, keys = head_shards(self.num_heads, self.num_kv_heads, info.world_size, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = linear_all_to_all(
            x, [p.weight for p in projections], [p.bias for p in projections], features=[queries, keys, keys],
            group=info.name,
        )  # fmt: skip
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        if positions is None:
            shards = positions_of(self.attention.layout, q.shape[2], info.world_size, documents)
            everyone = torch.cat(shards).to(x.device)
        else:
            everyone = all_gather(positions, dim=0, group=info.name)
        q, k = self._turned(q, k, everyone)
        y = context_attention_of_heads(
            q, k, v, shards=info.world_size, causal=self.causal, layout=self.attention.layout,
            window=self.sliding_window, cu_seqlens=documents,
        )  # fmt: skip
        return all_to_all_linear(
            y.transpose(1, 2).flatten(2),
            self.o_proj.weight,
            self.o_proj.bias,
            features=queries,
            group=info.name,
        )
