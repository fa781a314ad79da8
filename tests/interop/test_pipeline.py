"""Parallel layers as stages of torch's pipelines: two pipeline ranks times two tensor-parallel ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.modules import ParallelAttention, ParallelMLP, SummedGradients
from interlace.modules.layout import layouts_of
from tests.distributed import run_distributed
from tests.parallelize.models import assert_near

HIDDEN, MICRO_BATCHES = 8, 4
ONE_EACH = ("GPipe", "1F1B")
SEVERAL_EACH = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


class Whole(nn.Module):
    """A decoder block of plain torch, what the parallel one has to equal."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.norm, self.attention, self.norm2, self.mlp = parts.values()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


def _block(group: Any, sequence_parallel: bool) -> nn.Module:
    options = {"group": group, "sequence_parallel": sequence_parallel, "dtype": torch.float64}
    norms = [nn.LayerNorm(HIDDEN, dtype=torch.float64) for _ in range(2)]
    if sequence_parallel:
        norms = [SummedGradients(norm, group) for norm in norms]
    attention = ParallelAttention(HIDDEN, 4, 1, causal=True, rope_theta=1e4, **options)
    mlp = ParallelMLP(HIDDEN, 13, gated=True, activation="silu", **options)
    return Whole({"norm": norms[0], "attention": attention, "norm2": norms[1], "mlp": mlp})


class _Ops(TorchDispatchMode):
    """Names of our ops in this rank, with how often they ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "interlace":
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


def _loss(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def _stages(count: int, group: Any, sequence_parallel: bool) -> list[nn.Module]:
    torch.manual_seed(3)
    return [_block(group, sequence_parallel) for _ in range(count)]


def _placement(kind: str, pp_rank: int) -> list[int]:
    if kind in ONE_EACH:
        return [pp_rank]
    return [pp_rank, 3 - pp_rank] if kind.startswith("ZBV") else [pp_rank, pp_rank + 2]


def _schedule(kind: str, stages: list[PipelineStage]) -> Any:
    cls = schedules.get_schedule_class(kind)
    given = stages[0] if kind in ONE_EACH else stages
    return cls(given, MICRO_BATCHES, loss_fn=_loss, scale_grads=True)


def _halves(schedule: Any, pp_rank: int) -> int:
    """Backwards that are done in two runs; the first stage has no input gradient, so nothing to do apart."""
    actions = [a for a in getattr(schedule, "pipeline_order", {}).get(pp_rank, []) if a is not None]
    return sum(a.computation_type is schedules.BACKWARD_WEIGHT and a.stage_index > 0 for a in actions)


def _pipelines(rank: int, world_size: int, sequence_parallel: bool) -> dict[str, tuple[Counter[str], int]]:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("pp", "tp"))
    pp_rank, tp_rank = mesh["pp"].get_local_rank(), mesh["tp"].get_local_rank()
    generator = torch.Generator().manual_seed(5)
    x, target = (
        torch.randn(2 * MICRO_BATCHES, 6, HIDDEN, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    # the oracle: all stages in a row, a group of one rank, no pipeline
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    if sequence_parallel:
        x, target = (t.chunk(2, dim=1)[tp_rank].contiguous() for t in (x, target))
    counts = {}
    for kind in (*ONE_EACH, *SEVERAL_EACH):
        number = 2 if kind in ONE_EACH else 4
        own = _placement(kind, pp_rank)
        modules = {
            i: module for i, module in enumerate(_stages(number, mesh["tp"], sequence_parallel)) if i in own
        }
        stages = [
            PipelineStage(modules[i], i, number, torch.device("cpu"), group=mesh["pp"].get_group())
            for i in own
        ]
        schedule = _schedule(kind, stages)
        first, last = 0 in own, number - 1 in own
        for ops in (_Ops(), _Ops()):  # the first step infers shapes as well: its calls are not counted
            losses: list[Tensor] = []
            for module in modules.values():
                module.zero_grad()
            with ops:
                schedule.step(
                    *([x] if first else []), **({"target": target, "losses": losses} if last else {})
                )
        counts[kind] = ops.calls, _halves(schedule, pp_rank)
        whole = nn.Sequential(*_stages(number, alone, False))
        _check(kind, modules, whole, losses, generator, mesh, sequence_parallel)
    return counts


def _check(
    kind: str, modules: dict[int, nn.Module], whole: nn.Sequential, losses: list[Tensor],
    generator: torch.Generator, mesh: DeviceMesh, sequence_parallel: bool,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    x, target = (
        torch.randn(2 * MICRO_BATCHES, 6, HIDDEN, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    # under sequence_parallel every rank's loss is over its shard: the whole gradient is that of their sum
    scale = 2 if sequence_parallel else 1
    parts = [
        _loss(whole(a), b) for a, b in zip(x.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES), strict=True)
    ]
    (scale * sum(parts) / MICRO_BATCHES).backward()
    if losses:
        found = torch.stack([loss.detach() for loss in losses])
        if sequence_parallel:
            dist.all_reduce(found, group=mesh["tp"].get_group())
        assert_near(f"{kind}: losses", found, scale * torch.stack([part.detach() for part in parts]))
    for i, module in modules.items():
        layouts = layouts_of(module)
        for name, param in whole[i].named_parameters():
            want = (
                layouts[name].take(param.grad, mesh["tp"].get_local_rank()) if name in layouts else param.grad
            )
            assert_near(f"{kind}, stage {i}: {name}", module.get_parameter(name).grad, want)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_pipelines_have_the_gradients_of_one_process_and_no_call_too_many(sequence_parallel: bool) -> None:
    """Zero bubble asks for input and weight gradients in two runs: neither may do the other's work again."""
    forward = "all_gather_gemm", "gemm_reduce_scatter"
    if not sequence_parallel:
        forward = "column_gemm", "gemm_all_reduce"
    # a block has two of each forward and two backward, and one sum for the kv head that both ranks hold
    backward = {"sum_gemm_all_reduce": 2}
    if sequence_parallel:
        # dX of the columns; gathers of the rows' dY and, for dW, of the columns' X; one sum for each norm
        backward = {"sum_gemm_reduce_scatter": 2, "all_gather": 2}
    expected = Counter(dict.fromkeys(forward, 2)) + Counter(backward) + Counter({"all_reduce": 1})
    if sequence_parallel:
        expected += Counter({"all_gather_gemm": 2, "all_reduce": 2})
    for counts in run_distributed(4, _pipelines, sequence_parallel, timeout=120.0):
        for kind, (calls, halves) in counts.items():
            blocks = MICRO_BATCHES * (1 if kind in ONE_EACH else 2)
            want = Counter({op: n * blocks for op, n in expected.items()})
            assert bool(halves) == (kind in SEVERAL_EACH[1:]), f"{kind}: {halves} halves"
            if sequence_parallel:  # dY of the two rows: gathered for dX, and again for dW rather than kept
                want["all_gather"] += 2 * halves
            assert calls == want, kind
