"""Layers, models, experts and scaling on every rank with tiny sizes, whole or with a fault: for test_models."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from interlace import functional
from interlace.bench import layer, model, moe, scaling
from interlace.bench.decoders import Sizes, split_by_interlace

TINY = Sizes("small", 64, 96, 4, 2, 16, layers=2, vocabulary=48)
MODULES = {"layer": layer, "model": model, "moe": moe, "scaling": scaling}


def run(settings: Mapping[str, Any]) -> int:
    """Shrink all, break what the settings ask to break, run what they name; the worst status."""
    layer.SIZES = {"small": TINY}
    layer.FORWARD["quick"], layer.TRAIN["quick"] = (5,), (7,)
    model.TRANSFORMER["quick"], model.PROMPT = TINY, 6
    model.PREFILL["quick"], model.TRAIN["quick"] = (9,), (11,)
    moe.SIZES = {"small": moe.ExpertSizes("small", 64, 32, 2 * dist.get_world_size(), 2)}
    moe.TOKENS["quick"] = (13,)
    scaling.TRANSFORMER["quick"], scaling.TOKENS["quick"] = TINY, 8
    if settings["fault"] == "weights of one rank":
        for module in (layer, model, scaling):
            module.split_by_interlace = one_rank_wrong
    elif settings["fault"] == "rows to the wrong rank":
        functional.all_to_all = swapped(functional.all_to_all)
    worst = 0
    for name in settings["benchmarks"]:
        worst = max(worst, importlib.import_module(f"interlace.bench.{name}").run(settings))
    return worst


def one_rank_wrong(whole: nn.Module, group: Any = None) -> nn.Module:
    """Split, and the last rank has other weights than it should."""
    split = split_by_interlace(whole, group)
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            for parameter in split.parameters():
                parameter.mul_(1.5)
    return split


def swapped(exchange: Any) -> Any:
    def wrong(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = exchange(x, *args, **kwargs)
        return out if out.dtype is torch.int64 else out.roll(1, 0)

    return wrong
