"""Dropout in a split model: where ranks hold shards each drops elements of its own, elsewhere all drop the same.

Model code drops what it likes with torch's default generator. Between a column-parallel and a row-parallel linear
(attention weights, intermediate features) ranks hold different data, often of different size: there the generator
is this rank's own, and behind it all ranks go on alike, however much each has drawn. With sequence_parallel the
layers around see shards of the sequence, so each layer as a whole is such a region. Under torch.compile a region is a
graph break in training (fullgraph=True is refused there by torch); in eval mode there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..groups import GroupInfo
from ..random import ShardedRandom, in_step
from .plan import Plan

__all__ = ["add_dropout", "has_dropout"]

ENTERS, LEAVES = ("column", "column_inner"), ("row", "row_inner")


def add_dropout(model: nn.Module, plan: Plan, info: GroupInfo) -> None:
    """Hook the regions into a split model, if it drops anything in training."""
    if info.world_size == 1 or not has_dropout(model):
        return
    inner, checked = ShardedRandom(info.name), Checked()
    for module in list(model.modules()):
        style = getattr(module, "style", "")
        if style in ENTERS and not getattr(module, "gather_output", False):
            module.register_forward_hook(EnterBehind(inner, checked))
        elif style in LEAVES:
            module.register_forward_pre_hook(LeaveBefore(inner))
    if plan.sequence_parallel:
        for layer in _layers(model, plan):
            around = ShardedRandom(info.name)
            layer.register_forward_pre_hook(EnterBefore(around, checked), with_kwargs=True)
            layer.register_forward_hook(LeaveBehind(around), always_call=True)


def has_dropout(model: nn.Module) -> bool:
    """True when a module, or a config that it holds, has a dropout probability above zero."""
    holders: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        for holder in (module, getattr(module, "config", None)):
            if holder is not None:
                holders[id(holder)] = holder
    return any(
        isinstance(value, float) and value > 0 and ("drop" in name or "pdrop" in name)
        for holder in holders.values()
        for name, value in getattr(holder, "__dict__", {}).items()
    )


def _layers(model: nn.Module, plan: Plan) -> Iterator[nn.Module]:
    for name in plan.scatters:
        parent = model.get_submodule(name.rpartition(".")[0])
        yield from parent if isinstance(parent, nn.ModuleList) else [model.get_submodule(name)]


@dataclass
class Checked:
    """Whether the ranks were found in step: looked at once, at the first region in training."""

    done: bool = False

    def look(self, group_name: str) -> None:
        """Collective the first time. ValueError on every rank when the generators are not in step."""
        if self.done:
            return
        if not in_step(group_name):
            raise ValueError(
                "interlace: dropout in a split model needs random generators that are in step, but the ranks of the "
                "group were seeded differently, or drew different amounts; call interlace.random.synchronize(group), "
                "or torch.manual_seed with one seed on all ranks of the group"
            )
        self.done = True


@dataclass
class EnterBehind:
    """Forward hook of a column-parallel linear: what follows works on this rank's part."""

    reads_input: ClassVar[bool] = False  # so attention may go on with a stand-in for it
    random: ShardedRandom
    checked: Checked

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module.training:
            self.checked.look(self.random.group_name)
            self.random.enter(_device(output))


@dataclass
class LeaveBefore:
    """Forward pre-hook of a row-parallel linear: its output is the same on all ranks."""

    random: ShardedRandom

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training:
            self.random.leave()


@dataclass
class EnterBefore:
    """Forward pre-hook of a layer of which this rank sees a shard of the sequence."""

    random: ShardedRandom
    checked: Checked

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:
            self.checked.look(self.random.group_name)
            self.random.enter(_device((*args, *kwargs.values())))


@dataclass
class LeaveBehind:
    """Forward hook of such a layer, called after an error as well."""

    random: ShardedRandom

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module.training:
            self.random.leave()


def _device(values: Any) -> torch.device:
    found = values if isinstance(values, tuple | list) else (values,)
    return next((value.device for value in found if isinstance(value, Tensor)), torch.device("cpu"))
