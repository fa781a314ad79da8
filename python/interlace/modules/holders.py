"""Gradients of parameters that several ranks hold: each rank sees a part of the uses, the true gradient is
the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional import regions
from .shard import Shards

__all__ = ["sum_over_holders"]


class _SumOverHolders(torch.autograd.Function):
    """Identity; backward sums, at their places in the unsplit parameter, the gradients of the rows that several
    ranks hold.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group_name: str,
        rank: int,
        shards: tuple[Shards, ...],
        dims: tuple[int, ...],
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group_name, ctx.rank, ctx.shards, ctx.dims = group_name, rank, shards, dims
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [i for i in range(len(grads)) if ctx.needs_input_grad[4 + i]]
        summed: list[Tensor | None] = [None] * len(grads)
        if wanted:
            places = {i: _shared_rows(ctx.shards[i], ctx.rank) for i in wanted}
            placed = [_place(grads[i].movedim(ctx.dims[i], 0), ctx.shards[i], places[i]) for i in wanted]
            flat = regions.summed(torch.cat([part.reshape(-1) for part in placed]), ctx.group_name)
            for i, whole, part in zip(
                wanted, placed, flat.split([part.numel() for part in placed]), strict=True
            ):
                rows = grads[i].movedim(ctx.dims[i], 0)
                summed[i] = _taken(rows, part.view_as(whole), places[i]).movedim(0, ctx.dims[i])
        return None, None, None, None, *summed


def _shared_rows(shards: Shards, rank: int) -> list[tuple[int, int, int]]:
    """Rows of `rank` that others hold too: (place in its shard, place among the shared rows, how many)."""
    found = []
    local = 0
    for start, end in shards.ranges(rank):
        place = 0
        for low, high in shards.shared_ranges():
            first, last = max(start, low), min(end, high)
            if first < last:
                found.append((local + first - start, place + first - low, last - first))
            place += high - low
        local += end - start
    return found


def _place(grad: Tensor, shards: Shards, rows: list[tuple[int, int, int]]) -> Tensor:
    """The gradient of the shared rows, zero where this rank holds none."""
    whole = grad.new_zeros(sum(end - start for start, end in shards.shared_ranges()), *grad.shape[1:])
    for local, place, count in rows:
        whole[place : place + count] = grad[local : local + count]
    return whole


def _taken(grad: Tensor, whole: Tensor, rows: list[tuple[int, int, int]]) -> Tensor:
    """The gradient of this rank's rows, those that are shared as summed."""
    parts, done = [], 0
    for local, place, count in sorted(rows):
        parts += [grad[done:local], whole[place : place + count]]
        done = local + count
    return torch.cat([*parts, grad[done:]])


def sum_over_holders(
    params: Sequence[Tensor | None],
    shards: Sequence[Shards],
    *,
    group: str,
    rank: int,
    dims: Sequence[int] | None = None,
) -> list[Tensor | None]:
    """The parameters unchanged; their gradients, rows of an unsplit parameter, are summed over the ranks that
    hold them.

    params: each [rows of this rank, ..] or None; dims: where the rows of each are, default 0. One all-reduce, of the
    rows that several ranks hold, in the backward; none when no parameter needs a gradient.
    """
    present = {i: param for i, param in enumerate(params) if param is not None}
    out = list(params)
    if not torch.is_grad_enabled() or not any(param.requires_grad for param in present.values()):
        return out
    places = tuple(0 if dims is None else dims[i] for i in present)
    held = _SumOverHolders.apply(group, rank, tuple(shards[i] for i in present), places, *present.values())
    for i, param in zip(present, held, strict=True):
        out[i] = param
    return out
