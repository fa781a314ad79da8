"""Products of fp8 tensors with their scales, on CUDA tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import decomposed, reference
from ..checks import check_scaled, wrap_dim
from . import launches
from .deciding import decide, place_of, shard_sizes
from .launches import Epilogue
from .shapes import leads, per_index
from .sums import Sum, summed

__all__ = ["all_gather_gemm_scaled", "gemm_reduce_scatter_scaled"]


def all_gather_gemm_scaled(
    x_shard: Tensor,
    x_scale: Tensor,
    weights: Sequence[Tensor],
    weight_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out_dtype: torch.dtype,
    gather_dim: int,
    group_name: str,
    gather_size: int | None = None,
) -> list[Tensor]:
    """gather(x * x_scale) @ (W_i * weight_scale_i)^T + b_i; the scales of the rows travel with them."""
    op = "all_gather_gemm_scaled"
    check_scaled(op, x_shard, x_scale, weights, weight_scales, biases, out_dtype)
    dim = wrap_dim(op, "gather_dim", gather_dim, x_shard.dim())
    place = place_of(group_name)
    sizes = shard_sizes(op, x_shard.shape[dim], place, x_shard.device, gather_size)
    granule = per_index(x_shard.shape[:-1], dim)
    decision = decide(
        op, x_shard, place, rows=sum(sizes) * granule, width=x_shard.shape[-1],
        dim_leads=leads(x_shard, dim), products=len(weights), out_dtype=out_dtype,
    )  # fmt: skip
    arguments = (x_shard, x_scale, weights, weight_scales, biases, out_dtype, gather_dim, group_name)
    if decision.algorithm == "decomposed":
        return decomposed.all_gather_gemm_scaled(*arguments, gather_size)
    if decision.algorithm == "baseline":
        return reference.all_gather_gemm_scaled(*arguments, gather_size)
    shape = [*x_shard.shape[:dim], sum(sizes), *x_shard.shape[dim + 1 : -1]]
    rows = [size * granule for size in sizes]
    x, scales = (
        reference.flat_rows(x_shard),
        reference.row_scales(x_shard, x_scale).reshape(-1, 1).contiguous(),
    )
    if decision.algorithm == "fused":
        _, outs = launches.fused_gather(
            x, weights, biases, rows, place, decision.launch, out_dtype=out_dtype, want_gathered=False,
            x_scale=scales.view(-1),
            weight_scales=[by_row(w, s) for w, s in zip(weights, weight_scales, strict=True)],
        )  # fmt: skip
    else:
        whole = launches.all_gather(x.contiguous().view(torch.bfloat16), rows, place, decision.launch)
        whole_scales = launches.all_gather(scales, rows, place, decision.launch)
        outs = [
            reference.scaled_linear(whole.view(x.dtype), whole_scales, w, s, b, out_dtype)
            for w, s, b in zip(weights, weight_scales, biases, strict=True)
        ]
    return [out.view(*shape, out.shape[-1]) for out in outs]


def gemm_reduce_scatter_scaled(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    scatter_dim: int,
    group_name: str,
    length: int | None = None,
) -> Tensor:
    """This rank's part of the sum over ranks of (x * x_scale) @ (W * weight_scale)^T, plus the bias once."""
    op = "gemm_reduce_scatter_scaled"
    check_scaled(op, x, x_scale, [weight], [weight_scale], [bias], out_dtype)
    arguments = (x, x_scale, weight, weight_scale, bias, out_dtype, scatter_dim, group_name, length)
    scales = reference.row_scales(x, x_scale).reshape(-1, 1).contiguous()
    scale = by_row(weight, weight_scale)
    call = Sum(
        op, [x], [weight], Epilogue(bias), place_of(group_name), scatter_dim, length, scales, scale, out_dtype,
    )  # fmt: skip
    return summed(
        call,
        reference=lambda: reference.gemm_reduce_scatter_scaled(*arguments),
        pieces=lambda overlapped: decomposed.gemm_reduce_scatter_scaled(*arguments, overlapped=overlapped),
    )[0]


def by_row(weight: Tensor, scale: Tensor) -> Tensor:
    """A scale for every row of a weight [N, K]: the kernels take scales of x and weight both by row, or neither."""
    return scale.reshape(-1).expand(weight.shape[0]).contiguous()
