"""Sequence parallelism around model code that knows nothing of it: hooks that cut and gather the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .. import functional
from ..modules import ColumnParallelLinear, SequenceLength

__all__ = ["GatherSequence", "ScatterSequence", "StandIn"]

DIM = -2  # [.., sequence, features]


@dataclass
class ScatterSequence:
    """Forward pre-hook: the first tensor the module gets is cut, x [.., S, H] -> [.., S_r, H]."""

    length: SequenceLength
    group_name: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        argument = "" if args else next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        x = args[0] if args else kwargs[argument]
        self.length.size = x.shape[DIM]
        return _with_input(
            args, kwargs, argument, functional.scatter_to_region(x, group=self.group_name, dim=DIM)
        )


@dataclass
class GatherSequence:
    """Forward hook: the output, or the first part of it, is gathered, y [.., S_r, H] -> [.., S, H]."""

    length: SequenceLength
    group_name: str
    rank: int
    world_size: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        y = output if isinstance(output, Tensor) else output[0]
        size = self.length.of(y, DIM, self.rank, self.world_size)
        whole = functional.gather_from_region(y, group=self.group_name, dim=DIM, size=size)
        return whole if isinstance(output, Tensor) else (whole, *output[1:])


@dataclass
class StandIn:
    """Forward pre-hook of attention: q, k and v are computed from the shards, with one gather.

    The module goes on with a stand-in for its gathered input, of the right shape and NaN everywhere: its
    forward was checked to use nothing but the shape, and should it ever use more, the result is NaN and not a
    wrong number.
    """

    length: SequenceLength
    argument: str
    projection: str
    rank: int
    world_size: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x = args[0] if args else kwargs[self.argument]
        size = self.length.of(x, DIM, self.rank, self.world_size)
        shape = [*x.shape]
        shape[DIM] = x.shape[DIM] * self.world_size if size is None else size
        stand_in = x.new_full((1,), float("nan")).expand(shape)
        projection = module.get_submodule(self.projection)
        assert isinstance(projection, ColumnParallelLinear) and projection.shared_input is not None
        projection.shared_input.compute(x, stand_in, size)
        return _with_input(args, kwargs, self.argument, stand_in)


def _with_input(args: tuple[Any, ...], kwargs: dict[str, Any], argument: str, x: Tensor) -> tuple[Any, Any]:
    if args:
        return (x, *args[1:]), kwargs
    return args, {**kwargs, argument: x}
