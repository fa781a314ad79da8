"""Replicated layers that see different data on each rank (per-head norms, norms of a sequence shard)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..groups import Group, resolve
from .stand_in import StandIn

__all__ = ["SummedGradients"]


class SummedGradients(StandIn):
    """Stands in for `module`: same parameters under the same names, same forward, gradients summed over the
    group.

    The sum happens inside the backward, so `weight.grad` is complete right after it, for every optimizer,
    wrapper and copy. One all-reduce for all parameters of a dtype. Only parameters of `module` itself are
    covered. Raises ValueError when `module` has children with parameters.
    """

    style = "summed"

    def __init__(self, module: nn.Module, group: Group = None) -> None:
        super().__init__()
        if any(True for child in module.children() for _ in child.parameters()):
            raise ValueError(
                f"SummedGradients: {type(module).__name__} has children with parameters; "
                "wrap each of them instead"
            )
        self.group_name = resolve(group).name
        self._stand_in_for(module)
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `module` returns."""
        named = {name: param for name, param in self._parameters.items() if param is not None}
        if not torch.is_grad_enabled() or not any(param.requires_grad for param in named.values()):
            return self.module(*args, **kwargs)
        return torch.func.functional_call(self.module, _copied(named, self.group_name), args, kwargs)

    def extra_repr(self) -> str:
        """The module it stands for."""
        return repr(self.module)


def _copied(named: Mapping[str, Tensor], group_name: str) -> dict[str, Tensor]:
    """Every parameter through `copy_to_region`, those of one dtype together."""
    if len(named) == 1 or len({param.dtype for param in named.values()}) > 1:
        return {name: functional.copy_to_region(param, group=group_name) for name, param in named.items()}
    flat = functional.copy_to_region(
        torch.cat([param.flatten() for param in named.values()]), group=group_name
    )
    parts = flat.split([param.numel() for param in named.values()])
    return {name: part.view_as(param) for (name, param), part in zip(named.items(), parts, strict=True)}
