"""Dims and rows of the ops' tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["comes_first", "dense", "leads", "no_packed", "per_index"]


def comes_first(x: Tensor, dim: int) -> bool:
    """Whether what one index of `dim` selects lies together: only dims of size 1 come before it."""
    return all(size == 1 for size in x.shape[:dim])


def leads(x: Tensor, dim: int) -> bool:
    """The same for a dim of rows [.., K], which the last is not."""
    return dim < x.dim() - 1 and comes_first(x, dim)


def per_index(shape: Sequence[int], dim: int) -> int:
    """Elements per index of `dim`: equal on all ranks, whatever their lengths of it, also none."""
    return math.prod(size for at, size in enumerate(shape) if at != dim)


def dense(tensor: Tensor | None) -> Tensor | None:
    """Without gaps, as the kernels read biases, residuals and norm weights."""
    return None if tensor is None else tensor.contiguous()


def no_packed(op: str, packed_rows: Any) -> None:
    """ValueError for weights in the layout of the CPU kernels."""
    if packed_rows:
        raise ValueError(
            f"{op}: packed weights are for CPU kernels; on CUDA pass the plain weight (unpack())"
        )
