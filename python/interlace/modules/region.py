"""Work between a replicated activation and the sum over the ranks, entered and left by one collective each way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from .holders import sum_over_holders
from .linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["InnerColumnLinear", "InnerRowLinear", "SumRegion", "enter_region"]


class _EnterRegion(torch.autograd.Function):
    """Identity of several tensors; backward sums their gradients over the ranks, those of a dtype in one go."""

    @staticmethod
    def forward(ctx: Any, group_name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group_name = group_name
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        summed: list[Tensor | None] = [None] * len(grads)
        wanted = [place for place in range(len(grads)) if ctx.needs_input_grad[1 + place]]
        for places in _together([grads[place].dtype for place in wanted]):
            members = [wanted[place] for place in places]
            flat = torch.cat([grads[m].reshape(-1).to(grads[members[0]].dtype) for m in members])
            total = functional.all_reduce(flat, group=ctx.group_name)
            for m, part in zip(members, total.split([grads[m].numel() for m in members]), strict=True):
                summed[m] = part.view(grads[m].shape).to(grads[m].dtype)
        return None, *summed


def _together(dtypes: list[torch.dtype]) -> list[list[int]]:
    """Which gradients share a sum: those whose dtype the first of the sum holds without loss."""
    groups: list[list[int]] = []
    for place, dtype in enumerate(dtypes):
        for members in groups:
            if torch.promote_types(dtypes[members[0]], dtype) == dtypes[members[0]]:
                members.append(place)
                break
        else:
            groups.append([place])
    return groups


def enter_region(tensors: list[Tensor], *, group: str) -> list[Tensor]:
    """The tensors unchanged; backward: the gradients of all of them, summed over the ranks by one all-reduce.

    tensors: equal on all ranks, any shapes; the first is the widest dtype, else one all-reduce per dtype that does
    not fit into it. As `copy_to_region` for several tensors that enter work which differs between the ranks.
    """
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return list(tensors)
    return list(_EnterRegion.apply(group, *tensors))


class InnerColumnLinear(ColumnParallelLinear):
    """Column-parallel linear whose input has entered the region already: Y_r = X W_r^T + b_r, dX_r not summed."""

    style = "column_inner"
    packs_weight = False  # its product is torch's own

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x [.., in_features] -> [.., out_features of this rank]."""
        weight: Tensor | None = self.weight
        bias = self.bias
        if self.shards.overlapping:
            params, shards = [weight, bias], [self.shards, self.shards]
            weight, bias = sum_over_holders(params, shards, group=self.group_name, rank=self.rank)
        return F.linear(x, weight, bias)  # type: ignore[arg-type]


class InnerRowLinear(RowParallelLinear):
    """Row-parallel linear whose output is summed by the region: Y_r = X_r W_r^T, a part of the sum; no bias."""

    style = "row_inner"
    packs_weight = False

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x [.., in_features of this rank] -> [.., out_features]."""
        return F.linear(x, self.weight)


@dataclass
class SumRegion:
    """One region around several branches that read one input and whose outputs are added.

    Routed experts and shared experts: the first to be called enters for both, the block that adds their outputs
    sums once. The three methods are hooks; what is kept of a forward is dropped at its end.
    """

    group_name: str
    _outside: Tensor | None = field(default=None, repr=False)
    _inside: Tensor | None = field(default=None, repr=False)
    _version: int = 0

    def enter(self, x: Tensor, *others: Tensor) -> list[Tensor]:
        """x and what else enters, inside the region; x is kept for the other branch."""
        entered = enter_region([x, *others], group=self.group_name)
        self._outside, self._inside, self._version = x, entered[0], _version(x)
        return entered

    def branch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Forward pre-hook of the other branch: its input, inside the region."""
        x = args[0]
        before, inside = self._outside, self._inside
        if before is not None and inside is not None and _same(before, self._version, x):
            return (inside.view(x.shape), *args[1:]), kwargs
        return (enter_region([x], group=self.group_name)[0], *args[1:]), kwargs

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook of the block: its output, or the first part of it, summed over the ranks."""
        self._outside = self._inside = None
        y = output if isinstance(output, Tensor) else output[0]
        total = functional.reduce_from_region(y, group=self.group_name)
        return total if isinstance(output, Tensor) else (total, *output[1:])

    def __getstate__(self) -> dict[str, Any]:
        """Without tensors: they belong to a forward."""
        return {"group_name": self.group_name, "_outside": None, "_inside": None, "_version": 0}


def _version(x: Tensor) -> int:
    return -1 if torch.compiler.is_compiling() or x.is_inference() else x._version


def _same(before: Tensor, version: int, x: Tensor) -> bool:
    """Whether x is the tensor from before, maybe in another shape, with its values unchanged."""
    if before is x:
        return _version(x) == version
    one_base = (before if before._base is None else before._base) is (x if x._base is None else x._base)
    alike = before.numel() == x.numel() and before.storage_offset() == x.storage_offset()
    return one_base and alike and before.is_contiguous() and x.is_contiguous() and _version(x) == version
