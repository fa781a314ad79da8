"""Column-parallel products: all-gather + GEMM, and the local product whose input gradient is summed over the group."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ops import OPS
from ..reference import flat_rows
from ._autograd import (
    below_autograd,
    goes_as_forward,
    is_recorded,
    register,
    remember_backend,
    requires_grad,
    will_need,
)
from ._side import Beside
from ._weights import plain_weights
from .regions import as_copied, summed

__all__: list[str] = []


def weight_gradient(grad_out: Tensor, x: Tensor) -> Tensor:
    """grad_out [.., N], x [.., K] -> [N, K]: the product over all leading dims."""
    return flat_rows(grad_out).t() @ flat_rows(x)


def bias_gradient(grad_out: Tensor) -> Tensor:
    """grad_out [.., N] -> [N]: the sum over all leading dims."""
    return flat_rows(grad_out).sum(0)


def _input_gradient(grad_outs: list[Tensor], weights: list[Tensor]) -> Tensor:
    total = grad_outs[0] @ weights[0]
    for grad_out, weight in zip(grad_outs[1:], weights[1:], strict=True):
        total = total + grad_out @ weight
    return total


def reduce_scatter_input_gradient(
    grad_outs: list[Tensor], weights: list[Tensor], dim: int, group_name: str, length: int | None
) -> Tensor:
    """This rank's part of the sum over ranks and weights of grad_out @ W: its chunk, or its `length`."""
    if len(weights) == 1:
        return OPS.gemm_reduce_scatter(grad_outs[0], weights[0].t(), None, dim, group_name, None, length)
    if torch.is_grad_enabled():  # create_graph: the summed op has no gradient of its own
        return OPS.reduce_scatter(_input_gradient(grad_outs, weights), dim, group_name, length)
    return OPS.sum_gemm_reduce_scatter(grad_outs, [w.t() for w in weights], dim, group_name, length)


def _gathered_input_gradient(
    grad_gathered: Tensor | None,
    grad_outs: list[Tensor],
    weights: list[Tensor],
    dim: int,
    group_name: str,
    length: int | None,
) -> Tensor | None:
    """As above, plus what reached the gathered input itself; one collective for both."""
    if grad_gathered is None:
        if not grad_outs:
            return None
        return reduce_scatter_input_gradient(grad_outs, weights, dim, group_name, length)
    if grad_outs:
        grad_gathered = grad_gathered + _input_gradient(grad_outs, weights)
    return OPS.reduce_scatter(grad_gathered, dim, group_name, length)


def all_reduce_input_gradient(grad_outs: list[Tensor], weights: list[Tensor], group_name: str) -> Tensor:
    """The sum over ranks and weights of grad_out @ W."""
    if is_recorded():  # gemm_all_reduce takes its x as cut by columns, grad_out is; its weight would be, too
        return summed(_input_gradient(grad_outs, weights), group_name)
    if len(weights) == 1:
        return OPS.gemm_all_reduce(grad_outs[0], weights[0].t(), None, group_name)
    return OPS.sum_gemm_all_reduce(grad_outs, [w.t() for w in weights], group_name)


def _used(grads: tuple[Tensor | None, ...], weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [(g, w) for g, w in zip(grads, weights, strict=True) if g is not None]
    return [g for g, _ in pairs], [w for _, w in pairs]


class _AllGatherGemm(torch.autograd.Function):
    """Y_i = gather(X) W_i^T + b_i; dX = reduce_scatter(sum_i dY_i W_i), dW_i = dY_i^T gather(X), db_i = sum dY_i.

    Saves the shard only and gathers again for dW (or the gathered input, when the caller asked for it anyway).
    """

    @staticmethod
    def forward(
        ctx: Any, keyset: Any, options: tuple, packed_rows: list[int], x: Tensor, *tensors: Tensor | None
    ):
        n = len(tensors) // 2
        weights, biases = list(tensors[:n]), list(tensors[n:])
        gather_dim, group_name, return_gathered, gather_size = options
        gathered, outs = below_autograd(
            OPS.all_gather_gemm.default, keyset, group_name, x, weights, biases, *options, packed_rows
        )
        ctx.set_materialize_grads(False)
        ctx.options, ctx.packed_rows = options, packed_rows
        # without the total, shards may be of any length: backward's op exchanges them, no rank may guess
        ctx.length = x.shape[gather_dim] if gather_size is None else None
        ctx.has_bias = [b is not None for b in biases]
        remember_backend(ctx, x)
        ctx.save_for_backward(gathered if return_gathered else x, *weights)
        return gathered, *outs

    @staticmethod
    @goes_as_forward
    def backward(ctx: Any, grad_gathered: Tensor | None, *grads: Tensor | None):
        x, *weights = ctx.saved_tensors
        gather_dim, group_name, return_gathered, gather_size = ctx.options
        n = len(weights)
        if not return_gathered:
            grad_gathered = None  # of an empty output
        inputs = [x, *weights, *(weights[0] if has else None for has in ctx.has_bias)]
        needs = will_need(ctx, inputs)
        grad_x, grad_weights, grad_biases = None, [None] * n, [None] * n
        rows = x if return_gathered else None
        if rows is None and x.is_cuda and any(needs[1 : 1 + n]):
            # before dX, whose reduce-scatter then hides under dW
            rows = OPS.all_gather(x, gather_dim, group_name, gather_size)
        beside = Beside(x)
        if needs[0]:
            grad_outs, used = _used(grads, plain_weights(weights, ctx.packed_rows, x.shape[-1], x.dtype))
            grad_x = _gathered_input_gradient(
                grad_gathered, grad_outs, used, gather_dim, group_name, ctx.length
            )
        if any(needs[1 : 1 + n]):
            if rows is None:
                rows = OPS.all_gather(x, gather_dim, group_name, gather_size)
            for i, grad in enumerate(grads):
                if needs[1 + i] and grad is not None:
                    grad_weights[i] = beside.run(partial(weight_gradient, grad, rows), [grad, rows])
        for i, grad in enumerate(grads):
            if needs[1 + n + i] and grad is not None:
                grad_biases[i] = bias_gradient(grad)
        return None, None, None, grad_x, *grad_weights, *grad_biases


def _all_gather_gemm(
    keyset: Any,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    gather_dim: int,
    group_name: str,
    return_gathered: bool,
    gather_size: int | None = None,
    packed_rows: list[int] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    options = (gather_dim, group_name, return_gathered, gather_size)
    packed = list(packed_rows or [])
    if requires_grad(x, *weights, *biases):
        gathered, *outs = _AllGatherGemm.apply(keyset, options, packed, x, *weights, *biases)
        return gathered, outs
    return below_autograd(
        OPS.all_gather_gemm.default, keyset, group_name, x, weights, biases, *options, packed
    )


class _ColumnGemm(torch.autograd.Function):
    """Y_i = X W_i^T + b_i, all local; dX = all_reduce(sum_i dY_i W_i), dW_i = dY_i^T X, db_i = sum dY_i."""

    @staticmethod
    def forward(
        ctx: Any, keyset: Any, group_name: str, packed_rows: list[int], x: Tensor, *tensors: Tensor | None
    ):
        n = len(tensors) // 2
        weights, biases = list(tensors[:n]), list(tensors[n:])
        outs = below_autograd(
            OPS.column_gemm.default, keyset, group_name, x, weights, biases, group_name, packed_rows
        )
        ctx.set_materialize_grads(False)
        ctx.group_name, ctx.packed_rows = group_name, packed_rows
        ctx.has_bias = [b is not None for b in biases]
        remember_backend(ctx, x)
        ctx.save_for_backward(x, *weights)
        return tuple(outs)

    @staticmethod
    @goes_as_forward
    def backward(ctx: Any, *grads: Tensor | None):
        x, *weights = ctx.saved_tensors
        n = len(weights)
        inputs = [x, *weights, *(weights[0] if has else None for has in ctx.has_bias)]
        needs = will_need(ctx, inputs)
        grad_x, grad_weights, grad_biases = None, [None] * n, [None] * n
        beside = Beside(x)
        if needs[0]:
            grad_outs, used = _used(grads, plain_weights(weights, ctx.packed_rows, x.shape[-1], x.dtype))
            grad_x = all_reduce_input_gradient(grad_outs, used, ctx.group_name) if grad_outs else None
        x = as_copied(x, ctx.group_name)
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            if needs[1 + i]:
                grad_weights[i] = beside.run(partial(weight_gradient, grad, x), [grad, x])
            if needs[1 + n + i]:
                grad_biases[i] = bias_gradient(grad)
        return None, None, None, grad_x, *grad_weights, *grad_biases


def _column_gemm(
    keyset: Any,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    group_name: str,
    packed_rows: list[int] | None = None,
) -> list[Tensor]:
    packed = list(packed_rows or [])
    if requires_grad(x, *weights, *biases):
        return list(_ColumnGemm.apply(keyset, group_name, packed, x, *weights, *biases))
    return below_autograd(OPS.column_gemm.default, keyset, group_name, x, weights, biases, group_name, packed)


register("all_gather_gemm", _all_gather_gemm)
register("column_gemm", _column_gemm)
