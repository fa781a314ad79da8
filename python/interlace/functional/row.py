"""Row-parallel products: GEMM + reduce-scatter and GEMM + all-reduce."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import OPS
from ._autograd import (
    below_autograd,
    goes_as_forward,
    is_recorded,
    register,
    remember_backend,
    requires_grad,
    will_need,
)
from ._weights import plain_weights
from .column import bias_gradient, weight_gradient
from .regions import as_copied, summed

__all__: list[str] = []


class _GemmReduceScatter(torch.autograd.Function):
    """Y = part(sum_r X W^T) + b; dX = gather(dY) W, dW = gather(dY)^T X, db = sum gather(dY): one gather for all.

    options: scatter_dim, group_name, packed_rows, length, as the op takes them.
    """

    @staticmethod
    def forward(ctx: Any, keyset: Any, options: tuple, x: Tensor, weight: Tensor, bias: Tensor | None):
        ctx.options, ctx.has_bias = options, bias is not None
        remember_backend(ctx, x)
        ctx.save_for_backward(x, weight)
        return below_autograd(OPS.gemm_reduce_scatter.default, keyset, options[1], x, weight, bias, *options)

    @staticmethod
    @goes_as_forward
    def backward(ctx: Any, grad_out: Tensor):
        x, weight = ctx.saved_tensors
        scatter_dim, group_name, packed_rows, length = ctx.options
        dim = scatter_dim % x.dim()
        need_x, need_weight, need_bias = will_need(ctx, [x, weight, weight if ctx.has_bias else None])
        (plain,) = plain_weights([weight], packed_rows, x.shape[-1], x.dtype)
        size = plain.shape[0] if dim == x.dim() - 1 else x.shape[dim]
        size = size if length is None else None
        grad_x = grad_weight = grad_bias = gathered = None
        if need_x:
            gathered, (grad_x,) = OPS.all_gather_gemm(
                grad_out, [plain.t()], [None], dim, group_name, need_weight or need_bias, size
            )
        elif need_weight or need_bias:
            gathered = OPS.all_gather(grad_out, dim, group_name, size)
        if need_weight:
            grad_weight = weight_gradient(gathered, x)
        if need_bias:
            recorded = is_recorded() and dim != x.dim() - 1
            # equal on all ranks: recorded, the sum must say so to what reads its gradient
            grad_bias = summed(bias_gradient(grad_out), group_name) if recorded else bias_gradient(gathered)
        return None, None, grad_x, grad_weight, grad_bias


def _gemm_reduce_scatter(
    keyset: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scatter_dim: int,
    group_name: str,
    packed_rows: int | None = None,
    length: int | None = None,
) -> Tensor:
    options = (scatter_dim, group_name, packed_rows, length)
    if requires_grad(x, weight, bias):
        return _GemmReduceScatter.apply(keyset, options, x, weight, bias)
    return below_autograd(OPS.gemm_reduce_scatter.default, keyset, group_name, x, weight, bias, *options)


class _GemmAllReduce(torch.autograd.Function):
    """Y = sum_r X W^T + b; dX = dY W, dW = dY^T X, db = sum dY: all local, dY being equal on all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: Any,
        group_name: str,
        packed_rows: int | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ):
        ctx.group_name, ctx.packed_rows, ctx.has_bias = group_name, packed_rows, bias is not None
        remember_backend(ctx, x)
        ctx.save_for_backward(x, weight)
        return below_autograd(
            OPS.gemm_all_reduce.default, keyset, group_name, x, weight, bias, group_name, packed_rows
        )

    @staticmethod
    @goes_as_forward
    def backward(ctx: Any, grad_out: Tensor):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = will_need(ctx, [x, weight, weight if ctx.has_bias else None])
        grad_x = grad_weight = grad_bias = None
        if need_bias:
            grad_bias = bias_gradient(grad_out)
        grad_out = as_copied(grad_out, ctx.group_name)
        if need_x:
            (plain,) = plain_weights([weight], ctx.packed_rows, x.shape[-1], x.dtype)
            grad_x = grad_out @ plain
        if need_weight:
            grad_weight = weight_gradient(grad_out, x)
        return None, None, None, grad_x, grad_weight, grad_bias


def _gemm_all_reduce(
    keyset: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_name: str,
    packed_rows: int | None = None,
) -> Tensor:
    if requires_grad(x, weight, bias):
        return _GemmAllReduce.apply(keyset, group_name, packed_rows, x, weight, bias)
    return below_autograd(
        OPS.gemm_all_reduce.default, keyset, group_name, x, weight, bias, group_name, packed_rows
    )


register("gemm_reduce_scatter", _gemm_reduce_scatter)
register("gemm_all_reduce", _gemm_all_reduce)
