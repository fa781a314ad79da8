"""Lookup in an embedding whose rows, the vocabulary, are cut over a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..groups import Group, resolve
from ._check import check_dim
from ._vocabulary import check_ids, first_entry, places
from .collectives import reduce_scatter
from .regions import reduce_from_region

__all__ = ["vocab_parallel_embedding"]


class _Lookup(torch.autograd.Function):
    """Y = W[ids], zeros for ids of other ranks; dW = sum of dY over the places of each id."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, start: int, padding: int, scale_grad_by_freq: bool
    ) -> Tensor:
        entries, features = weight.shape
        place, outside = places(ids, start, entries)
        # the gradient has a row more, thrown away, for ids of other ranks: counted, but never with a row of ours
        ctx.save_for_backward(place.masked_fill(outside, entries))
        ctx.entries, ctx.padding, ctx.scale_grad_by_freq = entries, padding, scale_grad_by_freq
        if not entries:
            return weight.new_zeros(*ids.shape, features)
        out = weight.index_select(0, place.flatten()).view(*ids.shape, features)
        return out.masked_fill_(outside.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor):
        (place,) = ctx.saved_tensors
        rows = torch.ops.aten.embedding_dense_backward(
            grad_out, place, ctx.entries + 1, ctx.padding, ctx.scale_grad_by_freq
        )
        return rows[: ctx.entries], None, None, None, None


def vocab_parallel_embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    group: Group,
    vocab_size: int,
    vocab_start: int | None = None,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    scatter_dim: int | None = None,
) -> Tensor:
    """Y = W[ids] where each rank holds some rows of W: a masked lookup, then one sum over the ranks.

    ids [..], equal on all ranks, weight [V_r, H] (cut as torch.chunk does, or from vocab_start on; V_r = 0 works)
    -> [.., H], bitwise what the unsplit embedding gives, as a row is added to zeros. With scatter_dim the sum is
    scattered and each rank keeps its chunk of that dim, for sequence parallelism. dW_r = sum of dY over the places
    of each id of this rank: local, or after one gather of dY with scatter_dim. padding_idx (of the whole
    vocabulary) gets no gradient; scale_grad_by_freq divides by how often an id occurs.
    ValueError for ids outside the vocabulary and for shards that do not fit it.
    """
    info = resolve(group)
    check_ids("vocab_parallel_embedding", "ids", ids, vocab_size, info)
    start = first_entry("vocab_parallel_embedding", weight.shape[0], vocab_size, vocab_start, info)
    if info.world_size == 1:
        return F.embedding(ids, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    padding = -1
    if padding_idx is not None and start <= padding_idx < start + weight.shape[0]:
        padding = padding_idx - start
    out = _Lookup.apply(weight, ids, start, padding, scale_grad_by_freq)
    if scatter_dim is None:
        return reduce_from_region(out, group=info.name)
    check_dim("vocab_parallel_embedding", "scatter_dim", scatter_dim, out.dim(), info)
    return reduce_scatter(out, group=info.name, dim=scatter_dim)
