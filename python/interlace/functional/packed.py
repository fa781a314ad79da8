"""Weights in the tile engine's layout (interim)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def plain_weight(weight: Tensor, packed_rows: Sequence[int], index: int) -> Tensor:
    return weight
