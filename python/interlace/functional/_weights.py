"""Packed weights on their way into the ops and, for gradients, back to plain ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops import OPS
from ..packing import PackedWeight

__all__ = ["op_weights", "plain_weights"]


def op_weights(weights: Sequence[Tensor], unpack: bool) -> tuple[list[Tensor], list[int]]:
    """What the ops take: panels and their row counts when all weights are packed, else plain weights and []."""
    if not any(isinstance(w, PackedWeight) for w in weights):
        return list(weights), []
    if unpack or not all(isinstance(w, PackedWeight) for w in weights):
        return [w.unpack() if isinstance(w, PackedWeight) else w for w in weights], []
    return [w.panels for w in weights], [w.shape[0] for w in weights]


def plain_weights(
    weights: Sequence[Tensor], packed_rows: Sequence[int] | int | None, depth: int, dtype: torch.dtype
) -> list[Tensor]:
    """The [N, K] weights behind what an op took."""
    rows = [packed_rows] if isinstance(packed_rows, int) else list(packed_rows or [])
    if not rows:
        return list(weights)
    return [OPS.unpack_weight(w, n, depth).to(dtype) for w, n in zip(weights, rows, strict=True)]
