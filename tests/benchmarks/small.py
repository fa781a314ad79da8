"""The benchmarks on every rank with small problems, whole or with a fault: what test_scripts starts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from interlace import functional

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(settings: Mapping[str, Any]) -> int:
    """Shrink the script named in the settings, break what they ask to break, run it."""
    sys.path.insert(0, str(BENCHMARKS))
    script = importlib.import_module(settings["script"])
    if settings["script"] == "gemm_collectives":
        script.SHAPES = {op: [(5, 64, 96)] for op in script.SHAPES}
    elif settings["script"] == "block":
        script.HIDDEN, script.INNER, script.LAYERS, script.QUICK_ROWS = 64, 96, 2, (3,)
    else:
        script.QUICK_SIZES = (256,)
    if settings["fault"] == "no sum":
        functional.linear_all_reduce = no_sum
    elif settings["fault"] == "one rank":
        functional.all_reduce = one_rank_wrong(functional.all_reduce)
    return script.run(settings)


def no_sum(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: str) -> Tensor:
    return functional.column_linear(x, weight, bias, group=group)


def one_rank_wrong(all_reduce: Any) -> Any:
    import torch.distributed as dist

    def wrong(x: Tensor, *, group: str) -> Tensor:
        out = all_reduce(x, group=group)
        return out + 1 if dist.get_rank() == 1 else out

    return wrong
