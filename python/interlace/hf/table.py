"""Which modules of a split transformers model run on interlace, and why the others do not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from ..styles.parameters import SplitForward

__all__ = ["REASON", "Row", "report"]

REASON = "_interlace_stock"  # on a module that kept a stock forward: why


@dataclass(frozen=True)
class Row:
    """A module that its plan names: the style, whether the forward is ours, and the reason when it is not."""

    name: str
    style: str
    ours: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.name:<48} {self.style:<30} {'interlace' if self.ours else 'stock: ' + self.reason}"


def report(model: nn.Module) -> list[Row]:
    """A row for each module of the model's tp_plan. ValueError when transformers has not split the model."""
    plan = getattr(model, "tp_plan", None)
    if not plan or getattr(model, "_device_mesh", None) is None:
        raise ValueError(
            f"interlace.hf.report: {type(model).__name__} was not split by transformers; load it by "
            'from_pretrained(..., tp_plan="auto") under torchrun'
        )
    rows = []
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None:
            continue
        ours = isinstance(vars(module).get("forward"), SplitForward)
        reason = "" if ours else getattr(module, REASON, "split before enable(), or a stock style")
        rows.append(Row(name, style, ours, reason))
    return rows
