"""Uses the public API the way a typed program does. Never run: `make lint` gives it to mypy in strict mode.

An untyped public function, a result that is Any, or an argument that no longer fits is an error here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import interlace
from interlace import functional
from interlace.modules import ColumnParallelLinear, RowParallelLinear


def groups(group: dist.ProcessGroup, mesh: DeviceMesh) -> int:
    first: interlace.GroupInfo = interlace.init(group, timeout=10.0, workspace_bytes=1 << 20)
    second: interlace.GroupInfo = interlace.resolve(mesh)
    interlace.destroy(group)
    interlace.destroy()
    return first.rank + second.world_size + len(second.name)


def products(x: Tensor, weight: Tensor, bias: Tensor, mesh: DeviceMesh) -> Tensor:
    scattered: Tensor = functional.linear_reduce_scatter(x, weight, bias, group=mesh, scatter_dim=0)
    summed: Tensor = functional.linear_all_reduce(x, weight, group=None)
    return scattered + summed


def norms_and_scales(x: Tensor, weight: Tensor, scale: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    normalised, residual = functional.linear_all_reduce_norm(x, weight, None, x, scale, 1e-6, group=mesh)
    part, kept = functional.linear_reduce_scatter_norm(
        x, weight, None, None, scale, group=mesh, scatter_dim=1
    )
    one: Tensor = functional.all_gather_linear_scaled(x, scale, weight, scale, group=mesh)
    both: list[Tensor] = functional.all_gather_linear_scaled(x, scale, [weight], [scale], group=mesh)
    with interlace.backend("decomposed"):
        summed: Tensor = functional.linear_reduce_scatter_scaled(x, scale, weight, scale, group=mesh)
    return [normalised, residual, part, kept, one, *both, summed]


def collectives(x: Tensor, group: str) -> list[Tensor]:
    return [
        functional.all_reduce(x, group=group),
        functional.all_gather(x, group=group, dim=1),
        functional.reduce_scatter(x, group=group, dim=0),
        functional.all_to_all(x, [1, 2], [2, 1], group=group),
        functional.copy_to_region(x, group=group),
        functional.reduce_from_region(x, group=group),
        functional.scatter_to_region(x, group=group, dim=0),
        functional.gather_from_region(x, group=group, dim=0, size=7),
    ]


def layers(linear: nn.Linear, group: dist.ProcessGroup) -> nn.Module:
    column = ColumnParallelLinear.from_linear(linear, group)
    row = RowParallelLinear.from_linear(linear, group)
    return nn.Sequential(column, row)


def vocabulary(ids: Tensor, hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    embedding = interlace.VocabParallelEmbedding(61, 8, padding_idx=0, group=mesh)
    head = interlace.VocabParallelHead(8, 61, bias=False, group=mesh, gather_output=False)
    head.weight = embedding.weight
    rows: Tensor = functional.vocab_parallel_embedding(ids, embedding.weight, group=mesh, vocab_size=61)
    fused: Tensor = head.loss(hidden + rows, ids, label_smoothing=0.1, chunk_rows=128)
    plain: Tensor = functional.vocab_parallel_cross_entropy(
        head(hidden), ids, group=mesh, vocab_size=61, z_loss=1e-4
    )
    with interlace.random.region("sharded", group=mesh), interlace.count_ops() as counts:
        dropped: Tensor = interlace.ParallelDropout(0.1, dim=-2, group=mesh)(hidden)
    total: int = counts.total + counts.forward["all_reduce"]
    return fused + plain + dropped.sum() * total


def failures() -> type[RuntimeError]:
    try:
        functional.all_reduce(torch.ones(1), group=None)
    except interlace.CollectiveTimeout:
        return interlace.CollectiveTimeout
    except interlace.CollectiveAborted:
        return interlace.CollectiveAborted
    return RuntimeError


def doors(linear: nn.Linear, mesh: DeviceMesh) -> list[str]:
    plan: ParallelStyle = interlace.styles.ColumnLinear(gather_output=True)
    parallelize_module(linear, mesh, plan)
    with interlace.provide_symm_mem_ops(("cpu",)) as handle:
        assert not handle.closed
    with interlace.hf.enable() as enabled:
        names = [*enabled.ours, *enabled.stock]
    split: nn.Module = interlace.split_adapters(
        interlace.parallelize(linear, mesh, {"": "column"}, strict=True)
    )
    found: interlace.Report = interlace.report(split)
    names += [f"{row.name} {row.source} {row.path}" for row in found.unfused]
    return names + [row.name for row in interlace.hf.report(linear)]
