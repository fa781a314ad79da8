"""Decoding with a key/value cache whose tokens are on several ranks: partial attention, merged in one exchange.

Flash-decoding (Dao et al. 2023): every rank attends to the keys that it holds, partial outputs are weighted by their
log-sum-exp.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...groups import Group, resolve
from .._check import autocast, refuse
from ..collectives import all_gather
from . import kernels_cuda

__all__ = ["decode_attention"]

ATEN = torch.ops.aten


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    scale: float | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of new tokens to a cache that is split over the ranks; for inference, no gradients.

    q [B, Hq, T, D], the same on every rank; k, v [B, Hkv, C, D], the part of the cache that this rank holds, of any
    length and empty too -> [B, Hq, T, D], bitwise equal on every rank. One all-gather of outputs and log-sum-exps.
    Without positions every query sees every key of the cache (T = 1). query_positions [T], key_positions [C]: a query
    sees keys at its own position and before, and with a window only the last window - 1 of those before.
    Queries that see nothing give 0. Raises ValueError, on every rank, when shapes do not fit.
    """
    info = resolve(group)
    q, k, v = autocast(q, k, v)  # type: ignore[assignment]
    reason = _misfit(q, k, v, query_positions, key_positions, window)
    if reason:
        refuse(info, ValueError, f"decode_attention: {reason}")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    with torch.no_grad():
        out, lse = _partial(q, k, v, _visible(query_positions, key_positions, window), scale)
        wide = torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1)
        parts = all_gather(wide.unsqueeze(0), dim=0, group=info.name)
        outs, lses = parts[..., :-1], parts[..., -1:]
        weights = torch.nan_to_num((lses - lses.amax(0)).exp(), nan=0.0)  # -inf - -inf: nobody saw a key
        total = weights.sum(0).clamp(min=torch.finfo(lse.dtype).tiny)
        return ((outs * weights).sum(0) / total).to(q.dtype)


def _misfit(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor | None, keys: Tensor | None, window: int | None
) -> str:
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        return f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; expected [B, heads, tokens, D]"
    if (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]) or not k.shape[1] or q.shape[1] % k.shape[1]:
        return f"q {list(q.shape)} and k {list(k.shape)} differ in batch or head size, or their heads do not divide"
    if (queries is None) != (keys is None):
        return "pass query_positions and key_positions, or none of them"
    if queries is None and (q.shape[2] != 1 or window is not None):
        return f"{q.shape[2]} queries, window={window}: say which positions queries and keys have"
    if (
        queries is not None
        and keys is not None
        and (queries.shape, keys.shape) != (q.shape[2:3], k.shape[2:3])
    ):
        return f"positions {list(queries.shape)} and {list(keys.shape)} for {q.shape[2]} queries, {k.shape[2]} keys"
    return ""


def _visible(queries: Tensor | None, keys: Tensor | None, window: int | None) -> Tensor | None:
    """bool [T, C]"""
    if queries is None or keys is None:
        return None
    distance = queries.unsqueeze(1) - keys.unsqueeze(0)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _partial(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if not q.numel() or not k.shape[2]:
        return q.new_zeros(q.shape), q.new_full(q.shape[:-1], -math.inf, dtype=wide)
    mask = None
    if visible is not None:
        mask = q.new_zeros(visible.shape).masked_fill_(~visible, -math.inf)
    if q.is_cuda:
        out, lse = kernels_cuda.forward(q, k, v, False, mask, scale)
    else:
        out, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=scale
        )
    if visible is not None:  # kernels differ in what they give for a row without keys
        blind = ~visible.any(1)
        out = out.masked_fill(blind.view(-1, 1), 0.0)
        lse = lse.masked_fill(blind, -math.inf)
    return out, lse
