"""Sequence parallelism around model code that knows nothing of it: hooks that cut and gather the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .. import functional
from ..modules import ColumnParallelLinear, SequenceLength, SharedInput

__all__ = ["GatherSequence", "ScatterSequence", "StandIn", "WholeOutputs"]

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


class WholeOutputs:
    """Forward pre-hook of every module around the cut layers: hidden states between these are no output.

    Model code records them where they are shards of the sequence. ValueError when they are asked for.
    """

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        by_config = getattr(getattr(module, "config", None), "output_hidden_states", False)
        if kwargs.get("output_hidden_states", by_config):
            raise ValueError(
                f"{type(module).__name__}: output_hidden_states=True with sequence_parallel would return shards of the "
                "sequence; parallelize without sequence_parallel"
            )


@dataclass
class StandIn:
    """Forward pre-hook of attention: q, k and v are computed from the shards, with one gather.

    The module goes on with a stand-in for its gathered input, of the right shape and NaN everywhere: its
    forward was checked to use nothing but the shape, and should it ever use more, the result is NaN and not a
    wrong number. Where q, k or v are wrapped (adapters) or hooked, the stand-in is the gathered input itself.
    """

    length: SequenceLength
    argument: str
    projection: str
    rank: int
    world_size: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x = args[0] if args else kwargs[self.argument]
        size = self.length.of(x, DIM, self.rank, self.world_size)
        shared = _shared_input(module.get_submodule(self.projection))
        if _are_called_plainly(shared.linears, module):
            shape = [*x.shape]
            shape[DIM] = x.shape[DIM] * self.world_size if size is None else size
            stand_in = x.new_full((1,), float("nan")).expand(shape)
            shared.compute(x, stand_in, size)
        else:
            stand_in = shared.compute_gathered(x, size)
        return _with_input(args, kwargs, self.argument, stand_in)


def _shared_input(projection: nn.Module) -> SharedInput:
    """Of the projection, or of the linear that it wraps."""
    for module in projection.modules():
        if getattr(module, "reads_gathered", False) and module.shared_input:
            return module.shared_input
    raise TypeError(f"interlace: no parallel linear is left in {type(projection).__name__}")


def _are_called_plainly(linears: Sequence[ColumnParallelLinear], module: nn.Module) -> bool:
    """True when `module` calls the linears themselves, and nobody else sees their input."""
    for linear in linears:
        hooks = [
            *linear._forward_hooks.values(), *linear._forward_pre_hooks.values(),
            *linear._backward_hooks.values(), *linear._backward_pre_hooks.values(),
        ]  # fmt: skip
        seen = any(getattr(hook, "reads_input", True) for hook in hooks)
        if seen or not any(child is linear for child in module.children()):
            return False
    return True


def _with_input(args: tuple[Any, ...], kwargs: dict[str, Any], argument: str, x: Tensor) -> tuple[Any, Any]:
    if args:
        return (x, *args[1:]), kwargs
    return args, {**kwargs, argument: x}
