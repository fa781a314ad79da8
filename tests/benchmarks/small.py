"""Subcommands on every rank with small problems, whole or with a fault: what test_commands starts."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from interlace import functional
from interlace.bench import collective, shapes


def run(settings: Mapping[str, Any]) -> int:
    """Shrink what the settings name, break what they ask to break, run it."""
    collective.SIZES["quick"] = (256,)
    shapes.QUICK = dict.fromkeys(shapes.OPS, ((5, 96, 64),))
    if settings["fault"] == "no sum":
        functional.linear_all_reduce = no_sum
    elif settings["fault"] == "one rank":
        functional.all_reduce = one_rank_wrong(functional.all_reduce)
    worst = 0
    for name in settings["benchmarks"]:
        worst = max(worst, importlib.import_module(f"interlace.bench.{name}").run(settings))
    return worst


def no_sum(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: str) -> Tensor:
    return functional.column_linear(x, weight, bias, group=group)


def one_rank_wrong(all_reduce: Any) -> Any:
    def wrong(x: Tensor, *, group: str) -> Tensor:
        out = all_reduce(x, group=group)
        return out + 1 if dist.get_rank() == 1 else out

    return wrong
