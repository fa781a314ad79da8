"""What the dispatcher knows about the ops beyond their kernels: fake tensors, autocast, the way to torch.distributed.

Schemas are in csrc/ops.cpp, CPU kernels in csrc/cpu, gradients in `functional`. Every op has its fake here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import _C, Tensor

from . import reference
from ._native import _C as native
from .groups import resolve

__all__ = ["CAST_OPS", "OPS", "routed"]

OPS = torch.ops.interlace
CAST_OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "column_gemm")
_LIB = torch.library.Library("interlace", "IMPL")


def routed(op: torch._ops.OpOverload, group_name: str) -> torch._ops.OpOverload:
    """The op, or its twin in torch.distributed when the group or `interlace.backend` says so.

    The C++ kernels know the way too; going from here keeps the text of errors, which the stable ABI loses.
    """
    name = op._opname
    if name == "column_gemm" or native.is_fused(name, group_name):
        return op
    return getattr(OPS, f"{name}_reference").default


def _scattered(shape: Sequence[int], dim: int, group_name: str, length: int | None) -> list[int]:
    dim %= len(shape)
    if length is None:
        info = resolve(group_name)
        begin, end = reference.chunk_range(shape[dim], info.world_size, info.rank)
        length = end - begin
    return [*shape[:dim], length, *shape[dim + 1 :]]


def _gathered(shape: Sequence[int], dim: int, group_name: str, gather_size: int | None) -> list[int]:
    dim %= len(shape)
    total = shape[dim] * resolve(group_name).world_size if gather_size is None else gather_size
    return [*shape[:dim], total, *shape[dim + 1 :]]


def _rows(weights: Sequence[Tensor], packed_rows: Sequence[int]) -> list[int]:
    return list(packed_rows) or [w.shape[0] for w in weights]


def _all_gather_gemm(
    x_shard: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    gather_dim: int,
    group_name: str,
    return_gathered: bool,
    gather_size: int | None = None,
    packed_rows: Sequence[int] = (),
) -> tuple[Tensor, list[Tensor]]:
    shape = _gathered(x_shard.shape, gather_dim, group_name, gather_size)
    gathered = x_shard.new_empty(shape if return_gathered else [0])
    return gathered, [x_shard.new_empty([*shape[:-1], n]) for n in _rows(weights, packed_rows)]


def _gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scatter_dim: int,
    group_name: str,
    packed_rows: int | None = None,
    length: int | None = None,
) -> Tensor:
    n = weight.shape[0] if packed_rows is None else packed_rows
    return x.new_empty(_scattered([*x.shape[:-1], n], scatter_dim, group_name, length))


def _gemm_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, packed_rows: int | None = None
) -> Tensor:
    return x.new_empty([*x.shape[:-1], weight.shape[0] if packed_rows is None else packed_rows])


def _column_gemm(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    group_name: str,
    packed_rows: Sequence[int] = (),
) -> list[Tensor]:
    return [x.new_empty([*x.shape[:-1], n]) for n in _rows(weights, packed_rows)]


def _sum_gemm_reduce_scatter(
    xs: list[Tensor], weights: list[Tensor], scatter_dim: int, group_name: str, length: int | None = None
) -> Tensor:
    return xs[0].new_empty(
        _scattered([*xs[0].shape[:-1], weights[0].shape[0]], scatter_dim, group_name, length)
    )


def _sum_gemm_all_reduce(xs: list[Tensor], weights: list[Tensor], group_name: str) -> Tensor:
    return xs[0].new_empty([*xs[0].shape[:-1], weights[0].shape[0]])


def _all_reduce(x: Tensor, group_name: str) -> Tensor:
    return x.new_empty(x.shape)


def _all_gather(x: Tensor, dim: int, group_name: str, gather_size: int | None = None) -> Tensor:
    return x.new_empty(_gathered(x.shape, dim, group_name, gather_size))


def _reduce_scatter(x: Tensor, dim: int, group_name: str, length: int | None = None) -> Tensor:
    return x.new_empty(_scattered(x.shape, dim, group_name, length))


def _all_to_all(
    x: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group_name: str,
) -> Tensor:
    rows = x.shape[0] if output_split_sizes is None else sum(output_split_sizes)
    return x.new_empty([rows, *x.shape[1:]])


_FAKES: dict[str, Callable[..., Any]] = {
    "all_gather_gemm": _all_gather_gemm,
    "gemm_reduce_scatter": _gemm_reduce_scatter,
    "gemm_all_reduce": _gemm_all_reduce,
    "column_gemm": _column_gemm,
    "sum_gemm_reduce_scatter": _sum_gemm_reduce_scatter,
    "sum_gemm_all_reduce": _sum_gemm_all_reduce,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _pack_weight(weight: Tensor) -> Tensor:
    compute = torch.bfloat16 if weight.dtype is torch.bfloat16 and OPS.engine_info()[2] else torch.float32
    depth = (weight.shape[1] + 1) // 2 * 2 if compute is torch.bfloat16 else weight.shape[1]
    return weight.new_empty([(weight.shape[0] + 63) // 64, depth * 64], dtype=compute)


def _unpack_weight(packed: Tensor, rows: int, depth: int) -> Tensor:
    return packed.new_empty([rows, depth])


def _autocast_kernel(op: torch._ops.OpOverload, device_type: str, key: _C.DispatchKey) -> Callable[..., Any]:
    """The rule of F.linear: floating inputs but fp64 go to the autocast dtype of the device."""
    exclude = _C.DispatchKeySet(key)

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64:
            return value.to(dtype)
        if isinstance(value, list | tuple):
            return [cast(v, dtype) for v in value]
        return value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        with _C._ExcludeDispatchKeyGuard(exclude):
            return op(*(cast(a, dtype) for a in args), **{k: cast(v, dtype) for k, v in kwargs.items()})

    return kernel


def _sum_all_reduce(xs: list[Tensor], weights: list[Tensor], group_name: str) -> Tensor:
    return reference.all_reduce(reference.sum_of_products(xs, weights), group_name).to(xs[0].dtype)


def _sum_reduce_scatter(
    xs: list[Tensor], weights: list[Tensor], scatter_dim: int, group_name: str, length: int | None = None
) -> Tensor:
    total = reference.sum_of_products(xs, weights)
    return reference.reduce_scatter(total, scatter_dim, group_name, length).to(xs[0].dtype)


def _plain(weight: Tensor, rows: int | None, x: Tensor) -> Tensor:
    return weight if rows is None else OPS.unpack_weight(weight, rows, x.shape[-1]).to(x.dtype)


def _plain_list(weights: list[Tensor], packed_rows: Sequence[int], depth_of: Tensor) -> list[Tensor]:
    return [
        _plain(w, n, depth_of) for w, n in zip(weights, packed_rows or [None] * len(weights), strict=True)
    ]


def _reference_all_gather_gemm(
    x, weights, biases, dim, group_name, return_gathered, size=None, packed_rows=()
):
    plain = _plain_list(weights, packed_rows, x)
    return reference.all_gather_gemm(x, plain, biases, dim, group_name, return_gathered, size)


_REFERENCES: dict[str, Callable[..., Any]] = {
    "all_gather_gemm": _reference_all_gather_gemm,
    "gemm_reduce_scatter": lambda x, w, b, dim, group_name, rows=None, length=None: (
        reference.gemm_reduce_scatter(x, _plain(w, rows, x), b, dim, group_name, length)
    ),
    "gemm_all_reduce": lambda x, w, b, group_name, rows=None: reference.gemm_all_reduce(
        x, _plain(w, rows, x), b, group_name
    ),
    "sum_gemm_reduce_scatter": _sum_reduce_scatter,
    "sum_gemm_all_reduce": _sum_all_reduce,
    "column_gemm": lambda x, weights, biases, group_name, packed_rows=(): [
        F.linear(x, w, b) for w, b in zip(_plain_list(weights, packed_rows, x), biases, strict=True)
    ],
    "all_reduce": reference.all_reduce,
    "all_gather": reference.all_gather,
    "reduce_scatter": reference.reduce_scatter,
    "all_to_all": reference.all_to_all,
}


def _register() -> None:
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"interlace::{name}", fake, lib=_LIB)
        torch.library.register_fake(f"interlace::{name}_reference", fake, lib=_LIB)
    torch.library.register_fake("interlace::pack_weight", _pack_weight, lib=_LIB)
    torch.library.register_fake("interlace::unpack_weight", _unpack_weight, lib=_LIB)
    for name, kernel in _REFERENCES.items():
        _LIB.impl(f"{name}_reference", kernel, "CPU")
        for device in ("CUDA",):  # no fused CUDA kernels yet: torch.distributed serves GPU tensors
            _LIB.impl(f"{name}_reference", kernel, device)
            _LIB.impl(name, kernel, device)
    for name in CAST_OPS:
        op = getattr(OPS, name).default
        _LIB.impl(name, _autocast_kernel(op, "cpu", _C.DispatchKey.AutocastCPU), "AutocastCPU")
        _LIB.impl(name, _autocast_kernel(op, "cuda", _C.DispatchKey.AutocastCUDA), "AutocastCUDA")


_register()
