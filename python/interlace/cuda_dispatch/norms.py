"""Sums over ranks with residual and RMSNorm, on CUDA tensors."""

from __future__ import annotations

from torch import Tensor

from .. import decomposed, reference
from ..checks import check_norm, check_products, check_row_dim
from .deciding import place_of
from .launches import Epilogue
from .sums import Sum, summed

__all__ = ["gemm_all_reduce_norm", "gemm_reduce_scatter_norm"]


def gemm_all_reduce_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """(RMSNorm(s), s) with s = sum over ranks of x @ W^T + bias + residual."""
    op = "gemm_all_reduce_norm"
    check_products(op, [x], [weight], [bias])
    check_norm(op, x, [*x.shape[:-1], weight.shape[0]], residual, norm_weight)
    arguments = (x, weight, bias, residual, norm_weight, eps, group_name)
    sums, normalised = summed(
        Sum(op, [x], [weight], Epilogue(bias, residual, norm_weight, eps), place_of(group_name)),
        reference=lambda: reference.gemm_all_reduce_norm(*arguments),
        pieces=lambda overlapped: decomposed.gemm_all_reduce_norm(*arguments, overlapped=overlapped),
    )
    return normalised, sums  # type: ignore[return-value]  # an epilogue with a norm_weight normalises


def gemm_reduce_scatter_norm(
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
    """As gemm_all_reduce_norm for this rank's part along `scatter_dim`; residual is of that part."""
    op = "gemm_reduce_scatter_norm"
    check_products(op, [x], [weight], [bias])
    dim = check_row_dim(op, scatter_dim, x.dim())
    place = place_of(group_name)
    shape = [*x.shape[:-1], weight.shape[0]]
    begin, end = reference.chunk_range(x.shape[dim], place.world_size, place.rank)
    shape[dim] = end - begin if length is None else length
    check_norm(op, x, shape, residual, norm_weight)
    arguments = (x, weight, bias, residual, norm_weight, eps, scatter_dim, group_name, length)
    sums, normalised = summed(
        Sum(op, [x], [weight], Epilogue(bias, residual, norm_weight, eps), place, scatter_dim, length),
        reference=lambda: reference.gemm_reduce_scatter_norm(*arguments),
        pieces=lambda overlapped: decomposed.gemm_reduce_scatter_norm(*arguments, overlapped=overlapped),
    )
    return normalised, sums  # type: ignore[return-value]  # an epilogue with a norm_weight normalises
