"""Products and the exchange of features for tokens: `linear_all_to_all` and `all_to_all_linear`.

Sequence-parallel attention by heads (Jacobs et al., arXiv 2309.14509) projects its own tokens and then gives every rank
the heads that it works on. Here the product is written where the peers read it, so that the exchange costs one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import translated
from ..groups import Group, resolve
from ._check import autocast, refuse
from ._exchange_ops import Features, flat

__all__ = ["all_to_all_linear", "linear_all_to_all"]


class _LinearAllToAll(torch.autograd.Function):
    """Y_i = exchange(X W_i^T + b_i); dY comes back by the opposite exchange: dX = sum dY_i W_i, dW_i = dY_i^T X."""

    @staticmethod
    def forward(
        ctx: Any, features: list[int], group_name: str, count: int, x: Tensor, *params: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = list(params[:count]), list(params[count:])
        ctx.save_for_backward(x, *weights)
        ctx.features, ctx.group_name, ctx.count = features, group_name, count
        ctx.biased = [bias is not None for bias in biases]
        return tuple(torch.ops.interlace.gemm_all_to_all(x, weights, biases, features, group_name))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        totals = [weight.shape[0] for weight in weights]
        wholes = torch.ops.interlace.exchange_features(list(grads), ctx.features, totals, ctx.group_name)
        grad_x = None
        if needs[0]:
            grad_x = sum(whole @ weight for whole, weight in zip(wholes, weights, strict=True))
        rows = x.flatten(0, -2)
        grad_weights = [
            whole.flatten(0, -2).t() @ rows if needs[1 + i] else None for i, whole in enumerate(wholes)
        ]
        grad_biases = [
            whole.flatten(0, -2).sum(0) if ctx.biased[i] and needs[1 + ctx.count + i] else None
            for i, whole in enumerate(wholes)
        ]
        return None, None, None, grad_x, *grad_weights, *grad_biases


class _AllToAllLinear(torch.autograd.Function):
    """Y = exchange(X) W^T + b; dX = exchange back(dY W), dW = dY^T exchange(X)."""

    @staticmethod
    def forward(
        ctx: Any, features: list[int], group_name: str, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        out, whole = torch.ops.interlace.all_to_all_gemm(x, weight, bias, features, group_name)
        ctx.save_for_backward(whole, weight)
        ctx.features, ctx.group_name, ctx.biased = features, group_name, bias is not None
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        whole, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        grad_x = None
        if needs[0]:
            (grad_x,) = torch.ops.interlace.gemm_all_to_all(
                grad, [weight.t()], [None], ctx.features, ctx.group_name
            )
        rows = grad.flatten(0, -2)
        grad_weight = rows.t() @ whole.flatten(0, -2) if needs[1] else None
        grad_bias = rows.sum(0) if ctx.biased and needs[2] else None
        return None, None, grad_x, grad_weight, grad_bias


def linear_all_to_all(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    features: Sequence[Features],
    group: Group,
) -> list[Tensor]:
    """Products of the own tokens, of which every rank gets its features for all tokens: Y_i = exchange(X W_i^T + b_i).

    x [B, s, K] of this rank; weights [N_i, K], the same on every rank; features: for every weight the rows
    [begin, end) that each rank is to have, possibly the same rows on several ranks -> [B, R s, end - begin] of this
    rank, tokens in rank order. Every rank has the same s. Backward: gradients of all ranks for the own tokens come
    back in one exchange; rows that several ranks had are summed.
    Raises ValueError or TypeError, on every rank, when shapes do not fit.
    """
    info = resolve(group)
    reason = _misfit(x, weights, biases, features, info.world_size)
    if reason:
        refuse(info, ValueError, f"linear_all_to_all: {reason}")
    x, *params = autocast(x, *weights, *biases)  # type: ignore[assignment]
    try:
        with torch.autocast(x.device.type, enabled=False):
            return list(_LinearAllToAll.apply(flat(features), info.name, len(weights), x, *params))
    except RuntimeError as error:
        raise translated(error) from None


def all_to_all_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, features: Features, group: Group
) -> Tensor:
    """Features of all ranks for the own tokens, and their product: Y = exchange(X) W^T + b.

    x [B, R s, n] has this rank's features of all tokens, in rank order; features: the columns [begin, end) of the
    weight [N, K] that each rank has, a partition of K in rank order -> [B, s, N] of this rank's tokens.
    Raises ValueError or TypeError, on every rank, when shapes do not fit.
    """
    info = resolve(group)
    begin, end = features[info.rank]
    ends = [0, *(e for _, e in features)]
    if x.dim() != 3 or x.shape[2] != end - begin or x.shape[1] % info.world_size:
        refuse(
            info, ValueError,
            f"all_to_all_linear: x is {list(x.shape)}; expected [B, tokens of {info.world_size} ranks, {end - begin}]",
        )  # fmt: skip
    if any(b != e for (b, _), e in zip(features, ends, strict=False)) or ends[-1] != weight.shape[1]:
        refuse(
            info, ValueError,
            f"all_to_all_linear: features {list(features)} are no partition of the {weight.shape[1]} columns of "
            "the weight in rank order",
        )  # fmt: skip
    x, weight, bias = autocast(x, weight, bias)  # type: ignore[assignment]
    try:
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = _AllToAllLinear.apply(flat([features]), info.name, x, weight, bias)
    except RuntimeError as error:
        raise translated(error) from None
    return out


def _misfit(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    features: Sequence[Features],
    size: int,
) -> str:
    """Why the arguments do not fit together; empty when they do."""
    if x.dim() != 3:
        return f"x is {list(x.shape)}; expected [B, tokens, K]"
    if not len(weights) == len(biases) == len(features):
        return f"{len(weights)} weights, {len(biases)} biases, {len(features)} lists of features; expected as many"
    for weight, bias, mine in zip(weights, biases, features, strict=True):
        if weight.dim() != 2 or weight.shape[1] != x.shape[2]:
            return f"x {list(x.shape)} needs a weight [N, {x.shape[2]}], got {list(weight.shape)}"
        if bias is not None and bias.shape != weight.shape[:1]:
            return f"a weight {list(weight.shape)} with a bias {list(bias.shape)}"
        if len(mine) != size or any(not 0 <= b <= e <= weight.shape[0] for b, e in mine):
            return (
                f"features {list(mine)} are no slices of {weight.shape[0]} rows, one for each of {size} ranks"
            )
    return ""
