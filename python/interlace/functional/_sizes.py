"""Lengths of the shards that the ranks of a group hold."""

from __future__ import annotations

import torch

from ..ops import OPS

__all__ = ["gathered_sizes"]


def gathered_sizes(length: int, group_name: str) -> list[int]:
    """`length` of every rank, in rank order; a collective of 8 bytes a rank."""
    return OPS.all_gather(torch.tensor([length], dtype=torch.int64), 0, group_name).tolist()
