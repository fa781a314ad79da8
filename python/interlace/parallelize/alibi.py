"""Arguments that hold a value per head (alibi, biases in the mask): a rank passes on those of its own heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = ["OwnHeads"]


@dataclass(frozen=True)
class OwnHeads:
    """Forward pre-hook of attention: of the named arguments, the slices of this rank's heads.

    An argument is [batch, heads, ..] or [batch * heads, ..] with all `num_heads` heads; one with a single head, or
    none (None, a mask of two dims), is for all heads and stays.
    """

    arguments: tuple[str, ...]
    num_heads: int
    heads: tuple[int, int]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        own = {
            name: self._own(kwargs[name], x.shape[0])
            for name in self.arguments
            if isinstance(kwargs.get(name), Tensor)
        }
        return args, {**kwargs, **own}

    def _own(self, values: Tensor, batch: int) -> Tensor:
        first, last = self.heads
        if values.dim() == 3 and values.shape[0] == batch * self.num_heads:
            whole = values.unflatten(0, (batch, self.num_heads))
            return whole[:, first:last].reshape(batch * (last - first), *values.shape[1:])
        if values.dim() == 3 and values.shape[0] == self.num_heads:
            return values[first:last]
        if values.dim() == 4 and values.shape[1] == self.num_heads:
            return values[:, first:last]
        return values
