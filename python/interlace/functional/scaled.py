"""fp8 products under their collectives: e4m3 tensors with one scale, or a scale for every row. Forward only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from .. import checks, reference
from ..groups import Group, resolve
from ..ops import OPS
from ._autograd import below_autograd, call, register, requires_grad
from ._check import check_dim, check_gather_size, refuse, refused

__all__ = ["all_gather_linear_scaled", "linear_reduce_scatter_scaled"]


def _forward_only(op: str, group_at: int) -> Callable[..., Any]:
    """The op's Autograd kernel: quantised tensors have no gradients, and none may be lost in silence."""

    def kernel(keyset: Any, *args: Any) -> Any:
        tensors = [
            t for a in args for t in (a if isinstance(a, list | tuple) else [a]) if isinstance(t, Tensor)
        ]
        if requires_grad(*tensors):
            raise ValueError(
                f"{op}: forward only, but an input requires a gradient; call it under torch.no_grad(), or use the "
                "function without _scaled for training"
            )
        return below_autograd(getattr(OPS, op).default, keyset, args[group_at], *args)

    return kernel


register("all_gather_gemm_scaled", _forward_only("all_gather_gemm_scaled", 7))
register("gemm_reduce_scatter_scaled", _forward_only("gemm_reduce_scatter_scaled", 7))


@overload
def all_gather_linear_scaled(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = ...,
    *,
    group: Group,
    gather_dim: int = ...,
    gather_size: int | None = ...,
    out_dtype: torch.dtype = ...,
) -> Tensor: ...
@overload
def all_gather_linear_scaled(
    x: Tensor,
    x_scale: Tensor,
    weight: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    bias: Sequence[Tensor | None] | None = ...,
    *,
    group: Group,
    gather_dim: int = ...,
    gather_size: int | None = ...,
    out_dtype: torch.dtype = ...,
) -> list[Tensor]: ...
def all_gather_linear_scaled(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor | Sequence[Tensor],
    weight_scale: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: Group,
    gather_dim: int = 0,
    gather_size: int | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor | list[Tensor]:
    """Gathers fp8 shards and their scales while multiplying: Y = (gather(X) * s_x) (W * s_w)^T + b.

    x [.., s_r, .., K] e4m3, x_scale fp32 of one element (of this rank's shard) or one for every row of x, weight [N, K]
    e4m3, weight_scale one element or N, bias [N] in out_dtype -> [.., sum s_r, .., N] in out_dtype; lists of weights,
    scales and biases give a list from one gather. The scales are those of torch._scaled_mm: values are multiplied by
    them. Forward only. ValueError / TypeError for what does not fit.
    """
    op = "all_gather_linear_scaled"
    info = resolve(group)
    single = isinstance(weight, Tensor)
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    scales = [weight_scale] if isinstance(weight_scale, Tensor) else list(weight_scale)
    biases = [bias] * len(weights) if bias is None or isinstance(bias, Tensor) else list(bias)
    check_dim(op, "gather_dim", gather_dim, x.dim(), info)
    refused(info, checks.check_scaled, op, x, x_scale, weights, scales, biases, out_dtype)
    if gather_dim % x.dim() == x.dim() - 1:
        refuse(info, ValueError, f"{op}: gather_dim={gather_dim} is the inner dim; its scales are by row")
    check_gather_size(op, x, gather_dim, gather_size, info)
    if info.world_size == 1:
        x_scales = reference.row_scales(x, x_scale)
        outs = [
            reference.scaled_linear(x, x_scales, w, s, b, out_dtype)
            for w, s, b in zip(weights, scales, biases, strict=True)
        ]
        return outs[0] if single else outs
    outs = call(
        OPS.all_gather_gemm_scaled.default, info.name, x, x_scale, weights, scales, biases, out_dtype,
        gather_dim, info.name, gather_size,
    )  # fmt: skip
    return outs[0] if single else outs


def linear_reduce_scatter_scaled(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group,
    scatter_dim: int = 0,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """fp8 product whose partial sums are reduced while multiplying: this rank's chunk of sum_r (X s_x) (W s_w)^T + b.

    x [.., S, .., K_r] e4m3, x_scale fp32 of one element or one for every row of x, weight [N, K_r] e4m3, weight_scale
    one element or N, bias [N] in out_dtype, added once -> [.., S_r, .., N] in out_dtype. Partial sums cross ranks in
    fp32 or bf16 and are added in fp32. Forward only.
    """
    op = "linear_reduce_scatter_scaled"
    info = resolve(group)
    check_dim(op, "scatter_dim", scatter_dim, x.dim(), info)
    refused(info, checks.check_scaled, op, x, x_scale, [weight], [weight_scale], [bias], out_dtype)
    if scatter_dim % x.dim() == x.dim() - 1:
        refuse(
            info, ValueError, f"{op}: scatter_dim={scatter_dim} is the dim of columns; scatter one of rows"
        )
    if info.world_size == 1:
        x_scales = reference.row_scales(x, x_scale)
        return reference.scaled_linear(x, x_scales, weight, weight_scale, bias, out_dtype)
    return call(
        OPS.gemm_reduce_scatter_scaled.default, info.name, x, x_scale, weight, weight_scale, bias, out_dtype,
        scatter_dim, info.name,
    )  # fmt: skip
