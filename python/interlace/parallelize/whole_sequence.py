"""Blocks that need the whole sequence where the others see a shard: gathered before them, cut again behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .. import functional
from ..groups import GroupInfo
from ..modules import SequenceLength
from .sequence import DIM, ScatterSequence

__all__ = ["WholeSequence"]


@dataclass
class GatherInput:
    """Forward pre-hook: the first tensor the block gets is gathered, x [.., S_r, H] -> [.., S, H].

    Inside, its gradient is whole and equal on all ranks; each keeps its part.
    """

    length: SequenceLength
    group_name: str
    rank: int
    world_size: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        argument = "" if args else next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        x = args[0] if args else kwargs[argument]
        size = self.length.of(x, DIM, self.rank, self.world_size)
        whole = functional.gather_from_region(x, group=self.group_name, dim=DIM, size=size)
        return ((whole, *args[1:]), kwargs) if args else (args, {**kwargs, argument: whole})


@dataclass
class ScatterOutput:
    """Forward hook: of the output, or its first part, this rank's shard, y [.., S, H] -> [.., S_r, H]."""

    group_name: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        y = output if isinstance(output, Tensor) else output[0]
        own = functional.scatter_to_region(y, group=self.group_name, dim=DIM)
        return own if isinstance(output, Tensor) else (own, *output[1:])


@dataclass(frozen=True)
class WholeSequence:
    """Lets a block see the whole sequence, when all modules and the hooks that cut the sequence are in place.

    cuts_output: the block leaves the whole sequence, which is cut behind it; else its last linear cuts it.
    """

    block: str
    cuts_output: bool

    def __call__(self, model: nn.Module, info: GroupInfo) -> None:
        length = _length(model)
        block = model.get_submodule(self.block)
        hook = GatherInput(length, info.name, info.rank, info.world_size)
        block.register_forward_pre_hook(hook, with_kwargs=True)
        if self.cuts_output:
            block.register_forward_hook(ScatterOutput(info.name))


def _length(model: nn.Module) -> SequenceLength:
    """Of the sequence that is cut in this model."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return next(hook.length for hook in hooks if isinstance(hook, ScatterSequence))
