"""Gradients of parameters that several ranks hold: each rank sees a part of the uses, the true gradient is
the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import functional
from .shard import Shards

__all__ = ["sum_over_holders"]


class _SumOverHolders(torch.autograd.Function):
    """Identity; backward places every gradient at its rows in the unsplit parameter, sums once, takes its own
    rows.
    """

    @staticmethod
    def forward(
        ctx: Any, group_name: str, rank: int, shards: tuple[Shards, ...], *params: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group_name, ctx.rank, ctx.shards = group_name, rank, shards
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [i for i in range(len(grads)) if ctx.needs_input_grad[3 + i]]
        summed: list[Tensor | None] = [None] * len(grads)
        if wanted:
            placed = [_place(grads[i], ctx.shards[i], ctx.rank) for i in wanted]
            flat = functional.all_reduce(
                torch.cat([part.reshape(-1) for part in placed]), group=ctx.group_name
            )
            for i, part in zip(wanted, flat.split([part.numel() for part in placed]), strict=True):
                start, end = ctx.shards[i].bounds(ctx.rank)
                summed[i] = part.view(ctx.shards[i].total, *grads[i].shape[1:])[start:end]
        return None, None, None, *summed


def _place(grad: Tensor, shards: Shards, rank: int) -> Tensor:
    start, end = shards.bounds(rank)
    return torch.cat(
        [grad.new_zeros(start, *grad.shape[1:]), grad, grad.new_zeros(shards.total - end, *grad.shape[1:])]
    )


def sum_over_holders(
    params: Sequence[Tensor | None], shards: Sequence[Shards], *, group: str, rank: int
) -> list[Tensor | None]:
    """The parameters unchanged; their gradients, rows of an unsplit parameter, are summed over the ranks that
    hold them.

    params: each [rows of this rank, ..] or None. One all-reduce of the unsplit sizes in the backward, none
    when no parameter needs a gradient.
    """
    present = {i: param for i, param in enumerate(params) if param is not None}
    out = list(params)
    if not torch.is_grad_enabled() or not any(param.requires_grad for param in present.values()):
        return out
    held = _SumOverHolders.apply(group, rank, tuple(shards[i] for i in present), *present.values())
    for i, param in zip(present, held, strict=True):
        out[i] = param
    return out
