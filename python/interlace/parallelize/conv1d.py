"""Linears whose weight is stored transposed (`Conv1D` of transformers): [in, out] instead of [out, in]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from ..groups import GroupInfo
    from .plan import Plan, Step

__all__ = ["is_conv1d", "linear_sizes", "split_conv1d"]


def is_conv1d(module: nn.Module) -> bool:
    """True for transformers' Conv1D itself; a subclass may compute something else."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in_features, out_features) of a linear or Conv1D; None for anything else."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if is_conv1d(module):
        weight = module.get_parameter("weight")
        return weight.shape[0], weight.shape[1]
    return None


def split_conv1d(old: nn.Module, step: Step, plan: Plan, info: GroupInfo) -> nn.Module:
    """This rank's shard of a Conv1D, by the style and the shards of its step."""
    from ..modules.conv1d import ColumnParallelConv1D, RowParallelConv1D  # needs transformers

    if step.style.startswith("column"):
        return ColumnParallelConv1D.from_conv1d(
            old, info.name, shards=step.shards, gather_output=step.style == "column_gather_output",
            sequence_parallel=plan.sequence_parallel,
        )  # fmt: skip
    return RowParallelConv1D.from_conv1d(
        old, info.name, shards=step.shards, input_is_parallel=step.style == "row",
        sequence_parallel=plan.sequence_parallel,
    )  # fmt: skip
