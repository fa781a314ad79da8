"""Cross entropy of logits whose classes, the vocabulary, are cut over a group; no rank sees all logits of a row."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..groups import Group, GroupInfo, resolve
from ..ops import OPS
from ..reference import flat_rows
from ._check import refuse
from ._vocabulary import check_ids, first_entry, places
from .collectives import all_gather
from .linear import all_gather_linear, column_linear
from .regions import copy_to_region

__all__ = ["vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"]

REDUCTIONS = ("mean", "sum", "none")


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _shard_statistics(logits: Tensor, target: Tensor, start: int, smoothed: bool) -> Tensor:
    """logits [rows, V_r] -> per row: log of the sum of exp, logit of the target or 0, and, smoothed, sum of logits."""
    wide = _wide(logits)
    rows, entries = wide.shape
    if not entries:
        found = [wide.new_full((rows,), -math.inf), wide.new_zeros(rows)]
    else:
        place, outside = places(target, start, entries)
        of_target = wide.gather(1, place.to(torch.int64).unsqueeze(1)).squeeze(1)
        found = [wide.logsumexp(1), of_target.masked_fill(outside, 0)]
    return torch.stack([*found, wide.sum(1)] if smoothed else found)


def _losses(statistics: Tensor, target: Tensor, options: tuple) -> tuple[Tensor, Tensor]:
    """Loss [rows] and log of the sum of exp [rows], from what the shards know; the only collective."""
    group_name, world_size, _, vocab_size, ignore_index, label_smoothing, z_loss = options
    count = statistics.shape[0]
    if world_size > 1:
        statistics = OPS.all_gather(statistics, 0, group_name, count * world_size)
    shards = statistics.view(world_size, count, -1)
    lse = shards[:, 0].logsumexp(0)
    loss = (1 - label_smoothing) * (lse - shards[:, 1].sum(0))
    if label_smoothing:
        loss = loss + label_smoothing * (lse - shards[:, 2].sum(0) / vocab_size)
    if z_loss:
        loss = loss + z_loss * lse.square()
    return loss.masked_fill(target == ignore_index, 0), lse


def _logits_gradient(
    logits: Tensor, target: Tensor, lse: Tensor, grad_loss: Tensor, options: tuple
) -> Tensor:
    """d loss / d logits = softmax (1 + 2 z lse) - (1 - smoothing) onehot - smoothing / V, times dY; [rows, V_r]."""
    _, _, start, vocab_size, ignore_index, label_smoothing, z_loss = options
    grad_loss = grad_loss.masked_fill(target == ignore_index, 0)
    row_scale = grad_loss * (1 + 2 * z_loss * lse) if z_loss else grad_loss
    grad = (_wide(logits) - lse.unsqueeze(1)).exp_().mul_(row_scale.unsqueeze(1))
    if label_smoothing:
        grad.sub_((grad_loss * (label_smoothing / vocab_size)).unsqueeze(1))
    if logits.shape[1]:
        place, outside = places(target, start, logits.shape[1])
        of_target = (grad_loss * (label_smoothing - 1)).masked_fill(outside, 0)
        grad.scatter_add_(1, place.to(torch.int64).unsqueeze(1), of_target.unsqueeze(1))
    return grad.to(logits.dtype)


def _refuse_second_derivative() -> None:
    # the saved lse has no graph: with create_graph its part of the second derivative would be missing in silence
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "vocab_parallel_cross_entropy has no second derivative; do not pass create_graph=True"
        )


class _CrossEntropy(torch.autograd.Function):
    """Loss of every row from the logits of this rank; saves them and one number a row, backward is local."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: tuple) -> Tensor:
        statistics = _shard_statistics(logits, target, options[2], bool(options[5]))
        loss, lse = _losses(statistics, target, options)
        ctx.options = options
        ctx.save_for_backward(logits, target, lse)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor):
        _refuse_second_derivative()
        logits, target, lse = ctx.saved_tensors
        return _logits_gradient(logits, target, lse, grad_loss, ctx.options), None, None


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """As above behind a product, `chunk` rows of logits at a time; backward computes the logits again.

    dX is this rank's part of the sum over the group.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, chunk: int, options: tuple
    ) -> Tensor:
        statistics = torch.cat(
            [
                _shard_statistics(
                    torch.nn.functional.linear(rows, weight, bias), ids, options[2], bool(options[5])
                )
                for rows, ids in zip(x.split(chunk), target.split(chunk), strict=True)
            ],
            dim=1,
        )
        loss, lse = _losses(statistics, target, options)
        ctx.chunk, ctx.options = chunk, options
        ctx.save_for_backward(x, weight, bias, target, lse)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor):
        _refuse_second_derivative()
        x, weight, bias, target, lse = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_x = torch.empty_like(x) if need_x else None
        # sums over chunks are kept wide: bf16 would round once per chunk
        grad_weight = torch.zeros_like(_wide(weight)) if need_weight else None
        grad_bias = torch.zeros_like(_wide(bias)) if need_bias else None
        for first in range(0, x.shape[0], ctx.chunk):
            part = slice(first, first + ctx.chunk)
            logits = torch.nn.functional.linear(x[part], weight, bias)
            grad = _logits_gradient(logits, target[part], lse[part], grad_loss[part], ctx.options)
            if grad_x is not None:
                torch.mm(grad, weight, out=grad_x[part])
            if grad_weight is not None:
                grad_weight.addmm_(_wide(grad.t()), _wide(x[part]))
            if grad_bias is not None:
                grad_bias.add_(_wide(grad).sum(0))
        grads = [None if g is None else g.to(x.dtype) for g in (grad_x, grad_weight, grad_bias)]
        return *grads, None, None, None


def _options(
    op: str,
    info: GroupInfo,
    entries: int,
    target: Tensor,
    rows: torch.Size | None,
    vocab_size: int,
    vocab_start: int | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple:
    """The checked settings, as the Functions above take them."""
    if reduction not in REDUCTIONS:
        refuse(info, ValueError, f"{op}: reduction={reduction!r}; expected one of {', '.join(REDUCTIONS)}")
    if not 0 <= label_smoothing <= 1:
        refuse(info, ValueError, f"{op}: label_smoothing={label_smoothing}; expected 0 to 1")
    if rows is not None and target.shape != rows:
        refuse(
            info, ValueError, f"{op}: target is {list(target.shape)}, expected {list(rows)}: one class a row"
        )
    check_ids(op, "target", target, vocab_size, info, ignore_index)
    start = first_entry(op, entries, vocab_size, vocab_start, info)
    return (
        info.name, info.world_size, start, vocab_size, ignore_index, float(label_smoothing), float(z_loss),
    )  # fmt: skip


def _reduced(loss: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (target != ignore_index).sum()


def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    target: Tensor,
    *,
    group: Group,
    vocab_size: int,
    vocab_start: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy, equal to F.cross_entropy of the gathered logits, which nobody gathers.

    logits_shard [.., V_r] (cut as torch.chunk does, or from vocab_start on; V_r = 0 works), target [..] of class
    indices, equal on all ranks -> a scalar, or [..] with reduction="none"; fp32 (fp64 for fp64), bitwise equal on
    all ranks. Per row: lse - z_target, lse = log sum_v exp z_v over the whole vocabulary; label_smoothing mixes in
    the mean over all classes; z_loss adds z_loss * lse^2 (Chowdhery et al. 2022, PaLM). Rows of ignore_index count
    as 0 and not in the mean; when all are ignored the mean is NaN, as torch's.
    d z = (softmax (1 + 2 z_loss lse) - onehot) dY, local. One collective of 2 or 3 numbers a row and rank in the
    forward, none in the backward. Saves logits_shard. ValueError for targets outside the vocabulary.
    """
    op, info = "vocab_parallel_cross_entropy", resolve(group)
    if logits_shard.dim() < 1 or not logits_shard.is_floating_point():
        refuse(
            info,
            TypeError,
            f"{op}: logits are {logits_shard.dtype} {list(logits_shard.shape)}; expected [.., V_r]",
        )
    options = _options(
        op, info, logits_shard.shape[-1], target, logits_shard.shape[:-1],
        vocab_size, vocab_start, ignore_index, label_smoothing, z_loss, reduction,
    )  # fmt: skip
    flat = target.flatten()
    matrix = flat_rows(logits_shard)
    loss = _CrossEntropy.apply(matrix, flat, options).view(target.shape)
    return _reduced(loss, target, ignore_index, reduction)


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group,
    vocab_size: int,
    vocab_start: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    gather_dim: int | None = None,
    gather_size: int | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Output head and loss in one: cross entropy of X W^T + b whose rows, the vocabulary, are cut over the group.

    x [.., K], equal on all ranks (its shard along gather_dim, of gather_size in all, under sequence parallelism),
    weight [V_r, K], bias [V_r], target [..] of the whole x -> as `vocab_parallel_cross_entropy`. dX is summed (or
    reduce-scattered) over the group; dW, db are local. Two collectives in all without gather_dim: of 2 or 3 numbers
    a row in the forward, of dX in the backward. chunk_rows: never hold more than that many rows of logits; the
    backward computes them again.
    """
    op, info = "vocab_parallel_linear_cross_entropy", resolve(group)
    if chunk_rows is not None and chunk_rows < 1:
        refuse(info, ValueError, f"{op}: chunk_rows={chunk_rows}; expected at least 1")
    if chunk_rows is None:
        logits = (
            column_linear(x, weight, bias, group=info.name)
            if gather_dim is None
            else all_gather_linear(
                x, weight, bias, group=info.name, gather_dim=gather_dim, gather_size=gather_size
            )
        )
        return vocab_parallel_cross_entropy(
            logits, target, group=info.name, vocab_size=vocab_size, vocab_start=vocab_start,
            ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, reduction=reduction,
        )  # fmt: skip
    rows = x.shape[:-1] if gather_dim is None else None
    options = _options(
        op, info, weight.shape[0], target, rows,
        vocab_size, vocab_start, ignore_index, label_smoothing, z_loss, reduction,
    )  # fmt: skip
    if gather_dim is None:
        x = copy_to_region(x, group=info.name)
    else:
        x = all_gather(x, group=info.name, dim=gather_dim, gather_size=gather_size)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    flat = target.flatten()
    loss = _ChunkedLinearCrossEntropy.apply(x.flatten(0, -2), weight, bias, flat, chunk_rows, options)
    return _reduced(loss.view(target.shape), target, ignore_index, reduction)
