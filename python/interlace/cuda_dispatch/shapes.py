"""Dims and rows of the ops' tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["dense", "flat_rows", "granule_of", "leads", "no_packed", "wrap_dim"]


def wrap_dim(op: str, what: str, dim: int, x: Tensor) -> int:
    """`dim` counted from the front. ValueError when x has no such dim."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{op}: {what}={dim} is out of range for a tensor of {x.dim()} dims")
    return dim % x.dim()


def leads(x: Tensor, dim: int) -> bool:
    """Whether the rows [.., K] of one index of `dim` lie together: only dims of size 1 come before it."""
    return dim < x.dim() - 1 and all(size == 1 for size in x.shape[:dim])


def granule_of(x: Tensor, dim: int) -> int:
    """Rows [K] of x per index of `dim`; 1 for the dim of columns."""
    rows = x.shape[:-1].numel()
    return rows // x.shape[dim] if dim < x.dim() - 1 and x.shape[dim] else _without(x, dim)


def _without(x: Tensor, dim: int) -> int:
    sizes = [size for d, size in enumerate(x.shape[:-1]) if d != dim]
    product = 1
    for size in sizes:
        product *= size
    return product


def flat_rows(x: Tensor) -> Tensor:
    """x [.., K] -> [M, K]; flatten and not reshape, which cannot tell the rows of an empty tensor."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def dense(tensor: Tensor | None) -> Tensor | None:
    """Without gaps, as the kernels read biases, residuals and norm weights."""
    return None if tensor is None else tensor.contiguous()


def no_packed(op: str, packed_rows: Any) -> None:
    """ValueError for weights in the layout of the CPU kernels."""
    if packed_rows:
        raise ValueError(
            f"{op}: packed weights are for CPU kernels; on CUDA pass the plain weight (unpack())"
        )
