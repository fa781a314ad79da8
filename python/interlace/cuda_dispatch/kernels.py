"""Kernels of the CUDA key for every public op: check, decide, go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .. import decomposed, reference
from ..checks import check_products, wrap_dim
from ..paths import note_path
from . import launches
from .deciding import decide, place_of, shard_sizes
from .launches import Epilogue, Place
from .norms import gemm_all_reduce_norm, gemm_reduce_scatter_norm
from .scaled import all_gather_gemm_scaled, gemm_reduce_scatter_scaled
from .shapes import comes_first, leads, no_packed, per_index
from .sums import Sum, summed

__all__ = ["KERNELS"]


def _all_gather_gemm(
    x_shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    gather_dim: int,
    group_name: str,
    return_gathered: bool,
    gather_size: int | None = None,
    packed_rows: Sequence[int] = (),
) -> tuple[Tensor, list[Tensor]]:
    op = "all_gather_gemm"
    no_packed(op, packed_rows)
    dim = wrap_dim(op, "gather_dim", gather_dim, x_shard.dim())
    check_products(op, [x_shard], weights, biases, inner_is_gathered=dim == x_shard.dim() - 1)
    place = place_of(group_name)
    sizes = shard_sizes(op, x_shard.shape[dim], place, x_shard.device, gather_size)
    granule = per_index(x_shard.shape[:-1], dim)
    decision = decide(
        op, x_shard, place, rows=sum(sizes) * granule, width=x_shard.shape[-1],
        dim_leads=leads(x_shard, dim), products=len(weights),
    )  # fmt: skip
    arguments = (x_shard, weights, biases, gather_dim, group_name, return_gathered, gather_size)
    if decision.algorithm == "decomposed":
        return decomposed.all_gather_gemm(*arguments)
    if decision.algorithm == "baseline":
        return reference.all_gather_gemm(*arguments)
    shape = [*x_shard.shape[:dim], sum(sizes), *x_shard.shape[dim + 1 : -1]]
    rows = [size * granule for size in sizes]
    x = reference.flat_rows(x_shard)
    if decision.algorithm == "fused":
        whole, outs = launches.fused_gather(
            x, weights, biases, rows, place, decision.launch, out_dtype=x.dtype, want_gathered=return_gathered
        )
    else:
        whole = launches.all_gather(x, rows, place, decision.launch)
        outs = [F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True)]
    gathered = whole.view(*shape, -1) if return_gathered and whole is not None else x.new_empty(0)
    return gathered, [out.view(*shape, out.shape[-1]) for out in outs]


def _gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scatter_dim: int,
    group_name: str,
    packed_rows: int | None = None,
    length: int | None = None,
) -> Tensor:
    op = "gemm_reduce_scatter"
    no_packed(op, packed_rows)
    check_products(op, [x], [weight], [bias])
    arguments = (x, weight, bias, scatter_dim, group_name, length)
    return summed(
        Sum(op, [x], [weight], Epilogue(bias), place_of(group_name), scatter_dim, length),
        reference=lambda: reference.gemm_reduce_scatter(*arguments),
        pieces=lambda overlapped: decomposed.gemm_reduce_scatter(*arguments, overlapped=overlapped),
    )[0]


def _gemm_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, packed_rows: int | None = None
) -> Tensor:
    op = "gemm_all_reduce"
    no_packed(op, packed_rows)
    check_products(op, [x], [weight], [bias])
    arguments = (x, weight, bias, group_name)
    return summed(
        Sum(op, [x], [weight], Epilogue(bias), place_of(group_name)),
        reference=lambda: reference.gemm_all_reduce(*arguments),
        pieces=lambda overlapped: decomposed.gemm_all_reduce(*arguments, overlapped=overlapped),
    )[0]


def _sum_gemm_reduce_scatter(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    scatter_dim: int,
    group_name: str,
    length: int | None = None,
) -> Tensor:
    op = "gemm_reduce_scatter"
    check_products(op, xs, weights, [None] * len(weights))
    arguments = (xs, weights, scatter_dim, group_name, length)
    return summed(
        Sum(op, xs, weights, Epilogue(), place_of(group_name), scatter_dim, length),
        reference=lambda: reference.sum_gemm_reduce_scatter(*arguments),
        pieces=lambda overlapped: decomposed.sum_gemm_reduce_scatter(*arguments, overlapped=overlapped),
    )[0]


def _sum_gemm_all_reduce(xs: Sequence[Tensor], weights: Sequence[Tensor], group_name: str) -> Tensor:
    op = "gemm_all_reduce"
    check_products(op, xs, weights, [None] * len(weights))
    return summed(
        Sum(op, xs, weights, Epilogue(), place_of(group_name)),
        reference=lambda: reference.sum_gemm_all_reduce(xs, weights, group_name),
        pieces=lambda overlapped: decomposed.sum_gemm_all_reduce(
            xs, weights, group_name, overlapped=overlapped
        ),
    )[0]


def _column_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group_name: str,
    packed_rows: Sequence[int] = (),
) -> list[Tensor]:
    no_packed("column_gemm", packed_rows)
    check_products("column_gemm", [x], weights, biases)
    note_path("column_gemm", "baseline", "a local product: the library's", True)
    return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]


def _all_reduce(x: Tensor, group_name: str) -> Tensor:
    place = place_of(group_name)
    decision = decide("all_reduce", x, place, rows=1, width=x.numel())
    if decision.algorithm == "baseline":
        return reference.all_reduce(x, group_name)
    flat = x.contiguous().view(1, -1)
    sums, _ = launches.all_reduce(flat, decision.algorithm, Epilogue(), place, decision.launch)
    return sums.view(x.shape)


def _all_gather(x: Tensor, dim: int, group_name: str, gather_size: int | None = None) -> Tensor:
    at = wrap_dim("all_gather", "dim", dim, x.dim())
    place = place_of(group_name)
    sizes = shard_sizes("all_gather", x.shape[at], place, x.device, gather_size)
    width = per_index(x.shape, at)
    decision = decide("all_gather", x, place, rows=sum(sizes), width=width, dim_leads=comes_first(x, at))
    if decision.algorithm == "baseline":
        return reference.all_gather(x, dim, group_name, gather_size)
    whole = launches.all_gather(x.reshape(x.shape[at], width), sizes, place, decision.launch)
    return whole.view(*x.shape[:at], sum(sizes), *x.shape[at + 1 :])


def _reduce_scatter(x: Tensor, dim: int, group_name: str, length: int | None = None) -> Tensor:
    at = wrap_dim("reduce_scatter", "dim", dim, x.dim())
    place: Place = place_of(group_name)
    sizes = reference.scatter_sizes(x.shape[at], group_name, x.device, length)
    width = per_index(x.shape, at)
    decision = decide("reduce_scatter", x, place, rows=x.shape[at], width=width, dim_leads=comes_first(x, at))
    if decision.algorithm == "baseline":
        return reference.reduce_scatter(x, dim, group_name, length)
    flat = x.reshape(x.shape[at], width)
    sums, _ = launches.reduce_scatter(flat, sizes, Epilogue(), place, decision.launch)
    return sums.view(*x.shape[:at], sizes[place.rank], *x.shape[at + 1 :])


def _all_to_all(
    x: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group_name: str,
) -> Tensor:
    note_path("all_to_all", "baseline", "torch.distributed exchanges on CUDA", False)
    return reference.all_to_all(x, output_split_sizes, input_split_sizes, group_name)


KERNELS: dict[str, Callable[..., Any]] = {
    "all_gather_gemm": _all_gather_gemm,
    "gemm_reduce_scatter": _gemm_reduce_scatter,
    "gemm_all_reduce": _gemm_all_reduce,
    "sum_gemm_reduce_scatter": _sum_gemm_reduce_scatter,
    "sum_gemm_all_reduce": _sum_gemm_all_reduce,
    "gemm_all_reduce_norm": gemm_all_reduce_norm,
    "gemm_reduce_scatter_norm": gemm_reduce_scatter_norm,
    "all_gather_gemm_scaled": all_gather_gemm_scaled,
    "gemm_reduce_scatter_scaled": gemm_reduce_scatter_scaled,
    "column_gemm": _column_gemm,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
