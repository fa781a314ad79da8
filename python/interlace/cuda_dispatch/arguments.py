"""Checks of an op's tensors before any signal, and the shapes the kernels read.

A mistake that all ranks make, they all raise for, and the group goes on. Peers of a rank that is alone with its mistake
raise CollectiveTimeout: stopping their kernels at once would end the group for a ValueError that can be caught.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["aligned_matrices", "aligned_rows", "check_norm", "check_products", "check_scaled"]

_TRANSFER_BYTES = 16  # TMA and cp.async read rows that start at multiples of it


def check_products(
    op: str,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    inner: bool = False,
) -> None:
    """x_i [.., K_i], weights [N, K_i], biases [N] or None: one device and dtype. inner: K is the gathered x's."""
    if not weights or len(biases) != len(weights):
        raise ValueError(
            f"{op}: {len(weights)} weights, {len(biases)} biases; give one each, at least one weight"
        )
    first = xs[0]
    for x in xs:
        if x.dim() < 1:
            raise ValueError(f"{op}: x is a scalar; expected [.., K]")
        if not x.is_floating_point():
            raise TypeError(f"{op}: x is {x.dtype}; expected float32, bfloat16, float16 or float64")
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = xs[i] if len(xs) > 1 else first
        if weight.dim() != 2 or (weight.shape[1] != x.shape[-1] and not inner):
            raise ValueError(
                f"{op}: x {list(x.shape)} needs a weight [N, {x.shape[-1]}], got {list(weight.shape)}"
            )
        if bias is not None and list(bias.shape) != [weight.shape[0]]:
            raise ValueError(f"{op}: expected a bias [{weight.shape[0]}], got {list(bias.shape)}")
        for what, tensor in (("x", x), ("weight", weight), ("bias", bias)):
            if tensor is not None:
                _check_like(op, what, tensor, first)


def _check_like(op: str, what: str, tensor: Tensor, first: Tensor) -> None:
    if tensor.device != first.device:
        raise ValueError(f"{op}: x is on {first.device}, {what} on {tensor.device}; move one of them")
    if tensor.dtype != first.dtype:
        raise TypeError(
            f"{op}: x is {first.dtype}, {what} is {tensor.dtype}; cast one of them or use torch.autocast"
        )


def check_norm(
    op: str, x: Tensor, out_shape: Sequence[int], residual: Tensor | None, norm_weight: Tensor
) -> None:
    """residual has the shape of this rank's output, norm_weight [N]."""
    if residual is not None and list(residual.shape) != list(out_shape):
        raise ValueError(f"{op}: expected a residual {list(out_shape)}, got {list(residual.shape)}")
    if list(norm_weight.shape) != [out_shape[-1]]:
        raise ValueError(f"{op}: expected a norm_weight [{out_shape[-1]}], got {list(norm_weight.shape)}")
    for what, tensor in (("residual", residual), ("norm_weight", norm_weight)):
        if tensor is not None:
            _check_like(op, what, tensor, x)


def check_scaled(
    op: str, x: Tensor, x_scale: Tensor, weights: Sequence[Tensor], weight_scales: Sequence[Tensor]
) -> None:
    """fp8 tensors with fp32 scales: one element or one a row of x, one element or one a row of each weight."""
    rows = x.shape[:-1].numel()
    pairs = [("x", x, x_scale, rows)]
    if len(weights) != len(weight_scales):
        raise ValueError(f"{op}: {len(weights)} weights but {len(weight_scales)} weight_scales")
    pairs += [("weight", w, s, w.shape[0]) for w, s in zip(weights, weight_scales, strict=True)]
    for what, tensor, scale, count in pairs:
        if tensor.dtype is not torch.float8_e4m3fn:
            raise TypeError(
                f"{op}: {what} is {tensor.dtype}; expected float8_e4m3fn (quantise it, see the scales)"
            )
        if scale.dtype is not torch.float32 or scale.device != tensor.device:
            raise TypeError(
                f"{op}: the scale of {what} is {scale.dtype} on {scale.device}; expected float32 on {tensor.device}"
            )
        if scale.numel() not in (1, count):
            raise ValueError(
                f"{op}: the scale of {what} {list(tensor.shape)} has {scale.numel()} elements; expected 1, or "
                f"{count}, one a row"
            )


def aligned_rows(x: Tensor) -> Tensor:
    """x [.., K] -> [M, K] as the kernels read it: inner stride 1, rows at multiples of 16 bytes. Copies when needed.

    What one rank has to copy another need not: nothing that the ranks decide together depends on it.
    """
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.flatten(0, -2)
    return rows if _readable(rows) else _padded(rows)


def aligned_matrices(weights: Sequence[Tensor]) -> list[Tensor]:
    """Weights [N, K] as one launch reads them: all by rows of K, or all by rows of N; copied where they are neither.

    fp8 has one layout: wgmma reads rows of K only.
    """
    if weights[0].element_size() > 1 and all(_readable(w.t()) for w in weights):
        return list(weights)
    return [w if _readable(w) else _padded(w) for w in weights]


def _readable(matrix: Tensor) -> bool:
    inner = matrix.stride(1) == 1 or matrix.shape[1] == 1
    rows_apart = matrix.stride(0) * matrix.element_size()
    far = matrix.shape[0] <= 1 or (rows_apart % _TRANSFER_BYTES == 0 and matrix.stride(0) >= matrix.shape[1])
    return inner and far and _address(matrix) % _TRANSFER_BYTES == 0


def _address(tensor: Tensor) -> int:
    return tensor.storage_offset() * tensor.element_size() + tensor.untyped_storage().data_ptr()


def _padded(matrix: Tensor) -> Tensor:
    step = _TRANSFER_BYTES // matrix.element_size()
    columns = -(-matrix.shape[1] // step) * step
    copy = matrix.new_empty((matrix.shape[0], columns))[:, : matrix.shape[1]]
    return copy.copy_(matrix)
