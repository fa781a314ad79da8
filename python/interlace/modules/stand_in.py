"""A module in the place of another whose parameters, buffers and attributes are seen through it."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["StandIn"]


class StandIn(nn.Module):
    """Base of modules that stand in for another: its parameters keep their names, its attributes are found here."""

    module: nn.Module

    def _stand_in_for(self, module: nn.Module) -> None:
        # not a child: a child would rename the parameters; the dicts are shared, so both always see the same ones
        object.__setattr__(self, "module", module)
        self._parameters, self._buffers = module._parameters, module._buffers

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("module")
            if module is None:
                raise
            return getattr(module, name)

    def train(self, mode: bool = True) -> StandIn:
        """As nn.Module.train, for the module too."""
        self.module.train(mode)
        return super().train(mode)
