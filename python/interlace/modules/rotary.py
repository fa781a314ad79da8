"""Rotary position embedding (Su et al. 2021, RoFormer), in the half-split form of Llama."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_rotary", "rotary_angles"]


def rotary_angles(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """positions [.., S] -> cos, sin [.., S, head_dim], computed in fp32 and rounded once to `dtype`."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.to(torch.float32).unsqueeze(-1) * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [.., heads, S, head_dim], cos and sin [.., S, head_dim] -> x turned by its position."""
    if cos.dim() > 2:
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
