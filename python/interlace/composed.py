"""Ops on CPU tensors that are made of fused ones: the same collective under the same product, then what follows it.

The last pass (residual, RMSNorm, scales) runs on rows that are in the cache of this core or just left it; a core is
its own copy engine, so nothing would be hidden by doing it inside.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .checks import check_row_dim
from .paths import last_path, note_path

__all__ = [
    "all_gather_gemm_scaled",
    "gemm_all_reduce_norm",
    "gemm_reduce_scatter_norm",
    "gemm_reduce_scatter_scaled",
]


def _note(op: str, then: str) -> None:
    """The path of the op inside, under the name of the op outside."""
    path = last_path()
    note_path(op, path.algorithm, f"{path.op} ({path.reason}), then {then}", path.fused)


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
    total = torch.ops.interlace.gemm_all_reduce(x, weight, bias, group_name)
    _note("gemm_all_reduce_norm", "residual and RMSNorm of its rows")
    return _normalised(total, residual, norm_weight, eps)


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
    """As gemm_all_reduce_norm for this rank's part along `scatter_dim`."""
    check_row_dim("gemm_reduce_scatter_norm", scatter_dim, x.dim())
    total = torch.ops.interlace.gemm_reduce_scatter(x, weight, bias, scatter_dim, group_name, None, length)
    _note("gemm_reduce_scatter_norm", "residual and RMSNorm of its rows")
    return _normalised(total, residual, norm_weight, eps)


def _normalised(
    total: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if residual is not None:
        total = total + residual
    return reference.rms_norm(total, norm_weight, eps), total


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
    """Y_i = gather(x * x_scale) (W_i * weight_scale_i)^T + b_i, in fp32, where fp8 is exact."""
    plain = [_scaled_weight(w, s) for w, s in zip(weights, weight_scales, strict=True)]
    wide = [None if b is None else b.float() for b in biases]
    x = x_shard.float() * reference.row_scales(x_shard, x_scale)
    _, outs = torch.ops.interlace.all_gather_gemm(
        x, plain, wide, gather_dim, group_name, False, gather_size, []
    )
    _note("all_gather_gemm_scaled", "rounded: fp8 is multiplied in fp32 here")
    return [out.to(out_dtype) for out in outs]


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
    """This rank's part of the sum over ranks of (x * x_scale) (W * weight_scale)^T, plus the bias once; in fp32."""
    out = torch.ops.interlace.gemm_reduce_scatter(
        x.float() * reference.row_scales(x, x_scale),
        _scaled_weight(weight, weight_scale),
        None if bias is None else bias.float(),
        scatter_dim,
        group_name,
        None,
        length,
    )
    _note("gemm_reduce_scatter_scaled", "rounded: fp8 is multiplied in fp32 here")
    return out.to(out_dtype)


def _scaled_weight(weight: Tensor, scale: Tensor) -> Tensor:
    return weight.float() * scale.reshape(-1, 1)
