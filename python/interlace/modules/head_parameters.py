"""Parameters of an attention module itself that hold one value per head, such as the sinks of GPT-OSS (2025)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from ..groups import Group, resolve
from .clipping import install_total_norm, split_modules
from .holders import sum_over_holders
from .layout import ParameterLayout, take
from .shard import Shards
from .split import SplitModule

__all__ = ["HeadParameters", "hold_heads"]


class HeadParameters(SplitModule):
    """Mixed into the class of an attention module: its per-head parameters are those of this rank's heads.

    Parameters [heads] -> [heads of this rank]. Where ranks share a head (more ranks than heads) their gradients
    are summed.
    """

    base: type[nn.Module]
    group_name: str
    head_names: tuple[str, ...]
    head_shards: Shards

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the attention module returns."""
        if not self.head_shards.overlapping or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        kept = dict(self._parameters)
        own = [kept[name] for name in self.head_names]
        shards = [self.head_shards] * len(own)
        held = sum_over_holders(own, shards, group=self.group_name, rank=self.rank)
        for name, value in zip(self.head_names, held, strict=True):
            del self._parameters[name]
            self.__dict__[name] = value
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in self.head_names:
                del self.__dict__[name]
            self._parameters.clear()
            self._parameters.update(kept)

    def parameter_layouts(self) -> dict[str, ParameterLayout]:
        """Of the per-head parameters."""
        shards = self.head_shards
        layout = ParameterLayout.of_shards((shards.total,), 0, shards, self.group_name)
        return dict.fromkeys(self.head_names, layout)

    def __reduce_ex__(
        self, protocol: Any
    ) -> tuple[Callable[[type[nn.Module]], Any], tuple[Any], dict[str, Any]]:
        # the class is made at run time, so it goes by the class it was made from
        return _rebuild, (self.base,), dict(self.__dict__)


@cache
def _mixed(base: type[nn.Module]) -> type[HeadParameters]:
    return type(base.__name__, (HeadParameters, base), {"base": base, "__module__": base.__module__})


def _rebuild(base: type[nn.Module]) -> HeadParameters:
    mixed = _mixed(base)
    return mixed.__new__(mixed)


def hold_heads(module: nn.Module, names: Sequence[str], shards: Shards, group: Group = None) -> nn.Module:
    """Cut the parameters `names` [heads] of `module` itself to this rank's heads, in place; returns the module.

    It stays an instance of its class.
    """
    info = resolve(group)
    for name in names:
        param = module._parameters[name]
        assert param is not None
        own = take(param.detach(), 0, shards.ranges(info.rank)).clone()
        module._parameters[name] = nn.Parameter(own, requires_grad=param.requires_grad)
    mixed = _mixed(type(module))
    module.__class__ = mixed
    assert isinstance(module, HeadParameters)
    split_modules.add(module)  # as the constructor of a split module does
    install_total_norm()
    module.group_name, module.rank = info.name, info.rank
    module.head_names, module.head_shards = tuple(names), shards
    return module
