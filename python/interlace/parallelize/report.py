"""What `parallelize` did to a model, and which way the collectives of its modules go, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import cuda_dispatch
from ..groups import GroupInfo, resolve
from ..modules.held import as_dtensor
from ..ops import OPS
from .adapters import is_unsplit

__all__ = ["Report", "ReportRow", "op_of", "path_of", "report"]

UNFUSED = "library_gemm"  # what the dispatcher calls torch.mm followed by the collective
WITHOUT_COLLECTIVE = ("column_inner", "row_inner", "head_columns")
WHOLE = "whole"  # style of what could have been cut, but for the reason that stands under path
FEW, MANY = 1, 512  # rows: a step of decoding, a prompt


@dataclass(frozen=True)
class ReportRow:
    """One module: its style, the whole and the local shape of its weight, its op, and the way the op goes.

    `fused` is False when the collective runs beside the product (torch.mm, torch.distributed); `path` says why.
    `op` is empty for a module whose block has the collective. `source`: who put it in the plan ("given plan",
    "base_model_tp_plan", "structure", "adapter", "styles", "transformers"), empty for a module made by hand.
    """

    name: str
    style: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    op: str
    fused: bool
    path: str
    source: str = ""


@dataclass(frozen=True)
class Report:
    """The rows of a model; `str` is a table in which equal layers share a line."""

    rows: tuple[ReportRow, ...]

    @property
    def unfused(self) -> tuple[ReportRow, ...]:
        """The rows whose collective runs beside the product."""
        return tuple(row for row in self.rows if not row.fused)

    def __str__(self) -> str:
        lines = [("module", "style", "weight", "on this rank", "op", "fused", "path", "plan")]
        for name, row in _folded(self.rows):
            fused = "yes" if row.fused else "no"
            sizes = _size(row.shape), _size(row.local_shape)
            lines.append((name, row.style, *sizes, row.op, fused, row.path, row.source))
        widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def report(model: nn.Module) -> Report:
    """A row per parallel module of `model`. Raises ValueError when it has none."""
    found = ((name, _parallel_part(module)) for name, module in model.named_modules())
    rows = tuple(row for name, module in found if (row := _row_of(name, module)) is not None)
    if all(row.style == WHOLE for row in rows):
        raise ValueError(
            f"report: {type(model).__name__} has no parallel modules; call interlace.parallelize first"
        )
    return Report(rows)


def _parallel_part(module: nn.Module) -> Any:
    """The module, or what stands in for its forward when torch's or transformers' plan put a style on it."""
    forward = vars(module).get("forward")
    return forward if getattr(forward, "style", "") and hasattr(forward, "group_name") else module


def op_of(style: str, sequence_parallel: bool) -> str:
    """The op that carries the collective of a style: of the forward for row, of the backward for plain column.

    Empty for styles that have none of their own.
    """
    if style in WITHOUT_COLLECTIVE:
        return ""
    if style in ("summed", "experts"):
        return "all_reduce"
    if style == "vocab_embedding":
        return "reduce_scatter" if sequence_parallel else "all_reduce"
    if style.startswith(("column", "vocab_head")):
        return "all_gather_gemm" if sequence_parallel else "gemm_all_reduce"
    return "gemm_reduce_scatter" if sequence_parallel else "gemm_all_reduce"


def path_of(info: GroupInfo, op: str, dtype: torch.dtype, device: torch.device) -> tuple[bool, str]:
    """Whether the op is fused on this group and device, and the algorithms or the reason why not."""
    if not op:
        return True, "collective of its block"
    if info.world_size == 1:
        return True, "one rank: no collective"
    if info.fallback:
        return False, f"torch.distributed: {info.fallback}"
    if "gemm" not in op:
        return True, "symmetric memory"
    if device.type != "cpu":
        return _cuda_path_of(info, op, dtype, device)
    few, many = (OPS.choose(op, str(dtype).removeprefix("torch."), rows) for rows in (FEW, MANY))
    if few[0] == UNFUSED:
        return False, few[1]
    return True, few[0] if few == many else f"{few[0]} (few rows), {many[0]} (many)"


def _cuda_path_of(info: GroupInfo, op: str, dtype: torch.dtype, device: torch.device) -> tuple[bool, str]:
    """As path_of once the group has agreed on its GPUs, which its first call does."""
    found = [cuda_dispatch.foreseen(op, info.name, info.world_size, dtype, rows) for rows in (FEW, MANY)]
    few, many = found
    if few is None or many is None:
        return True, f"chosen at the call ({device.type})"
    fused = few.algorithm in cuda_dispatch.OURS or many.algorithm in cuda_dispatch.OURS
    if few.algorithm == many.algorithm:
        return fused, f"{few.algorithm}: {few.reason}"
    return fused, f"{few.algorithm} (few rows), {many.algorithm} (many)"


def _row_of(name: str, module: Any) -> ReportRow | None:
    if is_unsplit(module):
        return _unsplit_row(name, module)
    if hasattr(type(module), "style") and _first_parameter(module) is not None:
        return _row(name, module)
    if "whole_because" in vars(module):
        shape = tuple(module.weight.shape)
        return ReportRow(name, WHOLE, shape, shape, "", False, module.whole_because)
    return None


def _row(name: str, module: Any) -> ReportRow:
    info = resolve(module.group_name)
    param_name, param = _first_parameter(module)
    sequence_parallel = getattr(module, "sequence_parallel", False)
    op = op_of(module.style, sequence_parallel)
    fused, path = path_of(info, op, param.dtype, param.device)
    if module.style == "experts" and fused:
        fused, path = False, f"grouped products, then one all-reduce ({path})"
    layouts = module.parameter_layouts() if hasattr(module, "parameter_layouts") else {}
    shard = as_dtensor(param)
    local = tuple((param if shard is None else shard.to_local()).shape)
    shape = layouts[param_name].shape if param_name in layouts else tuple(param.shape)
    backward = module.style == "summed" or (op == "gemm_all_reduce" and module.style != "row")
    source = getattr(module, "plan_source", "")
    return ReportRow(
        name, module.style, shape, local, f"{op} (backward)" if backward else op, fused, path, source
    )


def _unsplit_row(name: str, wrapper: Any) -> ReportRow:
    base = wrapper.get_base_layer()
    local = tuple(base.weight.shape)
    shape = base.parameter_layouts()["weight"].shape
    return ReportRow(
        name, "adapter, not split", shape, local, "", False, "call interlace.split_adapters(model)"
    )


def _first_parameter(module: nn.Module) -> tuple[str, nn.Parameter] | None:
    """The weight, or what comes first of the module's own parameters."""
    own = dict(module.named_parameters(recurse=False))
    if "weight" in own:
        return "weight", own["weight"]
    return next(iter(own.items()), None)


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape)


def _folded(rows: tuple[ReportRow, ...]) -> list[tuple[str, ReportRow]]:
    """Rows that differ only in the number of their layer, as one: model.layers.*.mlp.up_proj (30)."""
    groups: dict[tuple[object, ...], list[ReportRow]] = {}
    for row in rows:
        pattern = ".".join("*" if part.isdigit() else part for part in row.name.split("."))
        key = (pattern, row.style, row.shape, row.local_shape, row.op, row.fused, row.path, row.source)
        groups.setdefault(key, []).append(row)
    return [
        (f"{key[0]} ({len(members)})" if len(members) > 1 else members[0].name, members[0])
        for key, members in groups.items()
    ]
