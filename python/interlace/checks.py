"""What is wrong with the tensors of an op, found before any signal: ValueError or TypeError with got and expected.

Pure: the public functions tell the peers first (`functional._check`), the kernels of the CUDA key just raise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["check_norm", "check_products", "check_row_dim", "check_scaled", "wrap_dim"]


def wrap_dim(op: str, what: str, dim: int, ndim: int) -> int:
    """`dim` counted from the front, of a tensor of `ndim` dims."""
    if not -ndim <= dim < ndim:
        raise ValueError(f"{op}: {what}={dim} is out of range for a tensor of {ndim} dims")
    return dim % ndim


def check_row_dim(op: str, scatter_dim: int, ndim: int) -> int:
    """scatter_dim counted from the front; a row that is normalised lies whole on one rank."""
    dim = wrap_dim(op, "scatter_dim", scatter_dim, ndim)
    if dim == ndim - 1:
        raise ValueError(f"{op}: scatter_dim={scatter_dim} is the normalised dim; scatter one of the others")
    return dim


def check_products(
    op: str,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    inner_is_gathered: bool = False,
    cast: bool = False,
) -> None:
    """x_i [.., K_i] (or one x for all), weights [N_i, K_i], biases [N_i] or None: one device, one dtype.

    inner_is_gathered: K of the weights is that of the gathered x, which this rank does not know yet. cast: autocast is
    on and makes the dtypes equal.
    """
    for x in xs:
        if x.dim() < 1:
            raise ValueError(f"{op}: x is a scalar; expected [.., K]")
    if not weights or len(biases) != len(weights):
        raise ValueError(
            f"{op}: {len(weights)} weights, {len(biases)} biases; give at least one weight, and a bias or None for each"
        )
    first = xs[0]
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = xs[i] if len(xs) > 1 else first
        if weight.dim() != 2 or (weight.shape[1] != x.shape[-1] and not inner_is_gathered):
            raise ValueError(
                f"{op}: x {list(x.shape)} needs a weight [N, {x.shape[-1]}], got {list(weight.shape)}"
            )
        if bias is not None and list(bias.shape) != [weight.shape[0]]:
            raise ValueError(f"{op}: expected a bias [{weight.shape[0]}], got {list(bias.shape)}")
        if x is not first:
            _check_like(op, "x", x, first, cast)
        _check_like(op, "weight", weight, first, cast)
        if bias is not None:
            _check_like(op, "bias", bias, first, cast)
    for x in xs:
        if not x.is_floating_point():
            raise TypeError(f"{op}: x is {x.dtype}; expected float32, bfloat16, float16 or float64")


def _check_like(op: str, what: str, tensor: Tensor, first: Tensor, cast: bool) -> None:
    if tensor.device != first.device:
        raise ValueError(f"{op}: x is on {first.device}, {what} on {tensor.device}; move one of them")
    if tensor.dtype != first.dtype and not cast:
        raise TypeError(
            f"{op}: x is {first.dtype}, {what} is {tensor.dtype}; cast one of them or use torch.autocast"
        )


def check_norm(
    op: str,
    x: Tensor,
    out_shape: Sequence[int],
    residual: Tensor | None,
    norm_weight: Tensor,
    *,
    cast: bool = False,
) -> None:
    """residual has the shape of this rank's output, norm_weight [N]; both like x."""
    for what, tensor, expected in (
        ("residual", residual, list(out_shape)),
        ("norm_weight", norm_weight, [out_shape[-1]]),
    ):
        if tensor is None:
            continue
        if list(tensor.shape) != expected:
            raise ValueError(f"{op}: expected a {what} {expected}, got {list(tensor.shape)}")
        _check_like(op, what, tensor, x, cast)


def check_scaled(
    op: str,
    x: Tensor,
    x_scale: Tensor,
    weights: Sequence[Tensor],
    weight_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out_dtype: torch.dtype,
) -> None:
    """fp8 tensors with fp32 scales: one element, or one a row of x and of each weight; biases [N_i] in out_dtype."""
    if x.dim() < 2:
        raise ValueError(f"{op}: x has shape {list(x.shape)}; expected [.., M, K]")
    if not weights or len(weights) != len(weight_scales) or len(weights) != len(biases):
        counts = f"{len(weights)} weights, {len(weight_scales)} weight scales, {len(biases)} biases"
        raise ValueError(f"{op}: {counts}; give as many of each, at least one (None for no bias)")
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"{op}: out_dtype={out_dtype}; expected bfloat16, float16 or float32")
    _check_scale(op, "x", x, x_scale, x.shape[:-1].numel())
    for weight, scale, bias in zip(weights, weight_scales, biases, strict=True):
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{op}: x {list(x.shape)} needs a weight [N, {x.shape[-1]}], got {list(weight.shape)}"
            )
        if weight.device != x.device:
            raise ValueError(f"{op}: x is on {x.device}, weight on {weight.device}; move one of them")
        _check_scale(op, "weight", weight, scale, weight.shape[0])
        if bias is not None and (list(bias.shape) != [weight.shape[0]] or bias.dtype != out_dtype):
            raise ValueError(
                f"{op}: expected a bias [{weight.shape[0]}] in {out_dtype}, got {list(bias.shape)} in {bias.dtype}"
            )


def _check_scale(op: str, what: str, tensor: Tensor, scale: Tensor, rows: int) -> None:
    if tensor.dtype is not torch.float8_e4m3fn:
        raise TypeError(
            f"{op}: {what} is {tensor.dtype}; expected float8_e4m3fn (quantise it, see the scales)"
        )
    if scale.dtype is not torch.float32 or scale.device != tensor.device:
        raise TypeError(
            f"{op}: the scale of {what} is {scale.dtype} on {scale.device}; expected float32 on {tensor.device}"
        )
    if scale.numel() not in (1, rows):
        raise ValueError(
            f"{op}: the scale of {what} {list(tensor.shape)} has {scale.numel()} elements; expected 1, or {rows}, "
            "one a row"
        )
