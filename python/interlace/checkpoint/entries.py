"""What a checkpoint of a split model holds: names of the unsplit model, and of which whole each tensor is a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn.parallel import DistributedDataParallel

from ..groups import resolve
from ..modules.held import Box, held_boxes
from ..modules.layout import ParameterLayout, layouts_of

__all__ = [
    "Entry",
    "agree",
    "entries_of",
    "layouts_by_tensor",
    "original_name",
    "rank_of",
    "tensors_by_place",
]

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and activation checkpointing


@dataclass(frozen=True)
class Entry:
    """A value of the state dict under the `name` it has in the unsplit model.

    key: its name here. value: the parameter or buffer itself (a tensor without gradient where a module hands out a
    copy), or what a module keeps as extra state. layout: how it is cut, None when it is replicated or a plain DTensor.
    """

    name: str
    key: str
    value: Any
    layout: ParameterLayout | None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape in the unsplit model."""
        return tuple(self.value.shape) if self.layout is None else self.layout.shape

    def boxes(self, tensor: Tensor) -> list[Box]:
        """Where the value, or what takes its place, lies in the whole."""
        return held_boxes(tensor, self.layout, rank_of(self.layout))


def rank_of(layout: ParameterLayout | None) -> int:
    """This process's rank in the group of the layout; 0 without one."""
    return 0 if layout is None else resolve(layout.group_name).rank


def layouts_by_tensor(model: nn.Module) -> dict[int, ParameterLayout]:
    """id of every cut parameter -> its layout. ValueError when a parameter is cut in two ways."""
    params = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, ParameterLayout] = {}
    for name, layout in layouts_of(model).items():
        param = params.get(name)
        if param is not None and found.setdefault(id(param), layout) != layout:
            raise ValueError(f"{name} is tied, but cut as {layout} here and as {found[id(param)]} elsewhere")
    return found


def original_name(model: nn.Module) -> Callable[[str], str]:
    """A function from names in `model` to names in the model before wrappers (compile, checkpointing, DDP) came."""
    ddp = [
        f"{name}.module." if name else "module."
        for name, module in model.named_modules()
        if isinstance(module, DistributedDataParallel)
    ]

    def clean(name: str) -> str:
        for prefix in ddp:
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name.removeprefix(prefix)
        return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

    return clean


def entries_of(model: nn.Module) -> list[Entry]:
    """Everything in the state dict of `model`, tied tensors under each of their names."""
    by_tensor, by_name, clean = layouts_by_tensor(model), layouts_of(model), original_name(model)
    return [
        Entry(clean(key), key, value, by_tensor.get(id(value), by_name.get(key)))
        for key, value in model.state_dict(keep_vars=True).items()
    ]


def tensors_by_place(model: nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """id of every parameter and buffer -> the dicts that hold it and its name there; several where it is tied."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((held, name))
    return places


def agree(op: str, layouts: Iterable[ParameterLayout | None], problem: Exception | None) -> None:
    """Raise on every rank of the layouts' groups when one of them has a problem. Collective."""
    names = dict.fromkeys(layout.group_name for layout in layouts if layout is not None)
    for name in names:
        info = resolve(name)
        texts: list[str] = [""] * info.world_size
        dist.all_gather_object(texts, str(problem) if problem else "", group=_resolve_process_group(name))
        for rank, text in enumerate(texts):
            if text and problem is None:
                problem = RuntimeError(f"{op}: rank {rank} cannot: {text}")
    if problem is not None:
        raise problem
