"""All-gather + GEMM in pieces: the own shard is multiplied while the first peer's is on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from .steps import Peers

__all__ = ["all_gather_gemm", "all_gather_gemm_scaled"]


def _gather(
    parts: Sequence[Tensor],
    wholes: Sequence[Tensor],
    sizes: Sequence[int],
    peers: Peers,
    multiply: Callable[[int, int], None],
) -> None:
    """Put the shards of all ranks into `wholes` and call multiply(begin, end) for the rows of each as they arrive.

    parts[i] [s_r, ..] goes to rows of wholes[i] [sum s_r, ..]. All transfers are started before the first product.
    """
    ends = list(accumulate(sizes))
    begins = [end - size for end, size in zip(ends, sizes, strict=True)]
    own = slice(begins[peers.rank], ends[peers.rank])
    transfers = []
    for to, source in peers.steps():
        received = [whole[begins[source] : ends[source]] for whole in wholes]
        transfers.append((source, peers.exchange(parts, to, received, source)))
    for part, whole in zip(parts, wholes, strict=True):
        whole[own] = part
    multiply(own.start, own.stop)
    for source, transfer in transfers:
        transfer.wait()
        multiply(begins[source], ends[source])


def all_gather_gemm(
    x_shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    gather_dim: int,
    group_name: str,
    return_gathered: bool,
    gather_size: int | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """As reference.all_gather_gemm; a dim of columns is gathered whole first, its products cannot be cut by rank."""
    dim = gather_dim % x_shard.dim()
    if dim == x_shard.dim() - 1:
        return reference.all_gather_gemm(
            x_shard, weights, biases, gather_dim, group_name, return_gathered, gather_size
        )
    peers = Peers(group_name)
    rows = x_shard.movedim(dim, 0).contiguous()
    sizes = reference.gather_sizes(rows.shape[0], group_name, rows.device, gather_size)
    gathered = rows.new_empty((sum(sizes), *rows.shape[1:]))
    outs = [rows.new_empty((*gathered.shape[:-1], w.shape[0])) for w in weights]

    def multiply(begin: int, end: int) -> None:
        for out, weight, bias in zip(outs, weights, biases, strict=True):
            if begin < end:
                out[begin:end] = F.linear(gathered[begin:end], weight, bias)

    _gather([rows], [gathered], sizes, peers, multiply)
    outs = [out.movedim(0, dim).contiguous() for out in outs]
    whole = gathered.movedim(0, dim).contiguous() if return_gathered else x_shard.new_empty(0)
    return whole, outs


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
    """As reference.all_gather_gemm_scaled; the scales of the rows travel with them."""
    dim = gather_dim % x_shard.dim()
    peers = Peers(group_name)
    rows = x_shard.movedim(dim, 0).contiguous()
    scales = reference.row_scales(x_shard, x_scale).movedim(dim, 0).contiguous()
    sizes = reference.gather_sizes(rows.shape[0], group_name, rows.device, gather_size)
    gathered = rows.new_empty((sum(sizes), *rows.shape[1:]))
    gathered_scales = scales.new_empty((sum(sizes), *scales.shape[1:]))
    outs = [rows.new_empty((*gathered.shape[:-1], w.shape[0]), dtype=out_dtype) for w in weights]

    def multiply(begin: int, end: int) -> None:
        if begin == end:
            return
        x, scale = gathered[begin:end], gathered_scales[begin:end]
        for out, weight, weight_scale, bias in zip(outs, weights, weight_scales, biases, strict=True):
            out[begin:end] = reference.scaled_linear(x, scale, weight, weight_scale, bias, out_dtype)

    _gather([rows, scales], [gathered, gathered_scales], sizes, peers, multiply)
    return [out.movedim(0, dim).contiguous() for out in outs]
