"""Calls of the device kernels: staging sizes, workspace, buffers, and the `_device_*` op of csrc/cuda/host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import device
from ..heuristics import Launch
from .arguments import aligned_matrices, aligned_rows
from .shapes import dense
from .state import known

__all__ = [
    "Epilogue",
    "Place",
    "all_gather",
    "all_reduce",
    "fused_gather",
    "fused_reduce",
    "reduce_scatter",
]


_EMPTY_SIZE = 16  # columns or depth that stand for none; any size the kernels take


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
    weight_scales: Sequence[Tensor] = (),
) -> tuple[Tensor | None, list[Tensor]]:  # fmt: skip
    """x [m_r, K] -> (gathered [M, K] or None, [M, N_i]); rows: m of every rank.

    Scales of fp8 are given by row: x_scale [m_r], weight_scales [N_i].
    """
    x = aligned_rows(x)
    total = sum(rows)
    outs = [x.new_empty((total, w.shape[0]), dtype=out_dtype) for w in weights]
    gathered = x.new_empty((total, x.shape[1])) if want_gathered else None
    # a rank may have no columns of a weight: it takes part in the gather all the same
    kept = [i for i, w in enumerate(weights) if w.shape[0]]
    if kept:
        matrices = aligned_matrices([weights[i] for i in kept])
        written, added = [outs[i] for i in kept], [dense(biases[i]) for i in kept]
        scales = [weight_scales[i] for i in kept] if weight_scales else []
    else:
        matrices, added = [_zeros(x, _EMPTY_SIZE, x.shape[1])], [None]
        written = [x.new_empty((total, _EMPTY_SIZE), dtype=out_dtype)]
        scales = [weight_scales[0].new_ones(_EMPTY_SIZE)] if weight_scales else []
    half = _kernels()._device_half_bytes_all_gather_gemm(list(rows), x.shape[1], x.element_size())
    workspace = device.workspace(place.group_name, x.device, half)
    _kernels()._device_all_gather_gemm(
        x, matrices, added, x_scale, scales, gathered, written, list(rows), *workspace.tail,
        launch.tile_columns, launch.blocks, launch.comm_blocks,
    )  # fmt: skip
    return gathered, outs


def _with_depth(xs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """x [M, K], weights [N, K] as the kernels read them. A rank may have no part of K: its product is zero then."""
    if any(x.shape[1] == 0 for x in xs):
        xs = [_zeros(x, x.shape[0], _EMPTY_SIZE) if x.shape[1] == 0 else x for x in xs]
        weights = [_zeros(w, w.shape[0], _EMPTY_SIZE) if w.shape[1] == 0 else w for w in weights]
    return [aligned_rows(x) for x in xs], aligned_matrices(weights)


def _zeros(like: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros of the dtype of `like`; all bits are zero in each, and torch fills no fp8."""
    nbytes = columns * like.element_size()
    return torch.zeros((rows, nbytes), dtype=torch.uint8, device=like.device).view(like.dtype)


def _may_sum_by_switch(place: Place) -> bool:
    """Whether the switch may sum: not when sums are to keep to rank order."""
    state = known(place.group_name)
    return state is not None and state.hardware.multicast and not state.rank_order


def _has_switch_sums(place: Place) -> bool:
    """The same for fused sums: only the kernels with the Hopper mainloop know how."""
    state = known(place.group_name)
    return _may_sum_by_switch(place) and state is not None and state.hardware.mainloop == "sm_90a"


def fused_reduce(
    xs: Sequence[Tensor], weights: Sequence[Tensor], epilogue: Epilogue, rows: Sequence[int] | None, place: Place,
    launch: Launch, *, out_dtype: torch.dtype, x_scale: Tensor | None = None, weight_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Sum over ranks and products of x_i [M, K_i] @ W_i^T and what follows it: (sums, normalised or None).

    rows: what each rank keeps of the M rows; None: everybody keeps all (all-reduce).
    """
    xs, matrices = _with_depth(xs, weights)
    columns, total = weights[0].shape[0], xs[0].shape[0]
    sums = xs[0].new_empty((total if rows is None else rows[place.rank], columns), dtype=out_dtype)
    normalised = None if epilogue.norm_weight is None else torch.empty_like(sums)
    switch = _has_switch_sums(place)
    shares = [total] if rows is None else list(rows)
    # whether the memory has a multicast address shows once it is there: room for both ways
    half = max(
        _kernels()._device_half_bytes_gemm_reduce(
            shares, place.world_size, rows is not None, columns, sums.element_size(), launch.float32_wire, way
        )
        for way in {False, switch}
    )
    workspace = device.workspace(place.group_name, sums.device, half)
    multicast = switch and workspace.multicast != 0
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
        options.append(_may_sum_by_switch(place) and workspace.multicast != 0)
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
    multicast = _may_sum_by_switch(place) and workspace.multicast != 0
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
    multicast = workspace.multicast != 0
    _kernels()._device_all_gather(x, out, list(rows), *workspace.tail, launch.blocks, multicast)
    return out
