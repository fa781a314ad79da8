"""Where tensor-parallel code begins and ends (Shoeybi et al. 2019, f and g; Korthikanti et al. 2022).

Four identities with a collective in one direction. They assume what tensor parallelism assumes: outside the region
activations, and so their gradients, are equal on all ranks. They are pairs: the backward of one is the forward of the
other, so gradients of gradients are right as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..groups import Group, resolve
from ..ops import OPS
from ..reference import chunk_range
from ._autograd import is_recorded
from ._check import check_dim
from ._sizes import gathered_sizes

__all__ = [
    "copy_to_region",
    "gather_from_region",
    "gathered_input",
    "reduce_from_region",
    "scatter_to_region",
]


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor):
        if is_recorded():
            return _ReduceFromRegion.apply(grad_out, ctx.group_name), None
        return OPS.all_reduce(grad_out, ctx.group_name), None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return OPS.all_reduce(x, group_name)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor):
        return _CopyToRegion.apply(grad_out, ctx.group_name) if is_recorded() else grad_out, None


class _ScatterToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group_name: str, begin: int, length: int) -> Tensor:
        ctx.dim, ctx.group_name, ctx.size, ctx.begin = dim, group_name, x.shape[dim], begin
        return x.narrow(dim, begin, length).contiguous()

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor):
        whole = OPS.all_gather(grad_out.detach(), ctx.dim, ctx.group_name, ctx.size)
        if is_recorded():
            whole = _GatheredInput.apply(grad_out, whole, ctx.dim, ctx.begin, ctx.group_name)
        return whole, None, None, None, None


class _GatherFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group_name: str, size: int | None, rank: int, world_size: int
    ) -> Tensor:
        out = OPS.all_gather(x, dim, group_name, size)
        length = x.shape[dim]
        if size is not None:
            begin = chunk_range(size, world_size, rank)[0]
        elif torch.compiler.is_compiling():
            begin = rank * length  # even shards: what the fake tensor assumed
        else:
            begin = sum(gathered_sizes(length, group_name)[:rank])
        ctx.place = dim, group_name, begin, length
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor):
        return _own_part(grad_out, *ctx.place), None, None, None, None, None


class _GatheredInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gathered: Tensor, dim: int, begin: int, group_name: str) -> Tensor:
        ctx.place = dim, group_name, begin, x.shape[dim]
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor):
        return _own_part(grad_out, *ctx.place), None, None, None, None


def _own_part(grad_out: Tensor, dim: int, group_name: str, begin: int, length: int) -> Tensor:
    """This rank's part of a gradient that is equal on all ranks."""
    if is_recorded():
        return _ScatterToRegion.apply(grad_out, dim, group_name, begin, length)
    return grad_out.narrow(dim, begin, length).contiguous()


def as_copied(x: Tensor, group_name: str) -> Tensor:
    """copy_to_region where a backward is recorded: x is equal on all ranks, what is made of it here is not."""
    return _CopyToRegion.apply(x, group_name) if is_recorded() else x


def summed(x: Tensor, group_name: str) -> Tensor:
    """reduce_from_region within a backward that may be recorded: the sum is equal on all ranks, and so its gradient."""
    return _ReduceFromRegion.apply(x, group_name) if is_recorded() else OPS.all_reduce(x, group_name)


def copy_to_region(x: Tensor, *, group: Group) -> Tensor:
    """Identity forward; backward dX = all_reduce(dY). Before work that differs between ranks."""
    info = resolve(group)
    return x if info.world_size == 1 else _CopyToRegion.apply(x, info.name)


def reduce_from_region(x: Tensor, *, group: Group) -> Tensor:
    """Sum over the ranks forward; backward dX = dY. After work that left partial sums."""
    info = resolve(group)
    return x if info.world_size == 1 else _ReduceFromRegion.apply(x, info.name)


def scatter_to_region(x: Tensor, *, group: Group, dim: int) -> Tensor:
    """x [.., S, ..] -> this rank's chunk of `dim`; backward dX = all_gather(dY)."""
    info = resolve(group)
    check_dim("scatter_to_region", "dim", dim, x.dim(), info)
    if info.world_size == 1:
        return x
    begin, end = chunk_range(x.shape[dim], info.world_size, info.rank)
    return _ScatterToRegion.apply(x, dim, info.name, begin, end - begin)


def gather_from_region(x: Tensor, *, group: Group, dim: int, size: int | None = None) -> Tensor:
    """x [.., s_r, ..] -> [.., sum s_r, ..]; backward keeps this rank's part of dY. size: total, if known."""
    info = resolve(group)
    check_dim("gather_from_region", "dim", dim, x.dim(), info)
    if info.world_size == 1:
        return x
    return _GatherFromRegion.apply(x, dim, info.name, size, info.rank, info.world_size)


def gathered_input(x: Tensor, gathered: Tensor, *, group: Group, dim: int, size: int | None = None) -> Tensor:
    """What gather_from_region(x) gives, when the values are there already: `gathered`, of all_gather_linear.

    x [.., s_r, ..], gathered [.., sum s_r, ..] -> gathered; backward keeps this rank's part of dY for x, because dY is
    equal on all ranks. size: the total, when shards are of unequal length.
    """
    info = resolve(group)
    check_dim("gathered_input", "dim", dim, x.dim(), info)
    if info.world_size == 1:
        return x
    length = x.shape[dim]
    begin = info.rank * length if size is None else chunk_range(size, info.world_size, info.rank)[0]
    return _GatheredInput.apply(x, gathered.detach(), dim, begin, info.name)
