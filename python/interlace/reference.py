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

__all__ = [
    "all_gather",
    "all_gather_gemm",
    "all_reduce",
    "all_to_all",
    "chunk_range",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "reduce_scatter",
    "sum_of_products",
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


def all_gather(x: Tensor, dim: int, group_name: str, gather_size: int | None = None) -> Tensor:
    """x [.., s_r, ..] -> [.., sum of s_r, ..]: the shards of all ranks along `dim`, in rank order."""
    pg = _resolve_process_group(group_name)
    world_size = pg.size()
    sizes = _gather_sizes(x.shape[dim], pg, world_size, x.device, gather_size)
    rows = x.movedim(dim, 0).contiguous()
    longest = max(sizes)
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
        return torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)
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
