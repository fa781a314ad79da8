"""Row-parallel products with residual and RMSNorm behind their sum: what stands between two blocks of a transformer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import checks, reference
from ..groups import Group, GroupInfo, resolve
from ..ops import OPS
from ._autograd import (
    below_autograd,
    call,
    goes_as_forward,
    register,
    remember_backend,
    requires_grad,
    will_need,
)
from ._check import autocast, check_product, refused
from ._weights import op_weights
from .column import bias_gradient, weight_gradient

__all__ = ["linear_all_reduce_norm", "linear_reduce_scatter_norm"]


def _norm_gradients(
    grad_normalised: Tensor | None, grad_total: Tensor | None, total: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Of s and of norm_weight (this rank's rows), from the gradients of RMSNorm(s) and of s itself."""
    if grad_normalised is None:
        return (total.new_zeros(total.shape) if grad_total is None else grad_total), None
    wide = total if total.dtype is torch.float64 else total.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit = wide * scale  # the rows before norm_weight
    grad_weight = bias_gradient(grad_normalised * unit).to(norm_weight.dtype)
    inner = grad_normalised * norm_weight.to(wide.dtype)
    grad = scale * (inner - unit * (inner * unit).mean(-1, keepdim=True))
    return (grad if grad_total is None else grad + grad_total).to(total.dtype), grad_weight


class _GemmAllReduceNorm(torch.autograd.Function):
    """S = sum_r X W^T + b + R, Y = RMSNorm(S) g; dS from dY and dS', dX = dS W, dW = dS^T X, db = sum dS, dR = dS.

    All local: dY and dS' are equal on all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        keyset: Any,
        eps: float,
        group_name: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        norm_weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        normalised, total = below_autograd(
            OPS.gemm_all_reduce_norm.default, keyset, group_name, x, weight, bias, residual, norm_weight, eps,
            group_name,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.has = eps, (bias is not None, residual is not None)
        remember_backend(ctx, x)
        ctx.save_for_backward(x, weight, norm_weight, total)
        return normalised, total

    @staticmethod
    @once_differentiable
    @goes_as_forward
    def backward(ctx: Any, grad_normalised: Tensor | None, grad_total: Tensor | None):
        x, weight, norm_weight, total = ctx.saved_tensors
        needs = will_need(ctx, [x, weight, *_given(weight, ctx.has), norm_weight])
        grad, grad_norm_weight = _norm_gradients(grad_normalised, grad_total, total, norm_weight, ctx.eps)
        return (
            None, None, None,
            grad @ weight if needs[0] else None,
            weight_gradient(grad, x) if needs[1] else None,
            bias_gradient(grad) if needs[2] else None,
            grad if needs[3] else None,
            grad_norm_weight if needs[4] else None,
        )  # fmt: skip


def _given(stand_in: Tensor, has: tuple[bool, bool]) -> list[Tensor | None]:
    """Something for each optional input that was given, as will_need counts them."""
    return [stand_in if given else None for given in has]


class _GemmReduceScatterNorm(torch.autograd.Function):
    """As _GemmAllReduceNorm for the rows that this rank keeps; dX = gather(dS) W, dW = gather(dS)^T X.

    db and dg are the full sums over all rows, on every rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        keyset: Any,
        options: tuple,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        norm_weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        normalised, total = below_autograd(
            OPS.gemm_reduce_scatter_norm.default, keyset, options[2], x, weight, bias, residual, norm_weight,
            *options,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.options, ctx.has = options, (bias is not None, residual is not None)
        remember_backend(ctx, x)
        ctx.save_for_backward(x, weight, norm_weight, total)
        return normalised, total

    @staticmethod
    @once_differentiable
    @goes_as_forward
    def backward(ctx: Any, grad_normalised: Tensor | None, grad_total: Tensor | None):
        x, weight, norm_weight, total = ctx.saved_tensors
        eps, scatter_dim, group_name, length = ctx.options
        needs = will_need(ctx, [x, weight, *_given(weight, ctx.has), norm_weight])
        grad, grad_norm_weight = _norm_gradients(grad_normalised, grad_total, total, norm_weight, eps)
        dim = scatter_dim % x.dim()
        size = x.shape[dim] if length is None else None
        grad_x = gathered = None
        if needs[0]:
            gathered, (grad_x,) = OPS.all_gather_gemm(
                grad, [weight.t()], [None], dim, group_name, needs[1] or needs[2], size
            )
        elif needs[1] or needs[2]:
            gathered = OPS.all_gather(grad, dim, group_name, size)
        if needs[4]:
            own = norm_weight.new_zeros(norm_weight.shape) if grad_norm_weight is None else grad_norm_weight
            grad_norm_weight = OPS.all_reduce(own, group_name)
        return (
            None, None,
            grad_x,
            weight_gradient(gathered, x) if needs[1] else None,
            bias_gradient(gathered) if needs[2] else None,
            grad if needs[3] else None,
            grad_norm_weight if needs[4] else None,
        )  # fmt: skip


def _gemm_all_reduce_norm(
    keyset: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    tensors = (x, weight, bias, residual, norm_weight)
    if requires_grad(*tensors):
        return _GemmAllReduceNorm.apply(keyset, eps, group_name, *tensors)
    op = OPS.gemm_all_reduce_norm.default
    return below_autograd(op, keyset, group_name, *tensors, eps, group_name)


def _gemm_reduce_scatter_norm(
    keyset: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    scatter_dim: int,
    group_name: str,
    length: int | None = None,
) -> tuple[Tensor, Tensor]:
    tensors, options = (x, weight, bias, residual, norm_weight), (eps, scatter_dim, group_name, length)
    if requires_grad(*tensors):
        return _GemmReduceScatterNorm.apply(keyset, options, *tensors)
    op = OPS.gemm_reduce_scatter_norm.default
    return below_autograd(op, keyset, group_name, *tensors, *options)


register("gemm_all_reduce_norm", _gemm_all_reduce_norm)
register("gemm_reduce_scatter_norm", _gemm_reduce_scatter_norm)


def _plain_checked(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor,
    shape: list[int],
    info: GroupInfo,
) -> Tensor:
    """The weight as the ops take it."""
    check_product(op, x, [weight], [bias], info, inner_is_gathered=False)
    cast = torch.is_autocast_enabled(x.device.type)
    refused(info, checks.check_norm, op, x, shape, residual, norm_weight, cast=cast)
    return op_weights([weight], True)[0][0]


def _local(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """A world of one: nothing to communicate."""
    x, weight, bias, residual, norm_weight = autocast(x, weight, bias, residual, norm_weight)
    total = F.linear(x, weight, bias)
    total = total if residual is None else total + residual
    return reference.rms_norm(total, norm_weight, eps), total


def linear_all_reduce_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float = 1e-6,
    *,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """Row-parallel product, residual and RMSNorm in one: S = sum_r X W^T + b + R, Y = S / sqrt(mean(S^2) + eps) * g.

    x [.., K_r], weight [N, K_r], bias [N] or None, residual [.., N] equal on all ranks or None, norm_weight [N]
    -> (Y [.., N], S [.., N]), both equal on all ranks; S is the next residual. All tensors have one dtype, under
    autocast its dtype. The gradients of Y and S are taken to be equal on all ranks, so backward needs no communication:
    dX = dS W, dW = dS^T X, db = sum dS, dR = dS. Differentiable once. ValueError / TypeError for shapes, devices or
    dtypes that do not fit.
    """
    op = "linear_all_reduce_norm"
    info = resolve(group)
    shape = [*x.shape[:-1], weight.shape[0]]
    plain = _plain_checked(op, x, weight, bias, residual, norm_weight, shape, info)
    if info.world_size == 1:
        return _local(x, plain, bias, residual, norm_weight, eps)
    return call(
        OPS.gemm_all_reduce_norm.default, info.name, x, plain, bias, residual, norm_weight, eps, info.name
    )


def linear_reduce_scatter_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float = 1e-6,
    *,
    group: Group,
    scatter_dim: int = 0,
) -> tuple[Tensor, Tensor]:
    """As linear_all_reduce_norm, but each rank keeps its chunk of `scatter_dim` (sequence parallel).

    x [.., S, .., K_r], residual [.., S_r, .., N] -> (Y, S) [.., S_r, .., N]. dX = gather(dS) W, dW = gather(dS)^T X;
    the gradients of bias and norm_weight are the full sums over all rows, on every rank.
    """
    op = "linear_reduce_scatter_norm"
    info = resolve(group)
    refused(info, checks.check_row_dim, op, scatter_dim, x.dim())
    dim = scatter_dim % x.dim()
    shape = [*x.shape[:-1], weight.shape[0]]
    begin, end = reference.chunk_range(x.shape[dim], info.world_size, info.rank)
    shape[dim] = end - begin
    plain = _plain_checked(op, x, weight, bias, residual, norm_weight, shape, info)
    if info.world_size == 1:
        return _local(x, plain, bias, residual, norm_weight, eps)
    return call(
        OPS.gemm_reduce_scatter_norm.default, info.name, x, plain, bias, residual, norm_weight, eps,
        scatter_dim, info.name,
    )  # fmt: skip
