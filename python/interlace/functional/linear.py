"""Linear layers whose collective hides in the product: the public functions over the ops, with their checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ..groups import Group, GroupInfo, resolve
from ..ops import OPS
from . import column, row  # noqa: F401  (register the gradients)
from ._autograd import call
from ._check import check_dim, check_gather_size, check_product
from ._weights import op_weights, plain_weights

__all__ = ["all_gather_linear", "column_linear", "linear_all_reduce", "linear_reduce_scatter"]

Biases = Sequence[Tensor | None]


def _lists(
    op: str,
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Biases | None,
    info: GroupInfo,
    *,
    inner_is_gathered: bool = False,
) -> tuple[list[Tensor], list[Tensor | None], list[int]]:
    if isinstance(weight, Tensor):
        weights, biases = [weight], [bias]
    else:
        weights = list(weight)
        biases = [None] * len(weights) if bias is None else list(bias)
    check_product(op, x, weights, biases, info, inner_is_gathered)
    weights, packed_rows = op_weights(weights, inner_is_gathered or torch.is_autocast_enabled(x.device.type))
    return weights, biases, packed_rows


@overload
def all_gather_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    *,
    group: Group,
    gather_dim: int = ...,
    gather_size: int | None = ...,
    return_gathered: Literal[False] = ...,
) -> Tensor: ...
@overload
def all_gather_linear(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Biases | None = ...,
    *,
    group: Group,
    gather_dim: int = ...,
    gather_size: int | None = ...,
    return_gathered: Literal[False] = ...,
) -> list[Tensor]: ...
@overload
def all_gather_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    *,
    group: Group,
    gather_dim: int = ...,
    gather_size: int | None = ...,
    return_gathered: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def all_gather_linear(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Biases | None = ...,
    *,
    group: Group,
    gather_dim: int = ...,
    gather_size: int | None = ...,
    return_gathered: Literal[True],
) -> tuple[list[Tensor], Tensor]: ...
def all_gather_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Biases | None = None,
    *,
    group: Group,
    gather_dim: int = 0,
    gather_size: int | None = None,
    return_gathered: bool = False,
) -> Tensor | list[Tensor] | tuple[Tensor, Tensor] | tuple[list[Tensor], Tensor]:
    """Gathers the shards of x along `gather_dim` while multiplying: Y = gather(X) W^T + b, for one or several W.

    x [.., s_r, .., K], weight [N, K], bias [N] -> [.., sum s_r, .., N]; a list of weights (q, k, v) gives a list
    from one gather. dX = reduce_scatter(sum dY W), dW = dY^T gather(X), db = sum dY. Saves the shard only; backward
    gathers again for dW. gather_size: total length, needed by torch.compile when shards differ in length.
    return_gathered: return (Y, gather(X)); then gather(X) is saved instead of the shard, backward does not gather,
    and a gradient of gather(X), this rank's part of the sum over ranks, joins the reduce-scatter.
    ValueError / TypeError for shapes, dims or dtypes that do not fit; CollectiveAborted when ranks disagree.
    """
    info = resolve(group)
    check_dim("all_gather_linear", "gather_dim", gather_dim, x.dim(), info)
    check_gather_size("all_gather_linear", x, gather_dim, gather_size, info)
    inner = gather_dim in (-1, x.dim() - 1)
    weights, biases, packed_rows = _lists("all_gather_linear", x, weight, bias, info, inner_is_gathered=inner)
    if info.world_size == 1:
        gathered, outs = x, _local(x, weights, biases, packed_rows)
    else:
        gathered, outs = call(
            OPS.all_gather_gemm.default,
            info.name,
            x,
            weights,
            biases,
            gather_dim,
            info.name,
            return_gathered,
            gather_size,
            packed_rows,
        )
    out = outs[0] if isinstance(weight, Tensor) else outs
    return (out, gathered) if return_gathered else out


@overload
def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None = ..., *, group: Group) -> Tensor: ...
@overload
def column_linear(
    x: Tensor, weight: Sequence[Tensor], bias: Biases | None = ..., *, group: Group
) -> list[Tensor]: ...
def column_linear(
    x: Tensor, weight: Tensor | Sequence[Tensor], bias: Tensor | Biases | None = None, *, group: Group
) -> Tensor | list[Tensor]:
    """Column-parallel product of a replicated input: forward is local, backward sums dX over the group once.

    x [.., K] equal on all ranks, weight [N_r, K] -> [.., N_r]. dX = all_reduce(sum dY W), dW = dY^T X, db = sum dY.
    """
    info = resolve(group)
    weights, biases, packed_rows = _lists("column_linear", x, weight, bias, info)
    if info.world_size == 1:
        outs = _local(x, weights, biases, packed_rows)
    else:
        outs = call(OPS.column_gemm.default, info.name, x, weights, biases, info.name, packed_rows)
    return outs[0] if isinstance(weight, Tensor) else outs


def linear_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: Group, scatter_dim: int = 0
) -> Tensor:
    """Row-parallel product whose partial sums are reduced while multiplying; each rank keeps its chunk.

    x [.., S, .., K_r], weight [N, K_r] -> [.., S_r, .., N], cut along `scatter_dim` as torch.chunk does; the bias is
    added once, after the sum. dX = gather(dY) W, dW = gather(dY)^T X, db = sum gather(dY): the full sum on all ranks.
    """
    info = resolve(group)
    weights, _, packed_rows = _lists("linear_reduce_scatter", x, weight, bias, info)
    check_dim("linear_reduce_scatter", "scatter_dim", scatter_dim, x.dim(), info)
    if info.world_size == 1:
        return _local(x, weights, [bias], packed_rows)[0]
    rows = packed_rows[0] if packed_rows else None
    return call(OPS.gemm_reduce_scatter.default, info.name, x, weights[0], bias, scatter_dim, info.name, rows)


def linear_all_reduce(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: Group) -> Tensor:
    """Row-parallel product whose partial sums are all-reduced while multiplying: Y = sum_r X W^T + b.

    x [.., K_r], weight [N, K_r] -> [.., N], bitwise equal on all ranks; the bias is added once. dY is taken to be
    equal on all ranks (the loss is replicated), so dX = dY W, dW = dY^T X, db = sum dY need no communication.
    """
    info = resolve(group)
    weights, _, packed_rows = _lists("linear_all_reduce", x, weight, bias, info)
    if info.world_size == 1:
        return _local(x, weights, [bias], packed_rows)[0]
    rows = packed_rows[0] if packed_rows else None
    return call(OPS.gemm_all_reduce.default, info.name, x, weights[0], bias, info.name, rows)


def _local(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], packed_rows: list[int]
) -> list[Tensor]:
    """A world of one: nothing to communicate."""
    if packed_rows and torch.is_grad_enabled() and x.requires_grad:
        weights = plain_weights(weights, packed_rows, x.shape[-1], x.dtype)
    elif packed_rows:
        return call(OPS.column_gemm.default, "", x, weights, biases, "", packed_rows)
    return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
