"""Lookup in an embedding whose rows, the vocabulary, are cut over a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..groups import Group, resolve
from ..ops import OPS
from ._autograd import call, requires_grad
from ._check import check_dim
from ._vocabulary import check_ids, first_entry, places

__all__ = ["vocab_parallel_embedding"]


def _own_rows(weight: Tensor, ids: Tensor, start: int, bounds: tuple[int, int] | None) -> Tensor:
    """W[ids] where this rank holds the row, zeros elsewhere. bounds: the least and the greatest id, if known."""
    entries, features = weight.shape
    if not entries or (bounds is not None and (bounds[1] < start or bounds[0] >= start + entries)):
        return weight.new_zeros(*ids.shape, features)
    if bounds is not None and bounds[0] >= start and bounds[1] < start + entries:
        return F.embedding(ids - start if start else ids, weight)
    place, outside = places(ids, start, entries)
    return F.embedding(place, weight).masked_fill_(outside.unsqueeze(-1), 0)


def _summed(rows: Tensor, group_name: str, scatter_dim: int | None) -> Tensor:
    if scatter_dim is None:
        return call(OPS.all_reduce.default, group_name, rows, group_name)
    return call(OPS.reduce_scatter.default, group_name, rows, scatter_dim, group_name, None)


class _VocabParallelEmbedding(torch.autograd.Function):
    """Y = W[ids], summed over the ranks; dW = sum of dY over the places of each id of this rank.

    options: start, padding, scale_grad_by_freq, group_name, scatter_dim, bounds.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, options: tuple) -> Tensor:
        start, _, _, group_name, scatter_dim, bounds = options
        rows = _own_rows(weight, ids, start, bounds)
        ctx.options, ctx.entries, ctx.shape = options, weight.shape[0], rows.shape
        ctx.save_for_backward(ids)
        return _summed(rows, group_name, scatter_dim)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor):
        (ids,) = ctx.saved_tensors
        start, padding, scale_grad_by_freq, group_name, scatter_dim, _ = ctx.options
        if scatter_dim is not None:
            grad_out = OPS.all_gather(grad_out, scatter_dim, group_name, ctx.shape[scatter_dim])
        place, outside = places(ids, start, ctx.entries)
        # a row more, thrown away, for ids of other ranks: they count, but never with a row of ours
        place = place.masked_fill(outside, ctx.entries)
        rows = torch.ops.aten.embedding_dense_backward(
            grad_out, place, ctx.entries + 1, padding, scale_grad_by_freq
        )
        return rows[: ctx.entries], None, None


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
    op, info = "vocab_parallel_embedding", resolve(group)
    bounds = check_ids(op, "ids", ids, vocab_size, info)
    start = first_entry(op, weight.shape[0], vocab_size, vocab_start, info)
    if info.world_size == 1:
        return F.embedding(ids, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    if scatter_dim is not None:
        check_dim(op, "scatter_dim", scatter_dim, ids.dim() + 1, info)
    if not requires_grad(weight):
        return _summed(_own_rows(weight, ids, start, bounds), info.name, scatter_dim)
    padding = -1
    if padding_idx is not None and start <= padding_idx < start + weight.shape[0]:
        padding = padding_idx - start
    options = (start, padding, scale_grad_by_freq, info.name, scatter_dim, bounds)
    return _VocabParallelEmbedding.apply(weight, ids, options)
