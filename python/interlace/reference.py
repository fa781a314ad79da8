"""Every op in plain torch.distributed: test oracle, benchmark baseline and the fallback that always works.

Shards follow `torch.chunk`: ceil(size / world_size) for the first ranks, the rest shorter or empty. Half precision
crosses ranks in fp32, so that a sum over ranks rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from .checks import check_row_dim

__all__ = [
    "all_gather",
    "all_gather_gemm",
    "all_gather_gemm_scaled",
    "all_reduce",
    "all_to_all",
    "chunk_range",
    "flat_rows",
    "gather_sizes",
    "gemm_all_reduce",
    "gemm_all_reduce_norm",
    "gemm_reduce_scatter",
    "gemm_reduce_scatter_norm",
    "gemm_reduce_scatter_scaled",
    "reduce_scatter",
    "rms_norm",
    "row_scales",
    "scaled_linear",
    "scatter_sizes",
    "sum_gemm_all_reduce",
    "sum_gemm_reduce_scatter",
    "sum_of_products",
    "with_residual",
]

_HALF = (torch.float16, torch.bfloat16)


def chunk_range(size: int, world_size: int, rank: int) -> tuple[int, int]:
    """Begin and end of a rank's shard of a dim of `size`, in the order of `torch.chunk`."""
    step = -(-size // world_size)
    return min(size, rank * step), min(size, (rank + 1) * step)


def _gather_sizes(
    local: int, pg: dist.ProcessGroup, world_size: int, device: torch.device, total: int | None
) -> list[int]:
    if total is not None:
        return [end - begin for begin, end in (chunk_range(total, world_size, r) for r in range(world_size))]
    mine = torch.tensor([local], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(sizes, mine, group=pg)
    return [int(s.item()) for s in sizes]


def gather_sizes(local: int, group_name: str, device: torch.device, total: int | None) -> list[int]:
    """Length of every rank's shard: `total` cut as torch.chunk does; without it the ranks tell each other."""
    pg = _resolve_process_group(group_name)
    return _gather_sizes(local, pg, pg.size(), device, total)


def scatter_sizes(size: int, group_name: str, device: torch.device, length: int | None) -> list[int]:
    """Length of every rank's part of a dim of `size`: torch.chunk's, or what each asks for (then collective)."""
    if length is None:
        return gather_sizes(0, group_name, device, size)
    sizes = gather_sizes(length, group_name, device, None)
    if sum(sizes) != size:
        raise ValueError(
            f"reduce_scatter: the lengths of the ranks add up to {sum(sizes)}, the scattered dim has {size}"
        )
    return sizes


def all_gather(x: Tensor, dim: int, group_name: str, gather_size: int | None = None) -> Tensor:
    """x [.., s_r, ..] -> [.., sum of s_r, ..]: the shards of all ranks along `dim`, in rank order."""
    pg = _resolve_process_group(group_name)
    world_size = pg.size()
    sizes = _gather_sizes(x.shape[dim], pg, world_size, x.device, gather_size)
    rows = x.movedim(dim, 0).contiguous()
    longest = max(sizes)
    if x.is_cuda and min(sizes) == longest > 0:  # one call and no copy where the backend has it
        out = rows.new_empty((sum(sizes), *rows.shape[1:]))
        dist.all_gather_into_tensor(out, rows, group=pg)
        return out.movedim(0, dim).contiguous()
    if rows.shape[0] < longest:
        rows = torch.cat([rows, rows.new_zeros(longest - rows.shape[0], *rows.shape[1:])])
    parts = [torch.empty_like(rows) for _ in range(world_size)]
    if rows.numel():
        dist.all_gather(parts, rows, group=pg)
    out = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return out.movedim(0, dim).contiguous()


def all_reduce(x: Tensor, group_name: str) -> Tensor:
    """Sum of x over the ranks, in fp32 for half precision."""
    out = x.to(torch.float32) if x.dtype in _HALF else x.clone(memory_format=torch.contiguous_format)
    out = out.contiguous()
    if out.numel():
        dist.all_reduce(out, group=_resolve_process_group(group_name))
    return out.to(x.dtype)


def _own_range(size: int, group_name: str, device: torch.device, length: int | None) -> tuple[int, int]:
    """Begin and end of this rank's part of a dim: its chunk, or its `length` in rank order (then collective)."""
    pg = _resolve_process_group(group_name)
    if length is None:
        return chunk_range(size, pg.size(), pg.rank())
    begin = sum(_gather_sizes(length, pg, pg.size(), device, None)[: pg.rank()])
    return begin, begin + length


def reduce_scatter(x: Tensor, dim: int, group_name: str, length: int | None = None) -> Tensor:
    """x [.., S, ..] -> this rank's part of the sum over ranks along `dim`: its chunk, or its `length` in rank order."""
    pg = _resolve_process_group(group_name)
    if x.is_cuda and length is None and x.numel() and x.shape[dim] % pg.size() == 0:
        wide = (x.to(torch.float32) if x.dtype in _HALF else x).movedim(dim, 0).contiguous()
        part = wide.new_empty((wide.shape[0] // pg.size(), *wide.shape[1:]))
        dist.reduce_scatter_tensor(part, wide, group=pg)
        return part.movedim(0, dim).contiguous().to(x.dtype)
    begin, end = _own_range(x.shape[dim], group_name, x.device, length)
    # gloo's reduce_scatter is slower than all_reduce + slice from 4 MB on, and takes even shards only
    part = all_reduce(x, group_name).narrow(dim, begin, end - begin)
    return part.clone(memory_format=torch.contiguous_format)


def all_to_all(
    x: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group_name: str,
) -> Tensor:
    """x [S, ..] cut along dim 0; part r goes to rank r; the parts received are stacked in rank order."""
    pg = _resolve_process_group(group_name)
    world_size = pg.size()
    if input_split_sizes is None:
        input_split_sizes = [x.shape[0] // world_size] * world_size
    if output_split_sizes is None:
        output_split_sizes = [x.shape[0] // world_size] * world_size
    out = x.new_empty((sum(output_split_sizes), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), list(output_split_sizes), list(input_split_sizes), group=pg)
    return out


def all_gather_gemm(
    x_shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    gather_dim: int,
    group_name: str,
    return_gathered: bool,
    gather_size: int | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """x_shard -> (gathered x, [gathered x @ W^T + b for every weight]); gathered is empty unless asked for."""
    x = all_gather(x_shard, gather_dim, group_name, gather_size)
    outs = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    return (x if return_gathered else x.new_empty(0)), outs


def _partial(x: Tensor, weight: Tensor) -> Tensor:
    """x @ W^T, in fp32 for half precision: a partial sum that is rounded before it is added costs accuracy."""
    if x.dtype not in _HALF:
        return F.linear(x, weight)
    if x.is_cuda:
        return torch.mm(flat_rows(x), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)
    return F.linear(x.float(), weight.float())


def sum_of_products(xs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Sum of x_i @ W_i^T, in fp32 for half precision."""
    total = _partial(xs[0], weights[0])
    for x, weight in zip(xs[1:], weights[1:], strict=True):
        total = total + _partial(x, weight)
    return total


def gemm_all_reduce(x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str) -> Tensor:
    """Sum over ranks of x @ W^T, plus the bias once."""
    out = all_reduce(_partial(x, weight), group_name)
    return (out if bias is None else out + bias).to(x.dtype)


def gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scatter_dim: int,
    group_name: str,
    length: int | None = None,
) -> Tensor:
    """This rank's part along `scatter_dim` of the sum over ranks of x @ W^T, plus the bias once."""
    out = reduce_scatter(_partial(x, weight), scatter_dim, group_name, length)
    if bias is not None:
        if scatter_dim % x.dim() == x.dim() - 1:
            begin, end = _own_range(bias.shape[0], group_name, x.device, length)
            bias = bias[begin:end]
        out = out + bias
    return out.to(x.dtype)


def sum_gemm_all_reduce(xs: Sequence[Tensor], weights: Sequence[Tensor], group_name: str) -> Tensor:
    """Sum over ranks and products of x_i @ W_i^T."""
    return all_reduce(sum_of_products(xs, weights), group_name).to(xs[0].dtype)


def sum_gemm_reduce_scatter(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    scatter_dim: int,
    group_name: str,
    length: int | None = None,
) -> Tensor:
    """This rank's part along `scatter_dim` of the sum over ranks and products of x_i @ W_i^T."""
    total = sum_of_products(xs, weights)
    return reduce_scatter(total, scatter_dim, group_name, length).to(xs[0].dtype)


def with_residual(total: Tensor, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """total + bias + residual, rounded once. total [.., N] in fp32 or fp64."""
    for term in (bias, residual):
        if term is not None:
            total = total + term
    return total.to(dtype)


def flat_rows(x: Tensor) -> Tensor:
    """x [.., K] -> [M, K]; flatten and not reshape, which cannot tell the rows of an empty tensor."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in fp32 inside for half precision, rounded once."""
    wide = x.float() if x.dtype in _HALF else x
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def gemm_all_reduce_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """(RMSNorm(s), s) with s = sum over ranks of x @ W^T + bias + residual."""
    total = with_residual(all_reduce(_partial(x, weight), group_name), bias, residual, x.dtype)
    return rms_norm(total, norm_weight, eps), total


def gemm_reduce_scatter_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    scatter_dim: int,
    group_name: str,
    length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As gemm_all_reduce_norm for this rank's part along `scatter_dim`; residual is of that part."""
    check_row_dim("gemm_reduce_scatter_norm", scatter_dim, x.dim())
    total = reduce_scatter(_partial(x, weight), scatter_dim, group_name, length)
    total = with_residual(total, bias, residual, x.dtype)
    return rms_norm(total, norm_weight, eps), total


def row_scales(x: Tensor, scale: Tensor) -> Tensor:
    """x [.., K], scale of one element or [.., 1] -> [.., 1] in fp32: one scale for every row of x."""
    shape = (*x.shape[:-1], 1)
    return (scale.reshape(1).expand(shape) if scale.numel() == 1 else scale.reshape(shape)).float()


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """(x * x_scale) @ (W * weight_scale)^T + bias. x [.., K], x_scale [.., 1], weight_scale of one element or N.

    On CUDA torch._scaled_mm when the sizes are multiples of 16; else in fp32, where fp8 values are exact.
    """
    columns = weight_scale.reshape(-1).float()
    if (
        x.is_cuda
        and not (x.shape[-1] % 16 or weight.shape[0] % 16)
        and x.numel()
        and out_dtype is torch.bfloat16
    ):
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch._scaled_mm(
            flat,
            weight.contiguous().t(),
            scale_a=x_scale.reshape(-1, 1).contiguous(),
            scale_b=columns.expand(weight.shape[0]).reshape(1, -1).contiguous(),
            bias=bias,
            out_dtype=out_dtype,
        )
        return out.view(*x.shape[:-1], -1)
    out = F.linear(x.float() * x_scale, weight.float() * columns.unsqueeze(-1))
    return (out if bias is None else out + bias).to(out_dtype)


def all_gather_gemm_scaled(
    x_shard: Tensor,
    x_scale: Tensor,
    weights: Sequence[Tensor],
    weight_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out_dtype: torch.dtype,
    gather_dim: int,
    group_name: str,
    gather_size: int | None = None,
) -> list[Tensor]:
    """As all_gather_gemm of x_shard * x_scale and weights * weight_scales, products of fp8 in fp32."""
    scales = all_gather(row_scales(x_shard, x_scale), gather_dim, group_name, gather_size)
    x = all_gather(x_shard.view(torch.uint8), gather_dim, group_name, gather_size).view(x_shard.dtype)
    return [
        scaled_linear(x, scales, w, s, b, out_dtype)
        for w, s, b in zip(weights, weight_scales, biases, strict=True)
    ]


def gemm_reduce_scatter_scaled(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    scatter_dim: int,
    group_name: str,
    length: int | None = None,
) -> Tensor:
    """This rank's part of the sum over ranks of (x * x_scale) @ (W * weight_scale)^T, plus the bias once."""
    partial = scaled_linear(x, row_scales(x, x_scale), weight, weight_scale, None, torch.float32)
    out = reduce_scatter(partial, scatter_dim, group_name, length)
    return (out if bias is None else out + bias).to(out_dtype)
