"""Our kernels under two op schemas of torch, so that code which calls those runs on them: Inductor's micro-pipelined
tensor parallelism, torchtitan's distributed linears, passes of vLLM and SGLang.

    symm_mem::fused_all_gather_matmul(A, Bs, gather_dim, group_name, *, return_A=True) -> (gathered A or None, [A @ B])
    symm_mem::fused_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name) -> reduce_scatter(A @ B)

The schemas promise strides (tag needs_fixed_stride_order), and torch's Meta kernels, which stay, state them: results
of the first op are contiguous with the gathered dim in front, results of the second are contiguous.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed._symmetric_memory  # (defines the schemas)
from torch import _C, Tensor
from torch._prims_common import make_contiguous_strides_for

from .errors import translated
from .functional._check import check_product, refuse
from .groups import GroupInfo, resolve
from .ops import OPS, routed

__all__ = ["ProvidedOps", "provide_symm_mem_ops"]

AG, RS = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
DEVICES = ("cpu", "cuda")


def _call(name: str, group_name: str, *args: Any) -> Any:
    """An op's own kernel, or its twin in torch.distributed; these schemas have no gradients of their own."""
    try:
        with _C._AutoDispatchBelowAutograd():
            return routed(getattr(OPS, name).default, group_name, args)(*args)
    except RuntimeError as error:
        raise translated(error) from None


def _checked(
    op: str, a: Tensor, bs: Sequence[Tensor], what: str, dim: int, group_name: str
) -> tuple[GroupInfo, int, list[Tensor]]:
    """The group, the dim counted from the front, and the matrices as weights [N, K]."""
    info = resolve(group_name)
    if a.dim() < 2:
        refuse(info, ValueError, f"{op}: A has shape {list(a.shape)}; expected [.., M, K]")
    if not (0 <= dim < a.dim() or dim == -1):
        refuse(
            info, ValueError, f"{op}: {what}={dim}; expected 0 to {a.dim() - 1}, or -1, for {list(a.shape)}"
        )
    for b in bs:
        if b.dim() != 2:
            refuse(info, ValueError, f"{op}: B has shape {list(b.shape)}; expected a matrix [K, N]")
    weights = [b.t() for b in bs]
    dim %= a.dim()
    inner = op == AG and dim == a.dim() - 1
    check_product(op, a, weights, [None] * len(weights), info, inner_is_gathered=inner)
    if inner and any(weight.shape[1] != a.shape[-1] * info.world_size for weight in weights):
        refuse(
            info,
            ValueError,
            f"{op}: A {list(a.shape)} gathered from {info.world_size} ranks along its last dim needs B "
            f"[{a.shape[-1] * info.world_size}, N], got {[list(b.shape) for b in bs]}",
        )
    return info, dim, weights


def _fused_all_gather_matmul(
    a: Tensor, bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """A [.., s, .., K], Bs [K, N_i] -> gathered A (None without return_A), [gather(A) @ B_i]."""
    info, dim, weights = _checked(AG, a, bs, "gather_dim", gather_dim, group_name)
    inner = dim == a.dim() - 1
    x = a if inner else a.movedim(dim, 0)
    place = dim if inner else 0
    if info.world_size == 1:
        gathered, outs = x.clone(memory_format=torch.contiguous_format), [x @ w.t() for w in weights]
    else:
        size = x.shape[place] * info.world_size
        gathered, outs = _call(
            "all_gather_gemm", info.name, x, weights, [None] * len(weights), place, info.name, return_A, size
        )
    if inner:
        return (gathered if return_A else None), outs
    return (gathered.movedim(0, dim) if return_A else None), [out.movedim(0, dim) for out in outs]


def _fused_matmul_reduce_scatter(
    a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    """A [.., S, .., K_r], B [K_r, N] -> this rank's chunk along `scatter_dim` of the sum or mean over ranks."""
    info, dim, (weight,) = _checked(RS, a, [b], "scatter_dim", scatter_dim, group_name)
    if reduce_op not in ("sum", "avg"):
        refuse(info, ValueError, f"{RS}: reduce_op={reduce_op!r}; expected 'sum' or 'avg'")
    size = b.shape[1] if dim == a.dim() - 1 else a.shape[dim]
    if size % info.world_size:
        refuse(
            info,
            ValueError,
            f"{RS}: {size} of dim {dim} do not divide by the {info.world_size} ranks, and the schema knows no uneven "
            "chunks; pad, or call interlace.functional.linear_reduce_scatter",
        )
    if info.world_size == 1:
        return (a @ b).contiguous()
    out: Tensor = _call("gemm_reduce_scatter", info.name, a, weight, None, dim, info.name).contiguous()
    out = out.as_strided(out.shape, make_contiguous_strides_for(out.shape))  # where a size is 1 as well
    return out if reduce_op == "sum" else out / info.world_size


class ProvidedOps:
    """What `provide_symm_mem_ops` returns: close it, or leave its `with` block, and torch's own kernels are back."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self._library: torch.library.Library | None = torch.library.Library("symm_mem", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*(?i:overrid)"
            )  # replacing torch's kernel is the point
            for device in self.devices:
                self._library.impl(AG, _fused_all_gather_matmul, device.upper())
                self._library.impl(RS, _fused_matmul_reduce_scatter, device.upper())

    @property
    def closed(self) -> bool:
        """True when torch's own kernels are in charge again."""
        return self._library is None

    def close(self) -> None:
        """Take the kernels away. A second call does nothing."""
        if self._library is not None:
            self._library._destroy()
            self._library = None
        if _provided and _provided[0] is self:
            _provided.clear()

    def __enter__(self) -> ProvidedOps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# a kernel lives as long as its Library: kept here, so that a call whose result nobody keeps has effect
_provided: list[ProvidedOps] = []


def provide_symm_mem_ops(devices: Sequence[str] = DEVICES) -> ProvidedOps:
    """Run torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter on interlace, from now on.

    Process-wide and opt-in; undone by `close()` of the handle, or by leaving `with provide_symm_mem_ops():`. CPU, where
    torch has no kernel, and CUDA, where ours replaces torch's. Sums cross ranks in fp32, in rank order. gather and
    scatter dim: any, the last one included; return_A=False; several Bs share one gather. Shards are equal, as the
    schema has it: ValueError otherwise. The scaled (fp8) variants stay torch's. The first call for a group is
    collective: it sets up symmetric memory. On CUDA without fused kernels torch.distributed serves the collective
    beside the product; a warning says so.

    Raises ValueError for an unknown device, and when the ops are provided already.
    """
    unknown = [device for device in devices if device not in DEVICES]
    if unknown or not devices:
        raise ValueError(f"provide_symm_mem_ops: devices={tuple(devices)}; expected some of {DEVICES}")
    if _provided:
        raise ValueError("provide_symm_mem_ops: the ops are provided already; close the first handle")
    if "cuda" in devices and torch.cuda.is_available():
        warnings.warn(
            "interlace: symm_mem ops on CUDA go through torch.distributed, nothing is fused there; pass "
            'devices=("cpu",) to keep torch\'s kernels',
            stacklevel=2,
        )
    _provided.append(ProvidedOps(devices))
    return _provided[0]
