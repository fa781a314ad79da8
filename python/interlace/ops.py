"""What the dispatcher knows about the ops beyond their kernels: fake tensors, autocast, the way to torch.distributed.

Schemas are in csrc/ops.cpp, CPU kernels in csrc/cpu and `composed`, those of the CUDA key in `cuda_dispatch`, gradients
in `functional`. Every op has its fake here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import _C, Tensor

from . import composed, cuda_dispatch, decomposed, reference
from ._native import _C as native
from .groups import resolve
from .paths import chosen_backend, note_path

__all__ = ["CAST_OPS", "OPS", "routed"]

OPS = torch.ops.interlace
CAST_OPS = (
    "all_gather_gemm",
    "gemm_reduce_scatter",
    "gemm_all_reduce",
    "gemm_all_reduce_norm",
    "gemm_reduce_scatter_norm",
    "column_gemm",
)
# their dtypes are what the caller made of them: autocast leaves them alone, and what they call
UNCAST_OPS = ("all_gather_gemm_scaled", "gemm_reduce_scatter_scaled")
_LIB = torch.library.Library("interlace", "IMPL")


def routed(op: torch._ops.OpOverload, group_name: str, args: Sequence[Any] = ()) -> torch._ops.OpOverload:
    """The op, or its twin in torch.distributed when the group or `interlace.backend` says so.

    The C++ kernels know the way too; going from here keeps the text of errors, which the stable ABI loses. Kernels of
    the CUDA key choose for themselves: `args` tell the device.
    """
    name = op._opname
    first = args[0] if args else None
    if isinstance(first, list | tuple) and first:
        first = first[0]
    if name == "column_gemm" or (isinstance(first, Tensor) and first.is_cuda):
        return op
    if chosen_backend() == "decomposed" and name in _DECOMPOSED:
        return getattr(OPS, f"{name}_decomposed").default
    if native.is_fused(name, group_name):
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


def _gemm_all_reduce_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    shape = [*x.shape[:-1], weight.shape[0]]
    return x.new_empty(shape), x.new_empty(shape)


def _gemm_reduce_scatter_norm(
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
    shape = _scattered([*x.shape[:-1], weight.shape[0]], scatter_dim, group_name, length)
    return x.new_empty(shape), x.new_empty(shape)


def _all_gather_gemm_scaled(
    x_shard: Tensor,
    x_scale: Tensor,
    weights: list[Tensor],
    weight_scales: list[Tensor],
    biases: list[Tensor | None],
    out_dtype: torch.dtype,
    gather_dim: int,
    group_name: str,
    gather_size: int | None = None,
) -> list[Tensor]:
    shape = _gathered(x_shard.shape, gather_dim, group_name, gather_size)
    return [x_shard.new_empty([*shape[:-1], w.shape[0]], dtype=out_dtype) for w in weights]


def _gemm_reduce_scatter_scaled(
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
    shape = _scattered([*x.shape[:-1], weight.shape[0]], scatter_dim, group_name, length)
    return x.new_empty(shape, dtype=out_dtype)


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
    "gemm_all_reduce_norm": _gemm_all_reduce_norm,
    "gemm_reduce_scatter_norm": _gemm_reduce_scatter_norm,
    "all_gather_gemm_scaled": _all_gather_gemm_scaled,
    "gemm_reduce_scatter_scaled": _gemm_reduce_scatter_scaled,
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
    """The rule of F.linear: floating inputs but fp64 go to the autocast dtype of the device. Nothing below is cast."""
    exclude = _C.DispatchKeySet(key)

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64:
            return value.to(dtype)
        if isinstance(value, list | tuple):
            return [cast(v, dtype) for v in value]
        return value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if op._opname in UNCAST_OPS:
            with _C._ExcludeDispatchKeyGuard(exclude):
                return op(*args, **kwargs)
        dtype = torch.get_autocast_dtype(device_type)
        with _C._ExcludeDispatchKeyGuard(exclude):
            return op(*(cast(a, dtype) for a in args), **{k: cast(v, dtype) for k, v in kwargs.items()})

    return kernel


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
    "sum_gemm_reduce_scatter": reference.sum_gemm_reduce_scatter,
    "sum_gemm_all_reduce": reference.sum_gemm_all_reduce,
    "gemm_all_reduce_norm": reference.gemm_all_reduce_norm,
    "gemm_reduce_scatter_norm": reference.gemm_reduce_scatter_norm,
    "all_gather_gemm_scaled": reference.all_gather_gemm_scaled,
    "gemm_reduce_scatter_scaled": reference.gemm_reduce_scatter_scaled,
    "column_gemm": lambda x, weights, biases, group_name, packed_rows=(): [
        F.linear(x, w, b) for w, b in zip(_plain_list(weights, packed_rows, x), biases, strict=True)
    ],
    "all_reduce": reference.all_reduce,
    "all_gather": reference.all_gather,
    "reduce_scatter": reference.reduce_scatter,
    "all_to_all": reference.all_to_all,
}


def _decomposed_all_gather_gemm(
    x, weights, biases, dim, group_name, return_gathered, size=None, packed_rows=()
):
    plain = _plain_list(weights, packed_rows, x)
    return decomposed.all_gather_gemm(x, plain, biases, dim, group_name, return_gathered, size)


_DECOMPOSED: dict[str, Callable[..., Any]] = {
    "all_gather_gemm": _decomposed_all_gather_gemm,
    "gemm_reduce_scatter": lambda x, w, b, dim, group_name, rows=None, length=None: (
        decomposed.gemm_reduce_scatter(x, _plain(w, rows, x), b, dim, group_name, length)
    ),
    "gemm_all_reduce": lambda x, w, b, group_name, rows=None: decomposed.gemm_all_reduce(
        x, _plain(w, rows, x), b, group_name
    ),
    "sum_gemm_reduce_scatter": decomposed.sum_gemm_reduce_scatter,
    "sum_gemm_all_reduce": decomposed.sum_gemm_all_reduce,
    "gemm_all_reduce_norm": decomposed.gemm_all_reduce_norm,
    "gemm_reduce_scatter_norm": decomposed.gemm_reduce_scatter_norm,
    "all_gather_gemm_scaled": decomposed.all_gather_gemm_scaled,
    "gemm_reduce_scatter_scaled": decomposed.gemm_reduce_scatter_scaled,
}


def _noted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, and its path told."""

    def told(*args: Any, **kwargs: Any) -> Any:
        note_path(name, "decomposed", 'interlace.backend("decomposed"): products in pieces', False)
        return kernel(*args, **kwargs)

    return told


# Ops of CPU tensors whose kernels are Python.
_COMPOSED: dict[str, Callable[..., Any]] = {
    "gemm_all_reduce_norm": composed.gemm_all_reduce_norm,
    "gemm_reduce_scatter_norm": composed.gemm_reduce_scatter_norm,
    "all_gather_gemm_scaled": composed.all_gather_gemm_scaled,
    "gemm_reduce_scatter_scaled": composed.gemm_reduce_scatter_scaled,
}


def _register() -> None:
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"interlace::{name}", fake, lib=_LIB)
        torch.library.register_fake(f"interlace::{name}_reference", fake, lib=_LIB)
    torch.library.register_fake("interlace::pack_weight", _pack_weight, lib=_LIB)
    torch.library.register_fake("interlace::unpack_weight", _unpack_weight, lib=_LIB)
    for name, kernel in _REFERENCES.items():
        for device in ("CPU", "CUDA"):
            _LIB.impl(f"{name}_reference", kernel, device)
    for name, kernel in _DECOMPOSED.items():
        torch.library.register_fake(f"interlace::{name}_decomposed", _FAKES[name], lib=_LIB)
        for device in ("CPU", "CUDA"):
            _LIB.impl(f"{name}_decomposed", _noted(name, kernel), device)
    for name, kernel in _COMPOSED.items():
        _LIB.impl(name, kernel, "CPU")
    for name, kernel in cuda_dispatch.KERNELS.items():
        _LIB.impl(name, kernel, "CUDA")
    for name in (*CAST_OPS, *UNCAST_OPS):
        op = getattr(OPS, name).default
        _LIB.impl(name, _autocast_kernel(op, "cpu", _C.DispatchKey.AutocastCPU), "AutocastCPU")
        _LIB.impl(name, _autocast_kernel(op, "cuda", _C.DispatchKey.AutocastCUDA), "AutocastCUDA")


_register()
