"""Calls of the device kernels: staging sizes, workspace, buffers, and the `_device_*` op of csrc/cuda/host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import device
from ..heuristics import Launch
from .arguments import aligned_matrix, aligned_rows

__all__ = [
    "Epilogue",
    "Place",
    "all_gather",
    "all_reduce",
    "fused_gather",
    "fused_reduce",
    "reduce_scatter",
]


@dataclass(frozen=True)
class Place:
    """This rank in its group."""

    group_name: str
    rank: int
    world_size: int


@dataclass(frozen=True)
class Epilogue:
    """What follows a sum over ranks: bias and residual are added, and the rows normalised when norm_weight is given.

    bias [N], residual [rows of the output, N], norm_weight [N].
    """

    bias: Tensor | None = None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    eps: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Nothing follows the sum."""
        return self.bias is None and self.residual is None and self.norm_weight is None


def _kernels() -> Any:
    return torch.ops.interlace


def fused_gather(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], rows: Sequence[int], place: Place,
    launch: Launch, *, out_dtype: torch.dtype, want_gathered: bool, x_scale: Tensor | None = None,
    weight_scales: Sequence[Tensor | None] = (),
) -> tuple[Tensor | None, list[Tensor]]:  # fmt: skip
    """x [m_r, K] -> (gathered [M, K] or None, [M, N_i]); rows: m of every rank."""
    x = aligned_rows(x)
    matrices = [aligned_matrix(w) for w in weights]
    total = sum(rows)
    outs = [x.new_empty((total, w.shape[0]), dtype=out_dtype) for w in weights]
    gathered = x.new_empty((total, x.shape[1])) if want_gathered else None
    half = _kernels()._device_half_bytes_all_gather_gemm(list(rows), x.shape[1], x.element_size())
    workspace = device.workspace(place.group_name, x.device, half)
    _kernels()._device_all_gather_gemm(
        x, matrices, list(biases), x_scale, list(weight_scales), gathered, outs,
        list(rows), *workspace.tail, launch.tile_columns, launch.blocks, max(launch.comm_blocks, int(want_gathered)),
    )  # fmt: skip
    return gathered, outs


def fused_reduce(
    xs: Sequence[Tensor], weights: Sequence[Tensor], epilogue: Epilogue, rows: Sequence[int] | None, place: Place,
    launch: Launch, *, out_dtype: torch.dtype, x_scale: Tensor | None = None, weight_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Sum over ranks and products of x_i [M, K_i] @ W_i^T and what follows it: (sums, normalised or None).

    rows: what each rank keeps of the M rows; None: everybody keeps all (all-reduce).
    """
    xs = [aligned_rows(x) for x in xs]
    matrices = [aligned_matrix(w) for w in weights]
    columns, total = weights[0].shape[0], xs[0].shape[0]
    sums = xs[0].new_empty((total if rows is None else rows[place.rank], columns), dtype=out_dtype)
    normalised = None if epilogue.norm_weight is None else torch.empty_like(sums)
    multicast = device.multicast(place.group_name, sums.device)
    half = _kernels()._device_half_bytes_gemm_reduce(
        [total] if rows is None else list(rows), place.world_size, rows is not None, columns,
        sums.element_size(), launch.float32_wire, multicast,
    )  # fmt: skip
    workspace = device.workspace(place.group_name, sums.device, half)
    head = (
        xs, matrices, epilogue.bias, epilogue.residual, epilogue.norm_weight, epilogue.eps, x_scale,
        [] if weight_scale is None else [weight_scale], sums, normalised,
    )  # fmt: skip
    tail = (
        launch.float32_wire, multicast, *workspace.tail, launch.tile_columns, launch.blocks, launch.comm_blocks
    )  # fmt: skip
    if rows is None:
        _kernels()._device_gemm_all_reduce(*head, *tail)
    else:
        _kernels()._device_gemm_reduce_scatter(*head, list(rows), *tail)
    return sums, normalised


def all_reduce(
    partial: Tensor, algorithm: str, epilogue: Epilogue, place: Place, launch: Launch
) -> tuple[Tensor, Tensor | None]:
    """Sum over ranks of partial [M, N] and what follows it: (sums, normalised or None)."""
    partial = partial.contiguous()
    sums = torch.empty_like(partial)
    sizes = (partial.shape[0], partial.shape[1], partial.element_size())
    if algorithm == "one_shot":
        half = _kernels()._device_half_bytes_one_shot(*sizes)
    else:
        half = _kernels()._device_half_bytes_two_shot(*sizes, place.world_size)
    workspace = device.workspace(place.group_name, partial.device, half)
    options = [launch.blocks]
    if algorithm == "two_shot":
        options.append(device.multicast(place.group_name, partial.device))
    if epilogue.is_empty:
        kernel = getattr(_kernels(), f"_device_{algorithm}_all_reduce")
        kernel([partial], [sums], *workspace.tail, *options)
        return sums, None
    normalised = None if epilogue.norm_weight is None else torch.empty_like(sums)
    getattr(_kernels(), f"_device_{algorithm}_all_reduce_norm")(
        partial, epilogue.bias, epilogue.residual, epilogue.norm_weight, epilogue.eps, sums, normalised,
        *workspace.tail, *options,
    )  # fmt: skip
    return sums, normalised


def reduce_scatter(
    partial: Tensor, rows: Sequence[int], epilogue: Epilogue, place: Place, launch: Launch
) -> tuple[Tensor, Tensor | None]:
    """This rank's rows of the sum over ranks of partial [M, N] and what follows it: (sums, normalised or None)."""
    partial = partial.contiguous()
    sums = partial.new_empty((rows[place.rank], partial.shape[1]))
    half = _kernels()._device_half_bytes_slots(
        max(rows), partial.shape[1], partial.element_size(), place.world_size
    )
    workspace = device.workspace(place.group_name, partial.device, half)
    multicast = device.multicast(place.group_name, partial.device)
    if epilogue.is_empty:
        _kernels()._device_reduce_scatter(
            partial, sums, list(rows), *workspace.tail, launch.blocks, multicast
        )
        return sums, None
    normalised = None if epilogue.norm_weight is None else torch.empty_like(sums)
    _kernels()._device_reduce_scatter_norm(
        partial, epilogue.bias, epilogue.residual, epilogue.norm_weight, epilogue.eps, sums, normalised,
        list(rows), *workspace.tail, launch.blocks, multicast,
    )  # fmt: skip
    return sums, normalised


def all_gather(x: Tensor, rows: Sequence[int], place: Place, launch: Launch) -> Tensor:
    """The rows of all ranks: x [m_r, K] -> [M, K]."""
    x = x.contiguous()
    out = x.new_empty((sum(rows), x.shape[1]))
    half = _kernels()._device_half_bytes_slots(max(rows), x.shape[1], x.element_size(), place.world_size)
    workspace = device.workspace(place.group_name, x.device, half)
    multicast = device.multicast(place.group_name, x.device)
    _kernels()._device_all_gather(x, out, list(rows), *workspace.tail, launch.blocks, multicast)
    return out
