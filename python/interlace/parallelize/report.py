"""What `parallelize` did to a model, and which path its modules take, as a table."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..groups import resolve
from ..modules import ParallelLinear, SummedGradients

__all__ = ["Report", "ReportRow", "report"]


@dataclass(frozen=True)
class ReportRow:
    """One module: its style, the whole and the local shape of its weight, and how its collective runs."""

    name: str
    style: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    op: str
    path: str


@dataclass(frozen=True)
class Report:
    """The rows of a model; `str` is a table with runs of equal layers folded into one line."""

    rows: tuple[ReportRow, ...]

    def __str__(self) -> str:
        head = ("module", "style", "weight", "on this rank", "op", "path")
        lines = [head]
        for names, row in _folded(self.rows):
            lines.append((names, row.style, _size(row.shape), _size(row.local_shape), row.op, row.path))
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join(
            "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
        )


def report(model: nn.Module) -> Report:
    """A row per parallel module of `model`. Raises ValueError when it has none."""
    rows = tuple(
        _row(name, module)
        for name, module in model.named_modules()
        if isinstance(module, ParallelLinear | SummedGradients)
    )
    if not rows:
        raise ValueError(
            f"report: {type(model).__name__} has no parallel modules; call interlace.parallelize first"
        )
    return Report(rows)


def _row(name: str, module: nn.Module) -> ReportRow:
    fallback = resolve(module.group_name).fallback
    path = f"torch.distributed: {fallback}" if fallback else "symmetric memory"
    if isinstance(module, SummedGradients):
        shape = tuple(next(module.parameters()).shape)
        return ReportRow(name, "summed", shape, shape, "all_reduce (backward)", path)
    if module.style == "column":
        op = "all_gather_gemm" if module.sequence_parallel else "column_gemm"
    else:
        op = "gemm_reduce_scatter" if module.sequence_parallel else "gemm_all_reduce"
    shape = (module.out_features, module.in_features)
    return ReportRow(name, module.style, shape, tuple(module.weight.shape), op, path)


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape)


def _folded(rows: tuple[ReportRow, ...]) -> list[tuple[str, ReportRow]]:
    """Rows that differ only in the number of their layer, as one: model.layers.{0..29}.mlp.up_proj."""
    groups: dict[tuple[object, ...], list[ReportRow]] = {}
    for row in rows:
        pattern = ".".join("*" if part.isdigit() else part for part in row.name.split("."))
        groups.setdefault((pattern, row.style, row.shape, row.local_shape, row.op, row.path), []).append(row)
    folded = []
    for key, members in groups.items():
        count = f" ({len(members)})" if len(members) > 1 else ""
        folded.append(((str(key[0]) if count else members[0].name) + count, members[0]))
    return folded
