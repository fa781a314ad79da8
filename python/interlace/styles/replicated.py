"""Layers that every rank holds whole: norms, per-head norms, anything small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from .. import functional
from ..groups import resolve
from .parameters import SplitForward, check_untouched, distribute, local, run_with

__all__ = ["Replicated", "ReplicatedForward", "SequenceNorm"]


class ReplicatedForward(SplitForward):
    """The forward of the module's class, run on plain parameters; with `summed`, gradients are summed over the mesh."""

    def __init__(self, module: nn.Module, group_name: str, summed: bool) -> None:
        super().__init__(module, group_name)
        self.summed = summed
        self.style = "summed" if summed else ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for these arguments."""
        self.check_ties()
        plain = {name: local(param) for name, param in self.module._parameters.items()}
        if self.summed and torch.is_grad_enabled():
            plain |= _summed(plain, self.group_name)
        return run_with(self.module, plain, args, kwargs)


def _summed(params: Mapping[str, Tensor | None], group_name: str) -> dict[str, Tensor]:
    """Those that need a gradient through `copy_to_region`, of one dtype together: one all-reduce in the backward."""
    kinds: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, param in params.items():
        if param is not None and param.requires_grad:
            kinds.setdefault(param.dtype, {})[name] = param
    out: dict[str, Tensor] = {}
    for named in kinds.values():
        if len(named) == 1:
            out |= {name: functional.copy_to_region(param, group=group_name) for name, param in named.items()}
            continue
        flat = functional.copy_to_region(
            torch.cat([param.flatten() for param in named.values()]), group=group_name
        )
        parts = flat.split([param.numel() for param in named.values()])
        out |= {name: part.view_as(param) for (name, param), part in zip(named.items(), parts, strict=True)}
    return out


class Replicated(ParallelStyle):
    """Parameters as DTensors that every rank holds whole; the forward sees them as plain tensors.

    For modules whose input is equal on all ranks, so that every rank computes the whole gradient. They need no style
    to be right; with one, all parameters of a model live on one mesh, as clip_grad_norm_ and foreach optimizers want.
    Only parameters of the module itself are covered. Raises ValueError when it has a style, or none to cover.
    """

    summed = False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        op = type(self).__name__
        check_untouched(op, module)
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if not names:
            raise ValueError(
                f"{op}: {type(module).__name__} has no parameters of its own; drop it from the plan"
            )
        forward = ReplicatedForward(module, resolve(device_mesh).name, self.summed)
        distribute(op, module, dict.fromkeys(names, Replicate()), device_mesh, self.src_data_rank, forward)
        return module


class SequenceNorm(Replicated):
    """Replicated parameters of a module that sees a part of the data: a shard of the sequence, or the heads of a rank.

    y = module(x), local. Gradients are summed over the mesh inside the backward, one all-reduce a dtype, so they are
    whole right after it. Input gradients are left alone: they belong to this rank's part.
    """

    summed = True
