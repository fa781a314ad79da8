"""Which models of transformers can have their sequence split: only attention mixes tokens, in a known way."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

__all__ = ["check_mask", "check_models"]

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
OTHER_MASKS = (
    "or_masks",
    "blockwise_",
    "chunked_",
)  # of transformers: more than causal, window and documents


def check_models() -> Callable[[], None]:
    """Look at every model of transformers once, when it is called first. Returns what undoes it.

    Raises ValueError, in the call, for a model that computes attention itself, or mixes tokens otherwise: its ranks
    would work on their tokens as if there were no others.
    """
    from transformers import PreTrainedModel

    seen: WeakSet[nn.Module] = WeakSet()

    @torch.compiler.assume_constant_result  # a graph is made for one model, so the answer is part of it
    def problem(model: nn.Module) -> str:
        found = "" if model in seen else _problem(model, PreTrainedModel)
        if not found:
            seen.add(model)
        return found

    def checked_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = problem(self)
        if found:
            raise ValueError(found)
        return nn.Module.__call__(self, *args, **kwargs)

    PreTrainedModel.__call__ = checked_call

    def restore() -> None:
        if vars(PreTrainedModel).get("__call__") is checked_call:
            del PreTrainedModel.__call__

    return restore


def _problem(model: nn.Module, kind: type) -> str:
    """Why the sequence of `model` cannot be split; "" if it can, or if it holds models that are asked themselves."""
    inner = list(model.modules())[1:]
    if any(isinstance(module, kind) for module in inner):
        return ""
    reason = ""
    layers = set(getattr(getattr(model, "config", None), "layer_types", None) or ()) - KNOWN_LAYERS
    convolution = next(
        (name for name, m in model.named_modules() if isinstance(m, nn.Conv1d) and m.kernel_size != (1,)), ""
    )
    if not any(_asks_transformers(module) for module in inner):
        reason = "computes attention itself and not by the attention functions of transformers"
    elif layers:
        reason = f"has layers of {', '.join(sorted(map(str, layers)))}, which see the tokens of one rank only"
    elif convolution:
        reason = f"has a convolution over tokens ({convolution}), which sees the tokens of one rank only"
    if not reason:
        return ""
    return f"context parallel: {type(model).__name__} {reason}; its sequence cannot be split"


def _asks_transformers(module: nn.Module) -> bool:
    homes = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    return any(home is not None and hasattr(home, "ALL_ATTENTION_FUNCTIONS") for home in homes)


def check_mask(function: Any) -> None:
    """ValueError when a mask function of transformers says more than causal, window and documents."""
    for part in _parts(function):
        own = part.__module__ == "transformers.masking_utils"
        if not own or part.__qualname__.startswith(OTHER_MASKS):
            raise ValueError(
                f"context parallel: the model masks its attention by {part.__qualname__.partition('.')[0]}; causal, "
                "window and documents are what a split sequence can have"
            )


def _parts(value: Any) -> Iterator[types.FunctionType]:
    if isinstance(value, tuple):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, types.FunctionType):
        yield value
        for cell in value.__closure__ or ():
            yield from _parts(cell.cell_contents)
