"""Self-attention split over a group by heads: column-parallel q, k, v, row-parallel output, one collective
each way.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ..groups import Group, resolve
from ..random import region
from .cache import KVCache, StaticKVCache
from .linear import ColumnParallelLinear, RowParallelLinear
from .products import SharedInput
from .rotary import apply_rotary, rotary_angles
from .shard import split_heads

__all__ = ["ParallelAttention"]


class ParallelAttention(nn.Module):
    """y = o(softmax(q k^T / sqrt(head_dim) + mask) v), with the heads split over the group.

    x [.., S, hidden_size], equal on all ranks, -> y of the same shape, equal on all ranks. With
    sequence_parallel x and y are this rank's shards of S (torch.chunk convention; `forward(x, gather_size=S)`
    names the whole length when shards are uneven); q, k and v share one gather, or one sum of dX.
    Heads are cut by key/value groups, evenly or not: 9 query / 3 kv heads over 2 ranks are 6+3 / 2+1. With
    fewer kv heads than ranks a kv head is held by several ranks and the gradients of its weights are summed
    over them; with fewer query heads than ranks the surplus ranks compute a copy whose output is dropped.
    Parameters: q_proj, k_proj, v_proj, o_proj, and q_norm, k_norm (RMS over head_dim, replicated, gradients
    summed) with qk_norm_eps. rope_theta turns on rotary positions. sliding_window W lets a token see itself
    and the W - 1 tokens before it.
    Raises ValueError when the heads do not fit together.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        causal: bool = False,
        sliding_window: int | None = None,
        rope_theta: float | None = None,
        qk_norm_eps: float | None = None,
        dropout: float = 0.0,
        group: Group = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        info = resolve(group)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        layout = split_heads("ParallelAttention", num_heads, num_kv_heads, info.world_size)
        head_dim = _checked_head_dim(hidden_size, num_heads, head_dim)
        if sliding_window is not None and (sliding_window < 1 or not causal):
            raise ValueError(
                f"ParallelAttention: sliding_window={sliding_window} with causal={causal}; expected a window "
                ">= 1 and causal=True"
            )
        self.group_name, self.rank = info.name, info.rank
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.local_num_heads, self.local_num_kv_heads = layout.local_heads(info.rank)
        self.first_head = layout.query.starts[info.rank]
        self.causal, self.sliding_window = causal, sliding_window
        self.rope_theta, self.dropout = rope_theta, dropout
        query, kv = layout.query.scaled(head_dim), layout.key_value.scaled(head_dim)
        column = partial(
            ColumnParallelLinear, bias=bias, device=device, dtype=dtype, group=group,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip
        self.q_proj = column(hidden_size, query.total, shards=query)
        self.k_proj = column(hidden_size, kv.total, shards=kv)
        self.v_proj = column(hidden_size, kv.total, shards=kv)
        SharedInput([self.q_proj, self.k_proj, self.v_proj])
        self.o_proj = RowParallelLinear(
            query.total, hidden_size, bias if out_bias is None else out_bias, device, dtype, group=group,
            sequence_parallel=sequence_parallel, shards=layout.output.scaled(head_dim), drop_input=True,
        )  # fmt: skip
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps, device=device, dtype=dtype)
            self.k_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps, device=device, dtype=dtype)

    @classmethod
    def from_linears(
        cls,
        query: nn.Linear,
        key: nn.Linear,
        value: nn.Linear,
        output: nn.Linear,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        causal: bool = False,
        sliding_window: int | None = None,
        rope_theta: float | None = None,
        q_norm: nn.RMSNorm | None = None,
        k_norm: nn.RMSNorm | None = None,
        dropout: float = 0.0,
        group: Group = None,
        sequence_parallel: bool = False,
    ) -> ParallelAttention:
        """This rank's shards of an unsplit block's linears, copied; norms are copied whole. ValueError when their
        sizes do not fit the heads.
        """
        head_dim = query.out_features // num_heads
        kv_features = (num_kv_heads or num_heads) * head_dim
        if not (
            query.out_features == output.in_features == num_heads * head_dim
            and key.out_features == value.out_features == kv_features
        ):
            raise ValueError(
                f"ParallelAttention: q, k, v give {query.out_features}, {key.out_features}, {value.out_features} "
                f"features and output takes {output.in_features}; not {num_heads} query and "
                f"{num_kv_heads or num_heads} kv heads of one length"
            )
        block = cls(
            query.in_features, num_heads, num_kv_heads, head_dim=head_dim, causal=causal,
            sliding_window=sliding_window, rope_theta=rope_theta, dropout=dropout, group=group,
            sequence_parallel=sequence_parallel, device="meta",
        )  # fmt: skip
        column = partial(ColumnParallelLinear.from_linear, group=group, sequence_parallel=sequence_parallel)
        block.q_proj = column(query, shards=block.q_proj.shards)
        block.k_proj = column(key, shards=block.k_proj.shards)
        block.v_proj = column(value, shards=block.v_proj.shards)
        SharedInput([block.q_proj, block.k_proj, block.v_proj])
        block.o_proj = RowParallelLinear.from_linear(
            output, group, shards=block.o_proj.shards, drop_input=True, sequence_parallel=sequence_parallel
        )
        block.q_norm, block.k_norm = copy.deepcopy(q_norm), copy.deepcopy(k_norm)
        return block.train(query.training)

    def static_cache(self, batch: int, max_tokens: int) -> StaticKVCache:
        """An empty cache for `batch` sequences of up to max_tokens, in the dtype and on the device of the weights.

        Two tensors [batch, kv heads of this rank, max_tokens, head_dim].
        """
        weight = self.k_proj.weight
        shape = (batch, self.local_num_kv_heads, max_tokens, self.head_dim)
        keys, values = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        return StaticKVCache(keys, values, torch.zeros((), dtype=torch.int64, device=weight.device))

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | StaticKVCache | None = None,
        gather_size: int | None = None,
    ) -> Tensor:
        """x -> y; see the class.

        mask: bool (True: look) or additive, broadcastable to [.., heads, S, tokens], where heads is 1 or
        num_heads; with a static cache tokens is its max_tokens. positions [.., S]: for rotary, default counts
        on from the cache. cache: this rank's keys and values so far; the tokens of x are added to it.
        """
        heads = (-1, self.head_dim)
        q = self.q_proj(x, gather_size=gather_size).unflatten(-1, heads)
        k = self.k_proj(x, gather_size=gather_size).unflatten(-1, heads)
        v = self.v_proj(x, gather_size=gather_size).unflatten(-1, heads).transpose(-2, -3)
        q, k = self._normed(q, k)
        q, k = q.transpose(-2, -3), k.transpose(-2, -3)
        past: int | Tensor = 0
        if cache is not None:
            past = cache.filled.clone() if isinstance(cache, StaticKVCache) else cache.length
        if self.rope_theta is not None:
            if positions is None:
                positions = torch.arange(q.shape[-2], device=q.device) + past
            cos, sin = rotary_angles(positions, self.head_dim, self.rope_theta, q.dtype)
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if cache is not None:
            k, v = cache.append(k, v)
        y = self._attend(q, k, v, mask, past)
        out: Tensor = self.o_proj(y.transpose(-2, -3).flatten(-2))
        return out

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [.., heads, head_dim], normed per head; every rank sees its heads only, so gradients are
        summed.
        """
        if self.q_norm is None or self.k_norm is None:
            return q, k
        both = torch.stack([self.q_norm.weight, self.k_norm.weight])
        q_weight, k_weight = functional.copy_to_region(both, group=self.group_name)
        shape = (self.head_dim,)
        return F.rms_norm(q, shape, q_weight, self.q_norm.eps), F.rms_norm(
            k, shape, k_weight, self.k_norm.eps
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, past: int | Tensor) -> Tensor:
        if mask is not None and mask.dim() >= 3 and mask.shape[-3] == self.num_heads > 1:
            mask = mask.narrow(-3, self.first_head, self.local_num_heads)
        static = isinstance(past, Tensor)
        plain_causal = (
            self.causal and mask is None and self.sliding_window is None and not static and past == 0
        )
        if static or (self.causal and not plain_causal):
            seen = _seen(q.shape[-2], k.shape[-2], past, self.causal, self.sliding_window, q.device)
            mask = seen if mask is None else _both(mask, seen)
        attend = partial(
            F.scaled_dot_product_attention, q, k, v, attn_mask=mask, is_causal=plain_causal,
            enable_gqa=q.shape[-3] != k.shape[-3],
        )  # fmt: skip
        if not self.training or not self.dropout:
            return attend()
        with region("sharded", group=self.group_name, device=q.device):  # other heads, other elements
            return attend(dropout_p=self.dropout)


def _checked_head_dim(hidden_size: int, num_heads: int, head_dim: int | None) -> int:
    if head_dim is not None:
        return head_dim
    if hidden_size % num_heads:
        raise ValueError(
            f"ParallelAttention: hidden_size={hidden_size} is not a multiple of num_heads={num_heads}; "
            "give head_dim"
        )
    return hidden_size // num_heads


def _seen(
    queries: int, tokens: int, past: int | Tensor, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """Which token query i, at position past + i, sees: none that is not there yet, causal none that is later, and
    none beyond its window. bool [queries, tokens].
    """
    position = (torch.arange(queries, device=device) + past).unsqueeze(-1)
    token = torch.arange(tokens, device=device)
    if not causal:
        return (token < past + queries).expand(queries, tokens)
    seen = token <= position
    return seen if window is None else seen & (token > position - window)


def _both(mask: Tensor, seen: Tensor) -> Tensor:
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))
