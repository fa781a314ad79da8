"""Plain collectives on symmetric memory, with the gradients of torch.distributed.nn.functional (true adjoints)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..groups import Group, resolve
from ..ops import OPS
from ._autograd import below_autograd, register, requires_grad
from ._check import check_dim, check_gather_size, check_splits

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]


def _group_name(args: Sequence[Any]) -> str:
    return next(a for a in args if isinstance(a, str))


class _Collective(torch.autograd.Function):
    """Y = op(X); dX = adjoint(dY), the adjoint being a collective too."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, op: Any, adjoint: Any, x: Tensor, *args: Any):
        ctx.adjoint, ctx.shape, ctx.args = adjoint, x.shape, args
        return below_autograd(op, keyset, _group_name(args), x, *args)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor):
        return None, None, None, ctx.adjoint(grad_out, ctx.shape, *ctx.args), *(None for _ in ctx.args)


def _differentiable(name: str, adjoint: Any) -> None:
    op = getattr(OPS, name).default

    def kernel(keyset: Any, x: Tensor, *args: Any) -> Tensor:
        if requires_grad(x):
            return _Collective.apply(keyset, op, adjoint, x, *args)
        return below_autograd(op, keyset, _group_name(args), x, *args)

    register(name, kernel)


def _adjoint_of_all_gather(
    grad: Tensor, shape: torch.Size, dim: int, group_name: str, size: int | None = None
) -> Tensor:
    # without the total, shards may be of any length: the op exchanges them, no rank may guess from its own
    return OPS.reduce_scatter(grad, dim, group_name, shape[dim] if size is None else None)


def _adjoint_of_reduce_scatter(
    grad: Tensor, shape: torch.Size, dim: int, group_name: str, length: int | None = None
) -> Tensor:
    return OPS.all_gather(grad, dim, group_name, shape[dim] if length is None else None)


def _adjoint_of_all_to_all(
    grad: Tensor,
    shape: torch.Size,
    outputs: Sequence[int] | None,
    inputs: Sequence[int] | None,
    group_name: str,
) -> Tensor:
    return OPS.all_to_all(grad, inputs, outputs, group_name)


_differentiable("all_reduce", lambda grad, shape, group_name: OPS.all_reduce(grad, group_name))
_differentiable("all_gather", _adjoint_of_all_gather)
_differentiable("reduce_scatter", _adjoint_of_reduce_scatter)
_differentiable("all_to_all", _adjoint_of_all_to_all)


def all_reduce(x: Tensor, *, group: Group) -> Tensor:
    """Sum of x over the ranks of the group, in rank order and fp32: the same bits on every rank.

    x [..] of equal shape and dtype on all ranks -> [..]. dX = all_reduce(dY). Fails (on every rank) when shapes or
    dtypes disagree. Source: one-shot and two-shot all-reduce over shared memory.
    """
    info = resolve(group)
    return OPS.all_reduce(x, info.name) if info.world_size > 1 else x.clone()


def all_gather(x: Tensor, *, group: Group, dim: int = 0, gather_size: int | None = None) -> Tensor:
    """Shards of all ranks along `dim`, in rank order.

    x [.., s_r, ..] -> [.., sum s_r, ..]; shards may differ in length along `dim` only. gather_size: the total, which
    torch.compile needs for shards of unequal length. dX = reduce_scatter(dY).
    """
    info = resolve(group)
    check_dim("all_gather", "dim", dim, x.dim(), info)
    check_gather_size("all_gather", x, dim, gather_size, info)
    return OPS.all_gather(x, dim, info.name, gather_size) if info.world_size > 1 else x.clone()


def reduce_scatter(x: Tensor, *, group: Group, dim: int = 0) -> Tensor:
    """This rank's chunk (as torch.chunk cuts) along `dim` of the sum over the ranks, in fp32 and rank order.

    x [.., S, ..] -> [.., S_r, ..]. dX = all_gather(dY).
    """
    info = resolve(group)
    check_dim("reduce_scatter", "dim", dim, x.dim(), info)
    return OPS.reduce_scatter(x, dim, info.name) if info.world_size > 1 else x.clone()


def all_to_all(
    x: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    group: Group,
) -> Tensor:
    """Rows of x for every rank, exchanged: part r of x goes to rank r, received parts are stacked in rank order.

    x [S, ..] -> [sum output_split_sizes, ..]; without sizes S must be divisible by the world size. dX is the
    exchange the other way round.
    """
    info = resolve(group)
    check_splits("all_to_all", x, output_split_sizes, input_split_sizes, info)
    return (
        OPS.all_to_all(x, output_split_sizes, input_split_sizes, info.name)
        if info.world_size > 1
        else x.clone()
    )
