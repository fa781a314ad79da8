"""torch.compile sees one graph in every layer and in a whole split model, at any number of tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from interlace.modules import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    SharedInput,
    SummedGradients,
    split_heads,
)
from interlace.parallelize import parallelize
from tests.distributed import run_distributed
from tests.interop.models import ids, llama, loss_of
from tests.parallelize.models import assert_near

F64 = torch.float64


class Projections(nn.Module):
    """q, k, v of one input: one product for all, k and v of one head that every rank holds."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        layout = split_heads("test", 4, 1, torch.distributed.get_world_size())
        shards = (layout.query.scaled(2), layout.key_value.scaled(2), layout.key_value.scaled(2))
        self.linears = nn.ModuleList(
            ColumnParallelLinear(6, cut.total, dtype=F64, shards=cut, sequence_parallel=sequence_parallel)
            for cut in shards
        )
        SharedInput(list(self.linears))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self.linears], dim=-1)


def _modules(sequence_parallel: bool) -> dict[str, nn.Module]:
    options = {"dtype": F64, "sequence_parallel": sequence_parallel}
    found = {
        "column": ColumnParallelLinear(6, 9, **options),
        "column, gathered": ColumnParallelLinear(6, 9, gather_output=True, **options),
        "row": RowParallelLinear(6, 9, input_is_parallel=False, **options),
        "gated mlp": ParallelMLP(6, 11, gated=True, activation="silu", **options),
        "attention": ParallelAttention(6, 3, 1, head_dim=4, causal=True, rope_theta=1e4, qk_norm_eps=1e-6, **options),
        "projections": Projections(sequence_parallel),
        "norm": SummedGradients(nn.LayerNorm(6, dtype=F64)),
    }  # fmt: skip
    if sequence_parallel:
        del found["column, gathered"]  # gathers features of a whole sequence: covered without
    return found


def _compiled(module: nn.Module, backend: str = "aot_eager") -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, dynamic=True, backend=backend)


# one graph has to do for all lengths: a silent compilation for each of them is an error
once = torch._dynamo.config.patch(error_on_recompile=True)


def _gradients(module: nn.Module, run: Callable[[Tensor], Tensor], rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(2, rows, 6, dtype=F64, generator=generator).requires_grad_()
    module.zero_grad()
    out = run(x)
    (out * torch.arange(out.numel(), dtype=F64).view(out.shape)).sum().backward()
    return [out.detach(), x.grad, *(param.grad for param in module.parameters())]


@once
def _layers(rank: int, world_size: int, sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    for name, module in _modules(sequence_parallel).items():
        compiled = _compiled(module)
        for rows in (4, 6, 11):
            what = f"{name}, {rows} rows, sequence_parallel={sequence_parallel}"
            for found, expected in zip(
                _gradients(module, compiled, rows), _gradients(module, module, rows), strict=True
            ):
                assert_near(what, found, expected)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_layer_is_one_graph_for_all_lengths(sequence_parallel: bool) -> None:
    """Catches graph breaks, a graph per length, and sizes burnt into a graph, forward and backward."""
    run_distributed(2, _layers, sequence_parallel, timeout=240.0)


@once
def _whole_model(rank: int, world_size: int, sequence_parallel: bool) -> None:
    split = parallelize(llama(4, 1, num_hidden_layers=1), None, sequence_parallel=sequence_parallel)
    same = copy.deepcopy(split)
    compiled = _compiled(split)
    for length in (6, 9, 11):
        tokens = ids(length=length)
        found, expected = loss_of(compiled, tokens), loss_of(same, tokens)
        assert_near(f"loss of {length} tokens", found.detach(), expected.detach())
        for model, loss in ((split, found), (same, expected)):
            model.zero_grad()
            loss.backward()
        for (name, param), other in zip(split.named_parameters(), same.parameters(), strict=True):
            assert_near(f"{name}, {length} tokens", param.grad, other.grad)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_whole_split_model_is_one_graph_for_all_lengths(sequence_parallel: bool) -> None:
    """The hooks that cut and gather the sequence carry its length: it must stay a symbol."""
    run_distributed(2, _whole_model, sequence_parallel, timeout=240.0)


@once
def _inductor(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    module = ParallelMLP(6, 11, gated=True, activation="silu", dtype=F64)
    compiled = _compiled(module, "inductor")
    for rows in (3, 5):
        for found, expected in zip(
            _gradients(module, compiled, rows), _gradients(module, module, rows), strict=True
        ):
            assert_near(f"inductor, {rows} rows", found, expected)


def test_inductor_runs_a_block() -> None:
    """Strides of fake and real tensors must agree; only a back end that generates code looks at them."""
    run_distributed(2, _inductor, timeout=240.0)
