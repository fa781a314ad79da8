"""Memory for a model that was built on the meta device, and the buffers that no checkpoint has (rotary frequencies)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .entries import tensors_by_place

__all__ = ["allocated", "like", "materialise", "materialise_buffers"]


def materialise(model: nn.Module, device: torch.device | str = "cpu") -> nn.Module:
    """Give a model on the meta device memory on `device`, in place, ties kept; torch.distributed.checkpoint needs it.

    Values of parameters and of buffers in the state dict are arbitrary; the other buffers are computed as
    `load_full_state_dict` does, with its errors. What has memory stays.
    """
    materialise_buffers("materialise", model, torch.device(device))
    places = tensors_by_place(model)
    tensors = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        if tensor.is_meta:
            fresh = allocated(tensor, torch.device(device))
            for held, name in places[id(tensor)]:
                held[name] = fresh
    return model


def allocated(value: Tensor, device: torch.device) -> Tensor:
    """Memory of the shape and kind of a meta tensor."""
    return like(value, torch.empty_like(value, device=device))


def like(value: Tensor, memory: Tensor) -> Tensor:
    """`memory` as a parameter, if the meta tensor `value` is one."""
    if not isinstance(value, nn.Parameter):
        return memory
    param = nn.Parameter(memory, requires_grad=value.requires_grad)
    param.__dict__.update(value.__dict__)  # marks that others left on it
    return param


def materialise_buffers(op: str, model: nn.Module, device: torch.device) -> None:
    """Compute every meta buffer that is not in the state dict, by the model's own `_init_weights`.

    Hugging Face models of transformers 5 know how. ValueError naming the buffers of any other model, which is left
    as it was: it must bring them along.
    """
    modules = dict(model.named_modules())
    pending = {name: module for name, module in modules.items() if _unsaved_meta(module)}
    places = tensors_by_place(model)
    fresh: dict[str, Tensor] = {}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    unknown: list[str] = []
    for name, module in pending.items():
        own = {f"{name}.{b}".removeprefix("."): module._buffers[b] for b in _unsaved_meta(module)}
        init = _initialiser(name, modules)
        if init is None:
            unknown += own
            continue
        for full_name, buffer in own.items():
            assert buffer is not None
            fresh[full_name] = _poisoned(buffer, device)
            for held, key in places[id(buffer)]:
                before.append((held, key, buffer))
                held[key] = fresh[full_name]
        with torch.no_grad():
            init(module)
    unknown += [name for name, buffer in fresh.items() if buffer.numel() and _is_poisoned(buffer)]
    if unknown:
        for held, key, buffer in before:
            held[key] = buffer
        raise ValueError(
            f"{op}: {', '.join(unknown)} are on the meta device, in no checkpoint, and {type(model).__name__} has no "
            "_init_weights that computes them; assign these buffers before loading, or build the model so that only "
            "its parameters are on the meta device"
        )


def _unsaved_meta(module: nn.Module) -> list[str]:
    return [
        name
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
    ]


def _initialiser(name: str, modules: dict[str, nn.Module]) -> Any:
    """`_init_weights` of the nearest module around that has one: composite models hold models of several kinds."""
    while True:
        init = getattr(modules[name], "_init_weights", None)
        if init is not None or not name:
            return init
        name = name.rpartition(".")[0]


def _poisoned(buffer: Tensor, device: torch.device) -> Tensor:
    """Memory for a buffer with a value that no buffer is made of, so that what is not computed shows."""
    empty = torch.empty_like(buffer, device=device)
    if empty.dtype == torch.bool:
        return empty.fill_(True)
    return empty.fill_(float("nan") if empty.is_floating_point() else torch.iinfo(empty.dtype).min)


def _is_poisoned(buffer: Tensor) -> bool:
    if buffer.dtype == torch.bool:
        return False
    low = None if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min
    return bool((buffer.isnan() if low is None else buffer == low).any())
