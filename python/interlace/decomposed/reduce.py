"""GEMM + reduce-scatter and GEMM + all-reduce in pieces: a peer's rows travel while the next ones are multiplied.

overlapped=False multiplies all rows at once and exchanges them afterwards: the same sums, no overlap. For bf16 half
the bytes of an all-reduce in fp32, and in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..checks import check_row_dim
from .steps import Peers, Transfer

__all__ = [
    "gemm_all_reduce",
    "gemm_all_reduce_norm",
    "gemm_reduce_scatter",
    "gemm_reduce_scatter_norm",
    "gemm_reduce_scatter_scaled",
    "sum_gemm_all_reduce",
    "sum_gemm_reduce_scatter",
]

# Rows begin .. end of this rank's partial sum: wide in fp32 (fp64 for fp64), else as they travel.
Product = Callable[[int, int, bool], Tensor]

_PIECES = 2  # of an all-reduce: the sums of one are gathered while the partial sums of the next are exchanged
_SMALLEST_PIECE = 512  # rows; below it a piece of a rank is too short for a product of the library


def _wire(dtype: torch.dtype) -> torch.dtype:
    """bf16 partial sums travel rounded: with the own one unrounded the error stays within 1.41 of one bf16 product."""
    return dtype if dtype in (torch.bfloat16, torch.float64) else torch.float32


class _Reduction:
    """Sum over ranks of the rows that this rank owns. Products and sends at once, `finish` when they are needed."""

    def __init__(
        self, product: Product, ranges: Sequence[tuple[int, int]], peers: Peers, overlapped: bool
    ) -> None:
        self.peers = peers
        self.parts: dict[int, Tensor] = {}
        self.transfers: list[Transfer] = []
        own = ranges[peers.rank]
        first = ranges[0][0]
        whole = None if overlapped else product(first, ranges[-1][1], False)
        for to, source in peers.steps():
            begin, end = ranges[to]
            partial = product(begin, end, False) if whole is None else whole[begin - first : end - first]
            slot = partial.new_empty((own[1] - own[0], partial.shape[-1]))
            self.transfers.append(peers.exchange([partial], to, [slot], source))
            self.parts[source] = slot
        # own rows last: they wait for nobody
        self.parts[peers.rank] = (
            product(*own, True) if whole is None else _widened(whole[own[0] - first : own[1] - first])
        )

    def finish(self) -> Tensor:
        """The sum in fp32, in rank order: bitwise the same in every run."""
        for transfer in self.transfers:
            transfer.wait()
        total = _widened(self.parts[0])
        for rank in range(1, self.peers.world_size):
            total = total + self.parts[rank]  # fp32 + bf16 is added in fp32
        return total


def _widened(rows: Tensor) -> Tensor:
    return rows if rows.dtype is torch.float64 else rows.float()


def _linear(xs: Sequence[Tensor], weights: Sequence[Tensor]) -> Product:
    """Sum of x_i @ W_i^T, of 2-D x."""

    def product(begin: int, end: int, wide: bool) -> Tensor:
        rows = [x[begin:end] for x in xs]
        if not wide and len(rows) == 1 and _wire(rows[0].dtype) == rows[0].dtype:
            return F.linear(rows[0], weights[0])
        total = reference.sum_of_products(rows, weights)
        return total if wide else total.to(_wire(xs[0].dtype))

    return product


def _ranges(sizes: Sequence[int], granule: int = 1, first: int = 0) -> list[tuple[int, int]]:
    ends = list(accumulate(sizes, initial=0))
    return [(first + a * granule, first + b * granule) for a, b in pairwise(ends)]


def _scatter(
    xs: Sequence[Tensor], weights: Sequence[Tensor], dim: int, group_name: str, length: int | None,
    product_of: Callable[[Sequence[Tensor]], Product], finish: Callable[[Tensor], Tensor], overlapped: bool,
) -> Tensor:  # fmt: skip
    """The reduce-scatter of a product over a leading dim: own rows of the sum, finished, with `dim` where it was."""
    peers = Peers(group_name)
    moved = [x.movedim(dim, 0) for x in xs]
    shape = moved[0].shape
    granule = shape[1:-1].numel()
    sizes = reference.scatter_sizes(shape[0], group_name, moved[0].device, length)
    flat = [x.reshape(shape[0] * granule, x.shape[-1]) for x in moved]
    reduction = _Reduction(product_of(flat), _ranges(sizes, granule), peers, overlapped)
    total = reduction.finish()
    out = finish(total.view(sizes[peers.rank], *shape[1:-1], total.shape[-1]))
    return out.movedim(0, dim).contiguous()


def _all_reduce(
    product: Product, rows: int, columns: int, peers: Peers, finish: Callable[[Tensor, int, int], Tensor],
    overlapped: bool,
) -> Tensor:  # fmt: skip
    """[rows, columns]: every rank finishes rows of its own in each piece and sends them to the others."""
    world_size, rank = peers.world_size, peers.rank
    pieces = _PIECES if overlapped and rows >= _PIECES * world_size * _SMALLEST_PIECE else 1
    out: Tensor | None = None
    transfers: list[Transfer] = []

    def share(reduction: _Reduction, ranges: Sequence[tuple[int, int]]) -> None:
        nonlocal out
        begin, end = ranges[rank]
        own = finish(reduction.finish(), begin, end)
        if out is None:
            out = own.new_empty((rows, columns))
        out[begin:end] = own
        for to, source in peers.steps():
            received = out[slice(*ranges[source])]
            transfers.append(peers.exchange([out[begin:end]], to, [received], source))

    waiting: tuple[_Reduction, Sequence[tuple[int, int]]] | None = None
    for piece in range(pieces):
        first, last = reference.chunk_range(rows, pieces, piece)
        chunks = [reference.chunk_range(last - first, world_size, r) for r in range(world_size)]
        ranges = [(first + a, first + b) for a, b in chunks]
        reduction = _Reduction(product, ranges, peers, overlapped)
        if waiting is not None:
            share(*waiting)
        waiting = reduction, ranges
    share(*waiting)  # type: ignore[misc]  # there is at least one piece
    for transfer in transfers:
        transfer.wait()
    return out  # type: ignore[return-value]


def _plus(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (total if bias is None else total + bias).to(dtype)


def gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scatter_dim: int,
    group_name: str,
    length: int | None = None,
    *,
    overlapped: bool = True,
) -> Tensor:
    """As reference.gemm_reduce_scatter; a dim of columns is scattered whole, its products cannot be cut by rank."""
    dim = scatter_dim % x.dim()
    if dim == x.dim() - 1:
        return reference.gemm_reduce_scatter(x, weight, bias, scatter_dim, group_name, length)
    return _scatter(
        [x], [weight], dim, group_name, length, lambda xs: _linear(xs, [weight]),
        lambda total: _plus(total, bias, x.dtype), overlapped,
    )  # fmt: skip


def sum_gemm_reduce_scatter(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    scatter_dim: int,
    group_name: str,
    length: int | None = None,
    *,
    overlapped: bool = True,
) -> Tensor:
    """This rank's part of the sum over ranks and products of x_i @ W_i^T."""
    dim = scatter_dim % xs[0].dim()
    dtype = xs[0].dtype
    if dim == xs[0].dim() - 1:
        return reference.sum_gemm_reduce_scatter(xs, weights, scatter_dim, group_name, length)
    return _scatter(
        xs, weights, dim, group_name, length, lambda flat: _linear(flat, weights), lambda total: total.to(dtype),
        overlapped,
    )  # fmt: skip


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
    *,
    overlapped: bool = True,
) -> tuple[Tensor, Tensor]:
    """As reference.gemm_reduce_scatter_norm."""
    dim = check_row_dim("gemm_reduce_scatter_norm", scatter_dim, x.dim())
    moved = None if residual is None else residual.movedim(dim, 0)
    total = _scatter(
        [x], [weight], dim, group_name, length, lambda xs: _linear(xs, [weight]),
        lambda sums: reference.with_residual(sums, bias, moved, x.dtype), overlapped,
    )  # fmt: skip
    return reference.rms_norm(total, norm_weight, eps), total


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
    *,
    overlapped: bool = True,
) -> Tensor:
    """As reference.gemm_reduce_scatter_scaled."""
    dim = scatter_dim % x.dim()
    scales = reference.row_scales(x, x_scale).movedim(dim, 0).reshape(-1, 1)

    def product_of(xs: Sequence[Tensor]) -> Product:
        return lambda begin, end, wide: reference.scaled_linear(
            xs[0][begin:end], scales[begin:end], weight, weight_scale, None,
            torch.float32 if wide else _wire(out_dtype),
        )  # fmt: skip

    return _scatter(
        [x],
        [weight],
        dim,
        group_name,
        length,
        product_of,
        lambda total: _plus(total, bias, out_dtype),
        overlapped,
    )


def sum_gemm_all_reduce(
    xs: Sequence[Tensor], weights: Sequence[Tensor], group_name: str, *, overlapped: bool = True
) -> Tensor:
    """Sum over ranks and products of x_i @ W_i^T."""
    flat = [reference.flat_rows(x) for x in xs]
    n, dtype = weights[0].shape[0], xs[0].dtype
    out = _all_reduce(
        _linear(flat, weights), flat[0].shape[0], n, Peers(group_name),
        lambda total, begin, end: total.to(dtype), overlapped,
    )  # fmt: skip
    return out.view(*xs[0].shape[:-1], n)


def gemm_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, *, overlapped: bool = True
) -> Tensor:
    """As reference.gemm_all_reduce."""
    return _with_residual(x, weight, bias, None, group_name, overlapped)


def _with_residual(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, group_name: str, overlapped: bool
) -> Tensor:
    n = weight.shape[0]
    flat = reference.flat_rows(x)
    rows = None if residual is None else residual.reshape(flat.shape[0], n)
    out = _all_reduce(
        _linear([flat], [weight]), flat.shape[0], n, Peers(group_name),
        lambda total, begin, end: reference.with_residual(
            total, bias, None if rows is None else rows[begin:end], x.dtype
        ), overlapped,
    )  # fmt: skip
    return out.view(*x.shape[:-1], n)


def gemm_all_reduce_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    group_name: str,
    *,
    overlapped: bool = True,
) -> tuple[Tensor, Tensor]:
    """As reference.gemm_all_reduce_norm."""
    total = _with_residual(x, weight, bias, residual, group_name, overlapped)
    return reference.rms_norm(total, norm_weight, eps), total
